# timeout: 120
"""What chevron-plan search finds and what it proves, beside the optimum by CP-SAT (OR-Tools), which shares no code with it.

Small random pipelines: placements, costs by stage, messages, memory limits, both objectives, half of those with few microbatches
with such of unequal length (tokens as --lengths takes them, in halves of the mean). No bound may be above the optimum,
no schedule below it, what is found may be above it by little, and bounds below it by little. A last case, with a bound that is made
too high and a length that is made too short, must be found out. More cases, other ones:

    search_optimum.py --cases 240 --short 240 --seed 7
"""
import argparse
import json
import os
import random
import subprocess
import sys

try:
    from ortools.sat.python import cp_model
except ImportError as problem:
    print(f"skipped: no solver to compare with ({problem})")
    sys.exit(77)

plan_program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")


def drawn(rng):
    """One case: sizes, costs by stage, a message for each boundary, a limit in chunks or none."""
    placement = rng.choice(["linear", "loop", "vee"])
    ranks, micro_batches = rng.randint(2, 3), rng.randint(2, 4)
    chunks = 1 if placement == "linear" else 2
    stages = ranks * chunks
    costs = [[rng.randint(4, 20) for _ in range(stages)] for _ in range(3)]
    return {"placement": placement, "ranks": ranks, "chunks": chunks, "micro_batches": micro_batches, "costs": costs,
            "message": rng.randint(1, 4) if rng.random() < 1 / 3 else 0,
            "halves": [rng.choice([1, 1, 2, 3, 6]) for _ in range(micro_batches)] if rng.random() < 1 / 2 and micro_batches < 4 else None,
            "limit": rng.choice([0] + list(range(chunks, chunks * micro_batches))), "kept": rng.choice([1, 1, 0.5]),
            "objective": "span" if rng.random() < 0.2 else "makespan"}


def short_of_memory(rng):
    """One case in a V with so few chunks that memory decides."""
    ranks = rng.randint(2, 3)
    micro_batches = rng.randint(3, 6 if ranks == 2 else 4)
    alike = rng.random() < 0.6
    costs = [[rng.randint(4, 20)] * (2 * ranks) if alike else [rng.randint(4, 20) for _ in range(2 * ranks)] for _ in range(3)]
    return {"placement": "vee", "ranks": ranks, "chunks": 2, "micro_batches": micro_batches, "costs": costs, "message": rng.randint(0, 3),
            "halves": [rng.choice([1, 2, 3]) for _ in range(micro_batches)] if rng.random() < 0.3 else None,
            "limit": rng.randint(2, min(ranks + 2, 2 * micro_batches - 1)), "kept": 1,
            "objective": "span" if rng.random() < 0.2 else "makespan"}


def searched(case):
    words = [plan_program, "search", "--format", "json"]
    for name in ("placement", "ranks", "chunks", "objective"):
        words += [f"--{name}", str(case[name])]
    words += ["--microbatches", str(case["micro_batches"]), "--communication", str(case["message"])]
    words += ["--kept-for-weight", str(case["kept"])]
    for flag, values in zip(("--forward", "--backward-input", "--backward-weight"), case["costs"]):
        words += [flag, ",".join(map(str, values))]
    if case["halves"]:  # costs are those of a length of 2 halves
        words += ["--lengths", ",".join(map(str, case["halves"])), "--measured-length", "2"]
    if case["limit"]:
        words += ["--memory-limit", repr(case["limit"] / case["chunks"])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
    best = json.loads(done.stdout)["placements"][0]
    return best["length"], best["bound"]  # in the costs' unit


def optimum(case, effort):
    """The shortest step of all schedules, or None if it is not proved with this effort."""
    ranks, stages, micro_batches = case["ranks"], case["ranks"] * case["chunks"], case["micro_batches"]
    rank_of = lambda s: s % ranks if case["placement"] != "vee" or s < ranks else 2 * ranks - 1 - s
    model = cp_model.CpModel()
    # In halves of the costs' unit, so that all are whole numbers.
    halves = case["halves"] or [2] * micro_batches
    most = (sum(map(sum, case["costs"])) + 2 * stages * case["message"]) * sum(halves)
    takes = lambda k, s, m: case["costs"][k][s] * halves[m]
    begin, on_rank = {}, [[] for _ in range(ranks)]
    for m in range(micro_batches):
        for s in range(stages):
            for k in range(3):
                begin[k, s, m] = model.new_int_var(0, most, "")
                on_rank[rank_of(s)].append(model.new_fixed_size_interval_var(begin[k, s, m], takes(k, s, m), ""))
    end = lambda k, s, m: begin[k, s, m] + takes(k, s, m)
    message = lambda s, t, m: case["message"] * halves[m] if rank_of(s) != rank_of(t) else 0
    for m in range(micro_batches):
        for s in range(stages):
            model.add(begin[1, s, m] >= end(0, s, m))
            model.add(begin[2, s, m] >= end(1, s, m))
            if s + 1 < stages:
                model.add(begin[0, s + 1, m] >= end(0, s, m) + message(s, s + 1, m))
                model.add(begin[1, s, m] >= end(1, s + 1, m) + message(s, s + 1, m))
            if m > 0:  # microbatches of one kind and stage can be sorted; of unequal length they are as they were given
                for k in range(3):
                    model.add(begin[k, s, m] >= end(k, s, m - 1))
    # Ranks begin as soon as they can, as runs do: a rank that let its first forward wait could make its span shorter. (A rank may still
    # take another microbatch first than the rank before it. Such plans are not looked at here, but bounds by span hold for them, too.)
    for r in range(ranks):
        model.add(begin[0, r, 0] == (end(0, r - 1, 0) + message(r - 1, r, 0) if r > 0 else 0))
    length = model.new_int_var(0, most, "")
    for r in range(ranks):
        model.add_no_overlap(on_rank[r])
        stages_here = [s for s in range(stages) if rank_of(s) == r]
        for s in stages_here:
            last = end(2, s, micro_batches - 1)
            if case["objective"] == "makespan":
                model.add(length >= last)
            else:
                model.add(length >= last - begin[0, stages_here[0], 0])
        if case["limit"]:
            # In halves of a chunk: the whole chunk until I ends, the share that W needs until W ends.
            until_weight = round(2 * case["kept"])
            spans, amounts = [], []
            for s in stages_here:
                for m in range(micro_batches):
                    for k, amount in ((1, 2 - until_weight), (2, until_weight)):
                        lasts = model.new_int_var(0, most, "")
                        spans.append(model.new_interval_var(begin[0, s, m], lasts, end(k, s, m), ""))
                        amounts.append(amount)
            model.add_cumulative(spans, amounts, 2 * case["limit"])
    model.minimize(length)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = effort  # counts its work, so that a busy machine proves as much
    return solver.objective_value / 2 if solver.solve(model) == cp_model.OPTIMAL else None


def complaints(cases):
    """What is wrong with (length, bound, optimum, case), a sentence each."""
    wrong = []
    for length, bound, best, case in cases:
        if bound > best * (1 + 1e-9):
            wrong.append(f"a bound of {bound} is above the optimum {best}: {case}")
        if length < best * (1 - 1e-9):
            wrong.append(f"a length of {length} is below the optimum {best}: {case}")
        if length > best * 1.05:
            wrong.append(f"a length of {length} is more than 5 % above the optimum {best}: {case}")
    return wrong


def judged(name, draw, count, asked):
    """Draws so many cases: (length, bound, optimum, case) of those whose optimum is proved, and what is wrong with them, in sentences."""
    rng = random.Random(asked.seed)
    seen = []
    if count == 0:
        return [], []
    for case in (draw(rng) for _ in range(count)):
        best = optimum(case, asked.effort)
        if best is not None:
            seen.append((*searched(case), best, case))
    if len(seen) < count * 0.9:
        return seen, [f"{name}: too few optima were proved to say anything"]
    wrong = complaints(seen)
    excess = [length / best - 1 for length, _, best, _ in seen]
    below = [1 - bound / best for _, bound, best, _ in seen]
    print(f"{name}: {len(seen)} of {count} optima proved; found above them by {100 * sum(excess) / len(seen):.3f} % on average, "
          f"{100 * max(excess):.2f} % at most, {sum(e < 1e-9 for e in excess)} optimal; bounds below them by "
          f"{100 * sum(below) / len(seen):.2f} % on average, {100 * max(below):.1f} % at most, "
          f"{sum(b < 1e-9 for b in below)} met")
    if sum(excess) / len(seen) > 0.002:
        wrong.append(f"{name}: what is found is more than 0.2 % above the optimum on average")
    if sum(below) / len(seen) > 0.01:
        wrong.append(f"{name}: bounds are more than 1 % below the optimum on average")
    return seen, wrong


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--cases", type=int, default=30)
    flags.add_argument("--short", type=int, default=15, help="number of further cases, of a vee placement with little memory")
    flags.add_argument("--seed", type=int, default=3)
    flags.add_argument("--effort", type=float, default=2, help="solver time to prove one optimum, about in seconds")
    asked = flags.parse_args()
    seen, wrong = judged("all sorts", drawn, asked.cases, asked)
    wrong += judged("a V with short memory", short_of_memory, asked.short, asked)[1]
    for length, bound, best, case in seen[:1]:
        if len(complaints([(length, best * 1.01, best, case), (best * 0.99, bound, best, case)])) < 2:
            wrong.append("a bound that is too high or a length that is too short is not found out")
    for line in wrong:
        print(line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
