#!/usr/bin/env python3
"""Does the double of CUDA and NCCL notice what is wrong? Changes chevron's headers in a copy, one mistake at a time, and runs the jobs of
jobs_test.cpp: each must fail. Run by hand, about two minutes each:

    tests/gpu_double/mutants.py --build build              all of them
    tests/gpu_double/mutants.py --build build abort        those whose name contains one of these words

`--build` is a folder in which chevron-gpu-double-tests has been built. The exit code is 1 where a mutant is not found; one whose text is no
longer in the headers is an error, too.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--build", type=pathlib.Path, required=True, help="where chevron-gpu-double-tests has been built")
    how = parser.parse_args()
    target = "bin/chevron-gpu-double-tests"
    listed = subprocess.run(["ninja", "-t", "commands", target], cwd=how.build, capture_output=True, text=True).stdout.splitlines()
    compiles = next(c for c in listed if c.endswith("gpu_double/jobs_test.cpp"))
    links = listed[-1]
    wrong = found = total = 0
    for name, header, text, instead, *unseen in MUTANTS:
        if how.names and not any(n in name for n in how.names):
            continue
        total += 1
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder)
            shutil.copytree(ROOT / "include", place / "include")
            file = place / "include/chevron/run" / header
            words, changes = re.subn(text, instead, file.read_text(), flags=re.DOTALL)
            if changes != 1:
                print(f"{name}: the header has this text {changes} times", flush=True)
                wrong += 1
                continue
            file.write_text(words)
            command = compiles.replace(str(ROOT / "include"), str(place / "include"))
            command = re.sub(r" -o \S+", f" -o {place}/jobs.o", command)
            if subprocess.run(command, shell=True, cwd=how.build).returncode != 0:
                print(f"{name}: does not compile", flush=True)
                wrong += 1
                continue
            command = re.sub(r"\S+/jobs_test\.cpp\.o", f"{place}/jobs.o", links)
            command = re.sub(r" -o \S+", f" -o {place}/tests", command)
            subprocess.run(command, shell=True, cwd=how.build, check=True)
            around = dict(os.environ, TORCH_FR_BUFFER_SIZE="0", OMP_NUM_THREADS="1")
            try:
                ran = subprocess.run([place / "tests", "--no-colors", "--source-file=*/jobs_test.cpp", "--abort-after=1"], env=around, capture_output=True, text=True, errors="replace", timeout=150)
                why = re.search(r"rule broken: .*|values: .*", ran.stdout) if ran.returncode != 0 else None
                verdict = (why.group(0) if why else f"exit code {ran.returncode}") if ran.returncode != 0 else "NOT FOUND"
            except subprocess.TimeoutExpired:
                verdict = "it hangs"
            found += verdict != "NOT FOUND"
            wrong += (verdict == "NOT FOUND") != bool(unseen)
            if verdict == "NOT FOUND" and unseen:
                verdict = f"nothing: {unseen[0]}"
            print(f"{name}: {verdict}", flush=True)
    print(f"\n{found} of {total} found")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
