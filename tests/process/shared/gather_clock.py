"""Times of schedule files with UNSHARD and RESHARD, independent of Chevron, and the shortest of all orders. A row computes in
its order; a gather begins once the row's earlier computations and gathers have ended; a computation waits for its inputs and
its gather."""
import itertools
import re

CELL = re.compile(r"(\d+)([FBIW])(\d+)|(\d+)UNSHARD")
NEEDS = {"F": (("F", -1),), "B": (("F", 0), ("B", 1)), "I": (("F", 0), ("I", 1)), "W": (("I", 0),)}


def rows_of(text):
    """Rows of ("gather", stage) and (kind, stage, microbatch); a fused pair is a list of two of these."""
    out = []
    for line in text.splitlines():
        row = []
        for cell in re.sub(r"\d+(RESHARD|REDUCE_GRAD|(WAIT_)?(SEND|RECV)_[FB]\d+)", "", line).split(","):
            halves = [("gather", int(m[4])) if m[4] else (m[2], int(m[1]), int(m[3])) for m in CELL.finditer(cell)]
            row += [halves] if len(halves) > 1 else halves
        out.append(row)
    return out


def length(rows, costs, message, gather):
    """The end of the last computation; None if rows wait for each other. `costs` by kind and stage, `gather` by stage."""
    rank_of = {one[1]: r for r, row in enumerate(rows) for cell in row for one in (cell if isinstance(cell, list) else [cell])}
    last, end = max(rank_of), {}
    at, free, wire = [0] * len(rows), [0.0] * len(rows), [0.0] * len(rows)
    whole, moved = {}, True
    while moved:
        moved = False
        for r, row in enumerate(rows):
            while at[r] < len(row):
                cell = row[at[r]]
                if cell[0] == "gather":
                    whole[cell[1]] = wire[r] = max(wire[r], free[r]) + gather[cell[1]]
                else:
                    start, takes = free[r], 0
                    halves = cell if isinstance(cell, list) else [cell]
                    for kind, stage, unit in halves:
                        takes += costs[kind][stage]
                        start = max(start, whole.get(stage, 0))
                        for other, step in NEEDS[kind]:
                            if not 0 <= stage + step <= last:
                                continue
                            key = (other, stage + step, unit)
                            if key not in end and other in "BI":  # a stage's gradient comes from either
                                key = ("BI"[other == "B"], stage + step, unit)
                            if key not in end:
                                start = None
                                break
                            start = max(start, end[key] + (message if rank_of[stage + step] != r else 0))
                        if start is None:
                            break
                    if start is None:
                        break
                    free[r] = start + takes
                    for half in halves:
                        end[half] = free[r]
                at[r] += 1
                moved = True
    return max(free) if all(at[r] == len(row) for r, row in enumerate(rows)) else None


def stays_of(row, resident):
    """(stage, first step, last step) of each stay of a stage in a row of single computations, in the order of the first steps: each
    step wants its stage and, with room, the next one's; the stage that is wanted again last leaves."""
    wants = [{row[i][1]} | ({row[i + 1][1]} if i + 1 < len(row) and resident > 1 else set()) for i in range(len(row))]
    out, have = [], {}  # have: by stage its stay, [stage, first, last]
    for i, cell in enumerate(row):
        for stage in sorted(wants[i] - have.keys(), key=lambda stage: stage != cell[1]):
            while len(have) >= resident:
                have.pop(max(have.keys() - wants[i],
                             key=lambda s: next((k for k in range(i, len(row)) if s in wants[k]), len(row))))
            have[stage] = [stage, i if stage == cell[1] else i + 1, i]
            out.append(have[stage])
        have[cell[1]][2] = i
    return out


def stays_in(row):
    """(stage, first step, last step) of each stay in a row of a file, and the steps before which their gathers begin."""
    steps = [cell[1] for cell in row if cell[0] != "gather"]
    stays, begins, step = [], [], 0
    for cell in row:
        step += cell[0] != "gather"
        if cell[0] == "gather":
            stays.append([cell[1], steps.index(cell[1], step), None])
            begins.append(step)
    for i, (stage, first, _) in enumerate(stays):
        again = min((at for at, (other, later, _) in zip(begins, stays) if other == stage and later > first), default=len(steps))
        stays[i][2] = max(k for k in range(first, again) if steps[k] == stage)
    return stays, begins


def most_at_once(stays, begins):
    return max(sum(begin <= step <= last for begin, (_, _, last) in zip(begins, stays)) for step in {*begins})


def placements(stays, resident, any_order=False):
    """All steps before which the gathers of stays may begin; without `any_order` in the order of the stays."""
    def extend(begins):
        if begins and most_at_once(stays[:len(begins)], begins) > resident:
            return
        if len(begins) == len(stays):
            yield list(begins)
            return
        for step in range(0 if any_order or not begins else begins[-1], stays[len(begins)][1] + 1):
            yield from extend(begins + [step])
    return extend([])


def with_gathers(row, stays, begins):
    """A row of computations with gathers before these steps; those before one step in the order of the stays."""
    out = []
    for i, cell in enumerate(row):
        out += [("gather", stay[0]) for stay, begin in zip(stays, begins) if begin == i] + [cell]
    return out


def earliest(stays, resident):
    """The steps before which the gathers begin, each as early as the gathers before it leave room."""
    begins = []
    for i, stay in enumerate(stays):
        some = range(begins[-1] if begins else 0, stay[1] + 1)
        begins.append(next(step for step in some if most_at_once(stays[:i + 1], [*begins, step]) <= resident))
    return begins


def orders(stages, units, backward):
    """All orders of a row in which microbatches of each stage and kind ascend and a stage's F comes before its backward."""
    def extend(done, row):
        if len(row) == len(stages) * units * (1 + len(backward)):
            yield list(row)
        for stage in stages:
            for depth, kind in enumerate("F" + backward):
                unit = done.get((kind, stage), 0)
                if unit == units or (depth and done.get((("F" + backward)[depth - 1], stage), 0) <= unit):
                    continue
                done[kind, stage] = unit + 1
                row.append((kind, stage, unit))
                yield from extend(done, row)
                row.pop()
                done[kind, stage] = unit
    return list(extend({}, []))


def shortest(stages_of_rank, units, backward, costs, message, gather, resident):
    """The length of the shortest of all combinations of orders."""
    def gathered(row):
        stays = stays_of(row, resident)
        return with_gathers(row, stays, earliest(stays, resident))

    rows = [[gathered(row) for row in orders(stages, units, backward)] for stages in stages_of_rank]
    lengths = (length(list(some), costs, message, gather) for some in itertools.product(*rows))
    return min(one for one in lengths if one is not None)
