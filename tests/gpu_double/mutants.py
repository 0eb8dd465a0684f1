#!/usr/bin/env python3
"""Does the double of CUDA and NCCL notice what is wrong? Changes chevron's headers in a copy, one mistake at a time, and runs the jobs of
jobs_test.cpp: each must fail. Run by hand, about two minutes each:

    tests/gpu_double/mutants.py --build build              all of them
    tests/gpu_double/mutants.py --build build abort        those whose name contains one of these words

`--build` is a folder in which chevron-gpu-double-tests has been built. The exit code is 1 where a mutant is not found; one whose text is no
longer in the headers is an error, too.
"""
import pathlib
import re
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from header_mutants import Mutant, options, run

STREAMS = "cuda/cuda_streams.hpp"
WATCH = "comm/streams/stream_watch.hpp"
TRANSPORT = "comm/streams/stream_transport.hpp"
MESSAGES = "comm/streams/stream_messages.hpp"

# name; header below include/chevron/run; regular expression; what stands in its place; why no job shows it, if none does
MUTANTS = [
    ("abort: communicators one by one", STREAMS, r"ncclGroupStart\(\);\n(    for \(ncclComm_t const comm : std::exchange.*?\n)    ncclGroupEnd\(\);", r"\1"),
    ("destructor: finalizes what is not joined", STREAMS, r"all_settled\(\) && finalize_all\(\)", "finalize_all()"),
    ("call: does not wait until it is connected", STREAMS, r"if \(result == ncclInProgress\)\n", "if (false)\n"),
    ("call: goes on after abort", STREAMS, r"if \(stopped_ \|\| !fault_\.empty\(\)\) return;", "",
     "the transport looks for failures before each call; this is for an abort in the microseconds between"),
    ("call: keeps the watch out while it connects", STREAMS, r"(settle\(\n\s+c\.comm, )\[\] \{ return false; \}", r"\1[this] { std::lock_guard const hold(mutex_); std::this_thread::sleep_for(std::chrono::minutes(1)); return false; }"),
    ("connect: does not wait until all have joined", STREAMS, r"    settle\(out\.comm, stop\);\n", ""),
    ("settle: asks NCCL without the lock", STREAMS, r"std::lock_guard const hold\(mutex_\);(\n\s+if \(stopped_\) return false;)", r"\1"),
    ("fault: asynchronous errors are not asked for", STREAMS, r"ncclCommGetAsyncError\(comm, &state\) == ncclSuccess && bad\(state\)", "false"),
    ("watch: no deadline for operations", WATCH, r"bool const late = waits_for != 0 &&", "bool const late = false &&"),
    ("watch: host calls are not watched", WATCH, r"owner_\.call_order_ = \+\+owner_\.asked_;", ""),
    ("watch: nothing is ended", WATCH, r"streams_->abort\(\);\n      \}\n      hold\.lock", "}\n      hold.lock"),
]


def broken_rule(output):
    why = re.search(r"rule broken: .*|values: .*", output)
    return why.group(0) if why else ""


if __name__ == "__main__":
    arguments = ["--no-colors", "--source-file=*/jobs_test.cpp", "--abort-after=1"]
    all_of = [Mutant(name, header, text, instead, "gpu_double/jobs_test.cpp", arguments, *unseen)
              for name, header, text, instead, *unseen in MUTANTS]
    sys.exit(run("bin/chevron-gpu-double-tests", all_of, options(__doc__), broken_rule, longest=150))
