#!/usr/bin/env python3
"""Measures Chevron beside PyTorch, and writes docs/reference/benchmarks.md: ./dev bench builds the programs and runs this.

  benchmarks.py                  all sections, in about 40 minutes on two quiet cores
  benchmarks.py quick            smaller sizes, in minutes on a quiet machine; the page goes to build/benchmarks, not to docs/
  benchmarks.py NAME…            these sections; the page keeps its other sections
  benchmarks.py --minutes 20     as many rounds as fit (each section measures at least one, so it may take a little longer)
  benchmarks.py --beside FOLDER  also another build of Chevron, alternating with ours; the page goes to build/benchmarks
  benchmarks.py --page           only writes the page anew, from the figures in bench/results
  benchmarks.py --check          exit status 1 if the page differs from the page that bench/results give

Sections: planning, compile, training-compile, step, memory, sleep, order, order-train, python, gpt.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time

from suite import machine, page
from suite.peers import torch_sides
from suite.run import Build, ProgramFailed, Run
from suite.sections import ALL

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


def arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="sections, or quick")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", metavar="FOLDER", help="build folder of Chevron")
    parser.add_argument("--beside", type=pathlib.Path, metavar="FOLDER", help="build folder of another commit of Chevron")
    parser.add_argument("--minutes", type=float, metavar="N", help="time for all sections")
    parser.add_argument("--without-newest", action="store_true", help="leave out the newest PyTorch, which is 5 GB to install")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_intermixed_args()
    given.quick = "quick" in given.names
    given.names = [name for name in given.names if name != "quick"]
    for name in given.names:
        if name not in ALL:
            parser.error(f"there is no section '{name}': {', '.join(ALL)}")
    given.names = given.names or [name for name, section in ALL.items() if section.quick or not given.quick]
    if given.minutes is None:
        given.minutes = 40 * sum(ALL[name].share for name in given.names) / sum(section.share for section in ALL.values())
    for folder in [given.build] + ([given.beside] if given.beside else []):
        if not given.page and not given.check and not (folder / "CMakeCache.txt").is_file():
            parser.error(
                f"{folder} is no build folder. Remedy: ./dev bench builds ours; "
                "docs/reference/benchmarks.md says how for another commit"
            )
    return given


def measure(given, folder):
    """Each section in its turn; what it measured, and the page, are written as soon as it is over."""
    builds = [Build(given.build)] + ([Build(given.beside, " beside")] if given.beside else [])
    beside = {"beside": {"label": f"Chevron {builds[1].commit}"}} if given.beside else {}
    # Installed only for sections that measure it.
    torch = torch_sides(not given.without_newest) if any(ALL[name].torch for name in given.names) else {}
    where = machine.machine(builds[0].path)
    results = folder / "results" if folder != ROOT / "docs" else RESULTS
    results.mkdir(parents=True, exist_ok=True)
    logs = ROOT / "build" / "benchmarks"
    logs.mkdir(parents=True, exist_ok=True)
    end, failed = time.monotonic() + 60 * given.minutes, 0
    for i, name in enumerate(given.names):
        section = ALL[name]
        left = sum(ALL[later].share for later in given.names[i:])
        seconds = max(0.0, end - time.monotonic()) * section.share / left
        print(f"== {name}: about {seconds:.0f} s", flush=True)
        sides = {**(torch if section.torch else {}), **beside}
        run = Run(name, builds, sides, seconds, 1 if given.quick else section.most_rounds, given.quick, logs)
        run.compiler = machine.found(r"^CMAKE_CXX_COMPILER:\w+=(.+)", builds[0].path / "CMakeCache.txt") or "c++"
        try:
            section.measure(run)
        except (ProgramFailed, subprocess.TimeoutExpired) as why:
            print(f"== {name} failed, and what the page said of it stays: {why}", file=sys.stderr, flush=True)
            failed += 1
            continue
        (results / f"{name}.json").write_text(json.dumps(run.result(where), indent=1) + "\n")
        page.write(results, folder)
    return results, failed


def main():
    given = arguments()
    if given.check:
        sys.exit(page.check(RESULTS, ROOT))
    failed = 0
    if given.page:
        results, folder = RESULTS, ROOT / "docs"
    else:
        folder = ROOT / "build" / "benchmarks" if given.quick or given.beside else ROOT / "docs"
        results, failed = measure(given, folder)
    page.write(results, folder)
    print(page.in_short(results), end="")
    print(f"== {folder.relative_to(ROOT)}/{page.PAGE}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
