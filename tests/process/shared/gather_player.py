"""A player of UNSHARD and RESHARD in schedule files, independent of Chevron; the fewest gathers by trying all choices; gathers that
could begin earlier, and stages that could be freed earlier."""
import itertools
import re


def cells_of(line):
    """The cells of a row as (kinds, stages): a computation is ("run", stages), a fused pair one of them with two stages."""
    for cell in line.strip().split(","):
        if "OVERLAP" in cell:
            yield "run", [int(stage) for stage in re.findall(r"(\d+)[FBI]\d", cell)]
        elif match := re.fullmatch(r"(\d+)(UNSHARD|RESHARD)", cell):
            yield match[2], [int(match[1])]
        elif match := re.fullmatch(r"(\d+)[FBIWR][\d.]+", cell):
            yield "run", [int(match[1])]


def play(text):
    """The gathers of each row, the most stages gathered at once in each, the late gathers of each, and the faults."""
    gathers, most, late, faults = [], [], [], []
    for rank, line in enumerate(text.splitlines()):
        age, runs = {}, 0  # by gathered stage: computations before its gather; -1 once it has computed
        gathers.append(0), most.append(0), late.append(0)
        for what, stages in cells_of(line):
            for stage in stages:
                if what == "UNSHARD":
                    if stage in age:
                        faults.append(f"rank {rank}: {stage} gathered twice")
                    age[stage] = runs
                    gathers[-1] += 1
                elif what == "RESHARD":
                    if age.pop(stage, None) != -1:
                        faults.append(f"rank {rank}: {stage} freed without a computation")
                elif stage not in age:
                    faults.append(f"rank {rank}: {stage} computes while absent")
                else:
                    late[-1] += age[stage] == runs > 0
                    age[stage] = -1
            runs += what == "run"
            most[-1] = max(most[-1], len(age))
        if age:
            faults.append(f"rank {rank}: {sorted(age)} never freed")
    return gathers, most, late, faults


def runs_of(line):
    return [stages for what, stages in cells_of(line) if what == "run"]


def wanted(runs, step, resident):
    """The stages that must be gathered during a step: its own, then the next one's as far as there is room."""
    out = list(dict.fromkeys(runs[step]))
    for stage in runs[step + 1] if step + 1 < len(runs) else []:
        if stage not in out and len(out) < resident:
            out.append(stage)
    return frozenset(out)


def fewest(line, resident):
    """The fewest gathers of a row, from all choices of the stages that are kept; None if a step needs more than there may be."""
    runs = runs_of(line)
    least = {frozenset(): 0}
    for step in range(len(runs)):
        need = wanted(runs, step, resident)
        if len(need) > resident:
            return None
        now = {}
        for have, cost in least.items():
            spare = have - need
            for count in range(min(len(spare), resident - len(need)) + 1):
                for kept in itertools.combinations(sorted(spare), count):
                    state = need | frozenset(kept)
                    now[state] = min(now.get(state, 1 << 30), cost + len(need - have))
        least = now
    return min(least.values())


def late_where_needed(line, resident):
    """The most gathers that may come directly before their use: of stages of steps whose stages and those before do not fit."""
    runs = runs_of(line)
    return sum(len(set(runs[i + 1]) - wanted(runs, i, resident)) for i in range(len(runs) - 1))


def movable(line, resident):
    """The gathers of a row that could begin a computation earlier: at most `resident` stages would be gathered at once still."""
    counts, starts, now = [], [], 0  # counts: by computation the stages gathered during it
    for what, stages in cells_of(line):
        if what == "run":
            counts.append(now)
        elif what == "RESHARD":
            now -= 1
        else:
            now += 1
            starts.append((len(counts), stages[0]))
    return [(step, stage) for step, stage in starts if step > 0 and counts[step - 1] < resident]


def kept_on(line):
    """The stages of a row that are freed after a computation of other stages, not right after one of their own."""
    out, last = [], []
    for what, stages in cells_of(line):
        last = stages if what == "run" else last
        out += [stage for stage in stages if what == "RESHARD" and stage not in last]
    return out
