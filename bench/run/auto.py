"""The gain of planning from measured costs, measured and predicted: layers that sleep, in the proportions of a GPT whose head makes
the last stage long.

    .venv/bin/python bench/run/auto.py [build folder] [--ranks 4] [--microbatches 8] [--blocks 16] [--milliseconds 2] [--head 3]

Rows: every schedule of the catalogue with as even layers as can be; `auto` from the shortest of them that splits its backward, with
the same layers; then layers and order found together (chevron-plan search --partition) from that run's profile, fixed, and `auto`
with these layers from a schedule of the catalogue. All under the memory of 1F1B, P microbatches; what holds more is shown in
brackets and not compared with. Times are medians of the last 20 steps, first F to last W. Ideal: simulated with the times that are
slept. Predicted: with the times that were measured in the same run. On a machine with other work on it they say nothing.
"""
import argparse
import json
import pathlib
import re
import subprocess
import tempfile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("build", nargs="?", default="build")
for name, value in (("ranks", "4"), ("microbatches", "8"), ("blocks", "16"), ("milliseconds", "2"), ("head", "3"), ("steps", "36")):
    parser.add_argument("--" + name, default=value)
parser.add_argument("--trials", help="trials of chevron-plan search")
wanted = parser.parse_args()
programs = pathlib.Path(wanted.build) / "bin"
shape = ["--ranks", wanted.ranks, "--microbatches", wanted.microbatches]


def output(command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def measured(*flags):
    sizes = [flag for name in ("blocks", "milliseconds", "head", "steps") for flag in ("--" + name, getattr(wanted, name))]
    return json.loads(output([programs / "bench-auto", *shape, *sizes, *flags]))


def row(name, run, best=None):
    ratio = run["measured"] / run["predicted"]
    gain = f"{100 * (1 - run['measured'] / best):+6.1f} %" if best else ""
    print(f"{name:34} {run['layers']:18} {run['in_flight']:9} {run['ideal']:8.2f} {run['predicted']:10.2f} {run['measured']:9.2f} "
          f"{ratio:9.3f}  {gain:9} {run['events']}".rstrip(), flush=True)


print(f"P={wanted.ranks}, M={wanted.microbatches}, {wanted.blocks} layers of F {wanted.milliseconds} ms, a head of {wanted.head} layers; "
      "times in ms\n")
print(f"{'schedule':34} {'layers':18} {'in flight':>9} {'ideal':>8} {'predicted':>10} {'measured':>9} {'/predicted':>10}  gain")
fixed = {}
for name in output([programs / "bench-auto", "--list"]).split():
    run = measured("--schedule", name)
    chunks = len(run["layers"].split(",")) // int(wanted.ranks)
    within = run["in_flight"] <= int(wanted.ranks) * chunks
    row(name if within else f"({name})", run)
    if within:
        fixed[name] = run["measured"]
best = min(fixed.values())
with tempfile.TemporaryDirectory() as folder:
    profile, plan = pathlib.Path(folder) / "profile.json", pathlib.Path(folder) / "searched.csv"
    start = min((name for name in fixed if name.startswith("ZB") or "Zero" in name or name.startswith("V-")), key=fixed.get)
    row(f"auto, from {start}", measured("--schedule", start, "--auto", "--profile", profile), best)
    trials = ["--trials", wanted.trials] if wanted.trials else []
    said = output([programs / "chevron-plan", "search", *shape, "--chunks", "2", "--memory-limit", wanted.ranks, "--profile", profile,
                   "--placement", "vee", "--partition", *trials, "-o", plan])
    layers = re.search(r"--layers ([0-9,]+)", said)[1]
    row("layers and order together", measured("--schedule", plan, "--layers", layers), best)
    row("auto, from ZBVZeroBubble", measured("--schedule", "ZBVZeroBubble", "--auto", "--layers", layers), best)
print(f"\ngain: against the best fixed schedule with even layers, {min(fixed, key=fixed.get)}")
