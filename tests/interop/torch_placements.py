# timeout: 120
"""docs/guides/torchtitan.md, its table of placements: PyTorch's loop and V, in which torchtitan and NeMo Automodel place the stages of a named
schedule, are those of the files that the table names, and of no others. A file over another placement ends in the KeyError of the page."""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
PLAN = pathlib.Path(os.environ.get("CHEVRON_BUILD", ROOT / "build")).resolve() / "bin" / "chevron-plan"
PAGE = (ROOT / "docs" / "guides" / "torchtitan.md").read_text()
# Of a name: its placement in both programs, and the stages on a rank that it may have; both programs' V has two.
STYLES = {"1F1B": ("loop", {1}), "Interleaved1F1B": ("loop", set(range(2, 9))), "ZBVZeroBubble": ("v", {2})}
try:
    import torch
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
except ImportError as problem:
    print(f"skipped: no PyTorch with pipelines ({problem})")
    sys.exit(77)

wrong = []


def expect(holds, words):
    if not holds:
        wrong.append(words)


def plan(*words):
    return subprocess.run([PLAN, *map(str, words)], capture_output=True, text=True, check=True).stdout


def placement(csv):
    """{stage: rank} of a file."""
    return {int(stage): rank for rank, row in enumerate(csv.splitlines()) for stage in re.findall(r"(\d+)[FBIW]\d", row)}


def styles_of(where, ranks):
    """The names whose placement a file has, with as many stages on a rank."""
    chunks = len(where) // ranks
    found = [name for name, (style, stages) in STYLES.items()
             if chunks in stages and generate_stage_to_rank_mapping(ranks, len(where), style) == where]
    return found or ["–"]


def rows():
    """(files of a row, its placement, torchtitan's name, NeMo Automodel's name)."""
    table = PAGE[PAGE.index("| file | placement |"):]
    out = []
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        files, style, titan, nemo = (cell.strip() for cell in line.strip("|").split("|"))
        out.append((re.findall("`([^`]+)`", files), style, titan.strip("`"), nemo.strip("`")))
    return out


def check_table():
    named = set(re.findall(r"`([^`]+)`", PAGE[PAGE.index("PyTorch does not run slices"):].split("`tests/")[0]))
    compared = 0
    for files, style, titan, nemo in rows():
        expect(titan == nemo, f"{files}: torchtitan and NeMo Automodel have the same placements for these names: {titan}, {nemo}")
        named |= set(files)
        for file in files:
            for ranks in (2, 3, 4):
                chunks = ["--chunks", 4] if style == "wave" else []
                if file.startswith("search"):
                    many = {"linear": 1, "wave": 4}.get(style.replace("one stage on each rank", "linear"), 2)
                    words = ["search", *file.split()[1:], "--chunks", many, "--ranks", ranks, "--microbatches", 4, "--trials", 1]
                else:
                    words = ["show", file, "--ranks", ranks, "--microbatches", 4 * ranks, *chunks]
                where = placement(plan(*words, "--format", "csv"))
                compared += 1
                expect(styles_of(where, ranks) == [titan], f"{file} on {ranks} ranks has the placement of {styles_of(where, ranks)}, not {titan}: {where}")
    expect(compared >= 40, f"only {compared} files were compared")
    catalogue = {line.split()[0] for line in plan("list").splitlines()[1:] if line.strip()}
    expect(len(catalogue) >= 15 and catalogue <= named, f"schedules without a row: {sorted(catalogue - named)}")


def rank_of_two(rank, folder, csv, mine):
    """One step over stages of these numbers; prints the error."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store{len(csv)}", rank=rank, world_size=2)
    PipelineStage._get_init_p2p_neighbors_ops = lambda self: []  # neighbours on one rank: no message to itself over Gloo
    x = torch.ones(4, 3)
    example = {"input_args": (x[:1],), "output_args": (x[:1],)}
    torch.manual_seed(1)
    stages = [PipelineStage(torch.nn.Linear(3, 3), s, 4, torch.device("cpu"), **example) for s in mine]
    runtime = schedules._PipelineScheduleRuntime(stages, n_microbatches=4, loss_fn=torch.nn.functional.mse_loss)
    file = pathlib.Path(folder, f"{rank}-{len(csv)}.csv")
    file.write_text(csv)
    result = "trained"
    try:
        runtime._load_csv(str(file))
        runtime.step(*([x] if 0 in mine else []), target=x)
    except KeyError as problem:
        result = f"KeyError {problem}"
    print(f"RESULT {rank} {result}", flush=True)
    os._exit(0)  # the peer of a failed rank is not waited for


def check_trap():
    looped, vee = [[0, 2], [1, 3]], [[0, 3], [1, 2]]
    file = plan("show", "ZBVZeroBubble", "--ranks", 2, "--microbatches", 4, "--format", "csv")
    for mine, wanted in ((vee, ["trained", "trained"]), (looped, ["KeyError 3", "KeyError 2"])):
        with tempfile.TemporaryDirectory() as folder:
            started = [subprocess.Popen([sys.executable, __file__, str(rank), folder, file, ",".join(map(str, mine[rank]))], stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE, text=True) for rank in range(2)]
            said = [process.communicate(timeout=90) for process in started]
            results = [re.findall(r"^RESULT \d (.*)$", out, re.M) for out, _ in said]
            expect(results == [[w] for w in wanted], f"stages {mine}: {results}, not {wanted}: {[err[-300:] for _, err in said]}")


def main():
    check_table()
    check_trap()
    for words in wrong[:20]:
        print("FAILED: " + words)
    return 1 if wrong else 0


if __name__ == "__main__":
    if len(sys.argv) == 5:
        rank_of_two(int(sys.argv[1]), sys.argv[2], sys.argv[3], list(map(int, sys.argv[4].split(","))))
    sys.exit(main())
