#!/usr/bin/env python3
"""The first minutes on a machine with a GPU that is only lent, with programs that were built elsewhere: `./dev gpu carried` starts it.

    python3 bench/gpu/first_run.py first     does it run at all: streams, trainer, graphs, training over NCCL; a build starts behind it
    python3 bench/gpu/first_run.py second    lost ranks, benchmarks, the sanitizer, one GPU as three
    python3 bench/gpu/first_run.py third     the official figures, bench/gpu/run.py, from that build
    python3 bench/gpu/first_run.py pair      two GPUs: NCCL and copies between them, each rank on its own, before `first`
    python3 bench/gpu/first_run.py first --only graphs,copies      the parts alone whose names hold one of these words

Each command ends within BUDGET seconds (590). Parts run in order of worth; a part begins where its time is left, else the summary says
so. Parts that measure nothing run beside each other, WIDTH at a time: they share the GPU. Two files grow in OUT (build/gpu/carried) as
parts end: summary.txt, a line each, and log.txt, the end of each part's output, and the stacks of its threads where a part was stopped
for its time and cuda-gdb is installed. The build lives in WORK (/tmp/chevron-gpu), a copy of the sources: it outlives the command, and
a new copy of the sources between commands.
"""
import argparse
import concurrent.futures
import dataclasses
import datetime
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT_BYTES = 40_000  # of the output of a part
SHORTEST = 20  # seconds: a part is not begun with less
HUNG = (4, 124)  # exit codes: of a rank that another one does not answer, of a part that is stopped
WIDTH = 4  # parts beside each other


@dataclasses.dataclass
class part:
    name: str
    seconds: int  # it is stopped after so long
    command: list
    ends: tuple = (0,)  # the exit codes that are right
    environment: dict = dataclasses.field(default_factory=dict)
    needs: Path = None  # a file without which it is not begun
    vital: bool = False  # nothing after it is worth its time where it fails
    otherwise: tuple = ()  # environments with which it is run again where it fails: each names a cause
    kept: int = KEPT_BYTES
    beside: bool = False  # may run beside the parts before and after it that may, too


class machine:
    """Runs commands and tells the time. A rehearsal takes another one."""

    now = staticmethod(time.monotonic)

    def run(self, command, seconds, environment):
        """\\returns (exit code, output); 124 for a command that was stopped"""
        started = subprocess.Popen([str(word) for word in command], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, env={**os.environ, **environment}, start_new_session=True)
        try:
            output, _ = started.communicate(timeout=seconds)
            return started.returncode, output.decode(errors="replace")
        except subprocess.TimeoutExpired:
            where = self.stacks(started.pid)
            os.killpg(started.pid, 9)  # its children, too, which may hold the output open
            output, _ = started.communicate()
            return 124, where + output.decode(errors="replace")

    def run_beside(self, several):
        """\\returns of each (exit code, output, seconds)"""
        def timed(one):
            began = self.now()
            return *self.run(*one), self.now() - began
        with concurrent.futures.ThreadPoolExecutor(len(several)) as pool:
            return list(pool.map(timed, several))

    @staticmethod
    def stacks(group):
        """Of all threads of the processes of a group, by cuda-gdb."""
        if shutil.which("cuda-gdb") is None:
            return ""
        found = subprocess.run(["pgrep", "-g", str(group)], capture_output=True, text=True)
        out = ""
        for process in found.stdout.split()[:3]:
            words = ["timeout", "-s", "KILL", "15", "cuda-gdb", "-p", process, "-batch", "-ex", "thread apply all backtrace 30"]
            done = subprocess.run(words, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
            lines = [line[:160] for line in done.stdout.splitlines() if line.startswith(("Thread", "#"))]
            out += f"stacks of process {process}:\n" + "\n".join(lines) + "\n"
        return out

    @staticmethod
    def gpus():
        """How many GPUs nvidia-smi lists."""
        if shutil.which("nvidia-smi") is None:
            return 0
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())

    def start(self, command, log):
        """Starts a command that outlives this one."""
        with open(log, "w") as to:
            subprocess.Popen([str(word) for word in command], cwd=log.parent, stdin=subprocess.DEVNULL, stdout=to, stderr=to,
                             start_new_session=True)


class first_run:
    def __init__(self, out, work, budget, on):
        self.out, self.work, self.budget, self.on, self.began = out, work, budget, on, on.now()
        self.failed, self.hung, self.late = [], [], []
        out.mkdir(parents=True, exist_ok=True)

    def left(self):
        return self.budget - (self.on.now() - self.began)

    def say(self, line):
        print(line, flush=True)
        with open(self.out / "summary.txt", "a") as to:
            to.write(line + "\n")

    def keep(self, title, output, kept):
        cut = "" if len(output) <= kept else f"[... {len(output) - kept} characters before]\n"
        with open(self.out / "log.txt", "a") as to:
            to.write(f"\n== {title}\n{cut}{output[-kept:]}")

    def seconds_for(self, one):
        """\\returns how long a part may take; None, said in the summary, for a part that is not begun"""
        if one.needs is not None and not one.needs.exists():
            self.say(f"{one.name}: not run, there is no {one.needs}")
            return None
        seconds = min(one.seconds, self.left() - 2)
        if seconds >= SHORTEST:
            return seconds
        self.say(f"{one.name}: not run, {self.left():.0f} s are left")
        self.late.append(one.name)
        return None

    def run(self, several):
        """Runs parts beside each other. \\returns whether all ended as they should"""
        begun = [(one, seconds) for one in several if (seconds := self.seconds_for(one)) is not None]
        if not begun:
            return False
        ended = self.on.run_beside([(one.command, seconds, one.environment) for one, seconds in begun])
        return all([self.note(one, *how) for (one, _), how in zip(begun, ended)]) and len(begun) == len(several)

    def note(self, one, code, output, took):
        """\\returns whether the part ended as it should"""
        self.keep(f"{one.name}: {' '.join(str(word) for word in one.command)}", output, one.kept)
        lines = output.strip().splitlines()
        good = code in one.ends
        how = "well" if good and code == 0 else f"with {code}, as it must" if good else "skipped" if code == 77 else \
            f"not: it was still running after {took:.0f} s" if code == 124 else f"with {code}"
        self.say(f"{one.name}: {took:.0f} s, ended {how}" + (f": {lines[-1][:200]}" if lines else ""))
        if not good and code != 77:
            self.failed.append(one)
            if code in HUNG:
                self.hung.append(one)
        return good

    def run_all(self, parts):
        for several in groups(parts):
            if not self.run(several) and several[0].vital:
                for name, value in several[0].otherwise:
                    again = {**several[0].environment, name: value}
                    self.run([dataclasses.replace(several[0], name=f"{several[0].name}, {name}={value}", environment=again)])
                self.say(f"stopped here: nothing else is worth its time while {several[0].name} fails")
                return
        # A kernel that is loaded late waits for kernels that wait for each other: where eager loading helps, that was the cause.
        for one in [each for each in self.hung if each.environment.get("CUDA_MODULE_LOADING") != "EAGER"]:
            eager = {**one.environment, "CUDA_MODULE_LOADING": "EAGER"}
            if self.left() > SHORTEST:
                self.run([dataclasses.replace(one, name=one.name + ", loading eagerly", environment=eager)])

    def end(self):
        failed = ", ".join(one.name for one in self.failed)
        late = f"; not begun: {', '.join(self.late)}" if self.late else ""
        self.say(f"all that ran ended as it should{late}" if not failed else f"failed: {failed}{late}")
        return 1 if failed else 0


def groups(parts):
    """Parts in their order, up to WIDTH of those that may run beside each other together."""
    out = []
    for one in parts:
        if out and one.beside and out[-1][0].beside and len(out[-1]) < WIDTH:
            out[-1].append(one)
        else:
            out.append([one])
    return out


def site_packages():
    """Where torch lies, as users of LibTorch know it, so are CUDA's and NCCL's libraries."""
    found = importlib.util.find_spec("torch")
    if found is None:
        sys.exit(f"no torch for {sys.executable}. Remedy: PYTHON=<one that can import torch>")
    return Path(found.submodule_search_locations[0]).parent


def training(binaries, name, seconds, *flags, backend="nccl", steps=20):
    command = [binaries / "chevron-train", "--backend", backend, "--steps", steps, "--timeout", 60, "--timeline", "none",
               "--trace", "none", "--data", "include", *flags]
    return part(f"train {name}", seconds, command, beside=True)


def tests_of(binaries, name, seconds, **more):
    command = [binaries / "chevron-gpu-tests", "--no-colors", "--duration=true", f"--source-file=*/{name}_test.cpp"]
    return part(f"tests of {name}", seconds, command, **more)


def stages_of_python(carried):
    cache = {"CHEVRON_PIPELINING_CACHE": str(carried.parent / "python")}
    return part("stages of Python", 150, [sys.executable, "bench/gpu/python_door.py"], environment=cache, needs=carried.parent / "python")


def beginning(site, carried):
    """What comes before all else on a machine."""
    libraries = " ".join(str(site / below) for below in ("torch/lib/*.so", "nvidia/*/lib/*.so*"))
    return [
        part("machine", 30, ["sh", "-c", "nvidia-smi && nproc --all && free -g && { nvidia-smi topo -m; nvidia-smi topo -p2p rwn; "
                             "df -h /dev/shm; ulimit -l; true; }"], vital=True),
        # The first program would read some gigabytes from a cold disk, against its own time.
        part("libraries into memory", 150, ["sh", "-c", f"ls {libraries} 2>/dev/null | xargs -P 16 -n 2 cat >/dev/null"]),
        part("libraries found", 30, ["sh", "-c", f"! ldd {carried}/* | grep 'not found'"], vital=True),
        tests_of(carried, "devices", 180, vital=True),
    ]


def first(carried):
    two = ["--share-gpus", "--replicas", 1, "--ranks", 2]
    return [
        *[tests_of(carried, name, seconds, beside=True) for name, seconds in (("streams", 60), ("trainer", 90), ("graphs", 110))],
        tests_of(carried, "copy_transport", 240, beside=True),  # five jobs of processes that share the GPU, without NCCL
        training(carried, "alone", 90, "--ranks", 1, "--replicas", 1),
        training(carried, "1F1B", 90, *two),
        training(carried, "by copies", 60, *two, backend="copies"),
        training(carried, "with graphs", 60, *two, "--cuda-graph"),
        training(carried, "ZBVZeroBubble", 60, *two, "--schedule", "ZBVZeroBubble"),
        training(carried, "with an optimizer over replicas", 60, "--share-gpus", "--ranks", 1, "--replicas", 2, "--shard", "optimizer"),
        training(carried, "with shards", 150, "--share-gpus", "--ranks", 1, "--replicas", 1, "--shards", 2, steps=8),
        training(carried, "with slices", 60, *two, "--schedule", "Seq1F1B", "--slices", 2),
        training(carried, "with late gathers", 60, "--share-gpus", "--ranks", 1, "--replicas", 2, "--shard", "gradients",
                 "--overlap-gather"),
        training(carried, "with masters", 60, *two, "--dtype", "bfloat16", "--master-parameters"),
        training(carried, "with experts", 150, "--share-gpus", "--ranks", 1, "--replicas", 1, "--shards", 2, "--experts", 2, steps=8),
        training(carried, "with shards by copies", 150, *two, "--shards", 2, backend="copies", steps=8),
        training(carried, "with replicas by copies", 60, "--share-gpus", "--ranks", 2, "--replicas", 2, "--shard", "gradients",
                 backend="copies"),
        training(carried, "with post-validation", 60, *two, "--schedule", "ZB-H2", "--post-validation"),
        stages_of_python(carried),
        tests_of(carried, "memory", 60),
        part("calls that wait", 40, [sys.executable, "bench/gpu/calls_that_wait.py"]),
        part("streams of 32 queues", 40, [sys.executable, "bench/gpu/streams.py"], environment={"CUDA_DEVICE_MAX_CONNECTIONS": "32"}),
    ]


def partitions(carried, out):
    """One GPU as three: MPS runs three processes at a time, each on at most a third of the multiprocessors, so that ranks compute beside
    each other and a schedule's bubble can be measured beside its prediction. With 32 queues each, MPS has no room for a fourth."""
    model = ["--layers", 12, "--width", 2048, "--heads", 16, "--context", 512, "--dtype", "bfloat16"]
    shape = ["--backend", "copies", "--share-gpus", "--ranks", 3, "--replicas", 1, "--microbatches", 9, "--microbatch-size", 4]
    for schedule, flags in (("1F1B", ()), ("ZB-H1", ()), ("ZBVZeroBubble", ()), ("Interleaved1F1B", ()), ("DualPipeV", ()),
                            ("1F1B", ("--cuda-graph",)), ("ZBVZeroBubble", ("--cuda-graph",))):
        drawing = ["--timeline", out / f"partitions-{schedule}.svg"] if schedule in ("1F1B", "ZBVZeroBubble") and not flags else \
            ["--timeline", "none"]
        command = ["sh", "bench/gpu/partitions.sh", 3, carried / "chevron-train", *shape, *model, "--schedule", schedule, "--steps", 16,
                   "--timeout", 60, "--trace", "none", "--data", "include", *drawing, *flags]
        yield part(f"partitions, {schedule}{' as graphs' if flags else ''}", 60, command)


def pair(carried):
    """Two GPUs, one for each rank, so that NCCL takes what lies between them: one part after another, since GPUs are not shared."""
    def alone(one, **more):
        return dataclasses.replace(one, beside=False, **more)

    causes = (("NCCL_P2P_DISABLE", "1"), ("CUDA_MODULE_LOADING", "EAGER"), ("NCCL_CUMEM_ENABLE", "0"))
    told = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,P2P,GRAPH,TUNING,ENV"}
    two, replicas = ["--ranks", 2, "--replicas", 1], ["--ranks", 1, "--replicas", 2, "--shard", "gradients", "--overlap-gather"]
    gpt = ["--layers", 12, "--width", 2048, "--heads", 16, "--context", 512, "--dtype", "bfloat16", "--microbatches", 8,
           "--microbatch-size", 4, *two]
    return [
        part("two GPUs", 20, ["sh", "-c", "test $(nvidia-smi -L | grep -c '^GPU ') -ge 2"], vital=True),
        alone(training(carried, "1F1B on two GPUs", 60, *two), vital=True, otherwise=causes, environment=told, kept=200_000),
        alone(training(carried, "ZBVZeroBubble as graphs on two GPUs", 60, *two, "--schedule", "ZBVZeroBubble", "--cuda-graph"), vital=True,
              otherwise=causes),
        alone(training(carried, "DualPipeV on two GPUs", 60, *two, "--schedule", "DualPipeV")),
        alone(training(carried, "replicas on two GPUs", 60, *replicas)),
        stages_of_python(carried),
        alone(training(carried, "shards and experts on two GPUs", 90, "--ranks", 1, "--replicas", 1, "--shards", 2, "--experts", 2, steps=8)),
        alone(training(carried, "1F1B by copies on two GPUs", 60, *two, "--cuda-graph", backend="copies")),
        # Runs whose losses those of the GPUs are compared with.
        training(carried, "1F1B on the CPU", 90, *two, backend="threads"),
        training(carried, "replicas on the CPU", 90, *replicas[:-1], backend="threads"),
        *[part(f"lost rank on two GPUs, SIG{signal}", 110, ["sh", "bench/gpu/lost_rank.sh", carried, signal]) for signal in ("KILL", "STOP")],
        part("a receive that waits on two GPUs", 60, [carried / "bench-gpu_waiting", "--blocks", "0,1,2,4,8,16,32"]),
        *[part(f"a step of two GPUs over {backend}", 110, [carried / "bench-gpu_step", "--ranks", 2, "--backend", backend])
          for backend in ("nccl", "copies")],
        *[alone(training(carried, f"large, {schedule} over {backend}", 60, *gpt, "--schedule", schedule, backend=backend, steps=16))
          for schedule in ("1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipeV") for backend in ("nccl", "copies")],
        part("memory by part on two GPUs", 60, [carried / "bench-gpu_memory"]),
        # Ranks that are threads of one process are the unusual case.
        part("tests of NCCL in threads", 120, [carried / "chevron-gpu-tests", "--no-colors", "--test-case=*NCCL*"]),
    ]


def second(carried, work, out, gpus):
    lost = [part(f"lost rank, SIG{signal}", 110, ["sh", "bench/gpu/lost_rank.sh", carried, signal], beside=True)
            for signal in ("KILL", "STOP")]
    # The scripts run programs from `bin` in the folder of their argument.
    with_torch = {what: [sys.executable, f"bench/run/gpu_{what}_beside_torch.py", carried.parent] for what in ("step", "end")}
    small = [carried / "bench-gpu_step", "--small", "--ranks", 2]
    return [
        part("the build", 30, ["sh", "-c", f"tail -n 3 {work}/build.log"]),
        part("a step on a GPU", 90, [carried / "bench-gpu_step"]),
        part("operations of a step's end", 30, [carried / "bench-gpu_step", "--small", "--operations", "--schedules", "1F1B"]),
        part("the end of a step beside PyTorch", 120, with_torch["end"]),
        part("a step beside PyTorch", 240, with_torch["step"]),
        part("a receive that waits", 60, [carried / "bench-gpu_waiting"]),
        *lost,
        part("a step of two ranks over NCCL", 90, [*small, "--backend", "nccl"]),
        part("a step of two ranks as threads", 60, small),
        part("memory by part", 60, [carried / "bench-gpu_memory"]),
        training(carried, "DualPipeV", 60, "--share-gpus", "--ranks", 2, "--replicas", 1, "--schedule", "DualPipeV"),
        # With eight queues for more than eight streams some pairs must wait for each other: so says the rule that sets 32.
        part("streams of 8 queues", 40, [sys.executable, "bench/gpu/streams.py"], ends=(1,), environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"}),
        part("memory errors", 120, ["compute-sanitizer", "--error-exitcode", 86, carried / "chevron-gpu-tests", "--no-colors",
                                    "--source-file=*/streams_test.cpp"], needs=Path(shutil.which("compute-sanitizer") or "compute-sanitizer")),
        part("memory errors of training", 120, ["compute-sanitizer", "--error-exitcode", 86, carried / "chevron-gpu-tests", "--no-colors",
                                                "--test-case=replicas on one*,one NCCL*,*float32 masters*"],
             needs=Path(shutil.which("compute-sanitizer") or "compute-sanitizer")),
        # With more GPUs some ranks would have one of their own.
        *(partitions(carried, out) if gpus == 1 else ()),
    ]


def third(run):
    script = run.work / "bench/gpu/run.py"
    budget = {"OUT": str(run.out / "figures"), "BUDGET": str(int(max(run.left() - 15, 0)))}
    return [part("official figures", 600, [sys.executable, script, "--only", "tests,train,bench"], environment=budget, needs=script)]


def copy_and_build(run):
    """Starts a build in WORK that goes on after this command."""
    if (run.work / "build.log").exists():
        return
    names = [p.name for p in ROOT.iterdir() if p.name not in ("build", ".git", ".venv")]
    for name in names:
        source = ROOT / name
        shutil.copytree(source, run.work / name, symlinks=True) if source.is_dir() else shutil.copy2(source, run.work / name)
    run.on.start(["nice", "-n", "15", sys.executable, run.work / "bench/gpu/run.py", "--only", "build"], run.work / "build.log")
    run.say(f"a build has started in {run.work}")


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("command", choices=("first", "second", "third", "pair"), nargs="?", default="first")
    words.add_argument("--only", default="", help="only the parts whose names contain one of these words, separated by commas")
    asked = words.parse_args()
    only = [word for word in asked.only.split(",") if word]
    work = Path(os.environ.get("WORK", "/tmp/chevron-gpu"))
    work.mkdir(parents=True, exist_ok=True)
    run = first_run(Path(os.environ.get("OUT") or ROOT / "build/gpu/carried").resolve(), work, float(os.environ.get("BUDGET") or 590), machine())
    site, carried = site_packages(), ROOT / ".gpu/bin"
    paths = [site / "torch/lib", site / "nvidia/cu13/lib", site / "nvidia/nccl/lib", os.environ.get("LD_LIBRARY_PATH", "")]
    os.environ.update(LD_LIBRARY_PATH=":".join(str(p) for p in paths if str(p)), OMP_NUM_THREADS="1", NCCL_DEBUG="WARN")
    run.say(f"{asked.command}, {datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC, {run.budget:.0f} s")
    if asked.command == "first" and not only:
        copy_and_build(run)
    if asked.command == "third":
        run.run_all(third(run))
    else:
        parts = {"first": lambda: first(carried), "pair": lambda: pair(carried),
                 "second": lambda: second(carried, work, run.out, run.on.gpus())}[asked.command]()
        run.run_all(beginning(site, carried) + [one for one in parts if not only or any(word in one.name for word in only)])
    return run.end()


if __name__ == "__main__":
    sys.exit(main())
