# timeout: 240
"""Orders equal to PyTorch's: the compute-only CSV of chevron-plan against the per-rank generators of torch 2.11.

The schedule objects are made without their stages (the generators read sizes only), so no process group is needed.
"""
import concurrent.futures
import os
import subprocess
import sys

try:
    from torch.distributed.pipelining import schedules as torch_schedules
except ImportError as problem:
    print(f"skipped: no torch to compare with ({problem})")
    sys.exit(77)

plan_program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")


def torch_orders(schedule_class, ranks, chunks, micro_batches):
    """One list of actions a rank, idle cells left out; None where torch refuses the shape."""
    bare = object.__new__(schedule_class)
    bare.pp_group_size = ranks
    bare.n_local_stages = chunks
    bare._stages = [None] * chunks
    bare._n_microbatches = micro_batches
    bare._num_stages = ranks * chunks
    bare.num_stages = ranks * chunks
    bare.number_of_rounds = max(1, micro_batches // ranks)
    bare.microbatches_per_round = micro_batches // bare.number_of_rounds
    interleaved = schedule_class in (torch_schedules.ScheduleInterleaved1F1B, torch_schedules.ScheduleInterleavedZeroBubble)
    if interleaved and micro_batches % bare.number_of_rounds != 0:
        return None
    orders = []
    for rank in range(ranks):
        bare.rank = rank
        orders.append([str(a) for a in bare._calculate_single_rank_operations(rank) if a is not None])
    return orders


def our_orders(schedule, ranks, chunks, micro_batches):
    command = [plan_program, "show", "--format", "csv", "--schedule", schedule, "--ranks", str(ranks),
               "--chunks", str(chunks), "--microbatches", str(micro_batches)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return [[cell.strip() for cell in line.split(",") if cell.strip()] for line in done.stdout.splitlines()]


# Ours, torch's class, chunks. With one chunk torch's InterleavedZeroBubble is ZB-H1.
comparisons = [
    ("ZBVZeroBubble", torch_schedules.ScheduleZBVZeroBubble, [2]),
    ("Interleaved1F1B", torch_schedules.ScheduleInterleaved1F1B, [1, 2, 3]),
    ("ZB-H1", torch_schedules.ScheduleInterleavedZeroBubble, [1]),
    ("InterleavedZeroBubble", torch_schedules.ScheduleInterleavedZeroBubble, [1, 2, 3]),
    ("LoopedBFS", torch_schedules.ScheduleLoopedBFS, [1, 2, 3]),
]
points = [(ours, theirs, ranks, chunks, micro_batches) for ours, theirs, all_chunks in comparisons
          for chunks in all_chunks for ranks in range(1, 9) for micro_batches in range(1, 33)]


def compare(point):
    ours, theirs, ranks, chunks, micro_batches = point
    expected = torch_orders(theirs, ranks, chunks, micro_batches)
    if expected is None:
        return "refused"
    got = our_orders(ours, ranks, chunks, micro_batches)
    if got == expected:
        return "equal"
    for rank, (mine, torchs) in enumerate(zip(got, expected)):
        for step, (a, b) in enumerate(zip(mine, torchs)):
            if a != b:
                return f"{ours} P={ranks} V={chunks} M={micro_batches}: rank {rank}, step {step}: {a}, torch has {b}"
    return f"{ours} P={ranks} V={chunks} M={micro_batches}: lengths differ"


with concurrent.futures.ThreadPoolExecutor(4) as pool:
    results = list(pool.map(compare, points))
different = [r for r in results if r not in ("equal", "refused")]
equal = results.count("equal")
print(f"{equal} orders equal to torch's, {results.count('refused')} shapes that torch refuses, {len(different)} different")
for line in different[:20]:
    print(line)
sys.exit(0 if equal > 2000 and not different else 1)
