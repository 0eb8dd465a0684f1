# timeout: 600
"""chevron_plan.parity: faults planted into PyTorch's pipeline are found and named, single bits that are changed anywhere are
found where they were changed, and right training raises no alarm.

    python tests/interop/torch_parity.py          a spread of all cases, with PyTorch 2.11 or 2.15
    python tests/interop/torch_parity.py --all    all, and the tables of docs/guides/parity.md
    python tests/interop/torch_parity.py --python PATH    by another release of PyTorch, that of this Python
"""
import contextlib
import io
import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from other_python import by_asked_python  # noqa: E402

by_asked_python()
os.environ["OMP_NUM_THREADS"] = "1"
try:
    import torch
    import torch.distributed.pipelining  # noqa: F401
except ImportError as problem:
    print(f"skipped: no torch to compare with ({problem})")
    sys.exit(77)
release = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
if (2, 12) <= release < (2, 15):
    print(f"skipped: the faults are planted into PyTorch 2.11 and 2.15, this is {torch.__version__}")
    sys.exit(77)

source = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[2]))
paths = [str(source / "cmake" / "packaging" / "python"), str(source / "tests" / "interop" / "parity")]
sys.path[:0] = paths
os.environ["PYTHONPATH"] = os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])

import clean  # noqa: E402
import faults  # noqa: E402
import models  # noqa: E402
from chevron_plan import parity  # noqa: E402
from chevron_plan.parity.__main__ import main as command  # noqa: E402

everything = "--all" in sys.argv
wrong = []


def timed(job, ranks):
    began = time.monotonic()
    verdict = parity.check(job, ranks)
    seconds = time.monotonic() - began
    if seconds > 60:
        wrong.append(f"{job} took {seconds:.0f} s")
    return verdict, seconds


def planted(ranks):
    """Every fault is found where it is planted, with its reason."""
    print("| fault | first difference | reason | seconds |\n|---|---|---|---|")
    for fault in faults.FAULTS:
        verdict, seconds = timed(fault.job, ranks)
        if release >= fault.corrected:
            if verdict.first:
                wrong.append(f"{fault.thread}: corrected in PyTorch {fault.corrected}, found:\n{verdict.text()}")
            continue
        found = verdict.first or next((one for one in verdict.orders if one.reason.code == fault.code), None)
        if found is None or (verdict.outcome, found.stage, found.micro_batch, found.operation,
                             found.reason.code) != (fault.outcome, fault.stage, fault.micro_batch, fault.operation,
                                                    fault.code) or fault.words not in found.reason.text:
            wrong.append(f"{fault.thread}: {fault.code} in {fault.operation} was planted, found:\n{verdict.text()}")
            continue
        place = f"stage {found.stage}" + (f", microbatch {found.micro_batch}"
                                          if found.micro_batch >= 0 else "") + f", `{found.operation}`"
        print(f"| {fault.thread} | {place} | `{found.reason.code}`: {found.reason.text} | {seconds:.1f} |")
    codes = {fault.code for fault in faults.FAULTS}
    if missing := set(parity.FAULTS) - codes - {"unknown"}:
        wrong.append(f"no fault has the reasons {missing}")


def bits(ranks):
    """A changed bit is found in the tensor in which it was changed: no reason fits it."""
    jobs = faults.flips()
    for job, event, stage, micro_batch, operation in jobs if everything else jobs[::9]:
        verdict, _ = timed(job, ranks)
        found = verdict.first
        if found is None or (found.stage, found.micro_batch, found.operation, found.reason.code) != (stage, micro_batch,
                                                                                                     operation, "unknown"):
            wrong.append(
                f"{job.schedule}: a bit of the {event} of stage {stage}, microbatch {micro_batch} was changed:\n{verdict.text()}")
    print(f"{len(jobs if everything else jobs[::9])} changed bits")


def right(ranks, folder):
    """No alarm; sums in another order are only reported where the schedule, the division or a tied weight makes another order."""
    jobs = list(clean.jobs(folder).items())
    seen = {"equal": 0, "order": 0}
    slowest = 0.0
    for name, job in jobs if everything else jobs[::3]:
        verdict, seconds = timed(job, ranks)
        slowest = max(slowest, seconds)
        codes = {one.reason.code for one in verdict.orders}
        wanted = set()
        if "LoopedBFS" in name or name == "reversed_weights":
            wanted.add("microbatch_order")
        if job.microbatches & (job.microbatches - 1) and not name.startswith(
            ("batches", "language", "tied")):  # these do not divide
            wanted.add("division_after_sum")
        if name.startswith("replicas"):
            wanted = {"replica_order"}
        if "tied" in name:
            wanted.add("tied_order")
        if verdict.first or not codes <= wanted or bool(codes) != bool(wanted) or not (verdict.compared["losses"]
                                                                                       and verdict.compared["parameters"]):
            wrong.append(f"{name}: right training, of which {wanted or 'no'} other order is expected:\n{verdict.text()}")
        else:
            seen[verdict.outcome] += 1
    print(f"{sum(seen.values())} right runs: {seen['equal']} equal in every bit, {seen['order']} but for the order of sums; "
          f"at most {slowest:.1f} s each")


def fails_on_rank_1():
    return faults.replaced(torch.nn.Linear, "forward", lambda old, self, x: old(self, x)
                           if os.environ["RANK"] == "0" else x.no_such_thing)


def sleeps_on_rank_1():
    return faults.replaced(torch.nn.Linear, "forward", lambda old, self, x:
                           (time.sleep(0 if os.environ["RANK"] == "0" else 30), old(self, x))[1])


def clipping():
    return models.regression(max_norm=1.0)


def no_case():
    return 5


def typed(*arguments):
    """The exit code of a command line, and what it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = command(list(map(str, arguments)))
        except SystemExit as end:
            code = end.code
    return code, out.getvalue()


def words(folder):
    """Exit codes, JSON, and messages of wrong uses."""
    uneven = pathlib.Path(folder) / "uneven.csv"
    uneven.write_text("0F0,0B0\n1F0,1B0,nonsense\n")
    for arguments, code, text in (
        (("--target", "models", "--schedule", "1F1B"), 2, "'models' names no function. Remedy: module:function"),
        (("--target", "nowhere:case", "--schedule", "1F1B"), 2, "the module of 'nowhere:case' cannot be imported"),
        (("--target", "models:nothing", "--schedule", "1F1B"), 2, "the module models has no function nothing"),
        (("--target", "models:tokens_of", "--schedule", "1F1B", "--ranks", 0), 2, "ranks is 0. Remedy: at least 1"),
        (("--target", "torch_parity:no_case", "--schedule", "1F1B"), 2,
         "returns a int. Remedy: return chevron_plan.parity.Case"), (("--target", "models:regression", "--schedule", "2F2B"), 2,
                                                                     "the schedule '2F2B' is no name that this PyTorch knows"),
        (("--target", "models:regression", "--schedule", "1F1B", "--ranks", 3), 2,
         "the case has 2 stages, the job 3 ranks. Remedy: --ranks 2"), (("--target", "models:regression", "--schedule",
                                                                         "DualPipeV"), 2, "Remedy: a model of 4 stages"),
        (("--target", "models:regression", "--schedule", "Interleaved1F1B", "--ranks", 4), 2,
         "2 stages cannot be divided evenly among 4 ranks"), (("--target", "models:regression", "--schedule", "1F1B",
                                                               "--microbatches", 5), 2,
                                                              "tensor of [24, 8], which 5 microbatches do not divide"),
        (("--target", "models:regression", "--schedule", "nowhere.csv"), 2,
         "nowhere.csv cannot be read: No such file"), (("--target", "models:regression", "--schedule", uneven), 2,
                                                       "uneven.csv, row 2: Invalid action string: nonsense"),
        (("--target", "models:regression", "--schedule", "1F1B", "--replicas", 3), 2,
         "replicas is 3. Remedy: 1 or 2"), (("--target", "torch_parity:clipping", "--schedule", "1F1B", "--replicas", 2), 2,
                                            "the case has a max_norm or an after_backward"),
        (("--schedule", "1F1B"), 2, "--target"), (("--target", "models:regression", "--schedule", "1F1B", "--within",
                                                   "torch_parity:fails_on_rank_1"), 3,
                                                  "rank 1: 'Tensor' object has no attribute 'no_such_thing'"),
        (("--target", "models:regression", "--schedule", "1F1B", "--within", "torch_parity:sleeps_on_rank_1", "--timeout", 3), 3,
         "rank 0: "), (("--target", "models:regression", "--schedule", "1F1B", "--microbatches", 3), 0,
                       "equal but for the order of sums"), (("--target", "models:regression", "--schedule", "1F1B",
                                                             "--microbatches", 3, "--strict"), 1,
                                                            "division_after_sum"), (("--target", "faults:seeded_by_rank",
                                                                                     "--schedule", "1F1B"), 1,
                                                                                    "reason: random_numbers")):
        ended, printed = typed(*arguments)
        if ended != code or text not in printed:
            wrong.append(f"{arguments} ended with {ended} instead of {code}, and printed not {text!r} but:\n{printed}")
    done = subprocess.run(
        [sys.executable, "-m", "chevron_plan.parity", "--target", "faults:seeded_by_rank", "--schedule", "1F1B", "--json"],
        capture_output=True,
        text=True,
        timeout=120)
    verdict = json.loads(done.stdout)
    if done.returncode != 1 or verdict["outcome"] != "differs" or verdict["first"]["reason"]["code"] != "random_numbers":
        wrong.append(f"--json ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def page(folder):
    """The guide's example prints its output; its tables have the options of --help and the reasons of the module, and no
    others."""
    text = (source / "docs" / "guides" / "parity.md").read_text()
    [(name, program)] = re.findall(r"^```python file (\S+)\n(.*?)^```$", text, re.M | re.S)
    (pathlib.Path(folder) / name).write_text(program)
    [console] = re.findall(r"^```console\n(.*?)^```$", text, re.M | re.S)
    environment = {**os.environ, "PATH": os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])}
    printed = ""
    for line in [line for line in console.splitlines() if line.startswith("$ ")]:
        command_line = line[2:].replace("python ", f"{sys.executable} ", 1)
        done = subprocess.run(command_line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
        printed += f"{line}\n{done.stdout}{done.stderr}"
    numbers = re.compile(r"\d+\.\d+(e-\d+)?")  # other machines round otherwise
    if numbers.sub("#", printed) != numbers.sub("#", console):
        wrong.append(f"docs/guides/parity.md shows another output than:\n{printed}")
    _, shown = typed("--help")
    options = set(re.findall(r"^ +(--[a-z-]+)", shown, re.M)) - {"--help"}
    rows = set(re.findall(r"^\| `(--[a-z-]+)` \|", text, re.M))
    if options != rows:
        wrong.append(f"docs/guides/parity.md and --help differ in the options {options ^ rows}")
    reasons = set(re.findall(r"^\| `([a-z_]+)` \| ", text[text.index("## Read the verdict"):text.index("## How well")], re.M))
    if reasons != set(parity.REASONS):
        wrong.append(f"docs/guides/parity.md and chevron_plan.parity.REASONS differ in {reasons ^ set(parity.REASONS)}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, parity.Ranks() as ranks:
        planted(ranks)
        bits(ranks)
        right(ranks, folder)
        words(folder)
        page(folder)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    print(f"{sum(one.ru_utime + one.ru_stime for one in used):.0f} s of processor time, without the ranks'")
    if wrong:
        sys.exit("FAILED:\n" + "\n".join(wrong))
