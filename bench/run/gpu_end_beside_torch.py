"""The end of a step on a GPU beside PyTorch's, in turns in one run: the norm of all gradients and their scaling (clip_grad_norm_ with
foreach), and AdamW (fused=True), of a GPT's 150 parameters and of one large parameter. Each is timed until the GPU is done, and until the
host may go on.

    .venv/bin/python bench/run/gpu_end_beside_torch.py [build folder] [--json FILE]
"""
import argparse
import json
import os
import statistics
import subprocess
import time

import torch

words = argparse.ArgumentParser(description=__doc__)
words.add_argument("build", nargs="?", default="build", help="build folder, whose bin/bench-gpu_end is measured beside PyTorch")
words.add_argument("--program", help="program to measure in place of bin/bench-gpu_end")
words.add_argument("--device", default="cuda", help="device of PyTorch")
words.add_argument("--width", type=int, default=768, help="width of the model")
words.add_argument("--rounds", type=int, default=20)
words.add_argument("--json", help="write the figures to this file, too")
warm_up = 3


def shapes_of(name, width):
    """Those of bench-gpu_end."""
    if name == "large":
        return [(10 * width, 8 * width)]
    shapes = []
    for _ in range(12):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return shapes + [(65 * width, width), (width, width), (width,), (width,), (65 * width, width), (65 * width,)]


class TorchEnd:
    def __init__(self, name, given):
        self.device = torch.device(given.device)
        self.parameters = [torch.nn.Parameter(torch.zeros(shape, device=self.device)) for shape in shapes_of(name, given.width)]
        for p in self.parameters:
            p.grad = torch.ones_like(p)
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-3, weight_decay=0, fused=True)

    def done(self):
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(self, work):
        began = self.done()
        work()
        host = time.perf_counter()
        return (self.done() - began) * 1e3, (host - began) * 1e6

    def round(self):
        foreach = True if self.device.type == "cuda" else None  # PyTorch refuses it on the CPU
        norm = self.timed(lambda: torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=foreach))
        step = self.timed(self.optimizer.step)
        return {"parameters": len(self.parameters), "elements": sum(p.numel() for p in self.parameters),
                "norm_ms": norm[0], "norm_host_us": norm[1], "step_ms": step[0], "step_host_us": step[1]}


def main():
    given = words.parse_args()
    program = given.program or os.path.join(given.build, "bin", "bench-gpu_end")
    timed = ("norm_ms", "norm_host_us", "step_ms", "step_host_us")
    figures = []
    with subprocess.Popen([program, "--serve", "--width", str(given.width)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as ours:
        print(f"{'set':8} {'tensors':>8} {'elements':>12} {'':8} " + " ".join(f"{key:>14}" for key in timed))
        for name in ("gpt", "large"):
            theirs = TorchEnd(name, given)
            rounds = {"ours": [], "torch": []}
            for _ in range(warm_up + given.rounds):
                print(name, file=ours.stdin, flush=True)
                if not (line := ours.stdout.readline()):
                    raise SystemExit(f"{program} ended with {ours.wait()}")
                rounds["ours"].append(json.loads(line))
                rounds["torch"].append(theirs.round())
            counted = {side: (all_of[0]["parameters"], all_of[0]["elements"]) for side, all_of in rounds.items()}
            if counted["ours"] != counted["torch"]:
                raise SystemExit(f"the two sides have other parameters or elements in {name}: {counted}")
            of = {side: {key: statistics.median(r[key] for r in all_of[warm_up:]) for key in timed} for side, all_of in rounds.items()}
            for side in ("torch", "ours"):
                print(f"{name:8} {counted[side][0]:8} {counted[side][1]:12} {side:8} "
                      + " ".join(f"{of[side][key]:14.3f}" for key in timed))
            print(f"{'':31} {'ratio':8} " + " ".join(f"{of['torch'][key] / of['ours'][key]:14.2f}" for key in timed))
            figures.append({"set": name, **{side: of[side] for side in of}})
        ours.stdin.close()
    if ours.returncode != 0:
        raise SystemExit(f"{program} ended with {ours.returncode}")
    if given.json:
        with open(given.json, "w") as out:
            json.dump(figures, out, indent=1)


if __name__ == "__main__":
    main()
