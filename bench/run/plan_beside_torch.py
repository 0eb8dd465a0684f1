"""How fast schedules are planned: describe + prove + lower, beside PyTorch's generate + validate + add communication.

    .venv/bin/python bench/run/plan_beside_torch.py [build folder] [--markdown]

Two tables. At P=64, V=2 (or what the schedule has), M=256, every schedule of the catalogue, those that PyTorch has beside it in the
same run, alternating. Then P=512, V=2, M=4096, each in a process of its own, with its peak memory; PyTorch is not run there, it
takes minutes. All of it is one thread's work: times are CPU times, so that a busy machine does not count; the second table also
has the time by the clock.
"""
import json
import statistics
import subprocess
import sys
import time

from torch.distributed.pipelining import schedules

ranks, micro_batches, rounds = 64, 256, 3
large_ranks, large_micro_batches = 512, 4096
arguments = [a for a in sys.argv[1:] if not a.startswith("--")]
markdown = "--markdown" in sys.argv
bench = (arguments[0] if arguments else "build") + "/bin/bench-plan"
torch_classes = {
    "GPipe": schedules.ScheduleGPipe,
    "LoopedBFS": schedules.ScheduleLoopedBFS,
    "Interleaved1F1B": schedules.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": schedules.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": schedules.ScheduleZBVZeroBubble,
    "DualPipeV": schedules.ScheduleDualPipeV,
}
# PyTorch's 1F1B exports an order that its own validation refuses.


def torch_seconds(name):
    """One run of what torch does when it builds a schedule, without its stages: orders, validation, sends and receives."""
    chunks = 1 if name == "GPipe" else 2
    bare = object.__new__(torch_classes[name])
    bare.pp_group_size, bare.n_local_stages, bare._n_microbatches = ranks, chunks, micro_batches
    bare._num_stages = bare.num_stages = ranks * chunks
    bare._stages = [None] * chunks
    bare.number_of_rounds = max(1, micro_batches // ranks)
    bare.microbatches_per_round = micro_batches // bare.number_of_rounds
    zig_zag = name in ("ZBVZeroBubble", "DualPipeV")
    rank_of = {s: (s if s < ranks else 2 * ranks - 1 - s) if zig_zag else s % ranks for s in range(ranks * chunks)}
    begin = time.process_time()
    orders = {}
    if name == "GPipe":
        made = bare._get_pipeline_order()
        orders = {rank: [a for a in made[rank] if a is not None] for rank in range(ranks)}
    else:
        for rank in range(ranks):
            bare.rank = rank
            orders[rank] = [a for a in bare._calculate_single_rank_operations(rank) if a is not None]
    schedules._validate_schedule(orders, ranks, ranks * chunks, micro_batches)
    schedules._add_send_recv(orders, stage_to_rank=lambda s: rank_of[s], num_stages=ranks * chunks)
    return time.process_time() - begin


def our_names():
    listed = subprocess.run([bench, "--benchmark_list_tests"], capture_output=True, text=True, check=True, timeout=60).stdout
    return listed.split()


def our_seconds(name):
    done = subprocess.run([bench, f"--benchmark_filter=^{name}$", "--benchmark_format=json", "--benchmark_min_time=0.1"],
                          capture_output=True, text=True, check=True, timeout=120)
    return json.loads(done.stdout)["benchmarks"][0]["cpu_time"] * 1e-3


def once(name):
    done = subprocess.run([bench, "once", name, str(large_ranks), str(large_micro_batches)], capture_output=True, text=True,
                          timeout=300)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr.strip()


def line(cells, first=22):
    if markdown:
        print("| " + " | ".join(str(c) for c in cells) + " |", flush=True)
    else:
        print(f"{cells[0]:{first}} " + " ".join(f"{c:>12}" for c in cells[1:]), flush=True)


def heading(cells):
    line(cells)
    if markdown:
        print("|---|" + "---:|" * (len(cells) - 1))


print(f"P={ranks}, V=2 where the schedule has chunks, M={micro_batches}: CPU time, median of {rounds}, alternating\n")
heading(["schedule", "torch ms", "ours ms", "ratio"])
for name in our_names():
    torchs, ours = [], []
    for _ in range(rounds):
        if name in torch_classes:
            torchs.append(torch_seconds(name))
        ours.append(our_seconds(name))
    b = statistics.median(ours)
    if torchs:
        a = statistics.median(torchs)
        line([name, f"{a * 1e3:.1f}", f"{b * 1e3:.2f}", f"{a / b:.0f}"])
    else:
        line([name, "", f"{b * 1e3:.2f}", ""])

print(f"\nP={large_ranks}, V=2 where the schedule has chunks, M={large_micro_batches}: once, each in a process of its own\n")
heading(["schedule", "actions", "describe s", "prove s", "lower s", "total s", "CPU s", "peak MB"])
for name in our_names():
    result = once(name)
    if isinstance(result, str):
        line([name, result, "", "", "", "", "", ""])
    else:
        line([name, f"{result['actions']:,}".replace(",", " "), f"{result['describe_s']:.2f}", f"{result['prove_s']:.2f}",
              f"{result['lower_s']:.2f}", f"{result['total_s']:.2f}", f"{result['cpu_s']:.2f}", f"{result['peak_mb']:.0f}"])
