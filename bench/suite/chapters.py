"""The sections of docs/reference/benchmarks.md: the question of each, its tables and pictures, and its limits."""

import dataclasses
import statistics
import typing

from . import chart
from . import order as ways
from .tables import FUSED, figure, median, present, ratio, span, spread, table, times, torch_columns, wrapped

GPT_NAMES = {
    "alone": "one process, no pipeline",
    "all alone": "two of these at once",
    "searched": "searched for measured costs",
}


@dataclasses.dataclass
class Chapter:
    name: str
    title: str
    asks: str  # for the table at the top, with what the setting holds in braces
    what: str  # the same, for the section
    cannot: str
    table: typing.Callable  # result -> Markdown
    pictures: typing.Callable  # result -> [(file, words, SVG)]
    short: typing.Callable  # result -> the figure of the table "In short", or nothing

    @property
    def anchor(self):
        return "".join(c for c in self.title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def ratios(result, ours):
    """Columns of how the other sides stand to ours, [(words, column above, column below)]: above 1 where ours takes less."""
    there = {column for of in result["values"].values() for column in of}
    found = [(f"{words} / Chevron", side, ours) for side, words in torch_columns(result) if side in there]
    return found + ([("beside / ours", ours + " beside", ours)] if ours + " beside" in there else [])


def beside_table(result, columns, against, unit=""):
    """A row a schedule: what was measured in each column, and how the sides stand to each other."""
    head = ["schedule", *(words + unit for _, words in columns), *(words for words, _, _ in against)]
    rows = []
    for row in result["values"]:
        measured = [spread(result, row, column) for column, _ in columns]
        stands = [times(ratio(result, row, above, below)) for _, above, below in against]
        rows.append([GPT_NAMES.get(row, row), *measured, *stands])
    return table(head, rows)


def drawn(file, words, title, unit, result, columns, rows=None, **more):
    rows = list(result["values"]) if rows is None else rows
    svg = chart.dots(title, unit, [(row, result["values"].get(row, {})) for row in rows], columns, **more)
    return [(file, words, svg)] if svg else []


def older(result):
    return [side for side, _ in torch_columns(result) if any(side in of for of in result["values"].values())]


# --- planning -----------------------------------------------------------------------------------------------------------------


def planning_table(result):
    columns = present(result, [*torch_columns(result), ("ours", "Chevron")])
    against = ratios(result, "ours")
    text = beside_table(result, columns, against, ", ms")
    large = [row for row, of in result["values"].items() if "large seconds" in of]
    if large:
        words = "At P = {large_ranks}, V = 2 where the schedule has chunks, M = {large_micro_batches}, once, each in "
        words += "a process of its own; PyTorch takes minutes there and is not run:"
        text += "\n" + wrapped(words.format(**result["setting"])) + "\n"
        text += table(
            ["schedule", "actions", "CPU s", "MB at most"],
            [
                [
                    row,
                    figure(median(result, row, "large actions")),
                    f"{median(result, row, 'large seconds'):.2f}",
                    figure(median(result, row, "large MB")),
                ]
                for row in large
            ],
        )
    return text


def planning_short(result):
    ours = [median(result, row, "ours") for row in result["values"]]
    parts = [f"{span(ours, '{:.1f}')} ms a schedule"]
    for side in older(result):
        factors = [ratio(result, row, side, "ours") for row in result["values"]]
        parts.append(f"{span(factors, '{:.0f}')} times faster than {result['sides'][side]['label']}")
    large = [median(result, row, "large seconds") for row in result["values"]]
    if any(large):
        most = max(median(result, row, "large actions") or 0 for row in result["values"])
        parts.append(f"at P=512, M=4096 {span(large, '{:.1f}')} s for up to {most / 1e6:.1f} million actions")
    return "; ".join(parts)


# --- compile time -------------------------------------------------------------------------------------------------------------


def case_words(case):
    if case == "header":
        return "`<chevron/schedule.hpp>` alone"
    name, ranks, micro_batches = case.removeprefix("lowered_").rsplit("_", 2)
    return f"`{'lowered' if case.startswith('lowered_') else 'checked'}<{name}>`, P={ranks}, M={micro_batches}"


def added_seconds(result, case):
    """Beside the header alone, in the same round."""
    both = zip(result["values"][case]["seconds"], result["values"]["header"]["seconds"])
    return statistics.median(whole - header for whole, header in both)


def compile_table(result):
    columns = present(result, [("seconds", "CPU s"), ("MB", "MB")])
    rows = []
    for case in result["values"]:
        added = added_seconds(result, case)
        count = [median(result, case, key) for key in ("actions", "operations")]
        rows.append(
            [
                case_words(case),
                *(figure(c) if c else "–" for c in count),
                *(spread(result, case, column) for column, _ in columns),
                f"{added:.2f}" if case != "header" else "–",
            ]
        )
    return table(["what", "actions", "evaluator operations", *(words for _, words in columns), "s added"], rows)


def compile_short(result):
    added = {case: added_seconds(result, case) for case in result["values"]}
    return (
        f"{median(result, 'header', 'seconds'):.1f} s for the header; `zb_v` at P=8, M=32 adds {max(0.0, added['zb_v_8_32']):.2f} "
        f"s, at P=32, M=512 {added['zb_v_32_512']:.1f} s, `one_f_one_b` at P=64, M=512 {added['one_f_one_b_64_512']:.1f} s"
    )


def compile_pictures(result):
    named = {"values": {case_words(case).replace("`", ""): of for case, of in result["values"].items()}}
    return drawn(
        "bench-compile.svg",
        "CPU seconds to compile a schedule",
        "A file that proves a schedule, -O0",
        "CPU seconds",
        named,
        present(result, [("seconds", "Chevron")]),
    )


# --- compile time of training -------------------------------------------------------------------------------------------------


def training_table(result):
    return table(
        ["what, level", "CPU s", "MB"],
        [
            [row.replace(", -O", ", `-O") + "`", spread(result, row, "seconds"), spread(result, row, "MB")]
            for row in result["values"]
        ],
    )


def training_pictures(result):
    shorter = [
        ("`", ""),
        ("the headers of LibTorch that <chevron/run.hpp> includes", "LibTorch's headers in run.hpp"),
        ("examples/", ""),
    ]
    named = {"values": {}}
    for row, of in result["values"].items():
        for old, new in shorter:
            row = row.replace(old, new)
        named["values"][row] = of
    return drawn(
        "bench-training-compile.svg",
        "CPU seconds to compile a file that trains",
        "A file that trains",
        "CPU seconds",
        named,
        [("seconds", "Chevron and LibTorch")],
    )


def training_short(result):
    of = lambda what: median(result, what + ", -O0", "seconds")
    return (
        f"`examples/minimal_train.cpp` {of('`examples/minimal_train.cpp`'):.0f} s, with a precompiled header "
        f"{of('`examples/minimal_train.cpp` with it'):.0f} s, at `-O0`"
    )


# --- step ---------------------------------------------------------------------------------------------------------------------


def step_table(result):
    columns = present(result, [*torch_columns(result), ("gloo", "Chevron, Gloo"), ("threads", "Chevron, threads")])
    against = [(words.replace("Chevron", "Gloo"), above, below) for words, above, below in ratios(result, "gloo")]
    against += [(words + ", threads", above, below) for words, above, below in ratios(result, "threads") if "beside" in above]
    return beside_table(result, columns, against, ", ms")


def step_short(result):
    parts = []
    for side in older(result):
        factors = {
            backend: span([ratio(result, row, side, backend) for row in result["values"]], "{:.0f}")
            for backend in ("gloo", "threads")
        }
        label = result["sides"][side]["label"]
        parts.append(f"Gloo processes {factors['gloo']} times faster than {label}, threads {factors['threads']} times")
    return "; ".join(parts)


def step_pictures(result):
    return drawn(
        "bench-step.svg",
        "Milliseconds of a step by schedule, PyTorch and Chevron",
        "A step that computes next to nothing",
        "ms, logarithmic",
        result,
        present(result, [*torch_columns(result), ("gloo", "Chevron, Gloo"), ("threads", "Chevron, threads")]),
        logarithmic=True,
    )


# --- memory -------------------------------------------------------------------------------------------------------------------


def memory_rows(result):
    """The schedule that keeps most first."""
    return sorted(result["values"], key=lambda row: -(median(result, row, "predicted") or 0))


def by_rank(result, row, what):
    found = []
    while median(result, row, f"{what} {len(found)}") is not None:
        found.append(median(result, row, f"{what} {len(found)}"))
    return found


def memory_table(result):
    columns = present(result, [("ours", "Chevron"), *torch_columns(result)])
    whole = present(result, [("ours in all", "Chevron"), *((side + " in all", words) for side, words in torch_columns(result))])
    head = [
        "schedule",
        "chunks in flight by rank",
        "Chevron by rank, MB",
        "predicted",
        *(f"{words}" for _, words in columns),
        *(f"{words}, whole process" for _, words in whole),
    ]
    return table(
        head,
        [
            [
                row,
                " ".join(f"{c:.0f}" for c in by_rank(result, row, "chunks")),
                " ".join(f"{c:.1f}" for c in by_rank(result, row, "rank")),
                figure(median(result, row, "predicted")),
                *(spread(result, row, column) for column, _ in columns),
                *(figure(median(result, row, column)) if median(result, row, column) else "–" for column, _ in whole),
            ]
            for row in memory_rows(result)
        ],
    )


def memory_short(result):
    above = [100 * (ratio(result, row, "ours", "predicted") - 1) for row in result["values"]]
    low, high = (f"{abs(of):.0f} % {'above' if of >= 0 else 'below'}" for of in (min(above), max(above)))
    parts = [f"{low} to {high} what the chunks in flight predict"]
    for side in older(result):
        shares = [ratio(result, row, side, "ours") for row in result["values"]]
        parts.append(f"{result['sides'][side]['label']} {span(shares, '{:.2f}')} times ours")
    return "; ".join(parts)


def memory_pictures(result):
    return drawn(
        "bench-memory.svg",
        "Megabytes that the worst rank grows by in a step, by schedule",
        "What a step needs: the rank that needs most",
        "MB more resident",
        result,
        present(result, [("predicted", "predicted"), ("ours", "Chevron"), *torch_columns(result)]),
        memory_rows(result),
    )


# --- sleep --------------------------------------------------------------------------------------------------------------------

SLEEPERS = [
    (f"{backend} {optimizer}", f"{words}, {optimizer}")
    for backend, words in (("threads", "threads"), ("gloo", "Gloo"))
    for optimizer in ("synchronous", "post-validated")
]


def sleep_columns(result, what):
    columns = present(result, [(f"{of} {what}", words) for of, words in SLEEPERS])
    beside = {column for of in result["values"].values() for column in of}
    for of, words in SLEEPERS:
        if f"{of} beside {what}" in beside:
            columns.append((f"{of} beside {what}", words + ", beside"))
    return columns


def per_cent(result, row, column):
    values = result["values"].get(row, {}).get(column)
    if not values:
        return "–"
    low, middle, high = (f"{v:.2f}" for v in (min(values), median(result, row, column), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low}–{high})"


def sleep_table(result):
    text = ""
    for what, words in (
        ("above prediction", "Per cent above the prediction from the costs measured in the same run:"),
        ("above ideal", "Per cent above the same simulation with the times that were slept:"),
    ):
        columns = sleep_columns(result, what)
        text += (
            f"{words}\n\n"
            + table(
                ["schedule", *(words for _, words in columns)],
                [[row, *(per_cent(result, row, column) for column, _ in columns)] for row in result["values"]],
            )
            + "\n"
        )
    return text.rstrip("\n") + "\n"


def sleep_short(result):
    parts = []
    for backend, words in (("threads", "threads"), ("gloo", "Gloo")):
        of = {
            what: [
                median(result, row, f"{backend} {optimizer} {what}")
                for row in result["values"]
                for optimizer in ("synchronous", "post-validated")
            ]
            for what in ("above prediction", "above ideal")
        }
        most = max(v for v in of["above ideal"] if v is not None)
        parts.append(
            f"{words} {span(of['above prediction'], '{:.1f}')} % above the prediction, at most {most:.1f} % above the ideal"
        )
    return "; ".join(parts)


def sleep_pictures(result):
    return drawn(
        "bench-sleep.svg",
        "Per cent above the prediction, by schedule",
        "Stages that sleep: the step above its prediction",
        "per cent",
        result,
        sleep_columns(result, "above prediction"),
    )


# --- order --------------------------------------------------------------------------------------------------------------------


def order_figures(result):
    """Predictions and medians of the measurements, in the order of the rows."""
    rows = [row for row in result["values"] if "measured" in result["values"][row]]
    return [[median(result, row, column) for row in rows] for column in ("predicted", "measured")]


def order_table(result):
    said = order_short(result)
    rows = []
    for row in result["values"]:
        deviation = 100 * (ratio(result, row, "measured", "predicted") - 1)
        rows.append([row, f"{median(result, row, 'predicted'):.0f}", spread(result, row, "measured"), f"{deviation:+.1f}"])
    words = f"{said[0].upper()}{said[1:]}. P pipeline ranks, T shards, R replicas, M microbatches x samples of each, V stages on each "
    words += "rank."
    return wrapped(words) + "\n" + table(["way", "predicted, ms", "measured, ms", "deviation, %"], rows)


def order_short(result):
    predictions, measurements = order_figures(result)
    deviations = [100 * (m / p - 1) for p, m in zip(predictions, measurements)]
    chosen = 100 * ways.above_best(predictions, measurements)
    rho, tau = ways.spearman(predictions, measurements), ways.kendall(predictions, measurements)
    return (
        f"{len(predictions)} of {result['setting']['ways']} ways: rank correlation {rho:.3f} (Kendall's tau {tau:.3f}), the way with the "
        f"least prediction {chosen:.1f} % above the shortest measured; steps {min(deviations):+.1f} to {max(deviations):+.1f} % beside their predictions"
    )


def order_pictures(result):
    points = []
    for row, of in result["values"].items():
        shards = int(row.split()[1].removeprefix("T"))
        points.append((row, f"{shards} shard" + "s" * (shards > 1), of["predicted"][0], of["measured"]))
    groups = sorted({group for _, group, _, _ in points})
    title, axes = "Ways to divide a model: measured over predicted steps", ("predicted, ms", "measured, ms")
    svg = chart.scatter(title, axes, points, groups)
    return [("bench-order.svg", "Measured over predicted milliseconds of a step, a mark for each way", svg)]


# --- order-train --------------------------------------------------------------------------------------------------------------


def order_train_pictures(result):
    def group(row):
        ranks, shards, replicas = (int(word[1:]) for word in row.split()[:3])
        return {1: "1 rank", 2: "2 shards" if shards == 2 else "2 ranks"}.get(ranks * shards * replicas, "4 ranks")

    points = [(row, group(row), of["predicted"][0], of["measured"]) for row, of in result["values"].items()]
    groups = sorted({kind for _, kind, _, _ in points})
    title, axes = "Ways to train a GPT on two cores: measured over predicted steps", ("predicted, ms", "measured, ms")
    svg = chart.scatter(title, axes, points, groups)
    return [("bench-order-train.svg", "Measured over predicted milliseconds of a step of chevron-train, a mark for each way", svg)]


# --- python -------------------------------------------------------------------------------------------------------------------

IN_PYTHON = [("", "step, P=2, ms"), (" 4", "step, P=4, ms"), (" gpt", "GPT, tokens a second")]


def python_ratio(result, row, side, ending):
    """Above 1 where Chevron is faster: by time, or by tokens a second."""
    theirs, ours = side + ending, side + " python" + ending
    return ratio(result, row, ours, theirs) if ending == " gpt" else ratio(result, row, theirs, ours)


def python_sides(result):
    """[(column, words)] of the sides of PyTorch that were measured."""
    there = {column for of in result["values"].values() for column in of}
    return [(side, words) for side, words in torch_columns(result) if side in there]


def python_table(result):
    parts = []
    for side, label in python_sides(result):
        head = ["schedule"]
        for _, words in IN_PYTHON:
            head += [f"{words}: PyTorch", "Chevron", "times"]
        rows = []
        for row in result["values"]:
            cells = [row]
            for ending, _ in IN_PYTHON:
                cells += [
                    spread(result, row, side + ending),
                    spread(result, row, side + " python" + ending),
                    times(python_ratio(result, row, side, ending)),
                ]
            rows.append(cells)
        parts.append(f"{label}:\n\n" + table(head, rows))
    return "\n".join(parts)


def python_short(result):
    parts = []
    for side, label in python_sides(result):
        of = {ending: [python_ratio(result, row, side, ending) for row in result["values"]] for ending, _ in IN_PYTHON}
        parts.append(
            f"{label}: steps {span(of[''], '{:.1f}')} times as fast (P=4: {span(of[' 4'], '{:.1f}')}), a GPT {span(of[' gpt'], '{:.2f}')} times"
        )
    return "; ".join(parts)


def python_pictures(result):
    columns = []
    for side, label in python_sides(result):
        columns += [(side, label), (side + " python", f"Chevron, on {label}")]
    return drawn(
        "bench-python.svg",
        "Milliseconds of a step of small modules of Python, PyTorch's runtime and Chevron",
        "A step of small modules of Python: P=2, M=8",
        "ms, logarithmic",
        result,
        columns,
        logarithmic=True,
    )


# --- gpt ----------------------------------------------------------------------------------------------------------------------


def gpt_table(result):
    columns = present(result, [*torch_columns(result), ("ours", "Chevron")])
    # Tokens, not seconds: the other way round.
    against = [
        ("ours / beside" if "beside" in words else f"Chevron / {words.removesuffix(' / Chevron')}", ours, other)
        for words, other, ours in ratios(result, "ours")
    ]
    text = beside_table(result, columns, against)
    if any(column.endswith(FUSED) for column, _ in columns):
        text += "\n" + wrapped("*Fused*: PyTorch's AdamW with `fused=True`; `chevron-train` steps with `fused_adamw`.")
    return text


def gpt_short(result):
    pipelined = [row for row in result["values"] if not row.endswith("alone")]
    ours = max(median(result, row, "ours") for row in pipelined)
    parts = []
    for side in older(result):
        theirs = max(median(result, row, side) or 0 for row in pipelined)
        same = span([ratio(result, row, "ours", side) for row in pipelined], "{:.2f}")
        label = dict(torch_columns(result))[side]
        parts.append(f"{label}: same schedule {same} times, best of each {ours / theirs:.2f} times")
        alone = median(result, "alone", side)
        if alone and side == "torch":
            parts[-1] += f", {ours / (2 * alone):.2f} of twice one un-pipelined process"
    return "; ".join(parts)


def gpt_pictures(result):
    named = {"values": {GPT_NAMES.get(row, row): of for row, of in result["values"].items()}}
    return drawn(
        "bench-gpt.svg",
        "Tokens a second by schedule, PyTorch and Chevron",
        "A GPT on two processes",
        "tokens a second",
        named,
        present(result, [*torch_columns(result), ("ours", "Chevron")]),
    )


CHAPTERS = [
    Chapter(
        "planning",
        "Planning",
        "describe + prove + lower at run time, P=64, V=2, M=256",
        """How long it takes to make a plan at run time, as a search does for each candidate: P = {ranks}, V =
{chunks} where the schedule has chunks, M = {micro_batches}. Chevron describes, proves and lowers (`bench-plan`);
PyTorch
generates the orders of all ranks, validates them and adds sends and receives, without its stages. CPU time of one
thread.""",
        """Chevron and PyTorch do different things: Chevron proves that no rank waits for ever and that memory stays
within its limits, PyTorch's validation counts sets of microbatches; Chevron is compiled, PyTorch's runtime is
Python. PyTorch's 1F1B is left out, since its own
validation refuses the order that it exports. Training makes a plan once, where a second does not matter.""",
        planning_table,
        lambda result: drawn(
            "bench-planning.svg",
            "Milliseconds to plan a schedule, PyTorch and Chevron",
            "Planning a schedule: P=64, M=256",
            "CPU ms, logarithmic",
            result,
            present(result, [*torch_columns(result), ("ours", "Chevron")]),
            logarithmic=True,
        ),
        planning_short,
    ),
    Chapter(
        "compile",
        "Compile time of a schedule",
        "compile time of a file that proves a schedule, `-O0`",
        """CPU seconds and peak memory of one compiler for a translation unit that includes `<chevron/schedule.hpp>`
and proves a schedule as a constant, with `{optimisation}`. *Evaluator operations* are GCC's count for its costliest
single constant; they repeat exactly for one version of it ({operations_of}), so tests gate them.
[results.md](../../bench/compile/results.md) has all schedules (`bench/compile/measure.py --write
bench/compile/results.md`).""",
        """Another compiler, or another version of this one: `bench/compile/measure.py --compiler clang++-16` measures
that. Linking and ccache are not included. PyTorch has no counterpart.""",
        compile_table,
        compile_pictures,
        compile_short,
    ),
    Chapter(
        "training-compile",
        "Compile time of training",
        "compile time of a file that trains",
        """Nearly all of the time for a file that trains is spent on LibTorch's headers ([how to reduce
it](../guides/compile-times.md)). CPU seconds and peak memory of one compiler, once each, with the flags of
`examples/minimal_train.cpp` in the build folder.""",
        """The spread, since each row is measured once; a build with ccache, which does not compile an unchanged
file again; a model with more modules.""",
        training_table,
        training_pictures,
        training_short,
    ),
    Chapter(
        "step",
        "What a step costs beside its computations",
        "step of one 64 × 64 layer a stage, P=4, M=8",
        """P = {ranks}, M = {micro_batches}, stages of one {width} × {width} linear layer, {samples} samples a
microbatch: there is hardly any computation, so the step is the runtime's own time, messages and SGD included;
median of {steps} steps. Chevron runs on processes over Gloo, as PyTorch does, and on threads of one process; its
step also includes the check and the gather of the gradients' norm.""",
        """How much of this time remains in a step with real computations, which hide most of it: see the GPT below. Four
processes share the processors of this machine, so a runtime that computes more also waits more for its turn; on a
core for each rank both would be faster. On GPUs, where launches count, see [GPUs](../guides/gpu.md).""",
        step_table,
        step_pictures,
        step_short,
    ),
    Chapter(
        "memory",
        "Memory where activations count",
        "memory that a step needs, activations nearly all of it, P=4, M=8",
        """{blocks} blocks of Linear, GELU, Linear, width {width}, {samples} samples a microbatch, P = {ranks}, M =
{micro_batches}, each rank a process over Gloo: parameters are some 2 MB a rank, a rank's share of a microbatch's
activations {share_mb:.1f} MB. The figure is the growth of a process's resident size in its second step (VmHWM above
VmRSS, with malloc set to return large blocks at once), for the rank that grows most. *Predicted* is this rank's
chunks in flight times the bytes of a chunk, from the plan alone.
*Whole process* is its largest resident size, with LibTorch, and Python
where there is one.""",
        """Memory that PyTorch's processes allocate in the first step and keep, such as 2.11's receive buffers of
all microbatches, which is part of the whole process only. If other actions run between I and W, the gradients that
W needs are kept in addition to the chunk, which the prediction leaves out. On a GPU an allocator keeps blocks for
later. [Memory](../guides/memory.md) explains how to reduce memory.""",
        memory_table,
        memory_pictures,
        memory_short,
    ),
    Chapter(
        "sleep",
        "How close steps come to their prediction",
        "step time of stages that sleep, P=4, M=8, all schedules",
        """Stages that sleep instead of compute leave the processors to the runtime, so four ranks fit any machine: P
= {ranks}, M = {micro_batches}, F = I = W = {milliseconds} ms a rank, {steps} steps a round (`bench-sleep`). With a
synchronous optimizer the prediction for a step is the plan's makespan, with post-validation the time of each of
many steps back to back. The rest is the time of executor and transport.""",
        """What happens when ranks compete for memory bandwidth, or when their times vary: sleeps do neither
(`bench-sleep --jitter 30` has the latter). The prediction uses costs measured in the same run, so the comparison
shows how well a plan is executed, not how well costs are known beforehand.""",
        sleep_table,
        sleep_pictures,
        sleep_short,
    ),
    Chapter(
        "order",
        "Predicted order of ways to divide a model",
        "{count} ways to divide a decoder over 2 × 4 devices, on threads that sleep: predicted and measured order",
        """`chevron-plan cluster` predicts the step of each way to divide a decoder over P pipeline ranks, T shards, R
replicas, M microbatches and schedules. `bench-order` runs the same way with the whole trainer on threads, but each layer
sleeps, for its time in the profile divided by T, and messages, gathers and sums over shards and replicas take the time of their
links. Sequences are cut over the shards. The decoder has {layers} layers of width {width}, a step {sequences} sequences
of {tokens} tokens. {nodes} machines have {gpus} devices each, with 0.2 GFLOP/s and memory of 100 MB/s; links have 16 MB/s and 0.2 ms inside a
machine, 4 MB/s and 1 ms between machines. `chevron-plan model` writes the profiles for these rates. Measured are the ten ways
with the least predictions, and further ones up to {count} at even distances in the predicted order of all {ways}. A round has the
median of {steps} steps, from the first rank's begin to the last rank's end, after one that is not counted. Threads ask for
real-time priority, with which other work of the machine delays no wake-up (granted here: {real_time}).""",
        """How well a profile knows the costs of layers: sleeps take what the profile has. Neither side has ranks that compete
for memory or for one network card, nor messages and sums that share a link. Predictions leave out the time of the executor and of
each collective on the host, so ways of many shards and small microbatches take longest beside theirs.""",
        order_table,
        order_pictures,
        order_short,
    ),
    Chapter(
        "order-train",
        "Predicted order of jobs that compute",
        "{count} ways to train a GPT with `chevron-train` on {cores} cores: predicted and measured order",
        """`chevron-train` trains a GPT of {layers} layers of width {width}, {sequences} sequences of {tokens} bytes a step, on ranks that
are threads, one thread each. Thirteen runs measure costs by `--profile`: for microbatches of 1, 2, 4 and 8 samples the costs of
layers under Interleaved1F1B and under InterleavedZeroBubble, which splits its backward, on two pipeline ranks, and those of two
shards; and once the sum over two replicas. `chevron-plan model --calibrate` turns these into costs of layers for each microbatch
size, and `chevron-plan cluster` predicts the step of every way to divide the model over 1, 2 and 4 ranks. The time of the profiles
behind the last backward gives the rate of the optimizer and of sums over replicas; the profile of two shards gives the latency of
their sums. Measured steps enter no prediction. Two ranks have a core each. Four ranks share the cores: the schedule is
played with {cores} ranks computing at one time, each until it waits, and the core then takes the rank that has waited longest
(`bench/suite/shared_cores.py`), as SCHED_FIFO runs threads of one priority; optimizer and sums take as long as their work on
{cores} cores. Of four ranks none are shards, since shards that share cores wait for one another in each sum. Compared are the five
ways with the least predictions, and further ones up to {count} at even distances in the logarithm of the predicted time, of all
{ways}; the names have the layers of the stages at their end. A round runs all profiles, and then all ways, in another order each
round: of {steps} steps the median of those behind the first {warm_up}. Predictions start from the medians of the profiles. Threads
ask for real-time priority (granted here: {real_time}), under which other programs on these cores hardly run in the meantime.""",
        """How the order would be on cores without other work: real-time priority keeps others from the cores nearly always,
but not from caches and memory, and a virtual machine shares its processors with others, so one way's rounds differ by more than
neighbours in this table do. Predictions take no account of ranks whose data leave one another's caches, nor of the threads in which
the halves of a fused pair run side by side.""",
        order_table,
        order_train_pictures,
        order_short,
    ),
    Chapter(
        "python",
        "Modules of Python",
        "the same modules of Python under PyTorch's runtime and `chevron_pipelining`",
        """The same modules, losses and optimizers of Python, in the same processes over Gloo, by turns under
`torch.distributed.pipelining` and under [chevron_pipelining](../guides/python.md): a step of stages of one {small_width} ×
{small_width} linear layer, M = {micro_batches}, SGD included, on two and on four ranks; and a GPT of {layers} blocks, width {width},
context {context}, on two ranks, with AdamW and clipping, {micro_batches} microbatches of {samples}. Medians of the steps of a turn.
*Times* is above 1 where Chevron is faster.""",
        """Four processes share the processors of this machine. On both sides modules run under the interpreter of Python, so a
stage of many small operations costs more than in C++ on both.""",
        python_table,
        python_pictures,
        python_short,
    ),
    Chapter(
        "gpt",
        "A GPT",
        "GPT of {layers} blocks, width {width}, two Gloo processes: tokens a second",
        """{layers} pre-norm blocks, width {width}, {heads} heads, context {context}, bytes; {ranks} processes over
Gloo, {micro_batches} microbatches of {samples}, AdamW, gradients clipped, one thread a rank: tokens a second, of the
median of {steps} steps after one that is not counted. Chevron's side is `chevron-train`. *Searched* is the schedule
that `chevron-plan search` finds for costs measured at the start, with no more memory than DualPipeV needs. *Two of
these at once* are two independent un-pipelined PyTorch processes: an upper limit for these processors.""",
        """Anything about GPUs, and about more than two ranks. Where two ranks share a core's arithmetic units, a
bubble is not lost: the other rank computes faster meanwhile; so schedules differ less here than on processors of
their own.""",
        gpt_table,
        gpt_pictures,
        gpt_short,
    ),
]
