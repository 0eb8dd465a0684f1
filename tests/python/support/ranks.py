"""Ranks as forks of the test, which has imported torch and chevron_pipelining once; and models that several tests train."""
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SOURCE = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[3]))
BUILD = pathlib.Path(os.environ.get("CHEVRON_BUILD", SOURCE / "build")).resolve()
sys.path.insert(0, str(SOURCE / "python"))
sys.dont_write_bytecode = True
os.environ.setdefault("CHEVRON_PIPELINING_CACHE", str(BUILD / "python"))
os.environ.setdefault("CHEVRON_PIPELINING_CXXFLAGS", "-O0")

try:
    import torch
    import torch.distributed as dist
    from torch import nn
except ImportError as problem:
    print(f"skipped: no torch ({problem})")
    sys.exit(77)

LONGEST = 240  # seconds until a job counts as hung
problems = []


def check(right, text):
    """Notes a failed check."""
    if not right:
        problems.append(text)
        sys.stderr.write(f"FAILED: {text}\n")


class Ended:
    """A rank that has ended: exit code (negative: a signal), and what it has printed."""

    def __init__(self, code, out, err):
        self.code, self.out, self.err = code, out, err


def start(count, body, how="file"):
    """Forks `count` ranks that call body(rank) and end as programs do: exceptions, and functions of atexit, have their usual effect.
    `how`: "file" (a process group over a file), "torchrun" (its variables alone). Returns what `join` takes."""
    folder = tempfile.mkdtemp(dir=os.environ.get("TMPDIR"))
    port = 0
    if how == "torchrun":
        command = f". '{pathlib.Path(__file__).resolve().parents[2]}/support/free_port.sh'; free_port"
        port = int(subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True).stdout)
    pids = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            problems.clear()
            # A fork replaces PyTorch's pool of threads at its first use; autograd's threads of several devices, which use the pool at once,
            # would find none (ParallelOpenMP.cpp: "Invalid thread pool!").
            torch.set_num_threads(torch.get_num_threads())
            for number, name in ((1, "out"), (2, "err")):
                file = os.open(f"{folder}/{name}{rank}", os.O_WRONLY | os.O_CREAT)
                os.dup2(file, number)
            if how == "torchrun":
                os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(count),
                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            else:
                dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
            body(rank)
            raise SystemExit(0)
        pids.append(pid)
    return folder, pids


def join(job):
    """Waits for the ranks of `start`; kills them where they hang."""
    folder, pids = job
    codes, until = {}, time.monotonic() + LONGEST
    while len(codes) < len(pids):
        for pid in pids:
            if pid in codes:
                continue
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    if time.monotonic() > until:
        check(False, f"a job hangs: {[codes[pid] for pid in pids]}")
    read = lambda name: pathlib.Path(f"{folder}/{name}").read_text()  # noqa: E731
    out = [Ended(codes[pid], read(f"out{r}"), read(f"err{r}")) for r, pid in enumerate(pids)]
    shutil.rmtree(folder)
    return out


def run(count, body, how="file"):
    """Runs a job that must succeed; the ranks' outputs, in their order."""
    ended = join(start(count, body, how))
    for rank, one in enumerate(ended):
        check(one.code == 0, f"rank {rank} ended with {one.code}:\n{one.out[-2000:]}{one.err[-4000:]}")
    return ended


def finish():
    """Ends the test."""
    if problems:
        sys.exit(f"{len(problems)} failed")
    print("all right")


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width, dropout=0.0, checkpointed=False):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout, self.checkpointed = dropout, checkpointed

    def body(self, x):
        return x + self.down(nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), self.dropout, self.training))

    def forward(self, x):
        if self.checkpointed:
            from torch.utils.checkpoint import checkpoint
            return checkpoint(self.body, x, use_reentrant=False)
        return self.body(x)


def made(kind, count, width=16, **more):
    """`count` modules of a class with the same numbers in every process."""
    torch.manual_seed(1)
    return [kind(width, **more) for _ in range(count)]


def data(samples=16, shape=(16,), seed=5):
    """Inputs and targets."""
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(samples, *shape, generator=draws), torch.randn(samples, *shape, generator=draws)


def where(schedule, ranks, micro_batches, stages):
    """The rank of each stage."""
    import chevron_pipelining
    return chevron_pipelining.binding.Program(schedule, ranks, micro_batches, stages // ranks).ranks_of_stages


def equal(a, b):
    """Whether two lists of tensors have equal bits; None equals None."""
    return len(a) == len(b) and all((x is None and y is None) or (x is not None and y is not None and torch.equal(x, y)) for x, y in zip(a, b))
