"""Host time of an action on a GPU, beside torch.distributed.pipelining in one run: one rank, M=8, stages of one 64 x 64 linear layer.
The host's time is that from the beginning of a step until all of its computations have been asked for.

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


def ours(build, name):
    """Our figures of a schedule: kernel by kernel, and as graphs."""
    with tempfile.NamedTemporaryFile() as file:
        command = [os.path.join(build, "bin", "bench-gpu_step"), "--small", "--schedules", name, "--json", file.name]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        by_launch = {f["graphs"]: f for f in json.load(open(file.name))}
    return by_launch[False], by_launch[True]


if __name__ == "__main__":
    given = words.parse_args()
    figures = []
    print(f"{'schedule':16} {'torch us':>10} {'ours us':>17} {'ratio':>7} {'graphs us':>15}   a computation; ours before and after torch's")
    for name in schedules:
        before = ours(given.build, name)
        theirs = on_torch_ranks(1, torch_us, name) / before[0]["actions"]
        kernels, graphs = zip(before, ours(given.build, name))
        kernels, graphs = ([f["host_us"] for f in of] for of in (kernels, graphs))
        ratio = theirs / statistics.mean(kernels)
        print(f"{name:16} {theirs:10.1f} {kernels[0]:8.1f} {kernels[1]:8.1f} {ratio:7.1f} {graphs[0]:7.1f} {graphs[1]:7.1f}", flush=True)
        figures.append({"schedule": name, "torch_us": theirs, "ours_us": kernels, "graphs_us": graphs})
    if given.json:
        with open(given.json, "w") as out:
            json.dump(figures, out, indent=1)
