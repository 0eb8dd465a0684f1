# timeout: 240
"""CSV both ways between chevron-plan and torch: 2.11's dialect, and from 2.13 on the one whose sends and sums are waited for.

Ours, computations only: torch's own loader takes the file, validates it and adds communication. Ours, with communication: torch's
loader takes it as it is, its dry run comes to the end, and it is what 2.11's own passes make of the computations, cell by cell.
Torch's, of both sorts: chevron-plan finds every law kept and writes the same computations back. And the counts of steps that
torch's own tests expect of its dry run. Torch's schedule objects are made without stages, so no process group is needed.
"""
import concurrent.futures
import csv
import os
import subprocess
import sys
import tempfile
import unittest.mock

try:
    from torch.distributed.pipelining import schedules as torch_schedules
except ImportError as problem:
    print(f"skipped: no torch to compare with ({problem})")
    sys.exit(77)

waits_for_sends = hasattr(torch_schedules, "WAIT_SEND_F")
plan_program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")
folder = tempfile.TemporaryDirectory()


def chevron(*arguments, expect=0):
    done = subprocess.run([plan_program, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    if done.returncode != expect:
        raise AssertionError(f"chevron-plan {' '.join(map(str, arguments))} ended with {done.returncode}, not {expect}: "
                             f"{done.stdout}{done.stderr}")
    return done.stdout


def bare(schedule_class, ranks, stages, micro_batches):
    """A schedule object with its sizes and the runtime's own options, which differ by version."""
    made = object.__new__(schedule_class)
    # The base would want stages and a process group.
    with unittest.mock.patch.object(torch_schedules.PipelineScheduleMulti, "__init__", lambda self: None):
        torch_schedules._PipelineScheduleRuntime.__init__(made)
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


def computations(file, idle=False):
    with open(file, newline="") as text:
        return [[c for c in row if c.strip() or idle] for row in csv.reader(text)]


def parsed(file, idle=False):
    return {rank: [torch_schedules._Action.from_str(cell) for cell in row] for rank, row in enumerate(computations(file, idle))}


def dry_run(orders, rank_of, stages):
    """Torch's dry run; how many steps it takes. It knows neither sums nor FSDP's actions, and of fused pairs not even the stage:
    there each half stands for itself."""
    not_simulated = ("UNSHARD", "RESHARD", "REDUCE_GRAD", "WAIT_REDUCE_GRAD", "WAIT_SEND_F", "WAIT_SEND_B")
    own = {}
    for rank, row in orders.items():
        own[rank] = []
        for action in row:
            own[rank] += [a for a in action.sub_actions or (action,) if a.computation_type.value not in not_simulated]
    steps = torch_schedules._simulate_comms_compute(own, lambda s: rank_of[s], stages)
    return max(len(row) for row in steps.values())


def torchs_lowering(file, micro_batches):
    """Torch's two passes on computations, each by itself: where sums stand, and where messages do."""
    actions = parsed(file)
    rank_of = {a.stage_index: rank for rank, row in actions.items() for action in row for a in action.sub_actions or (action,)}
    sums = {rank: torch_schedules._add_reduce_grad(row, micro_batches) for rank, row in actions.items()}
    messages = torch_schedules._add_send_recv({r: list(row) for r, row in actions.items()}, lambda s: rank_of[s], len(rank_of))
    return words(sums), words(messages), rank_of


def ours_in_torch(point):
    schedule, ranks, chunks, micro_batches = point
    name = os.path.join(folder.name, f"ours_{schedule}_{ranks}_{chunks}_{micro_batches}")
    shape = ["--ranks", ranks, "--microbatches", micro_batches] + (["--chunks", chunks] if chunks > 1 else [])
    plain, comms, waits = name + ".csv", name + "_comms.csv", name + "_waits.csv"
    chevron("show", schedule, *shape, "--format", "csv", "-o", plain)
    chevron("lower", schedule, *shape, "--format", "csv-comms", "-o", comms)
    chevron("lower", schedule, *shape, "--format", "csv-comms-2.15", "-o", waits)
    sums, messages, rank_of = torchs_lowering(plain, micro_batches)
    stages = len(rank_of)
    for file, form in [(plain, "compute_only"), (waits if waits_for_sends else comms, "compute_comms")]:
        orders, torchs_rank_of = load(file, form, ranks, stages, micro_batches)
        assert torchs_rank_of == rank_of
        dry_run(orders, rank_of, stages)
    ours = computations(comms)
    if not waits_for_sends:  # later passes give waits a turn, and so receives other places
        assert [[c for c in row if "REDUCE" not in c] for row in ours] == messages
        assert [[c for c in row if "SEND" not in c and "RECV" not in c] for row in ours] == sums
    for dialect in (comms, waits):
        chevron("show", dialect, "--format", "csv", "-o", name + "_back.csv")
        assert computations(name + "_back.csv") == computations(plain)
    # PyTorch 2.15 also requires one wait for each send and each reduction, after the action that is waited for.
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


def expected_steps():
    """The situations in which torch's own tests (test_schedule.py, TestScheduleLowering) count the steps of the dry run: 11, 24 and
    113, with messages as torch's pass puts them where idle cells take a turn too. Without idle cells, and as chevron-plan puts
    them, it takes no longer."""
    by_hand = os.path.join(folder.name, "v_of_two_ranks.csv")
    with open(by_hand, "w") as out:
        out.write("0F0,0F1,3F0,3I0,3F1,3I1,0I0,3W0,0I1,3W1,0W0,0W1\n1F0,2F0,1F1,2F1,2I0,1I0,2I1,1I1,2W0,2W1,1W0,1W1\n")
    zero_bubble = ["InterleavedZeroBubble", "--ranks", 2, "--chunks", 2, "--microbatches", 8]
    for expected, ours, what in [(11, 10, ["1F1B", "--ranks", 2, "--microbatches", 2]), (24, 23, [by_hand]), (113, 113, zero_bubble)]:
        file = os.path.join(folder.name, "counted.csv")
        chevron("show", *what, "--format", "csv-steps", "-o", file)
        actions = parsed(file, idle=True)
        if what is zero_bubble:  # torch's test merges an I right before its W
            actions = {rank: torch_schedules._merge_bw(row) for rank, row in actions.items()}
            with open(file, "w") as out:
                out.write("".join(",".join(map(str, row)) + "\n" for row in actions.values()))
        _, _, rank_of = torchs_lowering(file, 1)
        lowered = torch_schedules._add_send_recv(actions, lambda s: rank_of[s], len(rank_of))
        assert (steps := dry_run(lowered, rank_of, len(rank_of))) == expected, f"{what}: {steps} steps, torch's tests say {expected}"
        comms = os.path.join(folder.name, "counted_comms.csv")
        chevron("lower", file, "--format", "csv-comms", "-o", comms)
        assert (steps := dry_run(parsed(comms), rank_of, len(rank_of))) == ours, f"{what}: {steps} steps, not {ours}"


def read_alike():
    """Blanks and quotes around cells: torch's reader and chevron-plan take the same computations from them."""
    wanted = "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n"
    texts = [wanted, ' 0F0, ( 0F1; 0B0 )OVERLAP_F_B ,0B1\n1F0 ,\t1B0,1F1, 1B1 \n',
             '"0F0","(0F1;0B0)OVERLAP_F_B"," 0B1 "\r\n"1F0" ,"1B0",1F1,1B1\r\n', '0F0,"", (0F1;0B0)OVERLAP_F_B, ,0B1\n1F0,1B0,1F1,1B1\n']
    for text in texts:
        file, out = os.path.join(folder.name, "alike.csv"), os.path.join(folder.name, "alike_out.csv")
        with open(file, "w", newline="") as written:
            written.write(text)
        chevron("check", file)
        chevron("show", file, "--format", "csv", "-o", out)
        with open(out) as again:
            assert again.read() == wanted, f"{text!r} is read as another schedule"
        with open(out + ".wanted", "w") as plain:
            plain.write(wanted)
        assert parsed(file) == parsed(out + ".wanted"), f"torch reads {text!r} as another schedule"
    return len(texts)


def refused():
    """What torch's reader and validation take, and chevron-plan does not: its exit code, and what it says."""
    other = "1RECV_F0,1F0,1B0,1SEND_B0\n"
    cases = [
        # Text that torch reads as something else.
        ("0F0x junk,0B0\n1F0,1B0\n", 2, "goes on after its microbatch"),
        ("0F0SEND_F1,0B0\n1F0,1B0\n", 2, "goes on after its microbatch"),
        ("(0F0;0B0)F\n", 2, "wanted is OVERLAP_F_B right after the bracket"),
        ("0F0,(0SEND_F0;0B0)OVERLAP_F_B\n1F0,1B0\n", 2, "the first half of a fused pair must be an F"),
        ("0F0,(0B0;0F1)OVERLAP_F_B,0B1\n1F0,1B0,1F1,1B1\n", 2, "the first half of a fused pair must be an F"),
        ("0F0,(0B0)OVERLAP_F_B\n1F0,1B0\n", 2, "has not two halves"),
        # Computations.
        ("0F0,0F0,0B0\n1F0,1B0\n", 5, "0F0 was already done at step 0"),
        ("0F7,0B7\n1F7,1B7\n", 5, "more stages times microbatches than the file has computations"),
        ("0F0,0F1,0B0,0I0,0W0\n1F0,1F1,1B0,1B1\n", 5, "would add these gradients twice"),
        ("0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n", 5, "0B0 waits for 1B0, which is queued on rank 1 behind 1F1; 1F1 waits for 0F1"),
        ("(0F0;0B0)OVERLAP_F_B\n1F0,1B0\n", 5, "0F0 is fused with its own backward"),
        # Messages.
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1B0,1SEND_B0\n", 5, "1F0 reads a message that this rank never receives"),
        ("0F0,0RECV_B0,0B0\n" + other, 5, "0F0 makes a message that this rank never sends"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1RECV_F0,1F0,1B0,1SEND_B0\n", 5, "1RECV_F0 comes a second time"),
        ("0F0,0SEND_F0,0RECV_B0,0B0\n1F0,1RECV_F0,1B0,1SEND_B0\n", 5, "1F0 comes before 1RECV_F0, which it needs"),
        ("0SEND_F0,0F0,0RECV_B0,0B0\n" + other, 5, "0SEND_F0 comes before 0F0, which it needs"),
        ("0F0,0SEND_F0,0RECV_B0,0REDUCE_GRAD,0B0\n" + other, 5, "0REDUCE_GRAD comes before 0B0, which it needs"),
        ("0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1\n", 5,
         "1RECV_F1 is posted where this edge delivers 1RECV_F0"),
    ]
    for text, code, words_of_ours in cases:
        file = os.path.join(folder.name, "refused.csv")
        with open(file, "w") as out:
            out.write(text)
        actions = parsed(file)
        micro_batches = len({a.microbatch_index for row in actions.values() for action in row for a in action.sub_actions or (action,)
                             if a.computation_type is torch_schedules.F})
        torch_schedules._validate_schedule(actions, len(actions), len(actions), micro_batches)
        done = subprocess.run([plan_program, "check", file], capture_output=True, text=True, timeout=60)
        assert done.returncode == code and words_of_ours in done.stdout + done.stderr, f"{text!r}: {done}"
    return len(cases)


shapes = [(1, 1), (1, 4), (2, 4), (2, 6), (3, 7), (4, 8), (4, 12), (8, 16)]
ours = [(s, p, v, m) for p, m in shapes for s, v in [
    ("GPipe", 1), ("1F1B", 1), ("Eager1F1B", 1), ("LoopedBFS", 2), ("LoopedBFS", 3), ("Interleaved1F1B", 2), ("Hanayo", 2),
    ("InterleavedZeroBubble", 2), ("InterleavedZeroBubble", 3), ("ZB-H1", 1), ("ZB-H2", 1), ("ZBVZeroBubble", 2), ("V-Half", 2),
    ("V-Min", 2), ("DualPipeV", 2)]]
theirs = [(c, p, v, m) for p, m in shapes if m % max(1, m // p) == 0 for c, v in [
    (torch_schedules.ScheduleLoopedBFS, 2), (torch_schedules.ScheduleInterleaved1F1B, 2), (torch_schedules.ScheduleInterleaved1F1B, 3),
    (torch_schedules.ScheduleInterleavedZeroBubble, 2), (torch_schedules.ScheduleZBVZeroBubble, 2),
    (torch_schedules.ScheduleDualPipeV, 2)] if c is not torch_schedules.ScheduleDualPipeV or m >= 2 * p]


def outcome(job):
    what, point = job
    try:
        what(point)
        return None
    except Exception as problem:  # a line each, whatever went wrong in torch or here
        return f"{what.__name__} {point}: {type(problem).__name__}: {problem}"


with concurrent.futures.ThreadPoolExecutor(2) as pool:
    problems = [p for p in pool.map(outcome, [(ours_in_torch, p) for p in ours] + [(torchs_here, p) for p in theirs]) if p]
alike = read_alike()
faults = refused()
expected_steps()
print(f"{len(ours)} of ours in torch, {len(theirs)} of torch's here, {alike} with blanks and quotes, {faults} faults that torch takes, {len(problems)} problems")
for line in problems[:20]:
    print(line[:2000])
sys.exit(1 if problems else 0)
