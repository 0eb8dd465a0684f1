#!/usr/bin/env python3
"""Does the double of CUDA and NCCL notice what is wrong? Puts mistakes into a copy of chevron's headers, each behind a number, and runs the
jobs of jobs_test.cpp, the other tests of the double or what tests/gpu trains there with each of them: each must fail. Run by hand:

    tests/gpu_double/mutants.py --build build              all of them
    tests/gpu_double/mutants.py --build build abort        those whose name contains one of these words
    tests/gpu_double/mutants.py --build build --compile    only compiles them

`--build` is a folder in which chevron-gpu-double-tests has been built. The exit code is 1 where a mutant is not found; one whose text is no
longer in the headers is an error, too.
"""
import pathlib
import re
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from header_mutants import Mutant, doctest_error, options, run

STREAMS = "transports/gpu/cuda_streams.hpp"
GPU = "transports/gpu/gpu_streams.hpp"
COPIES = "transports/gpu/copy_streams.hpp"
CHANNEL = "transports/gpu/copy_channel.hpp"
PAGE = "transports/gpu/copy_page.hpp"
LENT = "transports/gpu/copy_memory.hpp"
DRIVER = "transports/gpu/stream_memory.hpp"
GRAPH = "transports/gpu/cuda_graph.hpp"
METER = "run/execute/memory_meter.hpp"
HOST_COPY = "run/core/host_copy.hpp"
WATCH = "transports/streams/stream_monitor.hpp"
CHANNELS_OF = "transports/streams/stream_channels.hpp"
TRANSPORT = "transports/streams/stream_transport.hpp"
SHARING = "transports/gpu/shared_gpus.hpp"
LIFE = "jobs/signs_of_life.hpp"
FAULT = "transports/streams/stream_fault.hpp"
FAILURE = "run/core/failure.hpp"

# The test that is to notice it: the file, and of jobs_test.cpp the test case, since all of them take minutes.
GRAPHS, MEMORY, CHANNELS, BY_COPIES, LOST, NCCL = "graphs", "memory", "channels", "copies", "lost_rank", "nccl_streams"
WELL, SHARE, THREADS = "jobs: a job over NCCL ends well*", "jobs: ranks that may share GPUs*", "jobs: ranks that are threads of one process*"
BLAME, PEER = "jobs: a rank whose own call fails*", "jobs: a lost peer is the other end*"
BREAKS, PRIORITY, ABSENT = "jobs: a job that breaks*", "jobs: a transfer begins before computation*", "jobs: a channel that a rank does not join*"

CURRENT = "at::Device(at::kCUDA, c10::cuda::current_device())"
TAKES_MEMORY = r"return (\*mine != 0 && capturing\(asks, id\) && id == \*mine);"
LAUNCH = r"(C10_CUDA_CHECK\(cudaGraphLaunch\(ready_, lane_\.stream\(\)\)\);)"
ROOM = r"(wait\(on, flag::taken, receiver, piece - pieces\(\)\);)"
COME = r"(wait\(on, flag::here, sender, piece\);)"
ALL_HERE = r"(wait_for_all\(on, flag::here, number\);)"

# name; header below include/chevron; regular expression, whose groups are statements or expressions; what stands in place of each; test;
# why the test does not find the mutant, if so
MUTANTS = [
    ("abort: communicators one by one", STREAMS, r"(ncclCommAbort\(made\);)", "ncclGroupEnd(); ncclCommAbort(made); ncclGroupStart();", BREAKS),
    ("shares: each is summed for the next rank", STREAMS, r"numbers, type, ncclSum, (rank), c", "(rank + 1) % static_cast<int>(cut.size() - 1)", WELL),
    ("shares: the first rank gives all", STREAMS, r"values\.itemsize\(\), ncclInt8, (rank), c", "0", WELL),
    ("shares: numbers are taken for bytes", STREAMS, r"(numbers \* values\.itemsize\(\)), ncclInt8", "numbers", WELL),
    ("abort: frees while a call waits", STREAMS, r"(idle = inside_ == 0;)", "idle = true;", BREAKS),
    ("destructor: finalizes what is broken", STREAMS, r"\((fault\(\)) \|\| !finalize_all\(\)\)", "detail::stream_fault{}", BREAKS,
     "every failure aborts first; this is for a fault in the microseconds between"),
    ("destructor: destroys what it did not finalize", STREAMS, r"(ncclCommFinalize\(m\.comm\) == ncclSuccess)", "m.comm != nullptr", WELL),
    ("communicators do not block, and nobody waits for NCCL's thread", STREAMS, r"(config\.blocking = 1;).*return (r != ncclSuccess);",
     ("config.blocking = 0;", "r != ncclSuccess && r != ncclInProgress"), WELL),
    ("call: goes on after abort", STREAMS, r"if \((stopped_ \|\| fault_)\) return;", "bool(fault_)", NCCL),
    ("call: goes on after a fault", STREAMS, r"if \((stopped_ \|\| fault_)\) return;", "stopped_.load()", NCCL),
    ("call: keeps the watch out while it connects", STREAMS, r"(ncclGroupStart\(\);)\n    ncclResult_t const asked[^\n]*\n    ncclResult_t const end = (ncclGroupEnd\(\));",
     ("mutex_.lock(); ncclGroupStart();", "[&] { std::unique_lock const inside(mutex_, std::adopt_lock); return ncclGroupEnd(); }()"), BREAKS),
    ("fault: asynchronous errors are not asked for", STREAMS, r"(ncclCommGetAsyncError\(m\.comm, &state\) == ncclSuccess && bad\(state\))", "false", BREAKS),
    ("streams are made on the current device", GPU, r"explicit stream\(at::Device on\) \{\n\s+c10::cuda::CUDAGuard const here\((on)\);", CURRENT, THREADS),
    ("events are made on the current device", GPU, r"explicit event\(at::Device on\) \{\n\s+c10::cuda::CUDAGuard const here\((on)\);", CURRENT, THREADS),
    ("channels take half of the GPU", STREAMS, r"if \(most > 0\) (config\.maxCTAs = most;)", "config.minCTAs = config.maxCTAs = 64;", WELL),
    ("messages take as many blocks as NCCL likes", STREAMS, r"channel_use::edge \? (limits_\.edge)", "0", WELL),
    ("sums take one block", STREAMS, r"channel_use::sum \? (limits_\.sum)", "limits_.gather", WELL),
    ("communicators have no names", STREAMS, r"\}\) (config\.commName = name;)", "", WELL),
    ("the monitor's thread stays on GPU 0", GPU, r"void enter_thread\(\) \{ (c10::cuda::set_device\(device_\.index\(\)\);) \}", "", WELL),
    ("transfers come after all computation", GPU, r"cudaStreamNonBlocking, (greatest)\)", "least", PRIORITY),
    ("a channel that is not joined has no name", CHANNELS_OF, r"words_\.emplace_back\((\"the other end of channel '\" \+ name \+ \"'\")\)",
     "std::string(\"the other end of a channel\")", ABSENT),
    ("a channel that is not joined has no peer", CHANNELS_OF, r"mine\{\.peer = (peer), \.words = words_", "-1", ABSENT),
    ("sharing GPUs: all ranks pretend", SHARING, r"if \((!detail::machine_shares_gpus\(all, static_cast<std::size_t>\(where\.global_rank\)\))\) return false;", "false", SHARE),
    ("sharing GPUs: no rank pretends", SHARING, r"return (std::adjacent_find\(gpus\.begin\(\), gpus\.end\(\)\) != gpus\.end\(\));", "false", SHARE),
    ("sharing GPUs: ranks of other machines count", SHARING, r"if \((each\.machine == all\[me\]\.machine)\) ", "true", SHARE),
    ("lost ranks: signs of life end when all have met", TRANSPORT, r"all_have_met\((breaks_connections)\)", "true", LOST),
    ("lost ranks: a stopped process counts as lost", LIFE, r" \|\| (exists_here\(seen_\.substr\(seen_\.find\(' '\) \+ 1\)\))", "false", LOST),
    ("lost ranks: a zombie counts as alive", LIFE, r"(words\[name \+ 2\] != 'Z' && words\[name \+ 2\] != 'X')", "true", LOST),
    ("computation does not wait for what comes", GPU, r"(C10_CUDA_CHECK\(cudaStreamWaitEvent\(current\(\), e\.get\(\), 0\)\);)", "", WELL),
    ("watch: no deadline for operations", WATCH, r"bool const late = (waits_for != 0) &&", "false", BREAKS),
    ("watch: the program's deadline is not told", TRANSPORT, r"(watch_\.deadline\(longest_wait\);)", "", BREAKS),
    ("results of a failed call are used", CHANNELS_OF, r"(check_streams\(mine\);)\n    check\(mine\);\n  \}", "", BREAKS),
    ("blame: a failed call is taken for a lost peer", STREAMS, r"\.of_others = (r == ncclRemoteError)", "true", BLAME),
    ("blame: a lost peer is taken for a failed call", STREAMS, r"\.of_others = (r == ncclRemoteError)", "false", PEER),
    ("blame: NCCL's own text is left out", STREAMS, r"more = (ncclGetLastError\(comm\));", '""', BLAME),
    ("blame: the text only of communicators that are there", STREAMS, r"more = (ncclGetLastError\(comm\));", 'comm != nullptr ? ncclGetLastError(comm) : ""', BLAME),
    ("blame: a group's end is not told from the call", STREAMS, r'\((at_group_end) \? ', "false", BLAME),
    ("blame: no id is published all the same", STREAMS, r"if \(ncclResult_t const result = ncclGetUniqueId\(&id\); (bad\(result\))\)", "false", BLAME),
    ("blame: the peer of the oldest wait", FAULT, r"\.rank = fault\.of_others \? (fault\.peer) : rank", "about.peer", PEER),
    ("blame: a channel has no peer", CHANNELS_OF, r"use, rank, size, (peer), \[this\]", "-1", PEER),
    ("blame: the rank at fault is given up", FAULT, r"(out\.by_itself = !fault\.of_others;)", "", BLAME),
    ("blame: other ranks do not learn that it found the fault itself", FAILURE, r"\.by_itself = (field\[6\] == \"1\")\}", "false", BLAME),
    ("watch: host calls are not watched", WATCH, r"(owner_\.call_order_ = \+\+owner_\.asked_;)", "", BREAKS),
    ("watch: nothing is ended", WATCH, r"(streams_->abort\(\);)\n      \}\n      hold\.lock", "", BREAKS),
    ("watch: what it has seen done is asked for anew", WATCH, r"(p->seen_done_ = true;)", "", BY_COPIES),
    ("transfers do not wait for computation", GPU, r"(C10_CUDA_CHECK\(cudaStreamWaitEvent\(on\.get\(\), e\.get\(\), 0\)\);)", "", GRAPHS),
    ("graph: its memory is everybody's", GRAPH, TAKES_MEMORY, "false", GRAPHS),
    ("graph: takes the memory of all streams", GRAPH, TAKES_MEMORY, "true", GRAPHS),
    ("graph: the other lane is not joined", GRAPH, r"if \((on\.two\(\))\) join\(lane, c10::cuda::CUDAStream\(on\.stream\(1\)\)\);\n", "false", GRAPHS,
     "autograd's engine and the end of a pair have joined it already"),
    ("graph: a capture forbids all threads", GRAPH, r"(cudaStreamCaptureModeThreadLocal)\)\);", "cudaStreamCaptureModeGlobal", GRAPHS),
    ("graph: the pool stays open", GRAPH, r"if \((allocating_)\) c10::cuda::CUDACachingAllocator::endAllocateToPool", "false", GRAPHS),
    ("graph: the pool goes back while it is used", GRAPH, r"(under_way_ = true;)",
     "under_way_ = true; c10::cuda::CUDACachingAllocator::releasePool(pool_->device, pool_->id);", GRAPHS),
    ("graph: launched on another stream", GRAPH, LAUNCH, "C10_CUDA_CHECK(cudaGraphLaunch(ready_, nullptr));", GRAPHS),
    ("graph: a capture that failed goes on", GRAPH, r"if \((under_way_)\) give_up\(\);", "false", GRAPHS),
    ("graph: launched once only", GRAPH, LAUNCH,
     "static thread_local std::unordered_set<cudaGraphExec_t> seen; if (seen.insert(ready_).second) C10_CUDA_CHECK(cudaGraphLaunch(ready_, lane_.stream()));", GRAPHS),
    ("meter: outputs in main memory are taken for the device's", METER, r"(t\.is_cpu\(\)) \? 0 : ", "false", MEMORY),
    ("meter: workspaces of the first step stay", METER, r"if \((steps_ < 2 && \+\+steps_ == 2)\)", "false", MEMORY),
    ("copies: a flag comes before its piece", CHANNEL, ROOM, "wait(on, flag::taken, receiver, piece - pieces()); write(on, flag::here, receiver, piece);", CHANNELS),
    ("copies: the receiver takes what has not come", CHANNEL, COME, "", CHANNELS),
    ("copies: room is used again before it is free", CHANNEL, ROOM, "", CHANNELS),
    ("copies: room for one piece less than there is", CHANNEL, ROOM, "wait(on, flag::taken, receiver, piece - pieces() + 1);", CHANNELS),
    ("copies: room for one piece more than there is", CHANNEL, ROOM, "wait(on, flag::taken, receiver, piece - pieces() - 1);", CHANNELS),
    ("copies: room is told free before it is", CHANNEL, COME, "wait(on, flag::here, sender, piece); write(on, flag::taken, sender, piece);", CHANNELS),
    ("copies: waits for equal numbers", DRIVER, r"(CU_STREAM_WAIT_VALUE_GEQ)", "CU_STREAM_WAIT_VALUE_EQ", CHANNELS),
    ("copies: numbers do not go round", CHANNEL, r"return (page_->mine\(\)\.first \+ static_cast<std::uint32_t>\(count\));",
     "static_cast<std::uint32_t>(std::min<std::uint64_t>(page_->mine().first + count, 0xffffffff))", CHANNELS),
    ("copies: a tensor that begins within a piece begins at its front", CHANNEL, r"filled \+= (\(bytes \+ 15\) / 16 \* 16);", "bytes == piece ? piece : 0", CHANNELS),
    ("copies: abort forgets a kind of flag", CHANNEL, r"beyond = .*?for \(flag const which : \{flag::here, flag::reduced, (flag::taken)\}", "flag::reduced", CHANNELS),
    ("copies: abort forgets the flags of the last rank", CHANNEL, r"beyond = .*?r < (size\(\)); \+\+r\) page_->host_flag\(which, r, rank", "size() - 1", CHANNELS),
    ("copies: abort ends everybody's waits", CHANNEL, r"(page_->host_flag\(which, r, rank\(\)\)\.store\(beyond\);)",
     "for (int w = 0; w < size(); ++w) page_->host_flag(which, r, w).store(beyond);", CHANNELS),
    ("copies: abort writes flags once", COPIES, r"(for \(auto const& each : channels_\) each->end_waits\(\);)",
     "if (static bool once = true; std::exchange(once, false)) for (auto const& each : channels_) each->end_waits();", CHANNELS),
    ("copies: abort does not look for calls under way", COPIES, r"(idle = inside_ == 0;)", "idle = true;", CHANNELS,
     "calls that put work on ended streams find their flags beyond; this is for memory that is freed meanwhile"),
    ("copies: an ended rank's numbers count", COPIES, r"\[\]\(auto const& each\) \{ return (each->is_sound\(\)); \}", "true", CHANNELS),
    ("copies: work is put on ended streams", COPIES, r"good_ = (!of_\.stopped_ && !of_\.fault_);", "true", CHANNELS),
    ("copies: sums in an order of each rank's own", CHANNEL,
     r"copy\(in_values\(me\), in_memory\((0), me\), bytes\);\n\s+for \(int r = 1; r < size\(\); \+\+r\) total\.add_\(on_gpu\(in_memory\((r), me\)", ("me", "(me + r) % size()"), CHANNELS),
    ("copies: a share is taken before it is added", CHANNEL, r"(wait\(on, flag::reduced, r, number\);)", "", CHANNELS),
    ("copies: a part of a sum is laid over what others still take", CHANNEL, r"(wait_for_all\(on, flag::taken, number - 1\);)  // until all have read this rank's previous piece", "", CHANNELS),
    ("copies: the room of a reduce-scatter is told free before it is added up", CHANNEL, ALL_HERE,
     "wait_for_all(on, flag::here, number); if (!takes) write_to_all(on, flag::taken, number);", CHANNELS),
    ("copies: shares are given before they are laid out", CHANNEL, r"if \((adds \|\| share == me)\) copy", "adds", CHANNELS),
    ("copies: parts are added before they are there", CHANNEL, ALL_HERE, "", CHANNELS),
    ("copies: room of a gather is used again before all have it", CHANNEL, r"(wait_for_all\(on, flag::taken, number - 1\);)\n    copy\(page_->room", "", CHANNELS),
    ("host reads: into memory that is not pinned", HOST_COPY, r"(row\.to\(at::kCPU, row\.scalar_type\(\), /\*non_blocking=\*/true\))", "values.cpu()", CHANNELS),
    ("host reads: before the copy is done", HOST_COPY, r"(if \(copied_\) wait_for\(\*copied_\);)", "", CHANNELS),
    ("copies: by CUDA's runtime", CHANNEL, r"(at::bitwise_or_out\(into, on_gpu\(from, elements, type\), 0\);)",
     "cudaMemcpyAsync(to, from, into.nbytes(), cudaMemcpyDeviceToDevice, c10::cuda::getCurrentCUDAStream());", BY_COPIES),
    ("copies: rank threads may share a GPU", CHANNEL, r"(refuse_shared_gpu\(\);)\n", "", CHANNELS),
    ("copies: memory is freed while others may write to it", LENT, r"if \((each\.page->of\(r\)\.ready != 0 && each\.page->of\(r\)\.left == 0)\) return false;", "false", BY_COPIES),
    ("copies: memory is never freed", LENT, r"(free_what_nobody_reaches\(\);)\n", "", BY_COPIES),
    ("copies: main memory stays registered", PAGE, r"if \((seen_ != nullptr)\) C10_CUDA_CHECK_WARN\(cudaHostUnregister\(file_->memory\(\)\)\);", "false", BY_COPIES),
    ("copies: handles stay open", LENT, r"(for \(void\* const opened : opened_\) C10_CUDA_CHECK_WARN\(cudaIpcCloseMemHandle\(opened\)\);)", "", BY_COPIES),
    ("copies: peers are not asked", LENT, r"if \((can == 0)\)", "false", BY_COPIES,
     "processes reach each other by handles, which the driver refuses by itself"),
]
SOURCES = {file: f"gpu_double/{file}_test.cpp" for file in ("jobs", LOST, CHANNELS, BY_COPIES, NCCL)}
SOURCES |= dict.fromkeys((GRAPHS, MEMORY), "rehearsed/copy_transport_test.cpp")


def of_test(name, header, text, instead, test, *unseen):
    file, _, case = test.partition(": ")
    only = [f"--test-case={case}"] if case else []
    return Mutant(name, header, text, instead, SOURCES[file], ["--no-colors", f"--source-file=*/{file}_test.cpp", "--abort-after=1", *only], *unseen)


PROGRAM, ALL = "bin/chevron-gpu-double-tests", [of_test(*row) for row in MUTANTS]


def broken_rule(output):
    why = re.search(r"rule broken: .*", output)
    late = re.search(r"values: .* did not end within .*", output)  # gpu_double/within.hpp
    return why.group(0) if why else late.group(0) if late else doctest_error(output)


if __name__ == "__main__":
    sys.exit(run(PROGRAM, ALL, options(__doc__), broken_rule))
