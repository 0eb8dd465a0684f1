#!/usr/bin/env python3
"""All kinds of torture, bounded, and docs/explanation/reliability.md written anew with what they found:

    tests/torture/run.py BUILD [--quick] [--write]

`--quick` takes minutes instead of an hour. The page's text between its marks is replaced with `--write`, and printed without. Exit code 1 where
anything went otherwise than it should.
"""
import argparse
import datetime
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "reliability.md"

# heading, words for chevron-torture, and the same for --quick
KINDS = [
    ("A rank fails at an action of a step", "faults --count 5000 --jobs 3", "faults --count 900 --jobs 3"),
    ("A job is killed while it saves", "kills --count 400 --jobs 3", "kills --count 60 --jobs 3"),
    ("A checkpoint is damaged", "damage --count 6000", "damage --count 3000"),
    ("A text from outside is mutated", "fuzz --seconds 600 --jobs 2", "fuzz --seconds 40 --jobs 2"),
    ("Long runs", "soak --steps 20000", "soak --steps 1500"),
]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the outcomes into docs/explanation/reliability.md")
    how = parser.parse_args()
    program = how.build / "bin" / "chevron-torture"
    around = dict(os.environ, TORCH_FR_BUFFER_SIZE="0", OMP_NUM_THREADS="1")
    text, wrong = [], 0
    for heading, whole, quick in KINDS:
        words = (quick if how.quick else whole).split()
        with tempfile.NamedTemporaryFile("r", suffix=".md") as report:
            begin = time.time()
            print(f"== {heading}: chevron-torture {' '.join(words)}", flush=True)
            code = subprocess.run([program, *words, "--report", report.name], env=around).returncode
            wrong += code != 0
            table = report.read().strip() or f"It ended with exit code {code}."
            text.append(f"### {heading}\n\n`build/bin/chevron-torture {' '.join(words)}`, {time.time() - begin:.0f} s:\n\n{table}\n")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    cores = len(os.sched_getaffinity(0))
    head = (f"`./dev torture{' quick' if how.quick else ''}`, {datetime.date.today()}, at {commit}, on {cores} cores ({platform.machine()}), "
            f"no GPU:\n\n")
    found = head + "\n".join(text)
    if how.write:
        page = PAGE.read_text()
        page = re.sub(r"(<!-- torture begins -->\n).*(<!-- torture ends -->)", lambda m: m[1] + "\n" + found + "\n" + m[2], page, flags=re.DOTALL)
        PAGE.write_text(page)
    else:
        print(found)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
