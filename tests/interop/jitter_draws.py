# timeout: 120
"""What chevron-plan says of a schedule under jitter, beside a simulation that shares no code with it.

Each action's factor is drawn here a second time, as the comment at `duration_sample` in tools/search/jitter.hpp says; each schedule's CSV
is played by a loop over all ranks; the quantiles are `statistics`'s. A control: with one factor changed, the numbers must differ.
"""
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile

plan = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")
MASK = (1 << 64) - 1
KINDS = {"F": 0, "I": 1, "W": 2}


class SplitMix:
    def __init__(self, seed):
        self.state = seed & MASK

    def next(self):
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def share(self):
        return (self.next() >> 11) / 2.0**53


def factor(spread, seed, draw, replica, kind, stage, micro_batch):
    of_draw = SplitMix(SplitMix(seed).next() + (draw << 32) + replica).next()
    here = SplitMix(SplitMix(of_draw + (KINDS[kind] << 32) + (stage << 16) + micro_batch).next())
    variance = math.log(1 + spread * spread)
    u, v = here.share(), here.share()
    z = math.sqrt(-2 * math.log(1 - u)) * math.cos(2 * math.pi * v)
    return math.exp(math.sqrt(variance) * z - variance / 2)


def rows_of(csv):
    """Each rank's actions, as (kind, stage, microbatch)."""
    rows = []
    for line in csv.strip().splitlines():
        cells = [cell.strip() for cell in line.split(",") if cell.strip()]
        row = []
        for cell in cells:
            at = next(i for i, c in enumerate(cell) if c.isalpha())
            row.append((cell[at], int(cell[:at]), int(cell[at + 1:])))
        rows.append(row)
    return rows


def makespan(rows, takes, message):
    """Round after round, each rank does its next action if what that needs has ended."""
    where = {stage: rank for rank, row in enumerate(rows) for _, stage, _ in row}
    last = max(where)
    end, place, clock = {}, [0] * len(rows), [0.0] * len(rows)
    while any(place[r] < len(row) for r, row in enumerate(rows)):
        moved = False
        for r, row in enumerate(rows):
            if place[r] == len(row):
                continue
            kind, stage, m = row[place[r]]
            needs = [("F", stage - 1, m)] if kind == "F" and stage > 0 else []
            if kind in "BI":
                needs = [("F", stage, m)] + ([("B", stage + 1, m)] if stage < last else [])
            if kind == "W":
                needs = [("B", stage, m)]  # an I is noted as a B: both make the input's gradient
            if any(one not in end for one in needs):
                continue
            ready = [end[one] + (message if where[one[1]] != r else 0) for one in needs]
            clock[r] = max([clock[r]] + ready) + takes(kind, stage, m)
            end[("B" if kind == "I" else kind, stage, m)] = clock[r]
            place[r] += 1
            moved = True
        assert moved, "a schedule that gets stuck"
    return max(clock)


def said(rows, chunks, case, spoilt=None):
    """Median, 90th percentile and spread of a schedule."""
    cost = {"F": 20 / chunks, "I": 26 / chunks, "W": 14 / chunks}
    where = {stage: rank for rank, row in enumerate(rows) for _, stage, _ in row}
    lengths = []
    for draw in range(case["draws"]):
        longest = 0
        for replica in range(case["replicas"]):
            def one(kind, stage, m):
                more = factor(case["spread"], case["seed"], draw, replica, kind, stage, m)
                more *= case["slow"] if where[stage] == 1 else 1
                more *= case["slow_replica"] if replica == 0 and case["replicas"] > 1 else 1
                return cost[kind] * more * (1.5 if spoilt == (kind, stage, m) else 1)
            takes = lambda kind, stage, m: one("I", stage, m) + one("W", stage, m) if kind == "B" else one(kind, stage, m)
            longest = max(longest, makespan(rows, takes, case["message"]))
        lengths.append(longest)
    tenths = statistics.quantiles(lengths, n=10, method="inclusive")
    return tenths[4], tenths[8], tenths[8] - tenths[0]


def told(file, case):
    words = [plan, "compare", file, "--format", "json", "--forward", "20", "--backward-input", "26", "--backward-weight", "14",
             "--communication", str(case["message"]), "--jitter", f"{100 * case['spread']:g}%", "--draws", str(case["draws"]),
             "--seed", str(case["seed"]), "--replicas", str(case["replicas"]), "--slow-rank", f"1={case['slow']}"]
    if case["replicas"] > 1:
        words += ["--slow-replica", str(case["slow_replica"])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    one = next(entry for entry in json.loads(done.stdout) if entry["schedule"] == file)
    return one["chunks"], (one["median"], one["p90"], one["spread"])


def near(one, other):
    return all(abs(a - b) < 1e-9 * max(1, abs(b)) for a, b in zip(one, other))


failed = False
cases = [{"spread": 0.05, "seed": 1, "draws": 25, "replicas": 1, "slow": 1.3, "slow_replica": 1, "message": 1},
         {"spread": 0.2, "seed": 77, "draws": 11, "replicas": 3, "slow": 1, "slow_replica": 1.1, "message": 2.5}]
with tempfile.TemporaryDirectory() as folder:
    file = os.path.join(folder, "one.csv")
    for case in cases:
        for name in ("1F1B", "ZB-H2", "ZBVZeroBubble", "V-Half"):
            subprocess.run([plan, "show", name, "--ranks", "3", "--microbatches", "7", "--format", "csv", "-o", file], check=True)
            rows = rows_of(open(file).read())
            chunks, theirs = told(file, case)
            ours = said(rows, chunks, case)
            print(f"{name:16} jitter {case['spread']:g}, {case['replicas']} replicas: median, p90, spread {ours}")
            if not near(ours, theirs):
                print(f"  but chevron-plan says {theirs}")
                failed = True
            if near(said(rows, chunks, case, spoilt=("F", 0, 0)), theirs):
                print("  a changed factor changes nothing: this judge judges nothing")
                failed = True
sys.exit(1 if failed else 0)
