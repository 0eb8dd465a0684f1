"""What a step costs beside its computations: P=4 processes on Gloo, M=8, stages of one 64 x 64 linear layer, beside
torch.distributed.pipelining in one run, alternating. Both sides also step SGD; ours checks and gathers the gradients' norm, too.

    .venv/bin/python bench/run/step_overhead_beside_torch.py [build folder] [rounds]
"""
import json
import os
import socket
import statistics
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules as torch_schedules

ranks, micro_batches, width, samples, steps, warm_up = 4, 8, 64, 4, 30, 3
build = sys.argv[1] if len(sys.argv) > 1 else "build"
rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
bench = os.path.join(build, "bin", "bench-step_overhead")
# One stage a rank, or two in a loop or a V.
torch_classes = {
    "GPipe": (pipelining.ScheduleGPipe, None),
    "1F1B": (pipelining.Schedule1F1B, None),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, "loop"),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, "loop"),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, "v"),
    "DualPipeV": (pipelining.ScheduleDualPipeV, "v"),
}
ours_alone = ["LoopedBFS", "ZB-H1", "ZB-H2"]


def torch_rank(rank, name, port, out):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    # 2.11 sends itself a message at start-up where neighbouring stages share a rank, which Gloo refuses.
    pipelining.PipelineStage._get_init_p2p_neighbors_ops = lambda self: []
    make, layout = torch_classes[name]
    mine = {None: [rank], "loop": [rank, rank + ranks], "v": [rank, 2 * ranks - 1 - rank]}[layout]
    count = ranks if layout is None else 2 * ranks
    modules = [torch.nn.Linear(width, width) for _ in mine]
    optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.01)
    rank_of = {s: (s if s < ranks else 2 * ranks - 1 - s) if layout == "v" else s % ranks for s in range(count)}
    stages = [pipelining.PipelineStage(m, s, count, torch.device("cpu")) for m, s in zip(modules, mine)]
    for stage in stages:
        stage.stage_index_to_group_rank = rank_of
    schedule = make(stages[0] if layout is None else stages, micro_batches, loss_fn=torch.nn.functional.mse_loss)
    inputs, targets = torch.randn(micro_batches * samples, width), torch.randn(micro_batches * samples, width)
    arguments = (inputs,) if 0 in mine else ()
    options = {"target": targets} if count - 1 in mine else {}
    seconds = []
    for step in range(warm_up + steps):
        begin = time.perf_counter()
        schedule.step(*arguments, **options)
        optimizer.step()
        optimizer.zero_grad()
        if step >= warm_up:
            seconds.append(time.perf_counter() - begin)
    if rank == 0:
        out.put(statistics.median(seconds))
    dist.barrier()
    dist.destroy_process_group()


def torch_ms(name):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = processes.get_context("spawn")
    out = context.SimpleQueue()
    processes.spawn(torch_rank, args=(name, port, out), nprocs=ranks, join=True)
    return out.get() * 1e3


def our_ms(name, backend):
    done = subprocess.run([bench, "--schedule", name, "--backend", backend, "--ranks", str(ranks), "--microbatches",
                           str(micro_batches), "--width", str(width), "--steps", str(steps)],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["step_ms"]


if __name__ == "__main__":
    print(f"P={ranks}, M={micro_batches}, one {width} x {width} layer a stage: step in ms, median of {rounds} rounds of {steps} steps")
    print(f"{'schedule':22} {'torch':>8} {'gloo':>8} {'ratio':>7} {'threads':>8} {'ratio':>7}")
    for name in [*torch_classes, *ours_alone]:
        taken = {"torch": [], "gloo": [], "threads": []}
        for _ in range(rounds):
            if name in torch_classes:
                taken["torch"].append(torch_ms(name))
            for backend in ("gloo", "threads"):
                taken[backend].append(our_ms(name, backend))
        middle = {side: statistics.median(values) for side, values in taken.items() if values}
        line = f"{name:22} {middle.get('torch', float('nan')):8.1f}"
        for backend in ("gloo", "threads"):
            ratio = middle["torch"] / middle[backend] if "torch" in middle else float("nan")
            line += f" {middle[backend]:8.2f} {ratio:7.1f}"
        print(line.replace("nan", "  -"), flush=True)
