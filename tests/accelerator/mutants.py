#!/usr/bin/env python3
"""Which order of streams does the runtime need? Leaves out each record, wait and record_stream of the runtime, one at a time, and trains on
the simulated device: the fault that comes of it must be told. Run by hand, some minutes:

    tests/accelerator/mutants.py --build build              all of them
    tests/accelerator/mutants.py --build build join scope   those whose name contains one of these words
    tests/accelerator/mutants.py --build build --table      a table in Markdown, for docs/inside/accelerator.md

All mutants are put into one copy of include/, each behind a number, so that the tests are compiled once. `--build` is a folder that
CMake has configured. The exit code is 1 where a mutant is found that is said to be redundant, or is not found and not said to be; a
mutant whose text is no longer in the headers is an error, too.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMPUTE = ["run/core/compute_streams.hpp"]
HANDOFF = ["run/core/stream_handoff.hpp"]
THREADS = ["run/comm/threads/threads_transport.hpp", "run/comm/threads/thread_collectives.hpp"]
STREAMS = ["transports/streams/stream_transport.hpp"]
MESSAGES = ["transports/streams/stream_messages.hpp"]
LINE = ["transports/streams/stream_channels.hpp"]

# name; files below include/chevron/run, of which one has the text; text (a regular expression, whose only group is the statement that
# is left out); "" or why nothing is lost without it
MUTANTS = [
    ("scope: begins behind the caller's stream", COMPUTE, r"(of\.after\(of\.stream\(0\), \*outside_\);)", ""),
    ("scope: the caller's stream goes on behind it", COMPUTE, r"(of_->after\(\*outside_, of_->stream\(0\)\);)", ""),
    ("pair: lane 1 forks from lane 0", COMPUTE, r"(after\(stream\(1\), stream\(0\)\);)", ""),
    ("pair: lane 0 joins lane 1", COMPUTE, r"(after\(stream\(0\), stream\(1\)\);)", ""),
    ("lanes: record of every order", COMPUTE, r"(here_->record\(earlier\);)", ""),
    ("lanes: wait of every order", COMPUTE, r"(here_->block\(later\);)", ""),
    ("pair: F's inputs are held until its end", ["run/execute/stage_runner.hpp"], r"(tensors const held = inputs;)", ""),
    ("hand-over: record", HANDOFF, r"(ready_->record\([^;]*;)", ""),
    ("hand-over: wait of who takes it", HANDOFF, r"(ready_->block\(stream\);)", ""),
    ("hand-over: record_stream on one device", HANDOFF, r"(value\.record_stream\(stream\);)\s*continue;", ""),
    ("hand-over: record_stream of a copy's source", HANDOFF, r"(source\.record_stream\([^;]*;)", ""),
    ("hand-over: record_stream of a copy", HANDOFF, r"value = source\.to.*?(value\.record_stream\(stream\);)", "the copy was allocated on that stream"),
    ("hand-over: wait for what stays in place", HANDOFF, r"(?:if \(ready_\) )(ready_->block\([^;]*\(where\)\);)", ""),
    ("sum of threads: the part's own device waits for it", THREADS, r"(given_\[r\]\.wait_for\(parts_\[r\]\.values\.device\(\)\);)", ""),
    ("sum of threads: the first part's device waits for it", THREADS, r"(given_\[0\]\.wait_for\(first\.values\.device\(\)\);)", ""),
    ("sum of threads: record", THREADS, r"(done\.record\(values\);)", ""),
    ("sum of threads: wait", THREADS, r"(all\[b\]\.result\.wait_for\(\);)", ""),
    ("transfer behind computation: record", LINE, r"(streams_\.record\(to\.computed\);)", ""),
    ("transfer behind computation: wait", LINE, r"(streams_\.wait\(to\.on, to\.computed\);)", ""),
    ("send behind computation", MESSAGES, r"(lines_\.behind_computation\(\*to\);)", ""),
    ("receive behind computation: record", MESSAGES, r"(streams_\.record\(slot\.computed\);)", ""),
    ("receive behind computation: wait", MESSAGES, r"(streams_\.wait\(from->on, slot\.computed\);)", ""),
    ("receive: asked for late where memory is short", STREAMS, r"(messages_\.receive_late\(late\);)", ""),
    ("sum behind computation", STREAMS, r"(lines_\.behind_computation\(\*group\.channel\);)", ""),
    ("send: record of its end", MESSAGES, r"(slot\.done->record\([^;]*;)", ""),
    ("send: wait before its memory is free", MESSAGES, r"(lines_\.wait\(\*slot\.done\);)", ""),
    ("receive: record of its end", MESSAGES, r"(slot\.arrived->record\([^;]*;)", ""),
    ("receive: wait before it is read", MESSAGES, r"(lines_\.wait\(\*slot\.arrived\);)", ""),
    ("sum: record of its end", STREAMS, r"(group\.done\[b\]->record\([^;]*;)", ""),
    ("sum: wait before it is read", STREAMS, r"(lines_\.wait\(\*of\(among\)\.done[^;]*;)", ""),
    ("first sends: wait before their copies are free", MESSAGES, r"(lines_\.wait\(\*sent\.done\);)", ""),
    ("first sends: wait in open()", MESSAGES, r"void open\([^)]*\) \{\s*(finish_first_sends\(\);)", ""),
    ("first sends: wait in begin_step()", STREAMS, r"(messages_\.finish_first_sends\(\);)",
     "the copies stay until open(), which waits for them, and take memory meanwhile"),
    ("first sends: from a copy", ["transports/message_agreement.hpp"], r"if \(value\.defined\(\)\) (value = value\.clone\(\);)",
     "the tensors themselves are kept as long, and only captured graphs write to such memory meanwhile"),
    ("gather: record of its end", STREAMS, r"(of\(slot\)->record\([^;]*;)", ""),
    ("gather: the host waits for it", STREAMS, r"(lines_\.wait_on_host\(\*of\(slot\)[^;]*;)", ""),
    ("connecting: behind computation", MESSAGES, r"(lines_\.behind_computation\(\*made\);)", ""),
    ("connecting: record of the first use", MESSAGES, r"(\bdone\.record\(made->on[^;]*;)", ""),
    ("connecting: the host waits for the first use", MESSAGES, r"(lines_\.wait_on_host\(done[^;]*;)", ""),
    ("memory: the cache goes back between steps", ["run/execute/memory_meter.hpp"], r"(stats_\.empty_cache\(\);)", ""),
    ("draws: a generator that ranks share is refused", ["run/stage/random_scope.hpp"], r"(throw usage_error\([^;]*;)", ""),
    ("connecting: wait for the first sum", STREAMS, r"(wait_collective\(among, 0\);)", ""),
]

# Where more than the statement would go with it.
INSTEAD = {
    "tensors const held = inputs;": "tensors const held = LEFT_OUT ? tensors() : inputs;",
    "finish_first_sends();": "LEFT_OUT ? agreement_.finish_first_sends([](auto&) {}) : finish_first_sends();",
}

SWITCH = """#pragma once
#include <cstdlib>
/// Whether this statement is left out.
inline bool chevron_left_out(int number) {
  static int const chosen = std::getenv("CHEVRON_MUTANT") != nullptr ? std::atoi(std::getenv("CHEVRON_MUTANT")) : -1;
  return number == chosen;
}
"""


def put_in(include, number, files, text):
    """Puts the statement behind its number; false where no file has it."""
    for file in files:
        header = include / "chevron" / file
        if not header.exists():
            continue
        words = header.read_text()
        found = re.search(text, words, flags=re.DOTALL)
        if not found:
            continue
        group = next(g for g in range(1, len(found.groups()) + 1) if found.group(g) is not None)
        begin, end = found.span(group)
        statement = words[begin:end]
        left = INSTEAD.get(statement, "if (!LEFT_OUT) { " + statement + " }").replace("LEFT_OUT", f"chevron_left_out({number})")
        header.write_text(words[:begin] + left + words[end:])
        return True
    return False


def build(place, how):
    """The program with all mutants in it."""
    listed = json.loads((how.build / "compile_commands.json").read_text())
    commands = [c for c in listed if "/tests/accelerator/" in c["file"] or "/batches/accelerator/" in c["file"]]
    if not commands:
        sys.exit(f"{how.build} does not know of tests/accelerator")
    (place / "switch.hpp").write_text(SWITCH)
    running, objects = [], []
    for number, c in enumerate(commands):
        made = place / f"{number}.o"
        command = c["command"].replace(str(ROOT / "include"), str(place / "include"))
        # Without the precompiled header, which holds the headers as they are.
        command = re.sub(r" -include \S+cmake_pch\S*| -Xclang -include(-pch)? -Xclang \S+| -Winvalid-pch", "", command)
        command = re.sub(r" -o \S+", f" -O0 -include {place}/switch.hpp -o {made}", command)
        running.append(subprocess.Popen(command, shell=True, cwd=c["directory"]))
        objects.append(str(made))
        while sum(r.poll() is None for r in running) >= how.jobs:
            time.sleep(0.2)
    if any(r.wait() != 0 for r in running):
        sys.exit("the mutants do not compile")
    words = subprocess.run(["ninja", "-t", "commands", "-s", "bin/chevron-accelerator-tests"], cwd=how.build, capture_output=True, text=True).stdout
    words = re.sub(r"\S*chevron-accelerator-tests\.dir/\S+\.o\b|\S*chevron-precompiled-\w+-functions\.dir/\S+\.o\b", "", words)
    program = place / "tests"
    words = re.sub(r" -o \S+", f" {' '.join(objects)} -o {program}", words)
    if subprocess.run(words, shell=True, cwd=how.build).returncode != 0:
        sys.exit("the mutants do not link")
    return program


def started(program, number, *arguments):
    """The tests without this statement; None where they hang."""
    around = dict(os.environ, CHEVRON_MUTANT=str(number), TORCH_FR_BUFFER_SIZE="0", OMP_NUM_THREADS="1")
    try:
        return subprocess.run([program, "--no-colors", *arguments], env=around, capture_output=True, text=True, errors="replace", timeout=120)
    except subprocess.TimeoutExpired:
        return None


def numbers(program, number):
    """Whether operators that run late give other numbers."""
    ran = started(program, number, "--source-file=*/late_test.cpp", "--test-case-exclude=*puts nothing*,*runs when somebody*")
    return ran is None or bool(re.search(r"losses ==|at::equal|not finite|norms|said ==|exception|signal", ran.stdout))


def run(program, number):
    """How the tests end without this statement, and in words what told of it."""
    for files in ("*/schedules_test.cpp,*/options_test.cpp,*/sharing_test.cpp", "*/late_test.cpp"):
        ran = started(program, number, f"--source-file={files}", "--abort-after=1")
        if ran is None:
            return True, "it hangs"
        if ran.returncode != 0:
            return True, told_by(ran)
    return False, ""


def told_by(ran):
    fault = re.search(r"^\s*(.*?: the one stream does not wait for the other)", ran.stdout, flags=re.MULTILINE)
    where = re.search(r"logged: (.*)", ran.stdout)
    told = fault.group(1) if fault else "other numbers" if re.search(r"losses|at::equal|norms", ran.stdout) else (
        re.search(r"ERROR: (.*)", ran.stdout) or re.search(r"(.*)", f"exit code {ran.returncode}")).group(1)
    return told + (f" ({where.group(1)})" if where else "")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--build", type=pathlib.Path, required=True, help="a folder that CMake has configured")
    parser.add_argument("--include", type=pathlib.Path, default=ROOT / "include")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--table", action="store_true")
    how = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        shutil.copytree(how.include, place / "include")
        for number, (name, files, text, _) in enumerate(MUTANTS):
            if not put_in(place / "include", number, files, text):
                print(f"{name}: the headers have no such text any more", flush=True)
                wrong += 1
        program = build(place, how)
        if how.table:
            print("| left out | what tells of it | other numbers, late |\n|---|---|---|")
        found = total = seen = 0
        if run(program, -2)[0]:
            sys.exit("the tests fail with nothing left out")
        for number, (name, _, _, redundant) in enumerate(MUTANTS):
            if how.names and not any(n in name for n in how.names):
                continue
            is_found, words = run(program, number)
            total += 1
            found += is_found
            wrong += is_found == bool(redundant)
            late = numbers(program, number)
            seen += late
            verdict = words if is_found else f"nothing: {redundant}" if redundant else "NOT FOUND"
            print(f"| {name} | {verdict} | {'yes' if late else 'no'} |" if how.table else f"{name}: {verdict}; other numbers: {late}", flush=True)
        print(f"\n{found} of {total} found, {seen} give other numbers when operators run late")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
