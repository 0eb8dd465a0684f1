#!/usr/bin/env python3
"""Which calls of CUDA's runtime wait while a stream of the same process waits for a message, and which of them keep other threads of the
process from the GPU meanwhile? A rank that is in such a call cannot be ended by its monitor, and ranks that are threads of one process wait
for each other for ever. A stream waits for a flag in memory (cuStreamWaitValue32); a thread makes the call; a second one asks the GPU for
something on another stream; then the flag is written.

And: how many operations does a stream take behind such a wait, before the call for one more waits? Which operations on another stream stand
behind an operation of the stream that waits, though nothing orders them?

    python3 bench/gpu/calls_that_wait.py
"""
import ctypes
import sys
import threading
import time

import torch

import cuda_runtime

PATIENCE = 0.4  # seconds: a call that takes longer waits for the stream
MOST = 20_000  # operations


def main():
    runtime = cuda_runtime.load()
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, size, kind = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def call(name, *given):
        code = getattr(runtime, name)(*given)
        if code != 0:
            raise RuntimeError(f"{name} failed with {code}")

    def stream():
        made = pointer()
        call("cudaStreamCreateWithFlags", ctypes.byref(made), 1)
        return made

    def host(count):
        made = pointer()
        call("cudaHostAlloc", ctypes.byref(made), size(count), 0)
        return made

    def device(count):
        made = pointer()
        call("cudaMalloc", ctypes.byref(made), size(count))
        return made

    on, other = stream(), stream()
    word = host(4096)
    flag, beside_word = ctypes.c_uint32.from_address(word.value), ctypes.c_uint64(word.value + 64)
    mib = 1 << 20
    there, there_too, pinned, pageable = device(4 * mib), device(4 * mib), host(4 * mib), ctypes.create_string_buffer(4 * mib)
    event = pointer()
    call("cudaEventCreateWithFlags", ctypes.byref(event), 2)
    spare_stream, spare_block, spare_pinned = stream(), device(mib), host(mib)

    def hold():
        flag.value = 0
        if driver.cuStreamWaitValue32_v2(on, ctypes.c_uint64(word.value), ctypes.c_uint32(1), ctypes.c_uint(0)) != 0:
            raise RuntimeError("cuStreamWaitValue32 failed")
        call("cudaEventRecord", event, on)

    def copy(to, source, count, way, where=on):
        return lambda: call("cudaMemcpyAsync", to, source, size(count), kind(way), where)

    def probe():
        """\\returns a thread that asks for work on another stream, and whether its call came back in time"""
        asked = threading.Thread(target=lambda: call("cudaMemsetAsync", there_too, 0, size(64), other), daemon=True)
        asked.start()
        asked.join(PATIENCE)
        return asked, not asked.is_alive()

    made = pointer()
    calls = [
        ("cudaMemcpyAsync to the host, 64 bytes, not pinned", copy(pageable, there, 64, 2)),
        ("cudaMemcpyAsync to the host, 64 bytes, pinned", copy(pinned, there, 64, 2)),
        ("cudaMemcpyAsync to the device, 64 bytes, not pinned", copy(there, pageable, 64, 1)),
        ("cudaMemcpyAsync to the device, 4 MiB, not pinned", copy(there, pageable, 4 * mib, 1)),
        ("cudaStreamSynchronize", lambda: call("cudaStreamSynchronize", on)),
        ("cudaEventSynchronize", lambda: call("cudaEventSynchronize", event)),
        ("cudaDeviceSynchronize", lambda: call("cudaDeviceSynchronize")),
        ("cudaStreamQuery", lambda: runtime.cudaStreamQuery(on)),
        ("cudaMalloc, 1 MiB", lambda: call("cudaMalloc", ctypes.byref(made), size(mib))),
        ("cudaMalloc, 1 GiB", lambda: call("cudaMalloc", ctypes.byref(made), size(1024 * mib))),
        ("cudaFree", lambda: call("cudaFree", spare_block)),
        ("cudaHostAlloc, 1 KiB", lambda: call("cudaHostAlloc", ctypes.byref(made), size(1024), 0)),
        ("cudaHostAlloc, 64 MiB", lambda: call("cudaHostAlloc", ctypes.byref(made), size(64 * mib), 0)),
        ("cudaFreeHost", lambda: call("cudaFreeHost", spare_pinned)),
        ("cudaStreamCreate", lambda: call("cudaStreamCreateWithFlags", ctypes.byref(made), 1)),
        ("cudaStreamDestroy, of an idle stream", lambda: call("cudaStreamDestroy", spare_stream)),
    ]
    print(f"{'call':56} {'waits':>6} {'keeps others out':>17}")
    for name, make in calls:
        hold()
        asked = threading.Thread(target=make, daemon=True)
        asked.start()
        asked.join(PATIENCE)
        waits = asked.is_alive()
        second, passed = probe()
        flag.value = 1
        asked.join(10)
        second.join(10)
        if asked.is_alive() or second.is_alive():
            sys.exit(f"{name} did not end")
        print(f"{name:56} {'yes' if waits else 'no':>6} {'no' if passed else 'yes':>17}", flush=True)
        call("cudaDeviceSynchronize")

    print(f"\n{'operation behind a wait':56} {'taken':>6} {'keeps others out':>17}")
    operations = [
        ("cudaMemcpyAsync on the device, 64 bytes", copy(there, there_too, 64, 3)),
        ("cudaMemcpyAsync on the device, 4 MiB", copy(there, there_too, 4 * mib, 3)),
        ("cudaMemsetAsync, 64 bytes", lambda: call("cudaMemsetAsync", there, 0, size(64), on)),
        ("cuStreamWriteValue32", lambda: driver.cuStreamWriteValue32_v2(on, beside_word, ctypes.c_uint32(1), ctypes.c_uint(0))),
    ]
    for name, make in operations:
        hold()
        count = [0]

        def ask():
            while count[0] < MOST and flag.value == 0:
                make()
                count[0] += 1

        asked = threading.Thread(target=ask, daemon=True)
        asked.start()
        before = -1
        while asked.is_alive() and count[0] != before:
            before = count[0]
            time.sleep(PATIENCE)
        taken, full = count[0], asked.is_alive()
        second, passed = probe()
        flag.value = 1
        asked.join(10)
        second.join(10)
        print(f"{name:56} {taken if full else f'> {taken}':>6} {'no' if passed else 'yes':>17}", flush=True)
        call("cudaDeviceSynchronize")

    third, fourth, pinned_too = device(4 * mib), device(4 * mib), host(4 * mib)
    done, number = pointer(), torch.zeros(1, device="cuda")
    call("cudaEventCreateWithFlags", ctypes.byref(done), 2)

    def kernel(where):
        with torch.cuda.stream(torch.cuda.ExternalStream(where.value)):
            number.add_(1)

    kernel(other)
    call("cudaDeviceSynchronize")
    kinds = {
        "on device": lambda where, a, b, h: copy(a, b, 4096, 3, where)(),
        "to device": lambda where, a, b, h: copy(a, h, 4096, 1, where)(),
        "to host": lambda where, a, b, h: copy(h, a, 4096, 2, where)(),
        "memset": lambda where, a, b, h: call("cudaMemsetAsync", a, 0, size(4096), where),
        "kernel": lambda where, a, b, h: kernel(where),
    }
    print("\nbehind an operation of the stream that waits (rows) stands one of another stream (columns)")
    print(f"{'':12} " + " ".join(f"{name:>10}" for name in kinds))
    for first in kinds:
        row = []
        for second in kinds:
            hold()
            kinds[first](on, there, there_too, pinned)
            kinds[second](other, third, fourth, pinned_too)
            call("cudaEventRecord", done, other)
            until = time.monotonic() + PATIENCE
            while runtime.cudaEventQuery(done) != 0 and time.monotonic() < until:
                time.sleep(0.001)
            row.append("no" if runtime.cudaEventQuery(done) == 0 else "yes")
            flag.value = 1
            call("cudaDeviceSynchronize")
        print(f"{first:12} " + " ".join(f"{each:>10}" for each in row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
