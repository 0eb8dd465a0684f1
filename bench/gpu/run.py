#!/usr/bin/env python3
"""Builds the programs that need a GPU, runs them, and writes a record of the results, for `./dev gpu`.

For a machine with CUDA's driver, a Python with torch, CMake, ninja and a compiler, but without internet: the headers of the other
libraries come from .deps, which `./dev gpu pack` fills on a machine that has them. On a machine without a GPU everything is
built, and each part that needs a GPU is skipped with the reason.

Writes to the folder OUT (default: build/gpu/results):
  summary.txt   for people
  figures.json  the same for programs: date, GPUs, driver, versions, and of each command its text, status, seconds and figures
  log.txt       all that the commands printed
  tests.xml     the GPU tests, as JUnit has them
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from pathlib import Path

root = Path(__file__).resolve().parents[2]
build = root / "build" / "gpu"
deps = root / ".deps"


class report:
    """What is written at the end, also of a run that was cut short."""

    def __init__(self, out, budget):
        self.out, self.budget, self.began = out, budget, time.monotonic()
        out.mkdir(parents=True, exist_ok=True)
        self.log = open(out / "log.txt", "w", buffering=1)
        self.figures = {"date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"), "commands": []}
        self.lines = []

    def left(self):
        return self.budget - (time.monotonic() - self.began)

    def say(self, line):
        print(line, flush=True)
        self.log.write(line + "\n")
        self.lines.append(line)

    def write(self):
        (self.out / "summary.txt").write_text("\n".join(self.lines) + "\n")
        (self.out / "figures.json").write_text(json.dumps(self.figures, indent=1) + "\n")

    def run(self, name, command, limit, environment=None):
        """Runs a command into the log and gives (status, output); status 'out of time' where nothing is left of the budget."""
        text = " ".join(str(word) for word in command)
        limit = min(limit, self.left())
        entry = {"name": name, "command": text}
        self.figures["commands"].append(entry)
        if limit < 5:
            entry["status"] = "not run: out of time"
            self.say(f"  {name}: not run, the {self.budget:.0f} s are over")
            return entry["status"], ""
        self.log.write(f"\n== {name}: {text}\n")
        began = time.monotonic()
        try:
            done = subprocess.run([str(word) for word in command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, cwd=root,
                                  stderr=subprocess.STDOUT, timeout=limit, env={**os.environ, **(environment or {})})
            status, output = done.returncode, done.stdout.decode(errors="replace")
        except subprocess.TimeoutExpired as late:
            status, output = "timeout", (late.stdout or b"").decode(errors="replace")
        entry["seconds"] = round(time.monotonic() - began, 2)
        entry["status"] = status
        self.log.write(output)
        self.say(f"  {name}: {'ok' if status == 0 else f'status {status}'}, {entry['seconds']:.1f} s")
        return status, output


def first_line(command):
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, cwd=root)
        return done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else None
    except (OSError, subprocess.TimeoutExpired):
        return None


def describe_machine(to):
    gpus = []
    try:
        told = subprocess.run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
                              capture_output=True, text=True, timeout=60)
        for line in told.stdout.strip().splitlines() if told.returncode == 0 else []:
            name, memory, driver = (word.strip() for word in line.split(","))
            gpus.append({"name": name, "memory": memory, "driver": driver})
    except (OSError, ValueError, subprocess.TimeoutExpired):
        pass
    # Not imported: that takes seconds.
    torch = "import importlib.metadata as m; print(m.version('torch'))"
    machine = {
        "gpus": gpus,
        "torch": first_line([sys.executable, "-c", torch]),
        "compiler": first_line([os.environ.get("CXX", "c++"), "--version"]),
        "cmake": first_line(["cmake", "--version"]),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "commit": first_line(["git", "describe", "--always", "--dirty", "--abbrev=12"]),
    }
    to.figures.update(machine)
    to.say(f"date      {to.figures['date']}")
    for number, gpu in enumerate(gpus):
        to.say(f"GPU {number}     {gpu['name']}, {gpu['memory']}, driver {gpu['driver']}")
    if not gpus:
        to.say("GPU       none (nvidia-smi lists none)")
    to.say(f"torch     {machine['torch']}; {machine['compiler']}; {machine['cores']} cores")
    to.say(f"commit    {machine['commit'] or 'not known: this is no checkout'}")
    return gpus


def missing_tools():
    missing = [tool for tool in ("cmake", "ninja", os.environ.get("CXX", "c++")) if shutil.which(tool) is None]
    given = os.environ.get("CHEVRON_TORCH_DIR")
    look = "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)"
    if not given and subprocess.run([sys.executable, "-c", look]).returncode != 0:
        missing.append(f"torch for {sys.executable}, or CHEVRON_TORCH_DIR")
    return missing


def compile_jobs():
    """As many as there are cores, or 3.2 GB each. Of all memory: some machines are given more only as they use it."""
    for line in open("/proc/meminfo"):
        if line.startswith("MemTotal"):
            return max(1, min(os.cpu_count() or 1, int(line.split()[1]) // 3_200_000))
    return os.cpu_count() or 1


def build_all(to):
    torch = os.environ.get("CHEVRON_TORCH_DIR", "")
    if not torch:
        find = "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
        torch = first_line([sys.executable, "-c", find])
    configure = ["cmake", "-S", root, "-B", build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release",
                 "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG", f"-DCHEVRON_TORCH_DIR={torch}"]
    if deps.is_dir():
        configure.append(f"-DCMAKE_PREFIX_PATH={deps}")
    to.say("\nbuild")
    status, output = to.run("configure", configure, 120)
    if status != 0 or "chevron: without chevron::nccl" in output:
        to.say("\n".join(output.splitlines()[-15:]))
        return False
    jobs = os.environ.get("JOBS", str(compile_jobs()))
    targets = ["chevron-gpu-tests", "chevron-pretended-gpus", "chevron-train", "chevron-train-nccl", "gpu-benchmarks"]
    status, output = to.run("compile", ["cmake", "--build", build, "-j", jobs, "--target", *targets], to.left())
    if status != 0:
        to.say("\n".join(output.splitlines()[-40:]))
    return status == 0


def run_tests(to):
    """The GPU tests. Gives (failed, why there is no GPU or None)."""
    to.say("\ntests")
    junit = to.out / "tests.xml"
    command = ["ctest", "--test-dir", build, "-L", "gpu", "-V", "--timeout", "300", "--test-output-size-passed", "65536",
               "--output-junit", junit]
    status, output = to.run("GPU tests", command, 600)
    if status not in (0, 8) or not junit.exists():
        return True, None
    cases, reason = [], None
    for case in xml.parse(junit).getroot().iter("testcase"):
        told = (case.findtext("system-out") or "").splitlines()
        skipped = sorted({line.removeprefix("skipped: ") for line in told if line.startswith("skipped: ")})
        reason = reason or (skipped[0] if skipped else None)
        messages = [line.split("MESSAGE: ", 1)[1] for line in told if "MESSAGE: " in line]
        state = {"run": "passed", "fail": "failed", "notrun": "skipped"}.get(case.get("status"), case.get("status"))
        cases.append({"name": case.get("name"), "result": state, "seconds": float(case.get("time", 0)), "not_run": skipped,
                      "messages": messages})
        for line in [f"{state:8}{case.get('name')}"] + [f"  skipped: {why}" for why in skipped] + [f"  {m}" for m in messages]:
            to.say("    " + line)
    to.figures["tests"] = cases
    failed = status != 0 or not cases
    return failed, reason if any(c["result"] == "skipped" for c in cases) else None


def sanitize(to):
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        to.say("  compute-sanitizer: not run, it is not installed")
        return False
    # It takes a program 10 to 100 times as long, so it is given the tests of streams alone, and comes last.
    command = [tool, "--error-exitcode", "86", build / "bin" / "chevron-gpu-tests", "--source-file=*/streams_test.cpp"]
    status, output = to.run("compute-sanitizer", command, 300)
    to.figures["sanitizer"] = [line for line in output.splitlines() if line.startswith("=========")][-3:]
    return status not in (0, 77)


def losses(file):
    return [json.loads(line)["loss_metrics/global_avg_loss"] for line in file.read_text().splitlines()] if file.exists() else []


def train(to, gpus):
    """The same job on the CPU and on GPUs, with several schedules: how far apart the losses are, and how fast."""
    to.say("\ntraining")
    work = build / "train"
    work.mkdir(exist_ok=True)
    size = ["--steps", "30", "--microbatches", "8", "--timeline", "none", "--trace", "none", "--data", root / "include"]
    program = build / "bin" / "chevron-train"
    failed = False

    def one(name, flags, limit):
        metrics = work / f"{name.replace(' ', '-')}.jsonl"
        metrics.unlink(missing_ok=True)
        status, output = to.run(name, [program, *size, *flags, "--metrics", metrics], limit)
        entry = to.figures["commands"][-1]
        entry["losses"] = losses(metrics)
        if status != 0:
            to.say("\n".join(output.splitlines()[-5:]))
        else:
            seconds = sorted(json.loads(line)["time_metrics/end_to_end(s)"] for line in metrics.read_text().splitlines()[5:])
            entry["step_seconds"] = seconds[len(seconds) // 2] if seconds else None
            for line in output.splitlines():
                if line.startswith("graphs"):
                    to.say("    " + line)
            entry["table"] = next((part.splitlines() for part in output.split("\n\n") if "predicted    measured" in part), [])
        return status == 0, entry["losses"]

    ranks = min(gpus, 4)
    share = []
    if gpus == 1:
        ok, _ = one("train one rank", ["--backend", "nccl", "--ranks", "1", "--replicas", "1"], 120)
        failed |= not ok
        ranks, share = 2, ["--share-gpus"]  # NCCL between two processes on one GPU, through sockets
    ok, plain = one("train on the CPU", ["--backend", "threads", "--ranks", ranks, "--replicas", "1"], 180)
    failed |= not ok
    for schedule, more in (("1F1B", []), ("ZBVZeroBubble", []), ("DualPipeV", []), ("1F1B", ["--cuda-graph"]),
                           ("DualPipeV", ["--cuda-graph"])):
        flags = ["--backend", "nccl", "--schedule", schedule, "--ranks", ranks, "--replicas", "1", "--timeout", "60", *share, *more]
        ok, other = one(f"train {schedule} over NCCL" + (" with CUDA graphs" if more else ""), flags, 180)
        failed |= not ok
        if ok and plain and len(plain) == len(other):
            apart = max(abs(a - b) / abs(a) for a, b in zip(plain, other))
            to.figures["commands"][-1]["largest_relative_difference_of_loss"] = apart
            to.say(f"    losses over {len(plain)} steps differ from the CPU's by at most {apart:.2e} of their value")
    return failed


def bench(to):
    to.say("\nbenchmarks")
    failed = False
    programs = sorted((build / "bin").glob("bench-gpu_*"))
    scripts = sorted((root / "bench" / "run").glob("gpu_*.py"))
    two_ranks = [[build / "bin" / "bench-gpu_step", "--ranks", 2, *more] for more in ([], ["--small", "--backend", "nccl"])]
    for command in [[p] for p in programs] + [[sys.executable, s, build] for s in scripts] + [c for c in two_ranks if c[0] in programs]:
        name = Path(command[1]).stem if command[0] == sys.executable else " ".join([Path(command[0]).name, *map(str, command[1:])])
        figures = build / f"{name.replace(' ', '')}.json"
        figures.unlink(missing_ok=True)
        status, output = to.run(name, [*command, "--json", figures], 240)
        failed |= status != 0
        to.figures["commands"][-1]["output"] = output.splitlines()[-60:]
        if figures.exists():
            to.figures["commands"][-1]["figures"] = json.loads(figures.read_text())
        to.say("\n".join("    " + line for line in output.splitlines()[-60:]))
    if not programs and not scripts:
        to.say("  none: bench/run has no gpu_*.cpp and no gpu_*.py")
    return failed


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--budget", type=float, default=float(os.environ.get("BUDGET", 3600)), help="seconds for all parts")
    parts = ("build", "tests", "train", "bench", "sanitize")
    words.add_argument("--only", default=",".join(parts), help=f"some of {','.join(parts)}; without build, what build/gpu holds")
    options = words.parse_args()
    only = options.only.split(",")
    if unknown := [word for word in only if word not in parts]:
        words.error(f"--only: no part is called {unknown[0]}. Remedy: some of {','.join(parts)}")
    missing = missing_tools()
    if missing:
        print(f"missing: {', '.join(missing)}. Remedy: install them, or ./dev build, which does", file=sys.stderr)
        return 2
    to = report(Path(os.environ.get("OUT") or build / "results").resolve(), options.budget)
    failed = True
    try:
        gpus = describe_machine(to)
        if "build" in only and not build_all(to):
            to.say("\nthe build failed: see log.txt")
            return 1
        failed, no_gpu = run_tests(to) if "tests" in only else (False, None if gpus else "nvidia-smi lists none")
        if no_gpu and not gpus:
            to.say(f"\nno GPU: {no_gpu.split('. Remedy')[0]}; tests skipped, training and benchmarks not run, the build is "
                   "complete")
            to.figures["not_run"] = no_gpu
        else:
            for name, do in (("train", lambda: train(to, len(gpus))), ("bench", lambda: bench(to)), ("sanitize", lambda: sanitize(to))):
                if name in only:
                    failed |= do()
            to.say("\n" + ("something failed: see log.txt" if failed else "all of it ran"))
        return 1 if failed else 0
    finally:
        to.figures["failed"] = failed
        to.write()
        print(f"written to {to.out}: {', '.join(sorted(f.name for f in to.out.iterdir()))}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
