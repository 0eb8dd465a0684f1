# timeout: 240
"""docs/guides/cluster-job.md, typed: its files are written, its commands print what stands on the page, and the batch script trains the
way that the table begins with. Stand-ins for sbatch, srun and torchrun start two processes of this machine. What needs chevron-finetune is
left out, and said so, where it was not built."""
import array
import json
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile

here = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(here / "shared"), str(here.parent)]
from consoles import BLOCK, matches, steps_of
from small_decoder import configurations, tensors_of, vocabulary, write_model

BIN = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve() / "bin"
PAGE = (here.parents[1] / "docs" / "guides" / "cluster-job.md").read_text()
TRAINS = re.compile("chevron-finetune|sbatch|torchrun")
STAND_INS = {  # as the programs of the cluster, for one machine; a rank's output goes to a file, and rank 0's is printed
    "sbatch": 'shift\nexec sh "$@"\n',
    "srun": 'while [ "${{1#--}}" != "$1" ]; do shift; done\ncode=0\n'
            'sh {shared}/as_srun.sh 2 "$PORT" "$@" || code=$?\ncat task0.out task?.err\nexit $code\n',
    "torchrun": 'while [ "$1" != chevron-finetune ]; do shift; done\ncode=0\n'
                'sh {shared}/as_torchrun.sh 2 "$PORT" "$@" || code=$?\ncat task0.out task?.err\nexit $code\n',
}
wrong = []


def expect(holds, words):
    if not holds:
        wrong.append(words)
        print("FAILED: " + words, flush=True)


def prepare(folder):
    for name, text in re.findall(r"^```json file (\S+)\n(.*?)^```$", PAGE, re.M | re.S):
        (folder / name).write_text(text)
    write_model(folder / "small", configurations["grouped"])
    draw = random.Random(5)
    (folder / "tokens.bin").write_bytes(array.array("H", (draw.randrange(vocabulary) for _ in range(16 * 64 + 1))).tobytes())
    (folder / "bin").mkdir()
    for name, body in STAND_INS.items():
        (folder / "bin" / name).write_text("#!/bin/sh\n" + body.format(shared=here / "shared"))
        (folder / "bin" / name).chmod(0o755)


def free_port():
    done = subprocess.run(["sh", "-c", f". {here}/../support/free_port.sh; free_port"], capture_output=True, text=True, check=True)
    return int(done.stdout)


def type_page(folder):
    """{command: output} of the page's commands, each compared with the page."""
    said, left = {}, 0
    for block in BLOCK.finditer(PAGE):
        expect(block["other"] == "tests/process/cluster_job.py", f"a console that no test runs: {block['text'][:60]}")
        for command, wanted in steps_of(block["text"]):
            if TRAINS.search(command) and not (BIN / "chevron-finetune").exists():
                left += 1
                continue
            # Slurm's number of a job gives the port: 20000 and the number modulo 20000.
            port = free_port()
            environment = dict(os.environ, PATH=f"{folder / 'bin'}:{BIN}:{os.environ['PATH']}", OMP_NUM_THREADS="1",
                               PORT=str(port if "torchrun" in command else port - 20000))
            done = subprocess.run(["sh", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120, check=False)
            said[command] = done.stdout + done.stderr
            expect(done.returncode == 0, f"`{command}` ended with {done.returncode}:\n{said[command][-1500:]}")
            expect(matches(said[command], wanted), f"`{command}` prints something else than the page shows:\n{said[command][:2500]}")
    if left:
        print(f"left out: {left} commands, as chevron-finetune was not built")
    return said


def flags_of(text):
    return dict(re.findall(r"(--[\w-]+) ([^-\s]\S*)", text))


def check_scripts(folder, said):
    """The batch script's flags, nodes and tokens are those of the table's first row."""
    for script, tokens, sequences in ("job.sh", 4096, 1024), ("small.sh", 16, 8):
        table, = [text for command, text in said.items() if f"--slurm {script}" in command]
        # P, T, R, M, samples, perhaps slices, schedule.
        row = re.search(r"takes most\n *[0-9.]+ +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(?:1 +)?([A-Z0-9]\S*[A-Z]\S*)", table).groups()
        ranks, shards, replicas, micro_batches, samples = map(int, row[:5])
        text = (folder / script).read_text()
        flags = flags_of(text[text.index("\nexec srun"):])
        got = [int(flags.get(f, 1)) for f in ("--ranks", "--shards", "--replicas", "--microbatches", "--microbatch-size", "--context")]
        expect(got == [ranks, shards, replicas, micro_batches, samples, tokens], f"{script}: {got} beside the row {row}")
        expect(flags["--schedule"] == row[5].rstrip(","), f"{script}: {flags['--schedule']} beside the row {row}")
        processes = int(re.search("--nodes=(.*)", text)[1]) * int(re.search("--ntasks-per-node=(.*)", text)[1])
        expect(ranks * shards * replicas == processes, f"{script}: {processes} processes for {row}")
        expect(replicas * micro_batches * samples == sequences, f"{script}: not {sequences} sequences in a step: {row}")
        expect("Train: torchrun --nnodes" in table, f"{script}: no command for torchrun")


def read_tensors(folder):
    names = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        names |= {n: e["shape"] for n, e in json.loads(content[8:8 + struct.unpack("<Q", content[:8])[0]]).items() if n != "__metadata__"}
    return names


def check_runs(folder, said):
    """Steps that the runs computed, and what they wrote."""
    steps = lambda text: [int(n) for n in re.findall(r"^step: *(\d+) ", text, re.M)]
    losses = lambda text: dict(re.findall(r"^step: *(\d+) +loss: *([0-9.]+)", text, re.M))
    first, more, launched = (said[c] for c in said if "--steps" in c)
    expect(steps(first) == [1, 2, 3, 4] and steps(more) == [5, 6], f"steps {steps(first)}, then {steps(more)}")
    expect(losses(first) == losses(launched) and len(losses(first)) == 4, f"srun {losses(first)}, torchrun {losses(launched)}")
    saved = sorted(p.name for p in (folder / "saved").glob("step-*"))
    expect(saved == ["step-00000004", "step-00000006"], f"checkpoints {saved}")
    wanted = tensors_of(configurations["grouped"])
    for out in ("tuned", "again"):
        expect(read_tensors(folder / out) == wanted, f"{out} has not the tensors of the model")


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        prepare(folder)
        said = type_page(folder)
        check_scripts(folder, said)
        if (BIN / "chevron-finetune").exists():
            check_runs(folder, said)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
