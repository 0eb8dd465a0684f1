# timeout: 240
"""chevron-plan lower --resident beside an independent player (shared/gather_player.py), over the catalogue, P, M and K: each file can
be played within K resident stages, has as few gathers as the best of all choices, none that could begin a computation earlier within
K, gathers late only where K has no room, frees each stage after its last computation, and is the file without --resident but for the
gathers. `check` counts as the player does, and refuses the mutants that the player refuses."""
import concurrent.futures
import os
import pathlib
import random
import re
import subprocess
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "shared"))
from gather_player import fewest, kept_on, late_where_needed, movable, play

program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")
LOOPED = ("LoopedBFS", "Interleaved1F1B", "Hanayo", "InterleavedZeroBubble")
TWO = ("ZBVZeroBubble", "V-Half", "V-Min", "DualPipeV")
ONE = ("GPipe", "1F1B", "ZB-H1", "1F1B-R")
wrong = []


def expect(holds, what):
    if not holds:
        wrong.append(what)
        print("FAILED: " + what, flush=True)


def ran(*arguments, stdin=None):
    return subprocess.run([program, *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=60)


def without(text):
    return re.sub(r"(^|,)\d+(UNSHARD|RESHARD)(?=,|$)", "", text, flags=re.M).replace("\n,", "\n").removeprefix(",")


def said_by_check(text, *flags):
    """(gathers, resident, late) by check; None if it refuses the file by the law of gathers."""
    out = ran("check", "-", *flags, stdin=text)
    if out.returncode == 5 and "broken law 'resident'" in out.stdout and "Remedy: " in out.stdout and "rank " in out.stdout:
        return None
    found = re.search(r"resident +at most (\d+) stages of a rank gathered at once, by (\d+) UNSHARD; (each|\d+)", out.stdout)
    if not found:
        return f"exit code {out.returncode}: {out.stdout}{out.stderr}"
    return int(found[2]), int(found[1]), 0 if found[3] == "each" else int(found[3])


def judge(job):
    """Lines about what is wrong, and the file."""
    schedule, ranks, chunks, micro_batches, resident, dialect = job
    size = ["--ranks", ranks, "--microbatches", micro_batches, *(["--chunks", chunks] if chunks else [])]
    out = ran("lower", schedule, *size, "--format", dialect, "--resident", resident)
    plain = ran("lower", schedule, *size, "--format", dialect).stdout
    rows = plain.splitlines()
    best = [fewest(row, resident) for row in rows]
    if None in best:
        bad = out.returncode != 2 or "--resident 1 is too few: rank " not in out.stderr
        return ([f"{job}: a pair needs two stages, and lower says {out}"] if bad else []), None
    gathers, most, late, faults = play(out.stdout)
    found = [f"{job}: {fault}" for fault in faults]
    if gathers != best:
        found.append(f"{job}: {gathers} gathers, the best are {best}")
    if max(most) > resident:
        found.append(f"{job}: {most} resident")
    found += [f"{job}: rank {r}, {one} could begin earlier" for r, row in enumerate(out.stdout.splitlines())
              for one in movable(row, resident)]
    found += [f"{job}: {stage} could be freed earlier" for row in out.stdout.splitlines() for stage in kept_on(row)]
    if any(count > most_late for count, most_late in zip(late, (late_where_needed(row, resident) for row in rows))):
        found.append(f"{job}: {late} late gathers")
    if without(out.stdout) != plain:
        found.append(f"{job}: not the file without --resident")
    if (said := said_by_check(out.stdout, "--resident", resident)) != (sum(gathers), max(most), sum(late)):
        found.append(f"{job}: check says {said}, the player {sum(gathers), max(most), sum(late)}")
    return found, out.stdout


def mutated(text, dice):
    rows = [line.split(",") for line in text.splitlines()]
    row = dice.choice(rows)
    moves = [i for i, cell in enumerate(row) if cell.endswith("SHARD")]
    at = dice.choice(moves)
    change = dice.choice(("drop", "double", "earlier", "later", "other", "swap"))
    if change == "drop":
        row.pop(at)
    elif change == "double":
        row.insert(dice.randrange(len(row) + 1), row[at])
    elif change in ("earlier", "later"):
        cell = row.pop(at)
        row.insert(max(0, at - dice.randint(1, 6)) if change == "earlier" else at + dice.randint(1, 6), cell)
    elif change == "other":
        row[at] = row[at].replace("UN", "RE") if "UN" in row[at] else row[at].replace("RE", "UN")
    else:
        other = dice.choice(moves)
        row[at], row[other] = row[other], row[at]
    return "".join(",".join(row) + "\n" for row in rows)


def judge_mutant(job):
    seed, text = job
    dice = random.Random(seed)
    text = mutated(text, dice)
    gathers, most, late, faults = play(text)
    said = said_by_check(text)
    wanted = None if faults else (sum(gathers), max(most), sum(late))
    found = [] if said == wanted else [f"seed {seed}: check says {said}, the player {wanted} {faults}\n{text}"]
    limit = dice.randint(1, 3)
    if not faults and (said_by_check(text, "--resident", limit) is None) != (max(most) > limit):
        found.append(f"seed {seed}: check --resident {limit} of a file with {max(most)} resident stages\n{text}")
    return found, bool(faults)


# The player: known verdicts.
expect(play("0UNSHARD,0F0,0B0,0RESHARD\n") == ([1], [1], [0], []), "the player refuses a file that runs")
expect(play("0UNSHARD,0F0,1UNSHARD,1F0,1B0,0B0,1RESHARD,0RESHARD\n") == ([2], [2], [1], []), "the player does not see a late gather")
for text in ("0F0,0B0\n", "0UNSHARD,0F0,0RESHARD,0B0\n", "0UNSHARD,0F0,0UNSHARD,0B0,0RESHARD\n", "0UNSHARD,0F0,0B0\n",
             "0UNSHARD,0RESHARD,0UNSHARD,0F0,0B0,0RESHARD\n"):
    expect(play(text)[3] != [], f"the player accepts {text}")
expect(movable("0UNSHARD,0F0,0F1,1UNSHARD,1F0,0RESHARD,1RESHARD\n", 2) == [(2, 1)], "a gather that could begin earlier")
expect(movable("0UNSHARD,0F0,0F1,0RESHARD,1UNSHARD,1F0,1RESHARD\n", 1) == [], "a gather without room")
expect(kept_on("0UNSHARD,0F0,1UNSHARD,1F0,0RESHARD,1RESHARD\n") == [0], "a stage that is freed late")
expect(fewest("0F0,1F0,2F0,0F1,1F1,2F1", 2) == 6 and fewest("0F0,1F0,2F0,0F1,1F1,2F1", 3) == 3, "the best of all choices")

sizes = [(schedule, ranks, chunks, micro_batches)
         for schedules, counts in ((LOOPED, (2, 4)), (TWO, (None,)), (ONE, (None,)))
         for schedule in schedules for chunks in counts for ranks, micro_batches in ((2, 3), (3, 6), (4, 8))]
jobs = [(*size, resident, "csv-comms") for size in sizes for resident in range(1, 2 + (size[2] or 2))]
jobs += [(*size, 3, "csv-comms-2.15") for size in sizes if size[2] == 4]
with concurrent.futures.ThreadPoolExecutor(2) as pool:
    files = []
    for found, text in pool.map(judge, jobs):
        wrong += found
        if text and text.count("UNSHARD") > 2 * text.count("\n"):
            files.append(text)
    print(f"{len(jobs)} files of the catalogue, of which {len(files)} gather more than two stages a rank", flush=True)
    expect(len(files) > 40, "too few files")
    dice = random.Random(7)
    refused = 0
    for found, faulty in pool.map(judge_mutant, [(seed, dice.choice(files)) for seed in range(300)]):
        wrong += found
        refused += faulty
    print(f"300 mutants, {refused} of which the player refuses")
    expect(100 < refused < 290, "mutants of one sort only")
for line in wrong[:20]:
    print(line[:3000])
sys.exit(1 if wrong else 0)
