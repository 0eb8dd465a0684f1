"""The step time of a GPT on two replicas with a sharded optimizer, beside the step time without: ratios of runs in turn.

    .venv/bin/python bench/run/sharded_step.py [build folder] [--rounds 6] [--steps 40] [--width 256]

Each round runs chevron-train without `--shard`, with it, and with `--overlap-gather` beside it, on threads and over Gloo, and takes
the median step of each run; printed are the medians of the rounds' ratios, and their range.
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("build", nargs="?", default="build")
parser.add_argument("--rounds", type=int, default=6)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--width", type=int, default=256)
given = parser.parse_args()

FORMS = {"whole": [], "--shard": ["--shard"], "--shard --overlap-gather": ["--shard", "--overlap-gather"]}
JOB = ["--ranks", 1, "--replicas", 2, "--layers", 4, "--width", given.width, "--steps", given.steps]


def median_step(backend, flags, folder):
    metrics = pathlib.Path(folder) / "metrics.jsonl"
    command = [given.build + "/bin/chevron-train", *JOB, "--backend", backend, "--metrics", metrics, *flags]
    subprocess.run([str(word) for word in command], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, stdout=subprocess.DEVNULL)
    steps = [json.loads(line)["time_metrics/end_to_end(s)"] for line in metrics.read_text().splitlines()]
    return statistics.median(steps[5:])


print(f"{'backend':8} {'':26} {'ms a step':>10} {'beside whole':>13}   range of {given.rounds} rounds")
for backend in ["threads", "gloo"]:
    rounds = []
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append({form: median_step(backend, flags, folder) for form, flags in FORMS.items()})
    for form in FORMS:
        ratios = [one[form] / one["whole"] for one in rounds]
        took = 1e3 * statistics.median(one[form] for one in rounds)
        print(f"{backend:8} {form:26} {took:10.1f} {statistics.median(ratios):13.3f}   {min(ratios):.3f} to {max(ratios):.3f}")
