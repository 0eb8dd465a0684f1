"""docs/reference/benchmarks.md and its pictures, made of bench/results/*.json alone."""

import json
import pathlib
import re

from . import machine
from .chapters import CHAPTERS
from .tables import torch_columns, wrapped

PAGE = "reference/benchmarks.md"  # below the folder of all pages, beside images/


def load(results):
    """{section: result} of what there is, in the page's order."""
    there = {}
    for chapter in CHAPTERS:
        path = pathlib.Path(results) / f"{chapter.name}.json"
        if path.is_file():
            there[chapter.name] = json.loads(path.read_text())
    return there


def is_quiet(result):
    return max(result["others"]) <= machine.QUIET


def measured_line(result):
    """When, of what and on what, in one line."""
    before, after = (f"{100 * share:.0f} %" for share in result["others"])
    rounds = "1 round" if result["rounds"] == 1 else f"{result['rounds']} rounds"
    line = (
        f"Measured {result['date']} at {result['commit']}, {rounds} in {result['seconds']} s"
        f"{', small sizes' if result['quick'] else ''}; others used {before} of the processors before and {after} after."
    )
    if not is_quiet(result):
        line += " **The machine was not quiet: take ratios as rough, and no figure for itself.**"
    elif result["rounds"] == 1 and result["section"] != "training-compile":
        line += " One round says nothing of the spread."
    return line


def failures(result):
    """What could not be measured, in words."""
    lines = [f"- {of['label']}: not there, {of['missing']}." for of in result["sides"].values() if "missing" in of]
    for row, columns in result["failed"].items():
        for column, why in columns.items():
            label = dict(torch_columns(result)).get(column, column)
            lines.append(f"- {row}, {label}: {why}")
    return "\n".join(lines)


def machines(there):
    """The machines, each with the sections that were measured on it."""
    groups = []
    for name, result in there.items():
        of = result["machine"]
        for group in groups:
            if group[0] == of:
                group[1].append(name)
                break
        else:
            groups.append((of, [name]))
    lines = []
    for of, names in groups:
        versions = sorted(
            {
                side["label"]
                for name in names
                for key, side in there[name]["sides"].items()
                if key in ("torch", "newest") and "missing" not in side
            }
        )
        parts = [of["processor"] + ", " + of["memory"], of["system"], of["compiler"], "LibTorch " + of["libtorch"]]
        parts += ["beside " + " and ".join(versions)] if versions else []
        lines.append(f"- {', '.join(names)}: {'; '.join(parts)}; no GPU.")
    return "\n".join(lines)


INTRODUCTION = """# Benchmarks

What Chevron costs, beside PyTorch where PyTorch does the same. This page is written by

    ./dev bench                # about 40 minutes on two quiet cores
    ./dev bench step memory    # these sections; the others stay
    ./dev bench --minutes 20   # as many rounds as fit
    ./dev bench quick          # small sizes, into build/benchmarks

of the figures in `bench/results`, which keep every round. In a round all sides are measured row by row, one after the
other, with the same number of processes and one thread in each, so a slow minute of the machine touches all of them.
Figures are medians over rounds, and in brackets the lowest and the highest; in pictures a point on a line.
PyTorch's processes stay from one measurement to the next and start warm; Chevron's are started for each
measurement. Two versions of PyTorch are measured: the one in `.venv` with which Chevron is built, and the newest
that pip finds, which goes to `build/bench-venv` (about 5 GB; delete it to have
a newer one, `--without-newest` does without). For Chevron on the newest's own LibTorch:
`CHEVRON_TORCH_DIR=$(echo "$PWD"/build/bench-venv/lib/python3.*/site-packages/torch) ./dev bench`, in a checkout of its own.
"""

ALSO = """## Measured by tests and programs

On two cores, without a GPU; [Runs on GPUs](gpu-runs.md) has the figures of GPUs.

| what | result | command |
|---|---|---|
| step time above the time that a rank computes, post-validated ZB-H2 and ZB-V | 0.6–1.2 % | `build/bin/bench-sleep` |
| random programs beside a plain loop, byte by byte after every step, in one hour on one core | 22,340 programs, 9 differences, each of a kind that [the page](../explanation/bits.md) lists | `build/bin/chevron-differential --minutes 60` |
| gradients and 20-step loss curves against the un-pipelined model, all schedules, threads and Gloo processes | bit-equal | `ctest --test-dir build -R trainer` |
| killing a rank with `kill -9` | all others exit 3 in under 2 s, naming it | `ctest --test-dir build -R killed`, `-R gloo_process` |
| `chevron-plan search` beside the optimum by CP-SAT, 240 random pipelines of 2 or 3 ranks | 239 found, the other is 0.3 % longer, 224 proved to be optimal; no bound is above an optimum, and they are 0.5 % below on average | `.venv/bin/python tests/interop/search_optimum.py --cases 240 --seed 7` |
| demo on a bare Debian 12: set-up, build, 300 steps of training, loss 5.56 → 2.10 | 3 min 11 s, of which training 28–39 s | `./dev demo` |
"""

BESIDE = """## Another commit beside this one

    git clone . build/before && git -C build/before checkout COMMIT && ln -s "$PWD/.venv" build/before/
    (cd build/before && cmake --preset dev -DCHEVRON_FAST_PROGRAMS=OFF && cmake --build build --target benchmarks chevron-plan chevron-train)
    ./dev bench --beside build/before/build step sleep gpt

measures both builds in turn, in the same run: columns that end in *beside* are those of the other commit, and
ratios are above 1 where this commit is faster. The page is written to `build/benchmarks`, and `docs/` does not
change. If the older programs lack something, the page says so, and the rest is measured.
"""


def in_short(results):
    """The table at the top."""
    lines = ["| what | figure | section |", "|---|---|---|"]
    for name, result in load(results).items():
        chapter = next(c for c in CHAPTERS if c.name == name)
        figure = chapter.short(result)
        if figure:
            mark = "" if is_quiet(result) else " (not quiet)"
            asks = chapter.asks.format(**result["setting"])
            lines.append(f"| {asks} | {figure}{mark} | [{name}](#{chapter.anchor}) |")
    return "\n".join(lines) + "\n"


def made(results):
    """{file below the page's folder: text}"""
    there = load(results)
    files, parts = {}, [INTRODUCTION, "## In short\n", in_short(results), "Measured on:\n", machines(there) + "\n"]
    for chapter in CHAPTERS:
        if chapter.name not in there:
            parts.append(f"## {chapter.title}\n\n    ./dev bench {chapter.name}\n\nNot measured yet.\n")
            continue
        result = there[chapter.name]
        parts += [
            f"## {chapter.title}\n",
            wrapped(chapter.what.format(**result["setting"])),
            f"    ./dev bench {chapter.name}\n",
            wrapped(measured_line(result)),
        ]
        for picture, words, svg in chapter.pictures(result):
            files[f"images/{picture}"] = svg
            parts.append(f"![{words}](../images/{picture})\n")
        parts.append(chapter.table(result))
        missing = failures(result)
        if missing:
            parts.append("Not measured:\n\n" + missing + "\n")
        parts.append(wrapped("**What it cannot tell.** " + chapter.cannot))
    parts += [ALSO, BESIDE]
    files[PAGE] = "\n".join(parts)
    return files


def write(results, folder):
    """The page and its pictures into a folder."""
    for name, text in made(results).items():
        path = pathlib.Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def check(results, root):
    """0 if what is committed is what `write` would write."""
    wrong = [
        name
        for name, text in made(results).items()
        if not (root / "docs" / name).is_file() or (root / "docs" / name).read_text() != text
    ]
    for name in wrong:
        print(f"docs/{name} is not what bench/results make of it. Remedy: python3 bench/benchmarks.py --page")
    return 1 if wrong else 0
