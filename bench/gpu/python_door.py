#!/usr/bin/env python3
"""chevron_pipelining on real GPUs: what the pretended ones of tests/python/gpus.py cannot show.

    python3 bench/gpu/python_door.py          two ranks, on two GPUs or sharing one (NCCL then takes them for ranks of two machines)

Parameters of each schedule equal the plain loop on the same GPU, bit for bit; a step waits for the caller's stream, and the caller's stream
for the step; autocast; dropout under two schedules; a rank that raises; and the time and memory of a step. Ends with 1 where a check
fails, with 77 without a GPU. Chevron's cache folder must have the binding, or this machine a compiler (docs/guides/python.md).
"""
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "python"), str(ROOT / "python")]
if os.environ.get("CHEVRON_GPU_DOUBLE"):  # a rehearsal
    import support.gpus  # noqa: F401
from support.kinds import case, loss  # noqa: E402
from support.ranks import Block, check, data, finish, join, made, run, start  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

import chevron_pipelining as cp  # noqa: E402

RANKS = 2
WIDTH, LAYERS, SAMPLES, STEPS = (int(word) for word in os.environ.get("CHEVRON_DOOR_SIZE", "2048,8,64,8").split(","))


def placed(rank):
    """The GPU of a rank; where ranks share one, NCCL must take them for ranks of two machines."""
    count = torch.cuda.device_count()
    if count < RANKS:
        os.environ["NCCL_HOSTID"] = f"rank{rank}"
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device


def bits(rank):
    device = placed(rank)
    for schedule, stages in (("GPipe", 2), ("1F1B", 2), ("ZB-H1", 2), ("ZBVZeroBubble", 4), ("V-Half", 4), ("DualPipeV", 4)):
        for kind in ("block", "checkpoint"):  # `several` hands a tensor on the CPU to the next stage
            case(rank, RANKS, schedule, kind, 4, stages, device=device, reference=device)
    finish()


def slow(tensor, seconds=0.2):
    """Keeps the current stream busy; the double's operators compute at once."""
    if not os.environ.get("CHEVRON_GPU_DOUBLE"):
        torch.cuda._sleep(int(seconds * 1.5e9))
    return tensor


class Slow(nn.Module):
    """Writes its result after a while."""

    def forward(self, x):
        return slow(x) + 1


def streams(rank):
    device = placed(rank)
    schedule = cp.Schedule("GPipe", cp.PipelineStage(Slow(), rank, RANKS, device), 2)
    for stream in (torch.cuda.Stream(device), torch.cuda.Stream(device)):
        with torch.cuda.stream(stream):
            x = torch.zeros(4, 1024, device=device)
            slow(x).add_(2)
            out = schedule.eval(*([x] if rank == 0 else []))
            check(rank == 0 or bool((out == 4).all()), f"an order of streams is lost: {out}")
    linear = cp.Schedule("GPipe", cp.PipelineStage(nn.Linear(1024, 1024).to(device), rank, RANKS, device), 2)
    with torch.autocast("cuda", torch.bfloat16):
        out = linear.eval(*([x] if rank == 0 else []))
    check(rank == 0 or out.dtype == torch.bfloat16, f"autocast has no effect: {out}")
    finish()


def dropped(rank, device, schedule):
    module = made(Block, RANKS, dropout=0.5)[rank].to(device)
    trainer = cp.Trainer(schedule, cp.PipelineStage(module, rank, RANKS, device), 4, loss, lambda p: torch.optim.AdamW(p, lr=1e-2))
    x, y = data()
    return [(trainer.step(x) if rank == 0 else trainer.step(target=y)).loss for _ in range(3)]


def draws(rank):
    device = placed(rank)
    before = torch.cuda.get_rng_state(device)
    one, other = dropped(rank, device, "GPipe"), dropped(rank, device, "ZB-H1")
    check(one == other, f"dropout under two schedules: {one}, {other}")
    check(torch.equal(before, torch.cuda.get_rng_state(device)), "the generator has changed")
    finish()


def raises(rank):
    device = placed(rank)

    class Faulty(Block):
        def forward(self, x):
            if rank == 1:
                raise ValueError("in the forward")
            return super().forward(x)

    schedule = cp.Schedule("1F1B", cp.PipelineStage(made(Faulty, RANKS)[rank].to(device), rank, RANKS, device), 4, loss_fn=loss)
    x, y = data()
    try:
        schedule.step(x) if rank == 0 else schedule.step(target=y)
    except cp.Error as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        raise SystemExit(9) from None


def timed(rank):
    """The time of a step of residual blocks in bfloat16."""
    device = placed(rank)
    torch.manual_seed(1)
    for schedule, stages in (("1F1B", 2), ("ZBVZeroBubble", 4)):
        places = cp.binding.Program(schedule, RANKS, 8, stages // RANKS).ranks_of_stages
        mine = [s for s in range(stages) if places[s] == rank]
        made_here = [cp.PipelineStage(nn.Sequential(*[Block(WIDTH) for _ in range(LAYERS // stages)]).to(device, torch.bfloat16), s, stages, device)
                     for s in mine]
        trainer = cp.Trainer(schedule, made_here, 8, loss, lambda p: torch.optim.AdamW(p, lr=1e-4))
        x, y = (part.to(device, torch.bfloat16) for part in data(SAMPLES, (WIDTH,)))
        seconds = []
        for _ in range(STEPS):
            began = time.perf_counter()
            report = trainer.step(*([x] if 0 in mine else []), target=y if stages - 1 in mine else None)
            seconds.append(time.perf_counter() - began)
        print(f"{schedule}, rank {rank}: step {1e3 * sorted(seconds)[len(seconds) // 2]:.2f} ms, idle {100 * report.bubble:.1f} %, memory "
              f"{report.peak_memory / 2**20:.0f} MiB, reserved {report.peak_reserved / 2**20:.0f} MiB", flush=True)
    finish()


# In a process of its own: the ranks are forks of this one, which must not use CUDA.
if subprocess.run([sys.executable, "-c", "import sys, torch; sys.exit(torch.cuda.device_count() == 0)"]).returncode and not os.environ.get("CHEVRON_GPU_DOUBLE"):
    print("skipped: no GPU")
    sys.exit(77)
for each in (bits, streams, draws):
    run(RANKS, each)
for rank, one in enumerate(join(start(RANKS, raises))):
    words = "StageError" if rank == 1 else "PeerLostError"
    check(one.code == 9 and words in one.out and "in the forward" in one.out, f"a rank that raises, rank {rank}: {one.code} {one.out}{one.err}")
for one in run(RANKS, timed):
    print(one.out.replace("all right\n", ""), end="")
finish()
