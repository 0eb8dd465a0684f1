"""Describe + prove + lower at P=64, M=256 beside PyTorch's generate + validate + add communication, in one run, alternating.

    .venv/bin/python bench/run/plan_beside_torch.py [build folder]
"""
import json
import statistics
import subprocess
import sys
import time

from torch.distributed.pipelining import schedules

ranks, micro_batches, rounds = 64, 256, 3
bench = (sys.argv[1] if len(sys.argv) > 1 else "build") + "/bin/bench-plan"
torch_classes = {
    "LoopedBFS": schedules.ScheduleLoopedBFS,
    "Interleaved1F1B": schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": schedules.ScheduleZBVZeroBubble,
}


def torch_seconds(name):
    """One run of what torch does when it builds a schedule, without its stages: orders, validation, sends and receives."""
    chunks = 2
    bare = object.__new__(torch_classes[name])
    bare.pp_group_size, bare.n_local_stages, bare._n_microbatches = ranks, chunks, micro_batches
    bare._num_stages = bare.num_stages = ranks * chunks
    bare._stages = [None] * chunks
    bare.number_of_rounds = max(1, micro_batches // ranks)
    bare.microbatches_per_round = micro_batches // bare.number_of_rounds
    zig_zag = name == "ZBVZeroBubble"
    rank_of = {s: (s if s < ranks else 2 * ranks - 1 - s) if zig_zag else s % ranks for s in range(ranks * chunks)}
    begin = time.perf_counter()
    orders = {}
    for rank in range(ranks):
        bare.rank = rank
        orders[rank] = [a for a in bare._calculate_single_rank_operations(rank) if a is not None]
    schedules._validate_schedule(orders, ranks, ranks * chunks, micro_batches)
    schedules._add_send_recv(orders, stage_to_rank=lambda s: rank_of[s], num_stages=ranks * chunks)
    return time.perf_counter() - begin


def our_seconds(name):
    done = subprocess.run([bench, f"--benchmark_filter=^{name}$", "--benchmark_format=json", "--benchmark_min_time=0.2"],
                          capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)["benchmarks"][0]["real_time"] * 1e-3


print(f"P={ranks}, V=2, M={micro_batches}: median of {rounds}, alternating")
print(f"{'schedule':22} {'torch ms':>10} {'ours ms':>10} {'ratio':>8}")
for name in torch_classes:
    torchs, ours = [], []
    for _ in range(rounds):
        torchs.append(torch_seconds(name))
        ours.append(our_seconds(name))
    a, b = statistics.median(torchs), statistics.median(ours)
    print(f"{name:22} {a * 1e3:10.1f} {b * 1e3:10.2f} {a / b:8.0f}", flush=True)
