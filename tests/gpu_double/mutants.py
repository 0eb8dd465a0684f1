#!/usr/bin/env python3
"""Does the double of CUDA and NCCL notice what is wrong? Changes chevron's headers in a copy, one mistake at a time, and runs the jobs of
jobs_test.cpp or what tests/gpu trains there: each must fail. Run by hand, about two minutes each:

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
GRAPH = "cuda/cuda_graph.hpp"
METER = "execution/memory_meter.hpp"
WATCH = "comm/streams/stream_watch.hpp"

JOBS, GRAPHS, MEMORY = "jobs", "graphs", "memory"  # the test that is to notice it

# name; header below include/chevron/run; regular expression; what stands in its place; test; why it does not show it, if so
MUTANTS = [
    ("abort: communicators one by one", STREAMS, r"    ncclGroupStart\(\);\n(    while \(true\) \{.*?\n    \}\n)    ncclGroupEnd\(\);", r"\1", JOBS),
    ("abort: frees while a call waits", STREAMS, r"idle = inside_ == 0;", "idle = true;", JOBS),
    ("destructor: finalizes what is broken", STREAMS, r"fault\(\)\.empty\(\) && finalize_all\(\)", "finalize_all()", JOBS,
     "every failure aborts first; this is for a fault in the microseconds between"),
    ("destructor: destroys what it did not finalize", STREAMS, r"ncclCommFinalize\(m\.comm\) == ncclSuccess", "m.comm != nullptr", JOBS),
    ("communicators do not block, and nobody waits for NCCL's thread", STREAMS, r"config\.blocking = 1;(.*)return r != ncclSuccess;",
     r"config.blocking = 0;\1return r != ncclSuccess && r != ncclInProgress;", JOBS),
    ("call: goes on after abort", STREAMS, r"if \(stopped_ \|\| !fault_\.empty\(\)\) return;", "", JOBS,
     "the transport looks for failures before each call; this is for an abort in the microseconds between"),
    ("call: keeps the watch out while it connects", STREAMS, r"(    c10::cuda::CUDAGuard const here\(device_\);\n    ncclGroupStart\(\);.*?= ncclGroupEnd\(\);\n)",
     r"    std::unique_lock outside(mutex_);\n\1    outside.unlock();\n", JOBS),
    ("fault: asynchronous errors are not asked for", STREAMS, r"ncclCommGetAsyncError\(m\.comm, &state\) == ncclSuccess && bad\(state\)", "false", JOBS),
    ("streams are made on the current device", STREAMS, r"explicit stream\(at::Device on\) \{\n\s+c10::cuda::CUDAGuard const here\(on\);", "explicit stream(at::Device) {", JOBS),
    ("events are made on the current device", STREAMS, r"explicit event\(at::Device on\) \{\n\s+c10::cuda::CUDAGuard const here\(on\);", "explicit event(at::Device) {", JOBS),
    ("channels take half of the GPU", STREAMS, r"if \(most > 0\) config\.maxCTAs = most;", "static_cast<void>(most), config.minCTAs = config.maxCTAs = 64;", JOBS),
    ("computation does not wait for what comes", STREAMS, r"C10_CUDA_CHECK\(cudaStreamWaitEvent\(current\(\), e\.get\(\), 0\)\);", "static_cast<void>(e);", JOBS),
    ("watch: no deadline for operations", WATCH, r"bool const late = waits_for != 0 &&", "bool const late = false &&", JOBS),
    ("watch: host calls are not watched", WATCH, r"owner_\.call_order_ = \+\+owner_\.asked_;", "", JOBS),
    ("watch: nothing is ended", WATCH, r"streams_->abort\(\);\n      \}\n      hold\.lock", "}\n      hold.lock", JOBS),
    ("transfers do not wait for computation", STREAMS, r"C10_CUDA_CHECK\(cudaStreamWaitEvent\(on\.get\(\), e\.get\(\), 0\)\);", "static_cast<void>(on), static_cast<void>(e);", GRAPHS),
    ("graph: its memory is everybody's", GRAPH, r"return \*mine != 0 && capturing\(asks, id\) && id == \*mine;", "static_cast<void>(asks), static_cast<void>(id); return false;", GRAPHS),
    ("graph: takes the memory of all streams", GRAPH, r"return \*mine != 0 && capturing\(asks, id\) && id == \*mine;", "static_cast<void>(asks), static_cast<void>(id); return true;", GRAPHS),
    ("graph: the other lane is not joined", GRAPH, r"    join\(lane, c10::cuda::CUDAStream\(on\.stream\(1\)\)\);\n", "", GRAPHS,
     "autograd's engine and the end of a pair have joined it already"),
    ("graph: a capture forbids all threads", GRAPH, r"cudaStreamCaptureModeThreadLocal\)\);", "cudaStreamCaptureModeGlobal));", GRAPHS),
    ("graph: the pool stays open", GRAPH, r"if \(allocating_\) (c10::cuda::CUDACachingAllocator::endAllocateToPool)", r"if (false) \1", GRAPHS),
    ("graph: the pool goes back while it is used", GRAPH, r"(under_way_ = true;)", r"\1 c10::cuda::CUDACachingAllocator::releasePool(pool_->device, pool_->id);", GRAPHS),
    ("graph: launched on another stream", GRAPH, r"cudaGraphLaunch\(ready_, lane_\.stream\(\)\)", "cudaGraphLaunch(ready_, nullptr)", GRAPHS),
    ("graph: a capture that failed goes on", GRAPH, r"if \(under_way_\) give_up\(\);", "", GRAPHS),
    ("graph: launched once only", GRAPH, r"void launch\(\) override \{ C10", "bool once_ = true;\n    void launch() override { if (std::exchange(once_, false)) C10", GRAPHS),
    ("meter: outputs in main memory are taken for the device's", METER, r"t\.is_cpu\(\) \? 0 : ", "", MEMORY),
    ("meter: workspaces of the first step stay", METER, r"if \(steps_ < 2 && \+\+steps_ == 2\)", "if (false)", MEMORY),
]
SOURCES = {JOBS: "gpu_double/jobs_test.cpp", GRAPHS: "rehearsed/graphs_test.cpp", MEMORY: "rehearsed/graphs_test.cpp"}


def broken_rule(output):
    why = re.search(r"rule broken: .*|values: .*", output)
    return why.group(0) if why else ""


if __name__ == "__main__":
    all_of = [Mutant(name, header, text, instead, SOURCES[test], ["--no-colors", f"--source-file=*/{test}_test.cpp", "--abort-after=1"], *unseen)
              for name, header, text, instead, test, *unseen in MUTANTS]
    sys.exit(run("bin/chevron-gpu-double-tests", all_of, options(__doc__), broken_rule, longest=150))
