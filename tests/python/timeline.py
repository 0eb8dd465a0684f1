# timeout: 300
"""Drawings of a schedule and of a step: predicted above measured, over all ranks, in each form; one outcome on all ranks."""
import json
import os
import pathlib
import re
import sys
import tempfile
import xml.etree.ElementTree

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support.ranks import Block, check, data, finish, made, run  # noqa: E402

from torch import nn  # noqa: E402

import chevron_pipelining as cp  # noqa: E402

M = 4
folder = pathlib.Path(tempfile.mkdtemp(dir=os.environ.get("TMPDIR")))


def refused(work, *words):
    """Checks that `work` raises a UsageError whose text has these words."""
    try:
        work()
        check(False, f"no UsageError with {words}")
    except cp.UsageError as problem:
        check(all(word in str(problem) for word in words), f"{words} in: {problem}")


def drawn(svg):
    """The actions that an SVG draws, as {(name, row): count}, by the hints of its boxes; the text must be well-formed."""
    xml.etree.ElementTree.fromstring(svg)
    found = {}
    for name, row in re.findall(r"<title>(\d+[FBIW]\d+), rank (\d+), ", svg):
        found[name, int(row)] = found.get((name, int(row)), 0) + 1
    return found


def of_plan(kinds, times, ranks=(0, 1)):
    return {(f"{r}{k}{m}", r): times for r in ranks for k in kinds for m in range(M)}


def two(rank):
    modules, (x, y) = made(Block, 2), data(8)
    stage = cp.PipelineStage(modules[rank], rank, 2, "cpu")
    schedule = cp.Schedule("ZB-H1", stage, M, loss_fn=nn.functional.mse_loss)
    line = repr(schedule)
    check(line.startswith(f"<Schedule ZB-H1: 2 ranks, {M} microbatches; rank {rank} has stage {rank} of 2; ") and "\n" not in line, line)
    refused(lambda: schedule.timeline(folder / "early.svg"), "no step has run", "Remedy")
    refused(lambda: schedule.report, "no step has run", "Remedy")
    check(drawn(schedule._repr_html_()) == of_plan("FIW", 1), f"the plan in a notebook: {drawn(schedule._repr_html_())}")
    for _ in range(2):
        schedule.step(*([x] if rank == 0 else []), target=y if rank == 1 else None)

    # A link at the path is replaced. Only rank 0's path counts.
    if rank == 0:
        (folder / "target").write_text("kept")
        (folder / "step.svg").symlink_to(folder / "target")
    schedule.timeline(folder / "step.svg" if rank == 0 else "/nowhere/step.svg")
    schedule.timeline(str(folder / "step.html"))
    schedule.timeline(folder / "step.json")
    # One outcome on all ranks.
    refused(lambda: schedule.timeline(folder / "step.png"), "step.png", ".svg", "Remedy")
    refused(lambda: schedule.timeline(folder / "missing" / "step.svg"), "missing/step.svg", "No such file")
    if rank == 0:
        check((folder / "target").read_text() == "kept" and not (folder / "step.svg").is_symlink(), "a link at the path")
        check(sorted(one.name for one in folder.iterdir()) == ["step.html", "step.json", "step.svg", "target"], "files left over")
        svg = (folder / "step.svg").read_text()
        check(drawn(svg) == of_plan("FIW", 2), f"predicted and measured: {drawn(svg)}")
        check("predicted from measured times" in svg and "measured, step 1<" in svg, "the titles")
        html = (folder / "step.html").read_text()
        check(html.startswith("<!doctype html>") and html.count("measured, step 1") > 0 and "predicted from measured times" in html, "the page")
        events = json.loads((folder / "step.json").read_text())
        names = [one.get("name") for one in (events if isinstance(events, list) else events["traceEvents"])]
        check(names.count("PP:1F3") == 2 and names.count("PP:0W0") == 2, f"the trace: {sorted(set(filter(None, names)))}")
        own = schedule._repr_html_()  # no other rank calls it
        plan, row = own.split("</svg>")[:2]
        check(drawn(plan + "</svg>") == of_plan("FIW", 1), "the plan after a step")
        measured = re.findall(r"<title>(\d)[FIW]\d", row)
        check(">rank 0<" in row and measured == ["0"] * (3 * M), f"the row of this rank: {measured}")
    if rank == 1:
        row = schedule._repr_html_().split("</svg>")[1]
        check(">rank 1<" in row and ">rank 0<" not in row, "the row of rank 1")


def steps(rank):
    """300 steps make nothing that stays."""
    import gc
    import resource
    modules, (x, y) = made(Block, 2), data(8)
    schedule = cp.Schedule1F1B(cp.PipelineStage(modules[rank], rank, 2, "cpu"), M, loss_fn=nn.functional.mse_loss)

    def some(count):
        for _ in range(count):
            schedule.step(*([x] if rank == 0 else []), target=y if rank == 1 else None, losses=[])
        gc.collect()
        # Pages that the process has now; the peak would hide a growth below the import's.
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return len(gc.get_objects()), pages * resource.getpagesize(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    some(100)
    before = some(50)
    after = some(300)
    check(after[0] <= before[0] + 10, f"objects of Python: {before[0]}, 300 steps later {after[0]}")
    check(after[1] <= before[1] + 2 ** 21, f"bytes of memory: {before[1]}, 300 steps later {after[1]}")
    check(after[2:] == before[2:], f"descriptors, threads: {before[2:]}, 300 steps later {after[2:]}")


def one(rank):
    """One rank in all: a notebook shows prediction and measurement."""
    stages = [cp.PipelineStage(module, number, 2, "cpu") for number, module in enumerate(made(Block, 2))]
    schedule = cp.ScheduleInterleaved1F1B(stages, M, loss_fn=nn.functional.mse_loss)
    x, y = data(8)
    schedule.step(x, target=y)
    check("has stages 0, 1 of 2" in repr(schedule), repr(schedule))
    check(drawn(schedule._repr_html_()) == {(f"{s}{k}{m}", 0): 2 for s in (0, 1) for k in "FB" for m in range(M)}, "a notebook of one rank")


def body(rank):
    two(rank)
    steps(rank)
    cp.close()
    finish()


run(2, body)
run(1, lambda rank: (one(rank), cp.close(), finish()))
finish()
