"""What a step costs beside its computations: P=4 processes on Gloo, M=8, stages of one 64 x 64 linear layer, beside
torch.distributed.pipelining in one run, alternating. Both sides also step SGD; ours checks and gathers the gradients' norm, too.

    .venv/bin/python bench/run/step_overhead_beside_torch.py [build folder] [rounds]
"""
import json
import os
import statistics
import subprocess
import time

import torch

from beside_torch import TorchPipeline, arguments, on_torch_ranks, torch_classes

ranks, micro_batches, width, samples, steps, warm_up = 4, 8, 64, 4, 30, 3
(bench,), rounds = arguments(__doc__, "bench-step_overhead")
ours_alone = ["LoopedBFS", "ZB-H1", "ZB-H2"]


def torch_seconds(name):
    pipeline = TorchPipeline(name, micro_batches, lambda stage, stages: torch.nn.Linear(width, width), torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)
    inputs, targets = torch.randn(micro_batches * samples, width), torch.randn(micro_batches * samples, width)
    seconds = []
    for step in range(warm_up + steps):
        begin = time.perf_counter()
        pipeline.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        if step >= warm_up:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


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
                taken["torch"].append(on_torch_ranks(ranks, torch_seconds, name) * 1e3)
            for backend in ("gloo", "threads"):
                taken[backend].append(our_ms(name, backend))
        middle = {side: statistics.median(values) for side, values in taken.items() if values}
        line = f"{name:22} {middle.get('torch', float('nan')):8.1f}"
        for backend in ("gloo", "threads"):
            ratio = middle["torch"] / middle[backend] if "torch" in middle else float("nan")
            line += f" {middle[backend]:8.2f} {ratio:7.1f}"
        print(line.replace("nan", "  -"), flush=True)
