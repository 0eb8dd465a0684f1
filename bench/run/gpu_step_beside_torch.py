"""A step on a GPU, beside torch.distributed.pipelining in one run: one rank, M=8.

First the host's time of a computation, with stages of one 64 x 64 linear layer: from the beginning of a step until all of its computations
have been asked for. Then a whole step from computation to computation, with the norm of all gradients and fused AdamW, of stages of one layer
of 64 and of eight layers of 4096: where kernels are long, both should take as long as the GPU does.

    .venv/bin/python bench/run/gpu_step_beside_torch.py [build folder] [--json FILE]
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch

from beside_torch import TorchPipeline, on_torch_ranks

micro_batches, width, samples, steps, warm_up = 8, 64, 4, 20, 5
words = argparse.ArgumentParser(description=__doc__)
words.add_argument("build", nargs="?", default="build")
words.add_argument("--json", help="write the figures to this file, too")
schedules = ["1F1B", "ZBVZeroBubble", "DualPipeV"]


def torch_us(name):
    device = torch.device("cuda", 0)
    pipeline = TorchPipeline(name, micro_batches, lambda stage, stages: torch.nn.Linear(width, width).to(device),
                             torch.nn.functional.mse_loss, device)
    batch = torch.randn(micro_batches * samples, width, device=device)
    taken = []
    for step in range(warm_up + steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        pipeline.step(batch, batch)
        if step >= warm_up:
            taken.append(time.perf_counter() - begin)
        for parameter in pipeline.parameters():
            parameter.grad = None
    return statistics.median(taken) * 1e6


def torch_step_ms(name, layers, width, samples):
    device = torch.device("cuda", 0)
    torch.backends.cuda.matmul.allow_tf32 = False

    def module_of(stage, stages):
        return torch.nn.Sequential(*[m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.Tanh())]).to(device)

    pipeline = TorchPipeline(name, micro_batches, module_of, torch.nn.functional.mse_loss, device)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=1e-3, fused=True)
    batch = torch.randn(micro_batches * samples, width, device=device)
    for step in range(warm_up + steps):
        if step == warm_up:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        pipeline.step(batch, batch)
        torch.nn.utils.get_total_norm([p.grad for p in pipeline.parameters()], foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def ours(build, name, *flags):
    """Our figures of a schedule, by stage: kernel by kernel, and as graphs."""
    with tempfile.NamedTemporaryFile() as file:
        command = [os.path.join(build, "bin", "bench-gpu_step"), *flags, "--schedules", name, "--json", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        out = {}
        for f in json.load(open(file.name)):
            out.setdefault(f["stage"], {})[f["graphs"]] = f
    return {stage: (by_launch[False], by_launch[True]) for stage, by_launch in out.items()}


def whole_steps(build):
    figures = []
    print(f"\n{'schedule':16} {'stage':17} {'torch ms':>9} {'ours ms':>9} {'graphs ms':>10}   a whole step, with norm and AdamW")
    for name in schedules:
        by_stage = ours(build, name)
        for stage, (layers, stage_width, stage_samples) in {"1 layer of 64": (1, 64, 4), "8 layers of 4096": (8, 4096, 512)}.items():
            theirs = on_torch_ranks(1, torch_step_ms, name, layers, stage_width, stage_samples)
            kernels, graphs = (f["step_ms"] for f in by_stage[stage])
            print(f"{name:16} {stage:17} {theirs:9.3f} {kernels:9.3f} {graphs:10.3f}", flush=True)
            figures.append({"schedule": name, "stage": stage, "torch_ms": theirs, "ours_ms": kernels, "graphs_ms": graphs})
    return figures


if __name__ == "__main__":
    given = words.parse_args()
    figures = []
    print(f"{'schedule':16} {'torch us':>10} {'ours us':>17} {'ratio':>7} {'graphs us':>15}   a computation; ours before and after torch's")
    for name in schedules:
        (before,) = ours(given.build, name, "--small").values()
        theirs = on_torch_ranks(1, torch_us, name) / before[0]["actions"]
        (after,) = ours(given.build, name, "--small").values()
        kernels, graphs = ([f["host_us"] for f in of] for of in zip(before, after))
        ratio = theirs / statistics.mean(kernels)
        print(f"{name:16} {theirs:10.1f} {kernels[0]:8.1f} {kernels[1]:8.1f} {ratio:7.1f} {graphs[0]:7.1f} {graphs[1]:7.1f}", flush=True)
        figures.append({"schedule": name, "torch_us": theirs, "ours_us": kernels, "graphs_us": graphs})
    figures += whole_steps(given.build)
    if given.json:
        with open(given.json, "w") as out:
            json.dump(figures, out, indent=1)
