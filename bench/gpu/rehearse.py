#!/usr/bin/env python3
"""Runs a benchmark of bench/run/gpu_* on the double of CUDA and NCCL (docs/inside/nccl-double.md), small, and checks what it counts. Its times
mean nothing there. CTest calls it (gpu_double.bench-*):

    python3 bench/gpu/rehearse.py build/bin/rehearsed-gpu_step
"""
import json
import math
import os
import subprocess
import sys
import tempfile

MICRO_BATCHES = 8
MIB = 1 << 20


def expect(what, got, wanted):
    if got != wanted:
        sys.exit(f"{what}: {got}, and not {wanted}")


def ran(program, *flags, lines=None):
    """What the program wrote to its `--json`; with `lines`, what it answers them."""
    with tempfile.NamedTemporaryFile() as file:
        command = [program, *map(str, flags)] + ([] if lines else ["--json", file.name])
        done = subprocess.run(command, input=lines, stdin=None if lines else subprocess.DEVNULL, capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "0"}, timeout=100)
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
        print(done.stdout, end="")
        return [json.loads(line) for line in done.stdout.splitlines()] if lines else json.load(open(file.name))


def step(program):
    # By schedule and ranks: rank 0's computations, and the ends of messages that are its, by microbatch.
    counts = {("1F1B", 1): (2, 0), ("1F1B", 2): (2, 2), ("ZBVZeroBubble", 1): (6, 0), ("ZBVZeroBubble", 2): (6, 4)}
    for ranks, backend in ((1, "threads"), (2, "threads"), (2, "nccl")):
        figures = ran(program, "--small", "--ranks", ranks, "--backend", backend, "--schedules", "1F1B,ZBVZeroBubble", "--steps", 8)
        expect("lines", [(f["schedule"], f["graphs"]) for f in figures],
               [(name, graphs) for name in ("1F1B", "ZBVZeroBubble") for graphs in (False, True)])
        for f in figures:
            what = f"{f['schedule']}, {ranks} ranks over {backend}, {'graphs' if f['graphs'] else 'kernels'}"
            actions, messages = (MICRO_BATCHES * n for n in counts[f["schedule"], ranks])
            expect(what + ": actions", f["actions"], actions)
            expect(what + ": messages", f["messages"], messages)
            expect(what + ": a message takes time", f["message_us"] > 0, messages > 0)
            # Parts of the host's time do not exceed the whole; idle time within a step is part of the whole step's idle time.
            expect(what + ": parts of host_us", f["action_us"] + f["message_us"] * messages / actions <= f["host_us"], True)
            expect(what + ": shares", 0 <= f["idle"] < f["idle_of_step"] < 1 and f["action_us"] > 0 and f["end_us"] > 0, True)
            # The step that is measured, cut: computing, nothing between, and from the last computation to the next step's first.
            within = f["step_ms"] - f["boundary_ms"]
            computing = within * (1 - f["idle"])
            expect(what + ": idle of a step", math.isclose(f["idle_of_step"], 1 - computing / f["step_ms"], abs_tol=1e-6), True)


def check_end(name, width, f):
    layers = 12 * (12 * width * width + 13 * width)
    elements = {"gpt": layers + 65 * width * width + width * width + 2 * width + 65 * width * width + 65 * width, "large": 80 * width * width}
    expect(f"{name}: parameters", f["parameters"], {"gpt": 150, "large": 1}[name])
    expect(f"{name}: elements", f["elements"], elements[name])
    # Gradients begin as ones; each round scales them to a norm of 1; a first step of AdamW moves a parameter by its rate.
    expect(f"{name}: norm", math.isclose(f["first_norm"], math.sqrt(elements[name]), rel_tol=1e-6), True)
    expect(f"{name}: norm after scaling", math.isclose(f["norm"], 1, rel_tol=1e-4), True)
    expect(f"{name}: moved", math.isclose(f["moved"], 1e-3, rel_tol=1e-2), True)
    expect(f"{name}: times", all(f[key] > 0 for key in ("norm_ms", "norm_host_us", "step_ms", "step_host_us")), True)


def end(program):
    width = 16
    for name, f in ran(program, "--width", width, "--rounds", 2).items():
        check_end(name, width, f)
    for name, f in zip(("gpt", "large"), ran(program, "--width", width, "--serve", lines="gpt\nlarge\ngpt\nlarge\n")[2:]):
        check_end(name, width, f)


def waiting(program):
    rounds, blocks = 3, [0, 1, 2, 4, 8]
    figures = ran(program, "--size", 64, "--products", 3, "--rounds", rounds, "--kilobytes", 1)
    expect("blocks", [f["blocks"] for f in figures], blocks)
    for f in figures:
        expect(f"{f['blocks']} blocks: the receive waited, and had its message", (f["waited"], f["right"], f["rounds"]), (True, True, rounds - 1))


def memory(program):
    layers, width, samples = 3, 256, 64
    f = ran(program, "--layers", layers, "--width", width, "--samples", samples)
    bytes_of_stage = 4 * layers * (width * width + width)
    for part, times in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        expect(f"{part}: within the allocator's rounding", 0 <= f[part] - times * bytes_of_stage <= 512 * 2 * layers, True)
    expect("batch", f["batch"], 4 * MICRO_BATCHES * samples * width)
    # The double's products take a workspace of 32 MiB for each thread and stream: those of the rank and of autograd.
    expect("workspaces", 2 * 32 * MIB <= f["workspaces, slots"] < 4 * 32 * MIB, True)
    # 1F1B on rank 0 of two has two microbatches in flight, of which a layer keeps two tensors, its product and its tanh, or one.
    chunk = 4 * layers * samples * width
    expect("activations", 2 * chunk <= f["activations"] <= 8 * chunk, True)
    expect("predicted", 2 * chunk <= f["predicted activations"] <= f["activations"] + chunk, True)


if __name__ == "__main__":
    {"step": step, "end": end, "waiting": waiting, "memory": memory}[sys.argv[1].rsplit("gpu_", 1)[1]](sys.argv[1])
