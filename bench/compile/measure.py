#!/usr/bin/env python3
"""What schedules cost to compile, and the gate that keeps it so.

  measure.py                     measure every case, print a table
  measure.py --write FILE        the same, and write the table as Markdown
  measure.py --record            measure evaluator operations and record them, with their limits, in limits.txt
  measure.py --gate CASE         exit with 1 if CASE no longer compiles within its recorded limit, 77 if that cannot be said

A case is a .cpp file beside this script; its first comment says what it is. Seconds and memory depend on the machine and are only
reported. The operations of g++'s constant evaluator repeat exactly for a compiler's major version, so those are gated: the least
-fconstexpr-ops-limit that a case compiles under, plus 5 %.
"""

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
INCLUDE = os.path.normpath(os.path.join(HERE, "..", "..", "include"))
LIMITS = os.path.join(HERE, "limits.txt")
HIGHEST = 1 << 28
MARGIN = 1.05
OVER_LIMIT = "operation count exceeds limit"
# Cases are compared with this one, which proves nothing.
BASELINE = "header"


def cases():
    return sorted((f[:-4] for f in os.listdir(HERE) if f.endswith(".cpp")), key=lambda name: (name != BASELINE, name))


def description(case):
    """The comment at the head of the case's source."""
    words = []
    with open(os.path.join(HERE, case + ".cpp")) as source:
        for line in source:
            if not line.startswith("//"):
                break
            words.append(line[2:].strip())
    return " ".join(words)


def compile_case(compiler, case, limit=HIGHEST):
    """Compiles; gives (exit status, output, seconds, peak memory in MB)."""
    command = [compiler, "-std=c++20", "-O0", "-I", INCLUDE, "-fconstexpr-ops-limit=%d" % limit, "-fno-diagnostics-show-caret",
               "-c", "-o", os.devnull, os.path.join(HERE, case + ".cpp")]
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=dict(os.environ, LC_ALL="C"))
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    # The compiler driver's own children count too: usage holds the largest of them.
    return process.returncode, output, time.monotonic() - began, usage.ru_maxrss / 1024


def require(outcome, case):
    if outcome[0] != 0:
        sys.exit("%s.cpp does not compile:\n%s" % (case, outcome[1][:4000]))
    return outcome


def operations(compiler, case, guess=None):
    """The least limit that the case compiles under, exactly, by bisection. None if no limit makes a difference."""

    def fits(limit):
        status, output, _, _ = compile_case(compiler, case, limit)
        if status != 0 and OVER_LIMIT not in output:
            sys.exit("%s.cpp does not compile:\n%s" % (case, output[:4000]))
        return status == 0

    if not fits(HIGHEST):
        sys.exit("%s.cpp needs more than %d evaluator operations" % (case, HIGHEST))
    low, high = 1, HIGHEST  # fits(high), not fits(low)
    if fits(low):
        return None
    if guess:
        for near in (guess - 1, guess, int(guess * 0.98), int(guess * 1.02)):
            if low < near < high:
                if fits(near):
                    high = near
                else:
                    low = near
    while high - low > 1:
        # By ratio while they are far apart: the answer may have any number of digits.
        middle = int((low * high) ** 0.5) if high > 2 * low else (low + high) // 2
        middle = min(max(middle, low + 1), high - 1)
        if fits(middle):
            high = middle
        else:
            low = middle
    return high


def compiler_version(compiler):
    """('g++', '12') and so on."""
    text = subprocess.run([compiler, "--version"], stdout=subprocess.PIPE, text=True).stdout
    if "clang" in text.lower():
        return "clang", re.search(r"version (\d+)", text).group(1)
    return "g++", subprocess.run([compiler, "-dumpversion"], stdout=subprocess.PIPE, text=True).stdout.strip().split(".")[0]


def read_limits():
    """(compiler and major version they were recorded with, {case: (need, limit)})"""
    recorded, limits = None, {}
    if os.path.exists(LIMITS):
        with open(LIMITS) as file:
            for line in file:
                if line.startswith("# recorded with "):
                    recorded = tuple(line[len("# recorded with "):].split()[:2])
                elif line.strip() and not line.startswith("#"):
                    case, need, limit = line.split()
                    limits[case] = (int(need), int(limit))
    return recorded, limits


def gate(compiler, case):
    version = compiler_version(compiler)
    recorded, limits = read_limits()
    if version != recorded:
        print("skipped: operations were recorded with %s, this is %s" % (" ".join(recorded), " ".join(version)))
        return 77
    need, limit = limits[case]
    status, output, seconds, _ = compile_case(compiler, case, limit)
    if status != 0 and OVER_LIMIT in output:
        print("FAILED: %s now needs more than %d evaluator operations; it needed %d when that was recorded." % (case, limit, need))
        print("If the rise is meant: bench/compile/measure.py --record, and say why in the commit.")
        return 1
    require((status, output), case)
    # The gate must be able to close: under half the recorded need the same file must fail, and for that reason.
    status, output, _, _ = compile_case(compiler, case, need // 2)
    if status == 0 or OVER_LIMIT not in output:
        print("FAILED: %s compiles under half of its recorded need, %d, so the limit says nothing any more." % (case, need))
        print("If it became cheaper: bench/compile/measure.py --record.")
        return 1
    print("%s: within %d evaluator operations (%.2f s)" % (case, limit, seconds))
    return 0


def record(compiler):
    version = compiler_version(compiler)
    if version[0] != "g++":
        sys.exit("evaluator operations are counted by g++ only; this is %s" % " ".join(version))
    _, old = read_limits()
    lines = ["# Evaluator operations that each case of this folder needs, and the limit its gate compiles it under: 5 % more.",
             "# Written by measure.py --record.",
             "# recorded with %s %s" % version]
    for case in cases():
        need = operations(compiler, case, old.get(case, (None, None))[0])
        if need is not None and case != BASELINE:
            lines.append("%-28s %10d %10d" % (case, need, int(need * MARGIN)))
            print(lines[-1], flush=True)
    with open(LIMITS, "w") as file:
        file.write("\n".join(lines) + "\n")


def processor():
    try:
        with open("/proc/cpuinfo") as info:
            return re.search(r"model name\s*: (.*)", info.read()).group(1)
    except (OSError, AttributeError):
        return platform.machine()


def table(compiler, repeats):
    kind, major = compiler_version(compiler)
    recorded, limits = read_limits()
    rows, seconds, memory = [], {}, {}
    # Round by round, so that a slow minute of the machine touches every case alike.
    times = {case: [] for case in cases()}
    for _ in range(repeats):
        for case in cases():
            _, _, took, peak = require(compile_case(compiler, case), case)
            times[case].append(took)
            memory[case] = peak
    for case in cases():
        seconds[case] = statistics.median(times[case])
    for case in cases():
        if case == BASELINE:
            added, need = "", ""
        else:
            added = "%.2f" % (seconds[case] - seconds[BASELINE])
            need = "%d" % operations(compiler, case, limits.get(case, (None, None))[0]) if kind == "g++" else ""
        rows.append("| `%s` | %.2f | %s | %.0f | %s | %s |" % (case, seconds[case], added, memory[case], need, description(case)))
    return "\n".join([
        "# What schedules cost to compile", "",
        "Written by `bench/compile/measure.py --write`: %s %s, `-std=c++20 -O0`, median of %d, %d cores of %s."
        % (kind, major, repeats, os.cpu_count(), processor()),
        "`added` is beside `header`. Operations are those of g++'s constant evaluator: the least `-fconstexpr-ops-limit` that the",
        "case compiles under. They repeat exactly and are gated (`limits.txt`); seconds and memory are not.", "",
        "| case | s | added s | MB | operations | what |", "|---|---:|---:|---:|---:|---|"] + rows) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default=os.environ.get("CXX", "c++"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--write", metavar="FILE")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--gate", metavar="CASE")
    options = parser.parse_args()
    if options.gate:
        sys.exit(gate(options.compiler, options.gate))
    if options.record:
        record(options.compiler)
        return
    text = table(options.compiler, options.repeats)
    print(text, end="")
    if options.write:
        with open(options.write, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()
