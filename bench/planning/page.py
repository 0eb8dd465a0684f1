"""docs/reference/published.md, made of the rows and of bench/planning/published.json alone."""

import re
import statistics
import textwrap

import rows

GIB = 1 << 30


def reflowed(text):
    """Paragraphs and items of lists in lines of at most 120 columns; headings, tables and code as they are."""
    out = []
    for block in text.split("\n\n"):
        for item in [block] if re.match("    |[|#]", block) else re.split(r"\n(?=- )", block):
            if not re.match("    |[|#]", item):
                item = textwrap.fill(
                    " ".join(item.split()),
                    120,
                    subsequent_indent="  " if item.startswith("- ") else "",
                    break_long_words=False,
                    break_on_hyphens=False,
                )
            out.append(item + ("\n" if item.startswith("- ") else "\n\n"))
        if out[-1].startswith("- "):
            out[-1] += "\n"
    return "".join(out).rstrip("\n") + "\n"


def signed(share):
    return f"{100 * share:+.1f} %"


def number(value):
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def open_choice(text, stated):
    """A choice that the source does not state is in italics."""
    return text if stated else f"*{text}*"


def schedule_of(way, named=True, counted=True):
    """\\param named and counted whether the source states the schedule and the number of chunks"""
    name = open_choice(way["schedule"], named)
    return (
        name
        + (", " + open_choice(f"{way['chunks']} chunks", counted) if way["schedule"] == "Interleaved1F1B" else "")
        + (", post-validated" if way.get("post_validation") else "")
    )


def way_text(way):
    parts = [
        f"{way['pipeline_ranks']} × {way['shards']} × {way['replicas']}",
        f"{way['micro_batches']} × {way['samples']}",
        schedule_of(way),
    ]
    if way["recompute"]:
        parts.append("recomputed")
    if way["sharded_optimizer"]:
        parts.append("sharded")
    parts.append(f"{way['bytes'] / GIB:.1f} GiB")
    return "; ".join(parts)


def table_text(table, figures):
    notes = [table.note] if table.note else []
    unit = table.unit
    heads = [
        "model",
        "GPUs",
        "P × T × R",
        "M × samples",
        "schedule",
        *notes,
        f"published, {unit}",
        f"predicted, {unit}",
        "deviation",
        "not calibrated",
        *(["published memory"] if table.memory_unit else []),
        "fullest rank",
        "shortest way of the search",
        "faster",
    ]
    figures_of_row = 5 + bool(table.memory_unit)
    lines = [
        "| " + " | ".join(heads) + " |",
        "|---|" + "---:|" * 3 + "---|" * (1 + len(notes)) + "---:|" * figures_of_row + "---|---:|",
    ]
    for row, of in zip(table.rows, figures["tables"][table.name], strict=True):
        theirs, ours = of["theirs"], of["ours"]
        gain = theirs["time"] / ours["time"] - 1
        cells = [
            row.model.name,
            str(row.gpus),
            f"{row.ranks} × {row.shards} × {row.replicas}",
            open_choice(f"{theirs['micro_batches']} × {theirs['samples']}", row.samples),
            schedule_of(theirs, row.schedule, row.chunks),
            *([row.note] if notes else []),
            f"{row.published:g}",
            number(table.figure(row, theirs["time"])),
            signed(table.deviation(row, theirs["time"])),
            signed(table.deviation(row, of["assumed"]["time"])),
            *([f"{row.memory:g} {table.memory_unit}" if row.memory else "–"] if table.memory_unit else []),
            bytes_text(theirs["bytes"], table),
            way_text(ours),
            signed(gain),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def bytes_text(bytes, table):
    """In the unit of the published figures."""
    return f"{bytes / 1e9:.1f} GB" if table.memory_unit == "GB" else f"{bytes / GIB:.1f} GiB"


def ranks(values):
    """Places of values in their order; equal values share the mean place."""
    order = sorted(values)
    return [order.index(v) + (order.count(v) - 1) / 2 for v in values]


def summary(table, figures):
    """Mean and greatest deviation of a table, and whether predictions order its rows as the measurements do."""
    pairs = [
        (row.published, table.figure(row, of["theirs"]["time"]))
        for row, of in zip(table.rows, figures["tables"][table.name], strict=True)
    ]
    deviations = [
        table.deviation(row, of["theirs"]["time"])
        for row, of in zip(table.rows, figures["tables"][table.name], strict=True)
    ]
    before = [
        table.deviation(row, of["assumed"]["time"])
        for row, of in zip(table.rows, figures["tables"][table.name], strict=True)
    ]
    gains = [of["theirs"]["time"] / of["ours"]["time"] - 1 for of in figures["tables"][table.name]]
    correlation = statistics.correlation(ranks([a for a, _ in pairs]), ranks([b for _, b in pairs]))
    mean = lambda values: sum(map(abs, values)) / len(values)
    return (
        f"| [{table.title}](#{anchor(table)}) | {len(pairs)} | {100 * mean(before):.1f} % | {100 * mean(deviations):.1f} % | "
        f"{signed(min(deviations))} to {signed(max(deviations))} | {correlation:.2f} | "
        f"{signed(min(gains))} to {signed(max(gains))} |"
    )


def anchor(table):
    return "".join(c for c in table.title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def order_of(table, figures):
    """Pairs of schedules with the same model and step: those that predictions order as the measurements do, and all."""
    jobs = {}
    for row, of in zip(table.rows, figures["tables"][table.name], strict=True):
        jobs.setdefault((row.model.name, row.batch), []).append(
            (row.published, table.figure(row, of["theirs"]["time"]))
        )
    pairs = [
        ((a < b) == (p < q)) for job in jobs.values() for i, (a, p) in enumerate(job) for b, q in job[:i] if a != b
    ]
    return sum(pairs), len(pairs)


def stage_table(figures):
    lines = [
        "| model | F measured, ms | predicted | I measured | predicted | W measured | predicted | sum |",
        "|---|" + "---:|" * 7,
    ]
    for name, (samples, layers, *measured) in rows.PROFILED.items():
        predicted = figures["stages"][name]
        cells = [
            c for m, p in zip(measured, predicted, strict=True) for c in (f"{m:.2f}", f"{p:.2f} ({signed(p / m - 1)})")
        ]
        lines.append(
            f"| {name}: {layers} layers, {samples} × 1,024 tokens | "
            + " | ".join(cells)
            + f" | {signed(sum(predicted) / sum(measured) - 1)} |"
        )
    return "\n".join(lines)


def dropout_table(figures):
    """Bytes of 1F1B, with the masks and outputs of dropout that the planner does not count: 2 n h + 3 a s n a layer."""
    lines = ["| model | GPUs | samples | published | predicted | with dropout | deviation |", "|---|" + "---:|" * 6]
    seen = set()
    for table in (rows.ZERO_BUBBLE, rows.ZB_V):
        for row, of in zip(table.rows, figures["tables"][table.name], strict=True):
            m, key = row.model, (row.model.name, row.gpus, row.samples)
            if row.schedule != "1F1B" or key in seen:
                continue
            seen.add(key)
            tokens = row.samples * m.tokens
            layer = 2 * tokens * m.width + 3 * m.heads * m.tokens * tokens
            # Rank r holds the chunks of P - r microbatches.
            more = layer * max(count * (row.ranks - r) for r, count in enumerate(row.layers(1)))
            bytes = of["theirs"]["bytes"]
            lines.append(
                f"| {m.name} | {row.gpus} | {row.samples} | {row.memory:g} GB | {bytes / 1e9:.1f} GB | "
                f"{(bytes + more) / 1e9:.1f} GB | "
                f"{signed((bytes + more) / 1e9 / row.memory - 1)} |"
            )
    return "\n".join(lines)


def text(figures):
    a100, h100 = (f"{figures['efficiency'][gpu]:g}" for gpu in ("a100", "h100"))
    every = [(t, r, of) for t in rows.TABLES for r, of in zip(t.rows, figures["tables"][t.name], strict=True)]
    longest = sum(of["theirs"]["bytes"] > t.machine.bytes for t, _, of in every)
    alike = [order_of(t, figures) for t in rows.TABLES]
    deviations = [abs(t.deviation(r, of["theirs"]["time"])) for t, r, of in every]
    small = figures["tables"]["weak"][0]["theirs"]
    part = lambda table: table_text(table, figures)
    heading = lambda table: f"## {table.title}\n\n{table.source}."
    return reflowed(f"""# Published jobs, timed

Papers and repositories publish how fast training jobs ran, and on what. This page has each such job as
[`chevron-plan cluster`](../guides/cluster-plan.md) times it, with the choices of its authors, beside the measured
throughput, and the shortest way that the search finds for the same model, machine and tokens of a step. The numbers say
how far the planner's times can be trusted, and where they are wrong.

    python3 bench/planning/published.py           times all rows, and writes this page
    python3 bench/planning/published.py --check   whether the page is what bench/planning/published.json makes of it

A row is two calls. Of the row of 39.1B below, with the microbatches and chunks that its source leaves open:

    chevron-plan model --kind gpt --layers 48 --width 8192 --heads 64 --vocabulary 51200 --tied --tokens 2048 --dtype fp16 \\
      --masters --attention full --kernels fused --gpu a100 --efficiency {a100} -o profile.json
    chevron-plan cluster profile.json --nodes 64 --gpus 8 --memory 80GiB --link-inside 300GB/s --link-between 25GB/s \\
      --batch-tokens 3072k --slices 1 --ranks 2 --shards 8 --samples 4 --schedule Interleaved1F1B --chunks 4 --recompute all \\
      --shard nothing

The second call without the flags from `--ranks` on is the search, over ways that train whole sequences, as these jobs do.

## In short

{len(every)} jobs, of which the mean deviation of the predicted throughput is
{100 * sum(deviations) / len(deviations):.1f} %, the greatest
{100 * max(deviations):.1f} %. Of {sum(n for _, n in alike)} pairs of schedules that one source measured with the same
model and step, the
predictions order {sum(n for n, _ in alike)} as the measurements do.

| table | rows | mean deviation, not calibrated | calibrated | from … to | rank correlation | shortest way, faster |
|---|---:|---:|---:|---:|---:|---:|
{chr(10).join(summary(t, figures) for t in rows.TABLES)}

The throughputs of weak scaling lie within a fifth of each other, so deviations of a tenth suffice to change their
order. Of the {len(every)} configurations {len(every) - longest} fit into the machine's memory by the planner's count.
For each of those the shortest way of the search takes no longer than the configuration itself, under the same times.

## How rows are timed

- **Efficiency.** Matrix products reach one share of the peak for each kind of GPU, whatever the model. It is found
  with one
  row: {a100} on A100 with the 145.6B model of SC'21, {h100} on H100 (of the peak in bfloat16) with torchtitan's 1F1B
  on 16 ranks.
  These two rows say nothing, then; the others are predictions. The column *not calibrated* has 0.6, the share that
  `chevron-plan model` assumes.
- **Choices that a source leaves open** are in *italics*: of those that agree with the source, the planner takes the
  shortest
  that fits. Interleaved stages have 2, 3 or 4 chunks there. Layers are divided evenly, by Qi et al. with one fewer on
  the first
  stage and the last, by torchtitan as suits the schedule.
- **Machines.** An A100 sends 300 GB/s over NVLink and 25 GB/s over its network card of 200 Gbit/s, an H100 450 and 50
  GB/s; Qi et
  al. do not state the rate of their network, for which the page takes 25 GB/s, too. Latencies are 0. Other operators
  reach 0.8 of
  the memory's rate: 2,039 GB/s on A100, 2.4 TB/s on torchtitan's H100 with HBM2e. A rank has 80 GiB, on these H100 96
  GB.
- **Models.** Megatron-LM's are `gpt` with stored scores, fused kernels, float16, float32 gradients and masters. Qi et
  al. do not
  state the vocabulary: 32,000 here, with which all four models have the parameters of their names. Shards cut
  sequences, too, of which
  SC'21 and the rows with all recomputed had no code; the bytes that shards send are the same.
- **Deviation**: predicted over measured throughput, less 1. **Faster**: by how much the shortest way of the search
  exceeds the
  configuration's predicted throughput. Ways are P × T × R; M × samples; schedule; whether layers are recomputed and
  the optimizer's
  state is sharded over replicas; bytes of the fullest rank.

{heading(rows.WEAK)} The interleaved schedule; microbatches and chunks are not stated. Throughput counts the
operations of
equation 3, with a fourth forward for recomputation, so the time of a step follows exactly.

{part(rows.WEAK)}

{heading(rows.WIDE)} One sequence a microbatch, 8 shards; the schedule is not stated.

{part(rows.WIDE)}

The predicted throughput falls less with more replicas than the measured one: sums over replicas are as fast as the
network
cards here, on more nodes they were not.

{heading(rows.RECOMPUTED)} The machine of SC'21. Rows without
recomputation of whole layers recompute the scores (`--attention selective`), and cut sequences.

{part(rows.RECOMPUTED)}

Recomputing scores alone is predicted to shorten the step as measured: {ratios(figures)}. The 1008B model without
recomputation of whole
layers exceeds a rank's memory by the planner's count; the authors free the outputs of stages that later ranks have
received
(appendix B there), which the planner does not.

{heading(rows.ZERO_BUBBLE)} ZB-1p has the makespan
of ZB-H1 (table 5 there). The authors search ZB-2p's order for the profiled times; the row is timed as ZB-H2 of the
catalogue, whose steps [overlap by post-validation](../guides/cluster-plan.md#steps-that-overlap) as theirs do
(`--post-validation yes`). By their table 5, with the profiled times, ZB-H2's bubble is 6.4 to 10.8 % at the least number
of microbatches, ZB-2p's 0.3 to 4.3 %; with the planner's times, whose W is longer, ZB-H2's is {bubbles_text(figures)}.
Embedding and head of these rows are not tied, since a tied gradient would make the first rank wait for the last. The
shortest way beside such a row is that of `--post-validation both`. In table 6 ZB-2p is left out.

{part(rows.ZERO_BUBBLE)}

Post-validation raises the measured throughput of ZB-2p (table 7 there, the least number of microbatches) and the
predicted one of ZB-H2: {overlap_text(figures)}. The planner counts a copy of the optimizer's state, by which
Chevron undoes a step, in time and bytes: {copies_text(figures)} of the fullest rank. The authors undo a step by
arithmetic, without a copy.

{heading(rows.ZB_V)} The authors' ZB-V is searched for the profiled times; the row is timed as
ZBVZeroBubble of the catalogue.

{part(rows.ZB_V)}

{heading(rows.TITAN)} Float8 products, torch.compile, asynchronous tensor parallelism, all layers recomputed.
The two sources differ in ranks and batch. Microbatches and chunks are not stated.

{part(rows.TITAN)}

With 8 ranks the planner's steps are too short: the tables of 16 and of 8 ranks have the same throughput, though 8
ranks with 32
microbatches have half the bubble. Fewer and larger microbatches in the measured job would explain it, as would the
higher
memory of its fullest rank. Products in float8 have twice the peak, so an efficiency found with them is none of
bfloat16.

## Causes of the deviations

The authors of zero bubble also publish the times of F, I and W of one stage (table 9 there):

{stage_table(figures)}

- **W is too long, the more so the fewer tokens a microbatch has.** By the [planner's formula](model-costs.md#times) W
  writes the gradient of each
  parameter, reads it and adds it to the float32 sum: 10 bytes a parameter, as `chevron-finetune` does. Megatron-LM
  can add
  within the kernel of the product (*gradient accumulation fusion*). With 1,024 tokens the additions take more than
  half as long as
  the product. F and I together are within a tenth. With one sequence of 2,048 tokens the additions are
  {additions_text(figures)} of the steps of the
  529.6B model.
- **Times between computations are missing.** With these times and the bubble rates of 1F1B in table 5 there, 1F1B
  would train 12.4,
  3.63, 1.51 and 0.81 samples/s per GPU at the least number of microbatches; measured were 11.8, 3.50, 1.40 and 0.76.
  The planner
  does not count these 4 to 7 %, which hide a part of the longer W.
- **One efficiency for all sizes.** Products of wide layers reach more of the peak (Narayanan et al., section 5.1):
  rows of one table go
  from too fast at a width of 6,144 or 8,192 to too slow at 20,480 and 25,600. The sizes on a shard count, too: the
  products of 8 shards are an eighth as
  wide.
- **Sums over replicas on one node's cards.** With 1, 2 or 4 shards several replicas lie on one node, and a ring over
  them can use all
  its network cards. The planner gives each GPU its own card's rate: the sums of the 1.7B model are
  {100 * small['sums'] / small['time']:.0f} % of
  the step.
- **Interleaving gains less than predicted.** The deviation of 1F1B-I is {gap_text(figures)} percentage points above
  that of 1F1B with the
  same model and step (zero bubble, one pipeline). Messages take no time of a computing rank here; with one layer a
  stage they are many.
- **Dropout, workspaces and fragmentation are missing in the bytes.** Masks and outputs of dropout are 2 n h
  + 3 a s n bytes a layer (Korthikanti et al., section 4.1). With them the bytes of 1F1B are:

{dropout_table(figures)}

The shortest ways are predictions without a measurement beside them. Most of them gain by doing without recomputation,
and fill the
memory by the planner's count: with dropout fewer of them fit.
""")


def ratios(figures):
    """Of each model, the step with all recomputed over the step with the scores recomputed: measured, predicted."""
    out = []
    jobs = list(zip(rows.RECOMPUTED.rows, figures["tables"]["recomputed"], strict=True))
    for (row, of), (other, than) in zip(jobs, jobs[1:]):
        if row.model is other.model and row.recompute and not other.recompute:
            out.append(
                f"{row.model.name} {row.published / other.published:.2f} times measured, "
                f"{of['theirs']['time'] / than['theirs']['time']:.2f} predicted"
            )
    return "; ".join(out)


def overlapping(figures):
    """Rows whose steps overlap, with their figures."""
    jobs = zip(rows.ZERO_BUBBLE.rows, figures["tables"]["zero-bubble"], strict=True)
    return [(row, of["theirs"]) for row, of in jobs if row.schedule == "ZB-H2" and row.post_validated]


def bubbles_text(figures):
    """Least and greatest bubble of the pipeline among the rows whose steps overlap, with the fewest microbatches of each model."""
    fewest = {}
    for row, way in overlapping(figures):
        fewest.setdefault(row.model.name, 100 * way["bubble"])
    return f"{min(fewest.values()):.1f} to {max(fewest.values()):.1f} %"


def overlap_text(figures):
    """Of each model, the throughput with post-validation over that without: measured, predicted."""
    out = []
    for row, of in zip(rows.ZERO_BUBBLE.rows, figures["tables"]["zero-bubble"], strict=True):
        if row.schedule != "ZB-H2" or row.post_validated:
            continue
        other, way = next((r, w) for r, w in overlapping(figures) if r.model is row.model and r.batch == row.batch)
        out.append(
            f"{row.model.name} {signed(other.published / row.published - 1)} measured, "
            f"{signed(of['theirs']['time'] / way['time'] - 1)} predicted"
        )
    return "; ".join(out)


def copies_text(figures):
    """Gigabytes by which the fullest rank has more with post-validation than without, over the models."""
    more = []
    for row, of in zip(rows.ZERO_BUBBLE.rows, figures["tables"]["zero-bubble"], strict=True):
        if row.schedule == "ZB-H2" and not row.post_validated:
            way = next(w for r, w in overlapping(figures) if r.model is row.model and r.batch == row.batch)
            more.append((way["bytes"] - of["theirs"]["bytes"]) / 1e9)
    return f"{min(more):.1f} to {max(more):.1f} GB"


def additions_text(figures):
    """Shares of the 529.6B model's steps without replicas that additions of gradients take: 10 bytes a parameter and
    microbatch."""
    shares = []
    for row, of in zip(rows.RECOMPUTED.rows, figures["tables"]["recomputed"], strict=True):
        if row.model.name == "529.6B" and row.gpus == 280:
            m, way = row.model, of["theirs"]
            parameters = 12 * m.layers * m.width**2 / row.gpus
            shares.append(10 * parameters * way["micro_batches"] / (0.8 * 2.039e12) * 1e3 / way["time"])
    return f"{100 * min(shares):.0f} to {100 * max(shares):.0f} %"


def gap_text(figures):
    """By how much the deviation of 1F1B-I exceeds that of 1F1B, over models and microbatches."""
    found = {}
    for row, of in zip(rows.ZERO_BUBBLE.rows, figures["tables"]["zero-bubble"], strict=True):
        found.setdefault((row.model.name, row.batch), {})[row.schedule] = rows.ZERO_BUBBLE.deviation(
            row, of["theirs"]["time"]
        )
    gaps = [100 * (job["Interleaved1F1B"] - job["1F1B"]) for job in found.values()]
    return f"{min(gaps):.0f} to {max(gaps):.0f}"
