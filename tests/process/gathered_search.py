# timeout: 240
"""chevron-plan search --resident and show --resident beside an independent clock (shared/gather_clock.py): random orders take
the time that the clock gives for their files with UNSHARD and RESHARD; no other placement of the gathers of small files is
shorter, and one computation ahead is often longer; the search finds the shortest of all orders of small pipelines, is never
longer than the catalogue, and writes a file that takes the time it says; flags that do not go together are refused."""
import concurrent.futures
import itertools
import json
import math
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "shared"))
from gather_clock import length, placements, rows_of, shortest, stays_in, with_gathers

program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")
guide = pathlib.Path(__file__).resolve().parents[2] / "docs" / "guides" / "gathers.md"
folder = pathlib.Path(tempfile.mkdtemp(prefix="gathered"))
wrong = []


def expect(holds, what):
    if not holds:
        wrong.append(what)
        print("FAILED: " + what, flush=True)


def ran(*arguments):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=120)


def listed(numbers):
    return ",".join(map(str, numbers))


class times:
    """Costs of stages as flags and for the clock."""

    def __init__(self, stages, dice):
        some = lambda choices: [dice.choice(choices) for _ in range(stages)]
        self.forward, self.input, self.weight = some((1, 2, 3)), some((1, 2)), some((0.5, 1, 2))
        self.gather, self.message = some((0.25, 1, 2, 5)), dice.choice((0, 0.5, 2))
        both = [a + b for a, b in zip(self.input, self.weight)]
        self.of = {"F": self.forward, "B": both, "I": self.input, "W": self.weight}
        self.flags = ["--forward", listed(self.forward), "--backward-input", listed(self.input), "--backward-weight",
                      listed(self.weight), "--communication", self.message, "--unshard", listed(self.gather)]

    def length(self, text):
        return length(rows_of(text), self.of, self.message, self.gather)


def random_order(ranks, chunks, units, split, pairs, dice):
    """A lawful file of a loop placement, from random choices among the actions whose inputs exist; with `pairs`, of an F and a
    backward of another stage at once, too."""
    done, rows = set(), [[] for _ in range(ranks)]
    backward, last = ("IW" if split else "B"), ranks * chunks - 1
    left = [(kind, stage, unit) for kind in "F" + backward for stage in range(last + 1) for unit in range(units)]

    def ready(cell):
        kind, stage, unit = cell
        needs = {"F": [("F", stage - 1)], "W": [("I", stage)]}.get(kind, [("F", stage), (kind, stage + 1)])
        return all((other, at, unit) in done for other, at in needs if 0 <= at <= last)

    while left:
        free = [cell for cell in left if ready(cell)]
        some = [[cell] for cell in free]
        if pairs:
            some += [[f, b] for f in free for b in free
                     if f[0] == "F" and b[0] in "BI" and f[1] != b[1] and (f[1] - b[1]) % ranks == 0] * 3
        chosen = dice.choice(some)
        words = [f"{stage}{kind}{unit}" for kind, stage, unit in chosen]
        rows[chosen[0][1] % ranks].append(words[0] if len(words) == 1 else f"({words[0]};{words[1]})OVERLAP_F_B")
        left = [cell for cell in left if cell not in chosen]
        done.update(chosen)
    return "".join(",".join(row) + "\n" for row in rows)


def judge_order(seed):
    dice = random.Random(seed)
    pairs = seed % 5 < 2
    if seed % 5 == 0:  # schedules with fused pairs and in a V
        name = dice.choice(("DualPipeV", "ZBVZeroBubble", "Interleaved1F1B", "LoopedBFS"))
        ranks, chunks = dice.choice((2, 4)), 2
        what = [name, "--ranks", ranks, "--microbatches", dice.choice((4, 8))]
    else:
        ranks, chunks = dice.randint(1, 3), dice.randint(3 if pairs else 1, 4)
        file = folder / f"{seed}.csv"
        file.write_text(random_order(ranks, chunks, dice.randint(1, 4), dice.random() < 0.5, pairs, dice))
        what = [file]
    cost, resident = times(ranks * chunks, dice), dice.randint(2 if pairs else 1, chunks + 1)
    said = re.search(r"makespan with them ([\d.]+)", ran("show", *what, *cost.flags, "--resident", resident).stdout)
    text = ran("lower", *what, "--format", "csv-comms", "--resident", resident).stdout
    wanted = cost.length(text)
    same = said and wanted and abs(float(said[1]) - wanted) < 1e-5 * wanted
    if not same:
        return [f"seed {seed}: show says {said and said[1]}, the clock {wanted}\n{text}"], False
    without = length(rows_of(re.sub(r"\d+UNSHARD,", "", text)), cost.of, cost.message, cost.gather)
    return [], wanted > without + cost.gather[0]  # nothing computes before stage 0 is gathered


def judge_placements(seed):
    """What is wrong, whether one gather time let the gathers of the file be placed in any order, and whether gathers one
    computation ahead take longer. None: too many placements."""
    dice = random.Random(seed)
    ranks, chunks = dice.randint(1, 2), dice.randint(2, 3)
    file = folder / f"placed{seed}.csv"
    file.write_text(random_order(ranks, chunks, dice.randint(1, 3), dice.random() < 0.5, False, dice))
    cost, resident, any_order = times(ranks * chunks, dice), dice.randint(2, chunks), dice.random() < 0.5
    if any_order:
        cost.gather = [dice.choice((1, 2, 5))] * (ranks * chunks)
    rows = rows_of(ran("lower", file, "--format", "csv-comms", "--resident", resident).stdout)
    plain, stays = [[cell for cell in row if cell[0] != "gather"] for row in rows], [stays_in(row)[0] for row in rows]
    choices = [list(itertools.islice(placements(some, resident, any_order), 3000)) for some in stays]
    if math.prod(map(len, choices)) >= 3000:
        return None
    takes = lambda begins: length([with_gathers(row, some, steps) for row, some, steps in zip(plain, stays, begins)], cost.of,
                                  cost.message, cost.gather)
    ours = length(rows, cost.of, cost.message, cost.gather)
    best = min(takes(begins) for begins in itertools.product(*choices))
    ahead = takes([[max(first - 1, 0) for _, first, _ in some] for some in stays])
    found = [] if abs(ours - best) < 1e-9 * best else [f"seed {seed}, {resident} resident: {ours}, the best placement {best}"]
    return found, any_order, ahead > ours * (1 + 1e-9)


def judge_row(cells):
    """A row of the guide's table: makespans without gathers, one computation ahead and as early as possible."""
    schedule, ranks, chunks, units, resident, gather, *said = cells
    text = ran("lower", schedule, "--ranks", ranks, "--chunks", chunks, "--microbatches", units, "--format", "csv-comms",
               "--resident", resident).stdout
    rows, count = rows_of(text), int(ranks) * int(chunks)
    takes = lambda rows: length(rows, {"F": [1] * count, "B": [2] * count}, 0, [int(gather)] * count)
    plain, stays = [[cell for cell in row if cell[0] != "gather"] for row in rows], [stays_in(row)[0] for row in rows]
    ahead = [with_gathers(row, some, [max(first - 1, 0) for _, first, _ in some]) for row, some in zip(plain, stays)]
    found = [takes(plain), takes(ahead), takes(rows)]
    return [] if found == [float(one) for one in said[:3]] else [f"the guide says {cells}, the clock {found}"]


def judge_small(job):
    ranks, chunks, units, split, seed = job
    dice = random.Random(seed)
    cost, resident = times(ranks * chunks, dice), dice.randint(1, chunks)
    out = ran("search", "--placement", "loop" if chunks > 1 else "linear", "--ranks", ranks, "--chunks", chunks, "--microbatches",
              units, *cost.flags, "--resident", resident, "--format", "json", *([] if split else ["--full-backward"]))
    said = json.loads(out.stdout)["placements"][0]
    stages = [range(r, ranks * chunks, ranks) for r in range(ranks)]
    best = shortest(stages, units, "IW" if split else "B", cost.of, cost.message, cost.gather, resident)
    found = []
    if abs(said["length"] - best) > 1e-9 * best or said["bound"] > best * (1 + 1e-9):
        found.append(f"{job}, {resident} resident: the search finds {said}, the shortest of all orders is {best}")
    return found, said["length"] > said["bound"]


def judge_search(job):
    placement, schedules, ranks, chunks, units, resident, seed = job
    dice = random.Random(seed)
    cost = times(ranks * chunks, dice)
    shape = ["--ranks", ranks, "--chunks", chunks, "--microbatches", units]
    file = folder / f"search{seed}.csv"
    flags = [*cost.flags, "--resident", resident]
    out = ran("search", "--placement", placement, *shape, *flags, "--trials", 20000, "--format", "csv-comms", "-o", file)
    row = re.search(rf"^{placement} +([\d.]+) .* ([\d.]+) +([A-Z]\S*) +(\d+)$", out.stdout, flags=re.M)
    if not row:
        return [f"{job}: {out.stdout}{out.stderr}"]
    text, found = file.read_text(), []
    if abs(cost.length(text) - float(row[1])) > 1e-5 * float(row[1]):
        found.append(f"{job}: search says {row[1]}, the clock {cost.length(text)}")
    if text.count("UNSHARD") != int(row[4]):
        found.append(f"{job}: search says {row[4]} UNSHARD, the file has {text.count('UNSHARD')}")
    if "ok: " not in (said := ran("check", file, "--resident", resident).stdout):
        found.append(f"{job}: {said}")
    for name in schedules:
        said = re.search(r"makespan with them ([\d.]+)", ran("show", name, *shape, *flags).stdout)
        if float(said[1]) < float(row[1]) * (1 - 1e-5) or float(said[1]) < float(row[2]) * (1 - 1e-5):
            found.append(f"{job}: {name} takes {said[1]}, the search found {row[1]}, and says that the best is {row[2]}")
    return found


# The clock: known times.
unit = {"F": [1, 1], "B": [2, 2]}
for text, wanted in (("0F0,0B0\n1F0,1B0\n", 6), ("0UNSHARD,0F0,0B0,0RESHARD\n1UNSHARD,1F0,1B0,1RESHARD\n", 10),
                     ("0UNSHARD,0F0,1UNSHARD,1F0,1B0,0B0,0RESHARD,1RESHARD\n", 13),
                     ("0UNSHARD,1UNSHARD,0F0,1F0,1B0,0B0,0RESHARD,1RESHARD\n", 12), ("0B0,0F0\n1F0,1B0\n", None)):
    expect(length(rows_of(text), unit, 0, [4, 3] if "RESHARD" in text else [0, 0]) == wanted, f"the clock: {text}")

with concurrent.futures.ThreadPoolExecutor(2) as pool:
    late = 0
    for found, waits in pool.map(judge_order, range(200)):
        wrong += found
        late += waits
    print(f"200 orders, of which {late} wait for gathers but the first", flush=True)
    expect(60 < late < 195, "too few orders that wait, or that do not")
    judged = [one for one in pool.map(judge_placements, range(150)) if one]
    wrong += [line for found, _, _ in judged for line in found]
    any_order, shorter = (sum(one[i] for one in judged) for i in (1, 2))
    print(f"{len(judged)} small files in all placements, {any_order} in any order; {shorter} are longer one computation ahead", flush=True)
    expect(len(judged) > 70 and any_order > 20 and shorter > 20, "too few small files")
    table = re.findall(r"^\| (\S+)" + r" \| (\d+)" * 9 + r" \|$", guide.read_text(), flags=re.M)
    expect(len(table) > 4, "the guide has no table of makespans")
    for found in pool.map(judge_row, table):
        wrong += found
    small = [(2, 2, 2, False, seed) for seed in range(10)] + [(1, 2, 3, False, seed) for seed in range(10, 12)]
    small += [(1, 2, 2, True, seed) for seed in range(12, 14)] + [(3, 2, 1, True, seed) for seed in range(14, 18)]
    open_ones = 0
    for found, above in pool.map(judge_small, small):
        wrong += found
        open_ones += above
    print(f"{len(small)} small pipelines, of which {open_ones} are above the bound", flush=True)
    expect(open_ones > 4, "too few small pipelines that the bound does not settle")
    jobs = [("loop", ("LoopedBFS", "Interleaved1F1B"), 2, 4, 8, 2, 1), ("loop", ("LoopedBFS", "Interleaved1F1B"), 4, 2, 8, 1, 2),
            ("vee", ("ZBVZeroBubble", "V-Half"), 4, 2, 8, 1, 3), ("wave", ("Hanayo",), 2, 4, 6, 3, 4)]
    for found in pool.map(judge_search, jobs):
        wrong += found

for flags, words in ((["--resident", 2], "--resident 2 of search needs the time of a gather: add --unshard COST"),
                     (["--unshard", 1], "--unshard 1 of search needs the number of stages that may be gathered at once"),
                     (["--resident", 0, "--unshard", 1], "--resident"),
                     (["--resident", 2, "--unshard", "1,2"], "--unshard"),
                     (["--resident", 2, "--unshard", 1, "--objective", "span"], "--resident does not go with --objective span"),
                     (["--resident", 2, "--unshard", 1, "--jitter", "0.1"], "--resident does not go with --jitter"),
                     (["--resident", 2, "--unshard", 1, "--memory", "80GiB", "--static-bytes", 1, "--activation-bytes", 1],
                      "--resident does not go with"),
                     (["--resident", 2, "--unshard", 1, "--format", "svg"], "--resident 2 does not go with --format svg")):
    out = ran("search", "--ranks", 2, "--chunks", 2, "--microbatches", 2, *flags)
    expect(out.returncode == 2 and words in out.stderr, f"search {flags}: exit code {out.returncode}, {out.stderr}")
out = ran("show", "LoopedBFS", "--resident", 2)
expect(out.returncode == 2 and "--resident 2 of show needs the time of a gather" in out.stderr, f"show: {out}")
out = ran("show", "DualPipeV", "--resident", 1, "--unshard", 1)
expect(out.returncode == 2 and "--resident 1 is too few: rank " in out.stderr, f"show: {out}")
for line in wrong[:20]:
    print(line[:3000])
sys.exit(1 if wrong else 0)
