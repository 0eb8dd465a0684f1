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


def with_gathers(row, resident):
    """A row of single computations with its gathers: each step holds its stage and, with room, the next one's; the stage that is
    wanted again last leaves."""
    wants = [{row[i][1]} | ({row[i + 1][1]} if i + 1 < len(row) and resident > 1 else set()) for i in range(len(row))]
    out, have = [], set()
    for i, cell in enumerate(row):
        for stage in sorted(wants[i] - have, key=lambda stage: stage != cell[1]):
            while len(have) >= resident:
                have.remove(max(have - wants[i], key=lambda s: next((k for k in range(i, len(row)) if s in wants[k]), len(row))))
            have.add(stage)
            out.append(("gather", stage))
        out.append(cell)
    return out


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
    rows = [[with_gathers(row, resident) for row in orders(stages, units, backward)] for stages in stages_of_rank]
    lengths = (length(list(some), costs, message, gather) for some in itertools.product(*rows))
    return min(one for one in lengths if one is not None)
