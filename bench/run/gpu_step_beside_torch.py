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


if __name__ == "__main__":
    given = words.parse_args()
    figures = []
    with tempfile.NamedTemporaryFile() as file:
        subprocess.run([os.path.join(given.build, "bin", "bench-gpu_step"), "--small", "--json", file.name], check=True, stdout=subprocess.DEVNULL)
        ours = {(f["schedule"], f["graphs"]): f for f in json.load(open(file.name)) if f["stage"] == "1 layer of 64"}
    print(f"{'schedule':16} {'torch us':>10} {'ours us':>10} {'ratio':>7} {'graphs us':>10}   a computation")
    for name in schedules:
        kernels, graphs = ours[name, False], ours[name, True]
        theirs = on_torch_ranks(1, torch_us, name) / kernels["actions"]
        print(f"{name:16} {theirs:10.1f} {kernels['host_us']:10.1f} {theirs / kernels['host_us']:7.1f} {graphs['host_us']:10.1f}")
        figures.append({"schedule": name, "torch_us": theirs, "ours_us": kernels["host_us"], "graphs_us": graphs["host_us"]})
    if given.json:
        with open(given.json, "w") as out:
            json.dump(figures, out, indent=1)
