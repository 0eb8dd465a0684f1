"""The measurements: a function a section. Each alternates its sides row by row, in rounds, and notes numbers by row and column.

A column is a side: `torch` and `newest` are PyTorch's, with ` fused` behind it under an optimizer with `fused=True`, the others ours;
with ` beside` behind it, ours of the other build.
"""

import importlib.util
import json
import multiprocessing
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import typing

from . import order as ways
from . import training_ways
from .run import ProgramFailed, Run, wakes_at_once
from .tables import FUSED

ROOT = pathlib.Path(__file__).resolve().parents[2]
IN_TORCH = ["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]


def load(path):
    """A script of bench/compile as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def options(**values):
    """The words of a command line: `--name value` for each."""
    return [word for name, value in values.items() for word in ("--" + name, value)]


def schedules(run):
    """The names of the catalogue, in its order."""
    return run.builds[0].run("bench-plan", "--benchmark_list_tests").split()


def planning(run):
    """Describe + prove + lower at run time, beside PyTorch's generate + validate + add communication."""
    ranks, micro_batches = 64, 256
    run.setting = {"ranks": ranks, "chunks": 2, "micro_batches": micro_batches, "large_ranks": 512, "large_micro_batches": 4096}
    # PyTorch's 1F1B exports an order that its own validation refuses.
    in_torch = [name for name in IN_TORCH if name != "1F1B"]
    names = schedules(run)
    timed = ["--benchmark_format=json", "--benchmark_min_time=0.1"]
    with run.peers(0) as peers:
        while run.another_round():
            for name in names:
                for side, peer in peers.items() if name in in_torch else ():
                    took = run.ask(peer, name, side, "planning", schedule=name, ranks=ranks, micro_batches=micro_batches)
                    if took is not None:
                        run.note(name, side, took)
                for build in run.builds:
                    column = "ours" + build.suffix
                    said = run.ours(build, name, column, "bench-plan", f"--benchmark_filter=^{name}$", *timed)
                    if said is not None:
                        run.note(name, column, json.loads(said)["benchmarks"][0]["cpu_time"])
    if run.quick:
        return
    for name in names:
        try:
            large = json.loads(
                run.builds[0].run("bench-plan", "once", name, run.setting["large_ranks"], run.setting["large_micro_batches"])
            )
        except (ProgramFailed, subprocess.TimeoutExpired, ValueError) as why:
            run.fail(name, "large seconds", why)
            continue
        run.note(name, "large actions", large["actions"])
        run.note(name, "large seconds", large["cpu_s"])
        run.note(name, "large MB", large["peak_mb"])


def compiling(run):
    """What a translation unit costs that proves a schedule."""
    measure = load(ROOT / "bench" / "compile" / "measure.py")
    cases = [measure.BASELINE, *measure.GATED]
    compiler = run.compiler
    run.setting["optimisation"] = "-O0"
    while run.another_round():
        for case in cases:
            for build in run.builds:
                include = str(build.source / "include") if build.suffix else measure.INCLUDE
                status, said, seconds, memory = measure.compile_case(compiler, case, include=include)
                if status != 0:
                    run.fail(case, "seconds" + build.suffix, (said.strip().splitlines() or ["the compiler said nothing"])[0])
                    continue
                run.note(case, "seconds" + build.suffix, seconds)
                run.note(case, "MB" + build.suffix, memory)
    recorded, limits = measure.read_limits()
    run.setting["operations_of"] = " ".join(recorded or ())
    for case, (actions, need, _) in limits.items():
        run.note(case, "actions", actions)
        run.note(case, "operations", need)


def training_compile(run):
    """What a file that trains costs to compile, with and without a precompiled header."""
    run_side = load(ROOT / "bench" / "compile" / "run_side.py")
    while run.another_round():
        for row in run_side.rows(run.builds[0].path, run.compiler, levels=("-O0",) if run.quick else ("-O0", "-O2")):
            run.note(f"{row['what']}, {row['level']}", "seconds", row["seconds"])
            run.note(f"{row['what']}, {row['level']}", "MB", row["mb"])


def step(run):
    """Stages that compute next to nothing: what a step costs beside them."""
    asked = {"micro_batches": 8, "width": 64, "samples": 4, "steps": 10 if run.quick else 30}
    run.setting = {"ranks": 4, **asked}
    size = options(ranks=4, microbatches=asked["micro_batches"], width=asked["width"], steps=asked["steps"])
    with run.peers(4) as peers:
        while run.another_round():
            for name in [*IN_TORCH, "ZB-H1", "ZB-H2", "V-Half"]:
                for side, peer in peers.items() if name in IN_TORCH else ():
                    took = run.ask(peer, name, side, "step", schedule=name, **asked)
                    if took is not None:
                        run.note(name, side, took)
                for backend in ("gloo", "threads"):
                    what = options(schedule=name, backend=backend)
                    for build in run.builds:
                        said = run.ours(build, name, backend + build.suffix, "bench-step_overhead", *what, *size)
                        if said is not None:
                            run.note(name, backend + build.suffix, json.loads(said)["step_ms"])


# schedule, backend, optimizer, and milliseconds: ideal, predicted, measured.
SLEEP_LINE = re.compile(r"^(\S+) +(threads|gloo) +(synchronous|post-validated) +([\d.]+) +([\d.]+) +([\d.]+) ", re.M)


def sleep(run):
    """Stages that sleep: the step that was measured beside the one that was predicted."""
    run.setting = {"ranks": 4, "micro_batches": 8, "milliseconds": 20, "steps": 2}
    # The first step is not counted; back to back, the second one neither.
    size = options(ranks=4, microbatches=8, milliseconds=20, steps=3)
    names = schedules(run)
    while run.another_round():
        for name in ["1F1B", "ZBVZeroBubble"] if run.quick else names:
            for backend in ("threads", "gloo"):
                what = options(schedule=name, backend=backend)
                for build in run.builds:
                    said = run.ours(build, name, backend + build.suffix, "bench-sleep", *what, *size)
                    for _, _, optimizer, *times in SLEEP_LINE.findall(said or ""):
                        ideal, predicted, measured = map(float, times)
                        of = f"{backend} {optimizer}{build.suffix}"
                        run.note(name, of + " ms", measured)
                        run.note(name, of + " above prediction", 100 * (measured / predicted - 1))
                        run.note(name, of + " above ideal", 100 * (measured / ideal - 1))


def order(run):
    """Ways to divide a decoder over a cluster: steps of layers that sleep beside those that chevron-plan cluster predicts."""
    run.setting = {**ways.SETTING, "count": 12 if run.quick else 40, "steps": 2, "real_time": "no"}
    plan = run.builds[0]
    with tempfile.TemporaryDirectory() as folder:
        profiles = ways.profiles(lambda *words: plan.run("chevron-plan", *words), ways.SETTING, folder)
        every = ways.predicted(lambda *words: plan.run("chevron-plan", *words), ways.SETTING, folder, profiles)
        run.setting["ways"] = len(every)
        while run.another_round():
            for way in ways.spread_over(every, run.setting["count"]):
                name = ways.name_of(way)
                for build in run.builds:
                    words = ways.measuring_words(way, ways.SETTING, profiles, run.setting["steps"] + 1)
                    said = run.ours(build, name, "measured" + build.suffix, "bench-order", *words)
                    if said is not None:
                        run.note(name, "measured" + build.suffix, ways.milliseconds(said))
                        run.setting["real_time"] = "yes" if json.loads(said)["real_time"] else "no"
                run.note(name, "predicted", way["time"])


def order_train(run):
    """Ways to train a GPT on the machine's cores: steps of chevron-train beside those predicted from its profiles."""
    setting = {**training_ways.SETTING, "count": 12 if run.quick else 32}
    with multiprocessing.get_context("spawn").Pool(1) as other:
        setting["real_time"] = "yes" if other.apply(wakes_at_once) else "no"
    run.setting, run.sides = setting, {}
    build = run.builds[0]

    def plan(*words):
        return build.run("chevron-plan", *words, before=wakes_at_once)

    def trained(way, steps, *more):
        return ["chevron-train", *training_ways.way_words(way, setting), "--steps", steps, *more]

    def profiles_of(folder):
        told = {}
        for name, way in training_ways.profiled_ways(setting).items():
            file = folder / "profile.json"
            build.run(*trained(way, setting["steps"] + 1, "--profile", file), before=wakes_at_once)
            told[name] = json.loads(file.read_text())
        return told

    def step_of(way, folder):
        metrics = folder / "metrics.jsonl"
        metrics.unlink(missing_ok=True)
        command = trained(way, 1000, "--metrics", metrics)
        lines = build.run_until(metrics, setting["steps"], *command, before=wakes_at_once)
        return training_ways.milliseconds(lines, setting["warm_up"])

    with tempfile.TemporaryDirectory() as name:
        folder, rounds, tried = pathlib.Path(name), [], []
        while run.another_round():
            rounds.append(profiles_of(folder))
            if not tried:
                planner = training_ways.Planner(plan, setting, rounds[0], folder)
                every = planner.space()
                setting["ways"] = len(every)
                tried = training_ways.spread_in_time(every, [planner.time_of(way) for way in every], setting["count"])
            # In another order each round, so that a slow minute of the machine meets other ways.
            for way in random.Random(len(rounds)).sample(tried, len(tried)):
                run.note(training_ways.way_name(way), "measured", step_of(way, folder))
        setting["profiles"] = {of: training_ways.median_of([one[of] for one in rounds]) for of in rounds[0]}
        planner = training_ways.Planner(plan, setting, setting["profiles"], folder)
        setting["tried"] = sorted(tried, key=planner.time_of)
        values = run.values
        run.values = {}
        for way in setting["tried"]:
            row = training_ways.way_name(way)
            run.note(row, "predicted", planner.time_of(way))
            run.values[row].update(values[row])


def memory(run):
    """By how much ranks' processes grow in a step, where activations are nearly everything."""
    asked = {"micro_batches": 8, "samples": 256, "width": 128, "blocks": 16}
    share = asked["samples"] * asked["width"] * 9 * 4 * asked["blocks"] / 4 / 1e6
    run.setting = {"ranks": 4, **asked, "share_mb": share}
    size = options(ranks=4, microbatches=asked["micro_batches"], samples=asked["samples"])
    names = ["1F1B", "ZB-H1", "GPipe", "V-Half"] if run.quick else schedules(run)
    # Freed memory returns to the system at once, and no thread has a heap of its own: bench-memory sets the same.
    with run.peers(4, MALLOC_ARENA_MAX="1", MALLOC_MMAP_THRESHOLD_="32768", MALLOC_TRIM_THRESHOLD_="32768") as peers:
        while run.another_round():
            for name in names:
                for side, peer in peers.items() if name in IN_TORCH else ():
                    answer = run.ask(peer, name, side, "memory", schedule=name, **asked)
                    if answer is not None:
                        run.note(name, side, max(answer["grown_mb"]))
                        run.note(name, side + " in all", max(answer["in_all_mb"]))
                for build in run.builds:
                    column = "ours" + build.suffix
                    said = run.ours(build, name, column, "bench-memory", "--resident", "--json", *options(schedule=name), *size)
                    if said is None:
                        continue
                    line = json.loads(said)
                    run.note(name, column, max(line["grown_mb"]))
                    run.note(name, column + " in all", max(line["in_all_mb"]))
                    if build.suffix:
                        continue
                    for rank, (grown, chunks) in enumerate(zip(line["grown_mb"], line["in_flight"])):
                        run.note(name, f"rank {rank}", grown)
                        run.note(name, f"chunks {rank}", chunks)
                    run.note(name, "predicted", max(line["in_flight"]) * line["chunk_mb"])


def gpt(run):
    """Tokens a second of a small GPT."""
    model = {"layers": 8, "width": 256, "heads": 8, "context": 128}
    if run.quick:
        model = {"layers": 4, "width": 128, "heads": 4, "context": 64}
    asked = {"micro_batches": 8, "samples": 4, "steps": 2, **model}
    warm_up = 1
    tokens = asked["micro_batches"] * asked["samples"] * model["context"]
    run.setting = {"ranks": 2, **asked}

    def trained(name, text, steps, *more):
        """The command of chevron-train."""
        pipeline = {"ranks": 1, "backend": "threads", "schedule": "1F1B"}
        if name != "alone":
            pipeline = {"ranks": 2, "backend": "gloo", "schedule": name}
        batch = {
            "microbatches": asked["micro_batches"],
            "microbatch-size": asked["samples"],
            "clip-grad-norm": 1,
            "steps": steps,
        }
        files = {"data": text, "trace": "none", "timeline": "none"}
        return ["chevron-train", *options(replicas=1, **pipeline, **model, **batch, **files), *more]

    def rate(build, row, name, text):
        with tempfile.NamedTemporaryFile(suffix=".jsonl") as metrics:
            command = trained(name, text, 1000, "--metrics", metrics.name)
            lines = run.tried(
                build, row, "ours" + build.suffix, lambda: build.run_until(metrics.name, warm_up + asked["steps"], *command)
            )
        if lines is None:
            return None
        steps = [json.loads(line) for line in lines[warm_up:]]
        return tokens / statistics.median(of["time_metrics/end_to_end(s)"] - of["time_metrics/data_loading(s)"] for of in steps)

    def searched(text, folder):
        """The best found for costs that are measured now, in no more memory than DualPipeV takes."""
        profile, schedule = folder / "costs.json", folder / "searched.csv"
        run.builds[0].run(*trained("ZBVZeroBubble", text, 3, "--profile", profile))
        size = options(ranks=2, chunks=2, placement="vee", microbatches=asked["micro_batches"])
        run.builds[0].run("chevron-plan", "search", *size, "--memory-limit", 5, "--profile", profile, "-o", schedule)
        return str(schedule)

    rows = ["alone", "all alone", *(name for name in IN_TORCH if name != "LoopedBFS"), "ZB-H1", "ZB-H2", "searched"]
    if run.quick:
        rows = ["alone", "1F1B", "ZBVZeroBubble", "searched"]
    with tempfile.TemporaryDirectory() as folder, run.peers(2) as peers:
        text = pathlib.Path(folder) / "bytes.txt"
        text.write_text("a pipeline has ranks, stages, microbatches and a schedule.\n" * 20000)
        schedule_of = {"searched": searched(text, pathlib.Path(folder))}
        while run.another_round():
            for row in rows:
                for side, peer in peers.items() if row in IN_TORCH or row.endswith("alone") else ():
                    for column, fused in ((side, False), (side + FUSED, True)):
                        got = run.ask(peer, row, column, "gpt", schedule=row, fused=fused, **asked)
                        if got is not None:
                            run.note(row, column, got)
                for build in run.builds if row != "all alone" else ():
                    got = rate(build, row, schedule_of.get(row, row), text)
                    if got is not None:
                        run.note(row, "ours" + build.suffix, got)


def python_stages(run):
    """The same modules of Python under PyTorch's runtime and under chevron_pipelining, in the same processes."""
    small = {"micro_batches": 8, "width": 16, "samples": 2, "steps": 20 if run.quick else 100}
    model = {"layers": 4, "width": 256, "heads": 8, "context": 64}
    asked = {"micro_batches": 8, "samples": 4, "steps": 2 if run.quick else 6, "fused": False, **model}
    run.setting = {"small_width": small["width"], **asked}
    cases = [(2, "step", "", small), (4, "step", " 4", small), (2, "gpt", " gpt", asked)]
    paths = {"PYTHONPATH": str(ROOT / "python"), "CHEVRON_PIPELINING_CACHE": str(ROOT / "build" / "python")}
    with run.peers(2, **paths) as two, run.peers(4, **paths) as four:
        while run.another_round():
            for row in IN_TORCH:
                for ranks, what, ending, arguments in cases:
                    for side, peer in (two if ranks == 2 else four).items():
                        for column, package in ((side, "torch.distributed.pipelining"), (side + " python", "chevron_pipelining")):
                            got = run.ask(peer, row, column + ending, what, schedule=row, package=package, **arguments)
                            if got is not None:
                                run.note(row, column + ending, got)


class Section(typing.NamedTuple):
    """A measurement, and how it is run."""

    measure: typing.Callable[[Run], None]
    share: float  # of the time
    most_rounds: int
    quick: bool  # whether a quick run has it
    torch: bool  # whether PyTorch is measured, too


# In this order. The last one takes the remaining time.
ALL = {
    "planning": Section(planning, 1.5, 5, quick=True, torch=True),
    "compile": Section(compiling, 1.5, 5, quick=True, torch=False),
    "training-compile": Section(training_compile, 5, 1, quick=False, torch=False),
    "step": Section(step, 5, 7, quick=True, torch=True),
    "memory": Section(memory, 4, 3, quick=True, torch=True),
    "sleep": Section(sleep, 7.5, 5, quick=True, torch=False),
    "order": Section(order, 8, 3, quick=True, torch=False),
    "order-train": Section(order_train, 8, 5, quick=True, torch=False),
    "python": Section(python_stages, 6, 9, quick=True, torch=True),
    "gpt": Section(gpt, 16, 5, quick=True, torch=True),
}
