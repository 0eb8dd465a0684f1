# timeout: 240
"""CSV both ways between chevron-plan and torch 2.11.

Ours, computations only: torch's own loader takes the file, validates it and adds communication. Ours, with communication: torch's
loader takes it as it is and its dry run comes to the end. Torch's, of both sorts: chevron-plan finds every law kept and writes
the same computations back. Torch's schedule objects are made without stages, so no process group is needed.
"""
import concurrent.futures
import os
import subprocess
import sys
import tempfile

try:
    from torch.distributed.pipelining import schedules as torch_schedules
except ImportError as problem:
    print(f"skipped: no torch to compare with ({problem})")
    sys.exit(77)

plan_program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")
folder = tempfile.TemporaryDirectory()


def chevron(*arguments, expect=0):
    done = subprocess.run([plan_program, *map(str, arguments)], capture_output=True, text=True, timeout=20)
    if done.returncode != expect:
        raise AssertionError(f"chevron-plan {' '.join(map(str, arguments))} ended with {done.returncode}, not {expect}: "
                             f"{done.stdout}{done.stderr}")
    return done.stdout


def bare(schedule_class, ranks, stages, micro_batches):
    """A schedule object with its sizes and nothing else."""
    made = object.__new__(schedule_class)
    made.pp_group_size = ranks
    made.n_local_stages = stages // ranks
    made._stages = [None] * made.n_local_stages
    made.pipeline_order = {}
    made._n_microbatches = micro_batches
    made._num_stages = made.num_stages = stages
    made.number_of_rounds = max(1, micro_batches // ranks)
    made.microbatches_per_round = micro_batches // made.number_of_rounds
    return made


def load(file, form, ranks, stages, micro_batches):
    """The file in torch's runtime: its orders with communication, and where its stages live."""
    runtime = bare(torch_schedules._PipelineScheduleRuntime, ranks, stages, micro_batches)
    runtime._stages = []  # they would be told where all stages live
    runtime._load_csv(file, format=form)
    return runtime.pipeline_order_with_comms, runtime.stage_index_to_group_rank


def words(orders):
    return [[str(a) for a in orders[rank] if a is not None] for rank in sorted(orders)]


def computations(file):
    with open(file, newline="") as text:
        return [[c for c in line.strip().split(",") if c] for line in text]


def ours_in_torch(point):
    schedule, ranks, chunks, micro_batches = point
    name = os.path.join(folder.name, f"ours_{schedule}_{ranks}_{chunks}_{micro_batches}")
    shape = ["--ranks", ranks, "--microbatches", micro_batches] + (["--chunks", chunks] if chunks > 1 else [])
    plain, comms, waits = name + ".csv", name + "_comms.csv", name + "_waits.csv"
    chevron("show", schedule, *shape, "--format", "csv", "-o", plain)
    chevron("lower", schedule, *shape, "--format", "csv-comms", "-o", comms)
    chevron("lower", schedule, *shape, "--format", "csv-comms-2.15", "-o", waits)
    stages = ranks * chunks
    lowered, rank_of = load(plain, "compute_only", ranks, stages, micro_batches)
    # torch adds UNSHARD and RESHARD, which its dry run has no case for.
    own = {r: [a for a in lowered[r] if a.computation_type.value not in ("UNSHARD", "RESHARD", "REDUCE_GRAD")] for r in lowered}
    torch_schedules._simulate_comms_compute(own, lambda s: rank_of[s], stages)
    ours, rank_of = load(comms, "compute_comms", ranks, stages, micro_batches)
    without_sums = {r: [a for a in ours[r] if a.computation_type.value != "REDUCE_GRAD"] for r in ours}
    torch_schedules._simulate_comms_compute(without_sums, lambda s: rank_of[s], stages)
    for rank in range(ranks):
        assert [str(a) for a in ours[rank] if a.is_compute_op] == computations(plain)[rank]
        # The same messages and sums as torch's own lowering; only where they stand differs.
        mine = sorted(str(a) for a in ours[rank])
        torchs = sorted(str(a) for a in lowered[rank] if a.computation_type.value not in ("UNSHARD", "RESHARD"))
        assert mine == torchs, f"rank {rank}: {set(mine) ^ set(torchs)}"
    # What 2.15 wants besides: one wait a send, one a reduction, each behind what it waits for.
    for row, plain_row in zip(computations(waits), computations(comms)):
        at = {cell: i for i, cell in enumerate(row)}
        assert len(at) == len(row)
        for cell in row:
            kind = cell.lstrip("0123456789")
            if kind.startswith(("SEND", "REDUCE")):
                wait = cell.replace(kind, "WAIT_" + kind)
                assert at[wait] > at[cell], f"{wait} before {cell}"
        assert [c for c in row if "WAIT" not in c] == plain_row


def torchs_here(point):
    schedule_class, ranks, chunks, micro_batches = point
    made = bare(schedule_class, ranks, ranks * chunks, micro_batches)
    for rank in range(ranks):
        made.rank = rank
        made.pipeline_order[rank] = made._calculate_single_rank_operations(rank)
    made._stages = []
    name = os.path.join(folder.name, f"torch_{schedule_class.__name__}_{ranks}_{chunks}_{micro_batches}")
    expected = words(made.pipeline_order)
    plain, comms = name + ".csv", name + "_comms.csv"
    made._dump_csv(plain, format="compute_only")
    chevron("check", plain)
    chevron("show", plain, "--format", "csv", "-o", name + "_back.csv")
    assert computations(name + "_back.csv") == expected
    made._prepare_schedule_with_comms(made.pipeline_order)
    made._dump_csv(comms)
    chevron("check", comms)  # torch's own messages, FSDP's actions among them
    chevron("show", comms, "--format", "csv", "-o", name + "_back.csv")
    assert computations(name + "_back.csv") == expected


def refused():
    """What torch takes and chevron-plan does not, or the other way round."""
    for text, code in [("0F0x junk,0B0\n1F0,1B0\n", 2), ("0F0,0F0,0B0\n1F0,1B0\n", 5), ("0F0,0BW0\n1F0,1B0\n", 2)]:
        file = os.path.join(folder.name, "refused.csv")
        with open(file, "w") as out:
            out.write(text)
        rows = [[torch_schedules._Action.from_str(cell) for cell in line.split(",")] for line in text.splitlines()]
        assert all(a is not None for row in rows for a in row)
        chevron("check", file, expect=code)
    # DualPipeV has fused pairs: said, not taken apart.
    pairs = bare(torch_schedules.ScheduleDualPipeV, 2, 4, 8)
    file = os.path.join(folder.name, "dualpipev.csv")
    for rank in range(2):
        pairs.rank = rank
        pairs.pipeline_order[rank] = pairs._calculate_single_rank_operations(rank)
    pairs._dump_csv(file, format="compute_only")
    chevron("check", file, expect=2)


shapes = [(1, 1), (1, 4), (2, 4), (2, 6), (3, 7), (4, 8), (4, 12), (8, 16)]
ours = [(s, p, v, m) for p, m in shapes for s, v in [
    ("GPipe", 1), ("1F1B", 1), ("LoopedBFS", 2), ("LoopedBFS", 3), ("Interleaved1F1B", 2), ("InterleavedZeroBubble", 2),
    ("InterleavedZeroBubble", 3), ("ZB-H1", 1), ("ZB-H2", 1), ("ZBVZeroBubble", 2)]]
theirs = [(c, p, v, m) for p, m in shapes if m % max(1, m // p) == 0 for c, v in [
    (torch_schedules.ScheduleLoopedBFS, 2), (torch_schedules.ScheduleInterleaved1F1B, 2), (torch_schedules.ScheduleInterleaved1F1B, 3),
    (torch_schedules.ScheduleInterleavedZeroBubble, 2), (torch_schedules.ScheduleZBVZeroBubble, 2)]]


def outcome(job):
    what, point = job
    try:
        what(point)
        return None
    except Exception as problem:  # a line each, whatever went wrong in torch or here
        return f"{what.__name__} {point}: {type(problem).__name__}: {problem}"


with concurrent.futures.ThreadPoolExecutor(2) as pool:
    problems = [p for p in pool.map(outcome, [(ours_in_torch, p) for p in ours] + [(torchs_here, p) for p in theirs]) if p]
refused()
print(f"{len(ours)} of ours in torch, {len(theirs)} of torch's here, {len(problems)} problems")
for line in problems[:20]:
    print(line[:2000])
sys.exit(1 if problems else 0)
