# timeout: 120
"""chevron-plan compare --resident --unshard beside an independent clock (shared/gather_clock.py): makespans with gathers of all schedules are
those that the clock gives for their files with UNSHARD and RESHARD, and decide their order; a schedule for which K is too few is left out with
the reason; all other numbers are those without gathers; flags that do not go together are refused."""
import csv
import io
import json
import os
import pathlib
import re
import subprocess
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "shared"))
from gather_clock import length, rows_of

program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")
wrong = []


def expect(holds, what):
    if not holds:
        wrong.append(what)
        print("FAILED: " + what[:2000], flush=True)


def ran(*arguments):
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def listed(typed, stages, chunks):
    """Costs by stage: a list is typed by stage, one number is that of a rank's whole share."""
    return [float(one) for one in typed.split(",")] if "," in typed else [float(typed) / chunks] * stages


def judge(ranks, units, resident, forward, backward_input, backward_weight, message, gather, chunks=None):
    shape = ["--ranks", ranks, "--microbatches", units, *(["--chunks", chunks] if chunks else [])]
    costs = ["--forward", forward, "--backward-input", backward_input, "--backward-weight", backward_weight, "--communication", message]
    flags = [*shape, *costs, "--resident", resident, "--unshard", gather]
    entries = json.loads(ran("compare", *flags, "--format", "json").stdout)
    fit, unfit = [e for e in entries if "reason" not in e], [e for e in entries if "reason" in e]
    plain = {e["schedule"]: e for e in json.loads(ran("compare", *shape, *costs, "--format", "json").stdout)}
    waits = 0
    for e in fit:
        stages = ranks * e["chunks"]
        own = [listed(typed, stages, e["chunks"]) for typed in (forward, backward_input, backward_weight, gather)]
        of = {"F": own[0], "I": own[1], "W": own[2], "B": [i + w for i, w in zip(own[1], own[2])]}
        text = ran("lower", e["schedule"], "--ranks", ranks, "--microbatches", units, "--chunks", e["chunks"], "--format", "csv-comms", "--resident",
                   resident).stdout
        wanted = length(rows_of(text), of, float(message), own[3])
        label = f"{e['schedule']} {flags}"
        expect(wanted and abs(e["gathered_makespan"] - wanted) < 1e-6 * wanted, f"{label}: compare says {e['gathered_makespan']}, the clock {wanted}")
        expect(e["unshard"] == text.count("UNSHARD"), f"{label}: compare says {e['unshard']} UNSHARD, the file has {text.count('UNSHARD')}")
        waits += e["gathered_makespan"] > e["makespan"] + own[3][0] + 1e-9
        alone = {key: value for key, value in e.items() if key not in ("unshard", "gathered_makespan")}
        expect(alone == plain[e["schedule"]], f"{label}: other numbers change: {alone}, {plain[e['schedule']]}")
    lengths = [e["gathered_makespan"] for e in fit]
    expect(all(a <= b * (1 + 1e-9) for a, b in zip(lengths, lengths[1:])), f"{flags}: not the shortest first: {lengths}")
    rows = list(csv.DictReader(io.StringIO(ran("compare", *flags, "--format", "csv").stdout)))
    expect([(r["schedule"], float(r["gathered_makespan"]), int(r["unshard"])) for r in rows if not r["reason"]]
           == [(e["schedule"], e["gathered_makespan"], e["unshard"]) for e in fit], f"{flags}: csv and json differ")
    expect([(r["schedule"], r["reason"]) for r in rows if r["reason"]] == [(e["schedule"], e["reason"]) for e in unfit], f"{flags}: reasons differ")
    said = ran("compare", *flags).stdout
    first = re.search(r"^schedule +chunks +gathered +slower +UNSHARD +makespan +bubble .*\n(\S+) +\d+ +([\d.]+) +- +(\d+) +([\d.]+) ", said, re.M)
    expect(first and first[1] == fit[0]["schedule"] and int(first[3]) == fit[0]["unshard"]
           and all(abs(float(first[at]) - fit[0][key]) < 1e-4 * fit[0][key] for at, key in ((2, "gathered_makespan"), (4, "makespan"))), f"{flags}: {said}")
    expect(f"with at most {resident} stage" in said and "search finds" not in said, f"{flags}: {said}")
    return len(fit), waits, unfit, [e["schedule"] for e in fit] != [e["schedule"] for e in sorted(fit, key=lambda e: e["makespan"])]


found = [judge(2, 4, 1, "1", "1", "1", "0", "1"), judge(4, 8, 1, "1", "1.5", ".5", ".25", "8"), judge(4, 8, 2, "2", "1", "1", "0", "3"),
         judge(3, 6, 3, "1", "1", "1", "0.5", "6"), judge(2, 4, 1, "1,2,1,2", "1,1,1,3", "1,1,2,1", "0", "5,1,2,1", chunks=2)]
expect(sum(fit for fit, _, _, _ in found) > 30 and sum(waits for _, waits, _, _ in found) > 10, f"too few schedules, or none that waits: {found}")
expect(any(other for _, _, _, other in found), "gathers change no order of schedules")
expect(any("--resident 1 is too few: rank " in e["reason"] for e in found[0][2]), f"no schedule for which one stage is too few: {found[0][2]}")
expect(not any("too few" in e["reason"] for e in found[2][2]), f"two stages are too few: {found[2][2]}")

for flags, words in ((["--resident", 2], "--resident 2 of compare needs the time of a gather: add --unshard COST"),
                     (["--unshard", 1], "--unshard 1 of compare needs the number of stages that may be gathered at once: add --resident STAGES"),
                     (["--resident", 0, "--unshard", 1], "--resident"), (["--resident", 2, "--unshard", "x"], "--unshard"),
                     (["--resident", 2, "--unshard", "1,2"], "--unshard '1,2' is a list"),
                     (["--resident", 2, "--unshard", "1,2", "--chunks", 2], "--unshard"),
                     (["--resident", 2, "--unshard", 1, "--jitter", "5%"], "--resident does not go with --jitter: leave one of them out")):
    out = ran("compare", "--ranks", 2, "--microbatches", 2, *flags)
    expect(out.returncode == 2 and words in out.stderr, f"compare {flags}: exit code {out.returncode}, {out.stderr}")
sys.exit(1 if wrong else 0)
