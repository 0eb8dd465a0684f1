# timeout: 240
"""docs/reference/published.md is what bench/planning/published.json makes of it, and the figures are those of
chevron-plan. Rows agree with further columns of the sources: sizes with the models' names, throughputs with the published
shares of the peak. The shortest way takes no longer than a published configuration that fits by the planner's count."""

import json
import os
import pathlib
import random
import sys
import tempfile

ROOT = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[2])).resolve()
BUILD = pathlib.Path(os.environ.get("CHEVRON_BUILD", ROOT / "build")).resolve()
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench" / "planning"))
import page  # noqa: E402
import published  # noqa: E402
import rows  # noqa: E402

wrong = []


def want(holds, words):
    if not holds:
        wrong.append(words)
        print("FAILED: " + words, flush=True)


def same(of, told):
    """Equal but for the rounding of another compiler."""
    if isinstance(of, float) or isinstance(told, float):
        return abs(of - told) <= 0.002 + 1e-6 * abs(told)
    if isinstance(of, dict):
        return of.keys() == told.keys() and all(same(of[key], told[key]) for key in of)
    if isinstance(of, list):
        return len(of) == len(told) and all(map(same, of, told))
    return of == told


def close(value, wanted, within, words):
    want(abs(value / wanted - 1) <= within, f"{words}: {value:.6g}, not {wanted:.6g} within {within:.1%}")


figures = json.loads(published.FIGURES.read_text())
tables = {table.name: table for table in rows.TABLES}
pairs = [
    (table, row, of) for table in rows.TABLES for row, of in zip(table.rows, figures["tables"][table.name], strict=True)
]

# The page, and a figure that is changed by hand.
want(published.check() == 0, "the page is not what the figures make of it")
changed = json.loads(published.FIGURES.read_text())
changed["tables"]["weak"][3]["theirs"]["time"] *= 1.02
want(page.text(changed) != published.PAGE.read_text(), "a changed figure leaves the page as it is")

# Rows beside further columns of their sources. Table 1 of SC'21: billions of parameters, share of the peak, petaFLOP/s.
PARAMETERS = {"22B": 22, "174.6B": 174.6, "Llama 3.1 405B": 405.0}
AGGREGATE = (4.4, 8.8, 18.2, 34.6, 70.8, 143.8, 227.1, 297.4, 410.2, 502.0)
SHARES = (44, 44, 46, 43, 44, 45, 47, 50, 52, 52)
for table, row, _ in pairs:
    m = row.model
    want(
        row.ranks * row.shards * row.replicas == row.gpus and (row.gpus % 8 == 0),
        f"{table.name} {m.name}: ranks do not multiply to the GPUs",
    )
    billions = PARAMETERS.get(m.name) or float(m.name.rstrip("B"))
    if "llama" in m.flags:
        counted = m.layers * (m.width * (2 * m.width + 2 * 8 * 128) + 3 * m.width * 53248) + 2 * m.width * m.vocabulary
    else:
        counted = 12 * m.layers * m.width**2 + 13 * m.layers * m.width + m.width * (m.vocabulary + m.tokens)
    close(counted / 1e9, billions, 0.03, f"{table.name} {m.name}: parameters")
    if table in (rows.ZERO_BUBBLE, rows.ZB_V):
        want(round(counted / 1e9, 1) == billions, f"{table.name} {m.name}: {counted:.4g} parameters")
    if row.samples:
        want(row.batch % (row.replicas * row.samples) == 0, f"{table.name} {m.name}: sequences of a step")
for row, aggregate, share in zip(rows.WEAK.rows, AGGREGATE, SHARES, strict=True):
    close(row.gpus * row.published / 1e3, aggregate, 0.006, f"weak {row.model.name}: petaFLOP/s of all GPUs")
    want(abs(100 * row.published / 312 - share) <= 0.75, f"weak {row.model.name}: share of the peak")
# Table 2 of SC'21: days for 300 billion tokens, 8 T P / n X.
for row, days in zip(rows.WIDE.rows, (84, 43, 23, 156, 80, 42), strict=True):
    told = 8 * 300e9 * float(row.model.name[:-1]) * 1e9 / (row.gpus * row.published * 1e12) / 86400
    want(
        abs(told - days) <= 0.5 + 0.02 * days, f"wide {row.model.name} on {row.gpus} GPUs: {told:.1f} days, not {days}"
    )
# Table 5 of Korthikanti et al.: share of the peak that the model's own operations reach, where the scores are recomputed.
shares = {"22B": 41.5, "174.6B": 51.4, "529.6B": 56.0, "1008B": 56.3}
for row in rows.RECOMPUTED.rows:
    m = row.model
    operations = (
        72
        * row.batch
        * m.tokens
        * m.layers
        * m.width**2
        * (1 + m.tokens / 6 / m.width + m.vocabulary / 12 / m.width / m.layers)
    )
    if not row.recompute and row.gpus < 2240:
        close(
            100 * operations / row.published / row.gpus / 312e12,
            shares[m.name],
            0.01,
            f"recomputed {m.name}: share of the peak",
        )
    if row.gpus == 2240:
        close(
            100 * operations / row.published / row.gpus / 312e12,
            54.2,
            0.01,
            "recomputed 529.6B on 2,240 GPUs: share of the peak",
        )
# Table 9 of Qi et al.: T_F + T_B + T_W of a stage and the throughput of 1F1B bound each other: no GPU trains faster than one
# microbatch in that time.
for row in rows.ZERO_BUBBLE.rows:
    samples, _, *times = rows.PROFILED[row.model.name]
    want(
        row.published <= 1.01 * samples / sum(times) * 1e3 / row.gpus,
        f"zero-bubble {row.model.name}: {row.published} samples/s are too many",
    )
for table in (rows.ZERO_BUBBLE, rows.ZB_V):
    for a in table.rows:
        for b in table.rows:
            if a.model is b.model and a.schedule == b.schedule and a.batch < b.batch:
                want(
                    a.published <= b.published,
                    f"{table.name} {a.model.name} {a.schedule}: fewer microbatches, more throughput",
                )

# Equation 3 of SC'21 beside a sum over matrix products, by layer: 4 forwards of attention and maps with full scores.
for row in rows.WEAK.rows:
    m, tokens = row.model, row.batch * row.model.tokens
    layer = 2 * tokens * (4 * m.width**2 + 8 * m.width**2) + 2 * 2 * tokens * m.tokens * m.width
    operations = 4 * m.layers * layer + 3 * 2 * tokens * m.width * m.vocabulary
    close(rows.WEAK.figure(row, 1000) * 1e12 * row.gpus, operations, 1e-12, f"weak {row.model.name}: equation 3")

# The rows that calibrate have their published throughput; others may be far from it, which the page says.
for gpu, (name, place) in rows.CALIBRATED_BY.items():
    deviation = tables[name].deviation(tables[name].rows[place], figures["tables"][name][place]["theirs"]["time"])
    want(abs(deviation) < 0.005, f"{name} {place} calibrates {gpu}, and deviates by {deviation:.2%}")

# Laws of the figures.
held = 0
for table, row, of in pairs:
    theirs, ours, words = of["theirs"], of["ours"], f"{table.name} {row.model.name} on {row.gpus} GPUs, {row.schedule}"
    want(
        theirs["pipeline_ranks"] == row.ranks and theirs["shards"] == row.shards and theirs["replicas"] == row.replicas,
        words + ": another grid",
    )
    want(
        row.samples in (None, theirs["samples"]) and row.chunks in (None, theirs["chunks"]),
        words + ": other microbatches or chunks",
    )
    want(
        row.schedule in (None, theirs["schedule"]) and row.recompute == theirs["recompute"],
        words + ": another schedule",
    )
    want(ours["bytes"] <= table.machine.bytes, words + ": the shortest way does not fit")
    if theirs["bytes"] <= table.machine.bytes:
        held += 1
        want(
            ours["time"] <= theirs["time"] * (1 + 1e-9),
            f"{words}: the shortest way takes {ours['time']} ms, the published one {theirs['time']}",
        )
    faster = figures["efficiency"][table.machine.gpu] > published.ASSUMED
    want((theirs["time"] < of["assumed"]["time"]) == faster, words + ": a greater efficiency makes the step longer")
want(held >= 40, f"only {held} published configurations fit")

# Figures beside the program: all configurations that take little time, and the shortest ways of some rows.
drawn = random.Random(7)
with tempfile.TemporaryDirectory() as folder:
    planner = published.Planner(BUILD, folder)
    again = [p for p in pairs if p[1].batch // p[1].replicas * p[1].ranks <= 6000 and p[1].schedule and p[1].samples]
    again = drawn.sample(again, 24) + [p for p in pairs if p[1] in (rows.RECOMPUTED.rows[0], rows.WEAK.rows[0])]
    for table, row, of in again:
        theirs = published.configured(planner, row, table.machine, figures["efficiency"][table.machine.gpu])
        want(
            same(published.kept(theirs), of["theirs"]),
            f"{table.name} {row.model.name} {row.schedule}: {published.kept(theirs)}, not {of['theirs']}",
        )
    for table, row, of in [
        (rows.ZERO_BUBBLE, *next(p[1:] for p in pairs if p[0] is rows.ZERO_BUBBLE)),
        drawn.choice([p for p in pairs if p[0] is rows.ZB_V]),
    ]:
        ours = published.shortest(planner, row, table.machine, figures["efficiency"][table.machine.gpu], of["theirs"])
        want(
            same(published.kept(ours), of["ours"]),
            f"{table.name} {row.model.name}: the shortest way is {published.kept(ours)}, not {of['ours']}",
        )
    want(same(published.stage_times(planner, figures["efficiency"]["a100"]), figures["stages"]), "other times of stages")

sys.exit(1 if wrong else 0)
