"""Runs of chevron-finetune, for tests that compare them with a plain loop: the program, its losses, the formula of its rates, and the
list of expectations that fail."""
import json
import math
import os
import subprocess

program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-finetune")
wrong = []


def expect(holds, what):
    if not holds:
        wrong.append(what)
        print("FAILED: " + what, flush=True)


def finetune(*flags, code=0, timeout=120):
    """Runs the program, which must end with `code` within `timeout` seconds. Returns its output and errors."""
    done = subprocess.run([program, *map(str, flags)], capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL)
    if done.returncode != code:
        expect(False, f"chevron-finetune {' '.join(map(str, flags))} ended with {done.returncode}:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    return done.stdout + done.stderr


def lines_of(file):
    """The steps in a file of --metrics."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def losses_of(file):
    return [line["loss_metrics/global_avg_loss"] for line in lines_of(file)]


def learning_rate(step, steps, highest, warm_up=None, lowest=None, cosine=True):
    """Up in a straight line, and down along half a cosine or a straight line; steps count from 1. Without `warm_up` and `lowest`, up
    for a twentieth of the steps and down to a tenth."""
    rising, lowest = max(1.0, steps / 20 if warm_up is None else warm_up), highest / 10 if lowest is None else lowest
    if step < rising:
        return highest * step / rising
    way = min(1.0, (step - rising) / max(1.0, steps - rising))
    return lowest + (highest - lowest) * ((1 + math.cos(math.pi * way)) / 2 if cosine else 1 - way)
