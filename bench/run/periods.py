"""The shortest period of periodic orders with some microbatches a period, by CP-SAT (OR-Tools), beside the results of search.

A V of some ranks, seven sets of costs, some numbers of chunks in flight. Prints for each case a rank's work for a microbatch, the
lower bound of `bounds` on the time of a further microbatch, the shortest period, and the time of a further microbatch in the results
of `chevron-plan search` (the difference of two lengths over that of their microbatches). A period is proved to be the shortest if the solver
has refused all shorter ones; else the least is given that it has not refused.

    .venv/bin/python bench/run/periods.py --ranks 4 --limits 4,5
"""
import argparse
import json
import os
import subprocess
import sys

try:
    from ortools.sat.python import cp_model
except ImportError as problem:
    print(f"skipped: no solver ({problem}). Remedy: .venv/bin/pip install ortools")
    sys.exit(77)

SETS = [(10, 10, 10, 0), (10, 11, 9, .5), (10, 13, 7, 1), (20, 18, 12, 2), (10, 20, 10, 1), (10, 10, 5, .5), (12, 14, 10, 1)]
FORWARD, INPUT, WEIGHT = range(3)


def repeats(ranks, limit, costs, period, count, effort):
    """Whether `count` microbatches can be repeated every `period`, with at most `limit` chunks in flight: None if that is not known.

    Each action has a time in a run of its own that begins with the first F, and a place in the period: the time modulo the period.
    Every interval stands twice, a period apart, so that those that cross the period's end meet what stands at its beginning."""
    stages = 2 * ranks
    rank_of = lambda s: s if s < ranks else stages - 1 - s
    lasts, message = costs[:3], costs[3]
    model = cp_model.CpModel()
    latest = period * (3 * limit + 3)
    begin, place = {}, {}
    for m in range(count):
        for s in range(stages):
            for k in range(3):
                at = begin[k, s, m] = model.new_int_var(0, latest, "")
                place[k, s, m] = model.new_int_var(0, period - 1, "")
                model.add(at == period * model.new_int_var(0, latest // period + 1, "") + place[k, s, m])
    model.add(begin[FORWARD, 0, 0] == 0)
    for m in range(count):
        for s in range(stages):
            model.add(begin[INPUT, s, m] >= begin[FORWARD, s, m] + lasts[FORWARD])
            model.add(begin[WEIGHT, s, m] >= begin[INPUT, s, m] + lasts[INPUT])
            if s + 1 < stages:
                way = message if rank_of(s) != rank_of(s + 1) else 0
                model.add(begin[FORWARD, s + 1, m] >= begin[FORWARD, s, m] + lasts[FORWARD] + way)
                model.add(begin[INPUT, s, m] >= begin[INPUT, s + 1, m] + lasts[INPUT] + way)
            for k in range(3):  # microbatches of one kind and stage can be sorted
                if m > 0:
                    model.add(begin[k, s, m] >= begin[k, s, m - 1] + lasts[k])
                if m > 0 and m == count - 1:
                    model.add(begin[k, s, 0] + period >= begin[k, s, m] + lasts[k])
    for r in range(ranks):
        computes, held, whole_periods, held_in_all = [], [], [], []
        for s in (s for s in range(stages) if rank_of(s) == r):
            for m in range(count):
                for k in range(3):
                    for shift in (0, period):
                        computes.append(model.new_fixed_size_interval_var(place[k, s, m] + shift, lasts[k], ""))
                turns = model.new_int_var(0, limit, "")
                rest = model.new_int_var(0, period - 1, "")
                from_to = begin[WEIGHT, s, m] + lasts[WEIGHT] - begin[FORWARD, s, m]
                model.add(from_to == period * turns + rest)
                whole_periods.append(turns)
                held_in_all.append(from_to)
                for shift in (0, period):
                    end = model.new_int_var(0, 3 * period, "")
                    held.append(model.new_interval_var(place[FORWARD, s, m] + shift, rest, end, ""))
        model.add_no_overlap(computes)
        room = model.new_int_var(0, limit, "")
        model.add(room == limit - sum(whole_periods))
        model.add(sum(held_in_all) <= limit * period)
        model.add_cumulative(held, [1] * len(held), room)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort  # counts its work, so that a busy machine proves as much
    known = {cp_model.OPTIMAL: True, cp_model.FEASIBLE: True, cp_model.INFEASIBLE: False}
    return known.get(solver.solve(model))


def shortest_period(ranks, limit, costs, count, effort):
    """The shortest that was found, and the least that was not refused: in the costs' unit, for all of the period's microbatches.
    A longer period is never harder to keep, so the search goes up from a rank's work."""
    unit = 2 if any(c != int(c) for c in costs) else 1
    whole = [round(c * unit) for c in costs]
    work = 2 * sum(whole[:3]) * count
    open_from = None
    for period in range(work, 2 * work):
        answer = repeats(ranks, limit, whole, period, count, effort)
        if answer is False:  # and so is all that is shorter
            open_from = None
        elif answer is None and open_from is None:
            open_from = period
        if answer:
            return period / unit, (open_from or period) / unit
    return None, (open_from or 2 * work) / unit


def found_period(program, ranks, limit, costs, micro_batches):
    """What a microbatch more takes, on average from `micro_batches` to twice as many: in what search finds, and by its bound."""
    lengths, bounds = [], []
    for count in (micro_batches, 2 * micro_batches):
        words = [program, "search", "--format", "json", "--placement", "vee", "--chunks", "2", "--ranks", ranks, "--microbatches", count,
                 "--memory-limit", limit / 2, "--communication", costs[3]]
        for flag, cost in zip(("--forward", "--backward-input", "--backward-weight"), costs):
            words += [flag, cost]
        done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=True)
        best = json.loads(done.stdout)["placements"][0]
        lengths.append(best["length"])
        bounds.append(best["bound"])
    return (lengths[1] - lengths[0]) / micro_batches, (bounds[1] - bounds[0]) / micro_batches


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--ranks", type=int, default=4)
    flags.add_argument("--limits", default="4,5", help="chunks in flight")
    flags.add_argument("--in-period", type=int, default=1, help="microbatches a period")
    flags.add_argument("--microbatches", type=int, default=32, help="microbatches of the shorter of two searches")
    flags.add_argument("--only", type=int, default=-1, help="one of the seven sets of costs, from 0")
    flags.add_argument("--effort", type=float, default=30, help="solver time for each period, about in seconds")
    asked = flags.parse_args()
    program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")
    print(f"| costs | limit | a rank's work | bound | shortest period of {asked.in_period} | found |")
    print("|---|---|---|---|---|---|")
    for number, costs in enumerate(SETS):
        if asked.only not in (-1, number):
            continue
        for limit in map(int, asked.limits.split(",")):
            exists, not_refused = shortest_period(asked.ranks, limit, costs, asked.in_period, asked.effort)
            period = f"{not_refused / asked.in_period:g}"
            if exists != not_refused:
                period += f" or more, {exists / asked.in_period:g} exists" if exists else " or more"
            found, bound = found_period(program, asked.ranks, limit, costs, asked.microbatches)
            case = f"({','.join(f'{c:g}' for c in costs)}) | {limit} | {2 * sum(costs[:3]):g}"
            print(f"| {case} | {bound:.1f} | {period} | {found:.1f} |", flush=True)


if __name__ == "__main__":
    main()
