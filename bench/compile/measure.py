#!/usr/bin/env python3
"""The compile cost of schedules, and the test that limits it.

  measure.py                     measure every case, print a table
  measure.py --write FILE        the same, and write the table as Markdown
  measure.py --only REGEX        only the cases whose name matches, e.g. --only 'zb_v|one_f'
  measure.py --record            measure the evaluator operations of the gated cases and record them in limits.txt; with --only,
                                 of those alone: the other lines stay
  measure.py --gate CASE         exit with 1 if CASE no longer compiles within its recorded limit, 77 on a compiler without limits

A case is a schedule of the catalogue at a size, worked out and proved (`zb_v_8_32`: P=8, M=32), or lowered to a program as well
(`lowered_zb_v_8_32`), or searched for (`best_8_32`), or the umbrella header alone (`header`). The catalogue says which schedules there are.

Operations are those of g++'s constant evaluator: the least -fconstexpr-ops-limit that the case compiles under, which is what its
costliest single constant needs. They repeat exactly for a compiler's major version, so they are gated: the recorded need plus 5 %.
Seconds and memory depend on the machine and are only reported.
"""

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
INCLUDE = os.path.normpath(os.path.join(HERE, "..", "..", "include"))
LIMITS = os.path.join(HERE, "limits.txt")
RESULTS = os.path.join(HERE, "results.md")
HIGHEST = 1 << 28
OVER_LIMIT = "operation count exceeds limit"
MARGIN = 1.05        # a gated case may grow by this much
PRECISION = 1.005    # operations are found to within this much, from above
GROWTH = 1.25        # operations per action at any size, over those at the smallest
# Other cases are compared with this one, which proves nothing.
BASELINE = "header"
SIZES = [(8, 32), (16, 128), (32, 512), (64, 512)]
MOST_ACTIONS = 110000
MOST_OPERATIONS = 1 << 26  # larger cases are not worth proving in a compiler
# The cases whose limits CTest checks: small ones, and the two largest that the documents promise.
GATED = ["best_8_32", "hanayo_8_32", "interleaved_1f1b_8_32", "lowered_zb_v_8_32", "one_f_one_b_8_32", "one_f_one_b_64_512", "zb_v_8_32",
         "zb_v_32_512"]
# A search in the compiler, as docs/guides/search.md has it.
SEARCHED = ["best_8_32"]
BEST = """#include <chevron/search.hpp>
inline constexpr auto best = chevron::search::best(chevron::placement::vee, chevron::costs{10, 13, 7, 1})
                                 .at_most_in_flight(2 * chevron::terms::ranks);
"""
LOWERED = ["lowered_one_f_one_b_8_32", "lowered_zb_v_8_32", "lowered_zb_v_16_128"]


def schedules():
    """The names of the catalogue's schedules, in its own order."""
    with open(os.path.join(INCLUDE, "chevron", "catalogue", "catalogue.hpp")) as header:
        listed = re.search(r"all\s*=\s*hana::make_basic_tuple\(([^)]*)\)", header.read()).group(1)
    return re.findall(r"&(\w+)", listed)


def parse(case):
    """(schedule, P, M, lowered) of a case."""
    match = re.match(r"^(lowered_)?(\w+?)_(\d+)_(\d+)$", case)
    if not match or match.group(2) not in schedules() + ["best"]:
        sys.exit("there is no case '%s': a case is [lowered_]SCHEDULE_P_M, SCHEDULE one of %s best" % (case, " ".join(schedules())))
    return match.group(2), int(match.group(3)), int(match.group(4)), bool(match.group(1))


def spelled(schedule):
    """A schedule's name in C++."""
    return "best" if schedule == "best" else "chevron::catalogue::" + schedule


def source(case):
    if case == BASELINE:
        return "#include <chevron/schedule.hpp>\n"
    schedule, ranks, micro_batches, lowered = parse(case)
    made = "chevron::%s<%s, chevron::shape{.ranks = %d, .micro_batches = %d}>" % (
        "lowered" if lowered else "checked", spelled(schedule), ranks, micro_batches)
    return "#include <chevron/schedule.hpp>\n%sconstexpr auto made = %s;\nstatic_assert(made.view().begin[%d] > 0);\n" % (
        BEST if schedule == "best" else "", made, ranks)


def compile_text(compiler, text, flags, output=os.devnull, include=INCLUDE):
    """Compiles; gives (exit status, what it said, CPU seconds, peak memory in MB)."""
    command = [compiler, "-std=c++20", "-O0", "-I", include] + flags + ["-x", "c++", "-", "-o", output]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env=dict(os.environ, LC_ALL="C"))
    process.stdin.write(text.encode())
    process.stdin.close()
    said = process.stdout.read().decode(errors="replace")
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    # The compiler driver's own children count too: memory is that of the largest of them.
    return process.returncode, said, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def compile_case(compiler, case, limit=HIGHEST, include=INCLUDE):
    if "clang" in compiler_version(compiler)[0]:
        flags = ["-fconstexpr-steps=%d" % limit, "-fno-caret-diagnostics"]
    else:
        flags = ["-fconstexpr-ops-limit=%d" % limit, "-fno-diagnostics-show-caret"]
    return compile_text(compiler, source(case), flags + ["-c"], include=include)


def require(outcome, case):
    if outcome[0] != 0:
        sys.exit("%s does not compile:\n%s" % (case, outcome[1][:4000]))
    return outcome


def count_actions(compiler, cases):
    """{case: (actions, chunks)}, by running the schedules once; a size at which a schedule does not exist is left out."""
    lines = []
    for case in cases:
        if case != BASELINE:
            schedule, ranks, micro_batches, _ = parse(case)
            lines.append('  show("%s", expand(%s, chevron::shape{.ranks = %d, .micro_batches = %d}));'
                         % (case, spelled(schedule), ranks, micro_batches))
    text = "\n".join(["#include <cstdio>", "#include <chevron/schedule.hpp>", BEST, "void show(char const* name, chevron::plan const& plan) {",
                      "  if (!chevron::check(plan)) std::printf(\"%s %d %d\\n\", name, plan.view().total(), plan.size.chunks);", "}",
                      "int main() {"] + lines + ["}", ""])
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "count")
        require(compile_text(compiler, text, [], program), "the program that counts actions")
        printed = subprocess.run([program], stdout=subprocess.PIPE, text=True, check=True).stdout
    return {name: (int(actions), int(chunks)) for name, actions, chunks in (line.split() for line in printed.splitlines())}


def operations(compiler, case, guess=None):
    """The least limit that the case compiles under, from above, to within PRECISION."""

    def fits(limit):
        status, output, _, _ = compile_case(compiler, case, int(limit))
        if status != 0 and OVER_LIMIT not in output:
            sys.exit("%s does not compile:\n%s" % (case, output[:4000]))
        return status == 0

    low, high = 1.0, None  # not fits(low), fits(high)
    probe, step = (guess or 500000) * PRECISION ** 0.5, PRECISION
    # Away from the guess in growing steps, until the answer lies between two probes.
    while high is None or (low == 1.0 and high > 2):
        if fits(probe):
            high = probe
            if low > 1.0:
                break
            probe = max(probe / step, 1.5)
        else:
            low = probe
            if high is not None:
                break
            if probe >= HIGHEST:
                sys.exit("%s needs more than %d evaluator operations" % (case, HIGHEST))
            probe = min(probe * step, HIGHEST)
        step = min(step ** 3, 16)
    while high / low > PRECISION:
        middle = (low * high) ** 0.5
        if fits(middle):
            high = middle
        else:
            low = middle
    return int(high)


versions = {}


def compiler_version(compiler):
    """('g++', '12') and so on."""
    if compiler not in versions:
        text = subprocess.run([compiler, "--version"], stdout=subprocess.PIPE, text=True).stdout
        if "clang" in text.lower():
            versions[compiler] = "clang", re.search(r"version (\d+)", text).group(1)
        else:
            dumped = subprocess.run([compiler, "-dumpversion"], stdout=subprocess.PIPE, text=True).stdout
            versions[compiler] = "g++", dumped.strip().split(".")[0]
    return versions[compiler]


def read_limits():
    """(compiler and major version they were recorded with, {case: (actions, need, limit)})"""
    recorded, limits = None, {}
    if os.path.exists(LIMITS):
        with open(LIMITS) as file:
            for line in file:
                if line.startswith("# recorded with "):
                    recorded = tuple(line[len("# recorded with "):].split()[:2])
                elif line.strip() and not line.startswith("#"):
                    case, actions, need, limit = line.split()
                    limits[case] = (int(actions), int(need), int(limit))
    return recorded, limits


def guesses():
    """Operations by case, as last recorded or written: where to look first."""
    found = {case: need for case, (_, need, _) in read_limits()[1].items()}
    if os.path.exists(RESULTS):
        with open(RESULTS) as file:
            for line in file:
                cells = [cell.strip() for cell in line.split("|")]
                if len(cells) > 7 and cells[1].startswith("`") and cells[6].replace(" ", "").isdigit():
                    found.setdefault("%s_%s_%s" % (cells[1].strip("`").replace("lowered ", "lowered_"), cells[2], cells[3]),
                                     int(cells[6].replace(" ", "")))
    return found


def smallest_of(case, of):
    """The case of the same schedule with the fewest ranks and microbatches."""
    schedule, _, _, lowered = parse(case)
    same = [c for c in of if c != BASELINE and parse(c)[0] == schedule and parse(c)[3] == lowered]
    return min(same, key=lambda c: parse(c)[1:3])


def gate(compiler, case):
    version = compiler_version(compiler)
    recorded, limits = read_limits()
    if version != recorded:
        print("skipped: operations were recorded with %s, this is %s" % (" ".join(recorded), " ".join(version)))
        return 77
    actions, need, limit = limits[case]
    small_actions, small_need, _ = limits[smallest_of(case, limits)]
    if need / actions > GROWTH * small_need / small_actions:
        print("FAILED: %s needs %.1f operations an action, %s only %.1f: that is not linear in the number of actions."
              % (case, need / actions, smallest_of(case, limits), small_need / small_actions))
        return 1
    status, output, seconds, _ = compile_case(compiler, case, limit)
    if status != 0 and OVER_LIMIT in output:
        print("FAILED: %s now needs more than %d evaluator operations; it needed %d when that was recorded." % (case, limit, need))
        print("If the rise is meant: bench/compile/measure.py --record, and say why in the commit.")
        return 1
    require((status, output), case)
    # The gate must be able to close: under half the recorded need the same case must fail, and for that reason.
    status, output, _, _ = compile_case(compiler, case, need // 2)
    if status == 0 or OVER_LIMIT not in output:
        print("FAILED: %s compiles under half of its recorded need, %d, so the limit says nothing any more." % (case, need))
        print("If it became cheaper: bench/compile/measure.py --record.")
        return 1
    print("%s: %d actions, within %d evaluator operations (%.2f s)" % (case, actions, limit, seconds))
    return 0


def record(compiler, only):
    version = compiler_version(compiler)
    if version[0] != "g++":
        sys.exit("evaluator operations are counted by g++ only; this is %s" % " ".join(version))
    recorded, kept = read_limits()
    if only and recorded != version:
        sys.exit("limits.txt was recorded with %s, this is %s: record all cases" % (" ".join(recorded or ["nothing"]), " ".join(version)))
    chosen = [case for case in GATED if re.search(only, case)]
    known, actions = guesses(), count_actions(compiler, chosen)
    lines = ["# Of each gated case: actions, the evaluator operations it needs, and the limit its gate compiles it under: 5 % more.",
             "# Written by measure.py --record.",
             "# recorded with %s %s" % version]
    for case in GATED:
        line = "%-24s %8d %10d %10d"
        if case in chosen:
            need = operations(compiler, case, known.get(case))
            lines.append(line % (case, actions[case][0], need, int(need * MARGIN)))
            print(lines[-1], flush=True)
        elif case in kept:
            lines.append(line % ((case,) + kept[case]))
    with open(LIMITS, "w") as file:
        file.write("\n".join(lines) + "\n")


def processor():
    try:
        with open("/proc/cpuinfo") as info:
            return re.search(r"model name\s*: (.*)", info.read()).group(1)
    except (OSError, AttributeError):
        return platform.machine()


def spaced(number):
    return "{:,}".format(number).replace(",", " ")


def table(compiler, repeats, only):
    kind, major = compiler_version(compiler)
    cases = ["%s_%d_%d" % (name, p, m) for name in schedules() for p, m in SIZES] + LOWERED + SEARCHED
    cases = [case for case in cases if re.search(only, case)]
    actions = count_actions(compiler, cases)
    cases = [case for case in cases if case in actions and actions[case][0] <= MOST_ACTIONS]
    known, needs, kept = guesses(), {}, []
    for case in cases:
        small = smallest_of(case, cases)
        predicted = needs[small] / actions[small][0] * actions[case][0] if small in needs else None
        if predicted and predicted > MOST_OPERATIONS:
            continue
        kept.append(case)
        if kind == "g++":
            needs[case] = operations(compiler, case, known.get(case) or predicted)
            print("%s: %d operations" % (case, needs[case]), file=sys.stderr, flush=True)
    cases = kept
    # Round by round, so that a slow minute of the machine touches every case alike.
    times, memory = {case: [] for case in [BASELINE] + cases}, {}
    for _ in range(repeats):
        for case in times:
            _, _, took, peak = require(compile_case(compiler, case), case)
            times[case].append(took)
            memory[case] = peak
    header = statistics.median(times[BASELINE])
    rows = []
    for case in cases:
        schedule, ranks, micro_batches, lowered = parse(case)
        count, chunks = actions[case]
        need, each = (spaced(needs[case]), "%.1f" % (needs[case] / count)) if case in needs else ("", "")
        seconds = statistics.median(times[case])
        rows.append("| `%s%s` | %d | %d | %d | %s | %s | %s | %.2f | %.2f | %.0f |" % (
            "lowered " if lowered else "", schedule, ranks, micro_batches, chunks, spaced(count), need, each, seconds,
            seconds - header, memory[case]))
    steepest = max((needs[c] / actions[c][0] / (needs[s] / actions[s][0]), c, s)
                   for c in needs for s in [smallest_of(c, needs)]) if needs else None
    return "\n".join([
        "# What schedules cost to compile", "",
        "Written by `bench/compile/measure.py --write`: %s %s, `-std=c++20 -O0`, median of %d, %d cores of %s."
        % (kind, major, repeats, os.cpu_count(), processor()), "",
        "Each line is `checked<schedule, shape>`, worked out and proved; `lowered` also makes the program, `best` searches for the plan (1000",
        "trials; with one header more). `operations` are those of g++'s constant evaluator: the least `-fconstexpr-ops-limit` that the case",
        "compiles under (to %.1f %%). They repeat exactly, and those of the cases in `limits.txt` are gated. Up to 33 554 432 of them g++ needs"
        % (100 * (PRECISION - 1)),
        "no flag at all; `chevron::schedule` sets one in any case. Sizes that would need more than %s are left out. CPU seconds and"
        % spaced(MOST_OPERATIONS),
        "memory depend on the machine and are for information; `added`"
        " is beside the header alone, which takes %.2f s and %.0f MB." % (header, memory[BASELINE]), ""] +
        (["Operations are linear in the number of actions: per action they grow at most by %.2f from a schedule's smallest size to any other"
          % steepest[0], "(%s to %s)." % (steepest[2], steepest[1]), ""] if steepest else []) +
        ["| schedule | P | M | V | actions | operations | per action | s | added s | MB |",
         "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"] + rows) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiler", default=os.environ.get("CXX", "c++"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", metavar="REGEX", default="")
    parser.add_argument("--write", metavar="FILE")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--gate", metavar="CASE")
    options = parser.parse_args()
    if options.gate:
        sys.exit(gate(options.compiler, options.gate))
    if options.record:
        record(options.compiler, options.only)
        return
    text = table(options.compiler, options.repeats, options.only)
    print(text, end="")
    if options.write:
        with open(options.write, "w") as file:
            file.write(text)


if __name__ == "__main__":
    main()
