#!/usr/bin/env python3
"""Which streams of a rank wait for each other though nothing orders them? A GPU takes the work of its streams through a few queues, so two of
them may share one; a receive that waits for a send behind it would wait for ever. Makes the streams that a rank has, in the order it makes them,
keeps each busy for some milliseconds in turn, and sees which of the others come to an end late. The last line says how many pairs do.
"""
import ctypes
import sys
import time

import torch

import cuda_runtime

BUSY = 20_000_000  # cycles: about 10 ms
LATE = 0.005  # seconds


def main():
    runtime = cuda_runtime.load()

    def made(priority):
        handle = ctypes.c_void_p()
        if runtime.cudaStreamCreateWithPriority(ctypes.byref(handle), 1, priority) != 0:
            sys.exit("cudaStreamCreateWithPriority failed")
        return torch.cuda.ExternalStream(handle.value)

    least, highest = ctypes.c_int(), ctypes.c_int()
    runtime.cudaDeviceGetStreamPriorityRange(ctypes.byref(least), ctypes.byref(highest))
    streams = {"context of NCCL": made(0)}

    def line(name):
        """A stream of Chevron's, and the two of NCCL's own that its communicator makes."""
        streams[name] = made(highest.value)
        for inner in ("host", "device"):
            streams[f"{name}, NCCL's for the {inner}"] = made(0)

    line("gathers")
    line("sums")
    for lane in range(2):
        streams[f"lane {lane}"] = torch.cuda.Stream()
    for edge in ("to the next", "from the next", "to the previous", "from the previous"):
        line(edge)
    values = {name: torch.zeros(1, device="cuda") for name in streams}
    for name, stream in streams.items():
        with torch.cuda.stream(stream):
            values[name].add_(1)
            torch.cuda._sleep(1000)
    torch.cuda.synchronize()

    helper = torch.cuda.Stream()
    # Two kernels, of which the second waits for the first: in its stream, or for an event of it on another, as NCCL does.
    waiting = []
    for through_event in (False, True):
        for busy, on_busy in streams.items():
            for other, on_other in streams.items():
                if busy == other:
                    continue
                with torch.cuda.stream(on_busy):
                    torch.cuda._sleep(BUSY)
                    if through_event:
                        between = torch.cuda.Event()
                        between.record()
                        helper.wait_event(between)
                        behind = torch.cuda.Event()
                        behind.record(helper)
                        on_busy.wait_event(behind)
                    torch.cuda._sleep(BUSY)
                done = torch.cuda.Event()
                with torch.cuda.stream(on_other):
                    values[other].add_(1)
                    done.record()
                began = time.perf_counter()
                done.synchronize()
                if time.perf_counter() - began > LATE:
                    waiting.append((busy, other))
                    print(f"{other} waits for {busy}{', by an event' if through_event else ''}", flush=True)
                torch.cuda.synchronize()
    print(f"{len(streams)} streams; {len(waiting)} of {2 * len(streams) * (len(streams) - 1)} pairs wait")
    return 1 if waiting else 0


if __name__ == "__main__":
    sys.exit(main())
