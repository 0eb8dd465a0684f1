#!/usr/bin/env python3
"""Does torture find what it looks for? Puts mistakes into a copy of Chevron's headers, each behind a number, and runs with
each of them the kind of torture that must find it. Run by hand, a minute each:

    tests/torture/mutants.py --build build              all of them
    tests/torture/mutants.py --build build blames       those whose name contains one of these words
    tests/torture/mutants.py --build build --compile    only compiles them

`--build` is a folder in which chevron-torture has been built. The exit code is 1 where a mutant is not found; one whose text is no longer in
the headers is an error, too.
"""
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from header_mutants import Mutant, options, run

# With a full disk every rank throws the error of the rank that cannot write.
FULL = "faults --with disk_full --jobs 2"
FAULTS, KILLS, DAMAGE, SOAK = "faults --count 80 --jobs 2", "kills --count 24 --jobs 2", "damage --count 900", "soak --steps 600"

ENDS = r"(accumulated_\.end_step\(next\);)"

# name; kind of torture; header below include/chevron; regular expression, whose group is a statement or an expression; what stands in its
# place; why the mutant is not found, if so
MUTANTS = [
    ("the launcher blames the next rank", FAULTS, "jobs/launch.hpp", r'\.reason = "rank " \+ std::to_string\((rank)\)', "rank + 1"),
    ("too little memory is a usage error", FAULTS, "run/comm/stage_failure.hpp", r"catch \(\.\.\.\) \{\n    return (exit_code::other);", "exit_code::usage"),
    ("a timeout is not followed to who is late", FAULTS, "jobs/failure_reports.hpp", r"(if \(auto better = follow\(mine, waiting, waited\)\) return \*better;)", ""),
    ("an action is not named", FAULTS, "run/execute/action_record.hpp", r"step\(\),\s+(to_text\(i\.op, slices_\)\.str\(\))\};", "std::string()"),
    ("a stuck thread is waited for", FAULTS, "run/comm/threads/run_threads.hpp", r"(\+\+naps \* nap < hub\.options\.grace)", "true"),
    ("a failing rank tells nobody at once", FAULTS, "run/comm/stage_failure.hpp", r"(if \(comm != nullptr\) comm->fail\(found\);)", "",
     "the error leaves the rank's body, and run_main and run_threads tell it then; a body that catches it is what failing_jobs_test has"),
    ("every rank is blamed for the error of one", FULL, "run/core/failure.hpp", r"failure_by\((e\.context\(\)\.rank >= 0 \? e\.context\(\)\.rank : rank), e\.unplaced", "rank"),
    ("a folder without a manifest is a checkpoint", KILLS, "checkpoint/checkpoint_folder.hpp", r'step < end && (std::filesystem::exists\(entry\.path\(\) / "manifest\.json", gone\))', "true"),
    ("the optimizer's state is not loaded", KILLS, "checkpoint/checkpoint_loader.hpp", r"(optimizer_\.set_whole\(to, saved\);)", "saved.state = nullptr; optimizer_.set_whole(to, saved);"),
    ("training goes on a step too late", KILLS, "checkpoint/checkpoint.hpp", r"train\.next_step\((about\.next_step)\);", "about.next_step + 1"),
    ("files are not compared with their fingerprints", DAMAGE, "checkpoint/checkpoint_manifest.hpp", r"&& (fingerprint_of\(file\) == wanted->second)\)", "true"),
    ("the manifest is not compared with its own", DAMAGE, "checkpoint/checkpoint_manifest.hpp", r"return (end == std::string\(before_fingerprint\) \+ right \+ std::string\(after_fingerprint\)) \? right : std::string\(\);", "true"),
    ("a step keeps memory", SOAK, "run/train/trainer.hpp", ENDS, "accumulated_.end_step(next); static thread_local std::vector<std::string> kept; kept.emplace_back(20000, 'x');"),
    ("a step leaves a file open", SOAK, "run/train/trainer.hpp", ENDS, 'accumulated_.end_step(next); if (step_ % 100 == 0 && std::fopen("/dev/null", "r") == nullptr) std::abort();'),
    ("a step draws from the clock", SOAK, "run/train/trainer.hpp", r"(reports_\.add\(next\);)", "next.loss += static_cast<double>(now_ns() % 1000) * 1e-9; reports_.add(next);"),
]


def first_failure(output):
    return next((line for line in output.splitlines() if line.startswith("FAILED")), "")


PROGRAM, ALL = "bin/chevron-torture", [Mutant(name, header, text, instead, f"torture/{kind.split()[0]}.cpp", kind.split(), *unseen)
                                       for name, kind, header, text, instead, *unseen in MUTANTS]


if __name__ == "__main__":
    sys.exit(run(PROGRAM, ALL, options(__doc__), first_failure))
