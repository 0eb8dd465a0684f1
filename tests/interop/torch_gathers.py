# timeout: 700
"""Gathers of FSDP stages: `chevron-plan lower --resident` beside torch's own pass, and in torch's runtime.

On the same orders of computations our files need at most as many UNSHARD as torch's pass with as many stages at once, and the counts
are those of the table in docs/guides/gathers.md; so are the makespans with the gathers of torch's pass. Then two pipeline ranks of two shards each, processes over Gloo whose stages are
`fully_shard`ed, train two steps by our files: losses, and parameters afterwards, are those of the un-pipelined, unsharded model, each UNSHARD is
one all-gather of each module and no other all-gather runs, and no more stages are ever whole than --resident allows. A file without
one of its UNSHARD is refused by `check` and by the runtime.

    python tests/interop/torch_gathers.py [--limit SECONDS]     after which the processes are ended"""
import argparse
import concurrent.futures
import json
import logging
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import warnings
from datetime import timedelta

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as processes
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group
    from torch.distributed.pipelining import schedules as torch_schedules
except ImportError as problem:
    print(f"skipped: no torch with FSDP2 to compare with ({problem})")
    sys.exit(77)

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "process" / "shared"))
from gather_clock import length, rows_of

plan_program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")
page = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[2])) / "docs/guides/gathers.md"
newer = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 15)
dialect = "csv-comms-2.15" if newer else "csv-comms"
width, samples, steps, shards = 8, 3, 2, 2
two_chunks = ("ZBVZeroBubble", "V-Half", "DualPipeV")  # with no --chunks
problems = []


def chevron(*arguments):
    return subprocess.run([plan_program, *map(str, arguments)], capture_output=True, text=True, timeout=600)


def gathers(text):
    return len(re.findall(r"\dUNSHARD", text))


def of_torch(line, resident):
    """The actions of a row with the gathers of torch's pass."""
    return torch_schedules._add_unshard_reshard([torch_schedules._Action.from_str(cell) for cell in line.split(",")], resident)


def torchs(text, resident):
    """The gathers of torch's pass, and the most stages that it holds at once, over all ranks."""
    count = most = 0
    for line in text.splitlines():
        now = 0
        for action in of_torch(line, resident):
            change = {torch_schedules.UNSHARD: 1, torch_schedules.RESHARD: -1}.get(action.computation_type, 0)
            count += change == 1
            now += change
            most = max(most, now)
    return count, most


def measured(point):
    """(torch's gathers, torch's most resident, ours) at one point; what is wrong."""
    schedule, ranks, chunks, micro_batches, resident = point
    plain = chevron("show", *size(schedule, ranks, chunks, micro_batches), "--format", "csv").stdout
    ours = chevron("lower", *size(schedule, ranks, chunks, micro_batches), "--format", dialect, "--resident", resident)
    theirs, most = torchs(plain, resident)
    wrong = None if ours.returncode == 0 and 0 < gathers(ours.stdout) <= theirs else f"{point}: torch {theirs}, ours {ours.stdout}{ours.stderr}"
    return theirs, most, gathers(ours.stdout), wrong


def table():
    """The rows of the guide's table: `| schedule | P | V | M | K | PyTorch | its most | ours | ratio |`."""
    rows = re.findall(r"^\| (\S+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| ([\d.]+) \|$", page.read_text(), re.M)
    return [(row[0], *map(int, row[1:8]), row[8]) for row in rows]


def size(schedule, ranks, chunks, micro_batches):
    fixed = schedule in two_chunks
    return [schedule, "--ranks", ranks, "--microbatches", micro_batches, *([] if fixed else ["--chunks", chunks])]


def compare_counts():
    rows = table()
    points = [row[:5] for row in rows]
    grid = [(schedule, ranks, chunks, micro_batches, resident)
            for schedule, counts in (("LoopedBFS", (2, 4)), ("Interleaved1F1B", (2, 4, 8)), ("InterleavedZeroBubble", (2, 4)), ("Hanayo", (4,)))
            for chunks in counts for ranks, micro_batches in ((2, 4), (4, 8), (4, 16)) for resident in (2, 3, 4)]
    grid += [(schedule, ranks, 2, 8, resident) for schedule in two_chunks for ranks in (2, 4) for resident in (2, 3)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for row, (theirs, most, ours, wrong) in zip(rows, pool.map(measured, points)):
            found = (theirs, most, ours, f"{theirs / ours:.2f}")
            if wrong or found != row[5:]:
                problems.append(f"the guide's row {row} should end in {found} {wrong or ''}")
        fewer = 0
        for theirs, _, ours, wrong in pool.map(measured, grid):
            fewer += ours < theirs
            if wrong:
                problems.append(wrong)
    if len(rows) < 6:
        problems.append("the guide has no table of gathers")
    return len(rows) + len(grid), fewer


def compare_makespans():
    """The guide's `| schedule | P | V | M | K | TIME | … | torch's pass |`, by the clock."""
    rows = re.findall(r"^\| (\S+)" + r" \| (\d+)" * 9 + r" \|$", page.read_text(), re.M)
    for schedule, ranks, chunks, micro_batches, resident, gather, *_, said in rows:
        plain = chevron("show", *size(schedule, ranks, chunks, micro_batches), "--format", "csv").stdout
        text = "\n".join(",".join(map(str, of_torch(line, int(resident)))) for line in plain.splitlines())
        stages = int(ranks) * int(chunks)
        takes = length(rows_of(text), {"F": [1] * stages, "B": [2] * stages}, 0, [int(gather)] * stages)
        if takes != float(said):
            problems.append(f"the guide's row of {schedule}, K = {resident}, TIME = {gather} should end in {takes}")
    if len(rows) < 5:
        problems.append("the guide has no table of makespans")


# ---- In torch's runtime.

def layer(stage, half):
    torch.manual_seed(100 + 2 * stage + half)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh())


def module_of(stage):
    return torch.nn.Sequential(layer(stage, 0), layer(stage, 1))


def data(micro_batches, shard):
    torch.manual_seed(7 + shard)
    rows = samples * micro_batches
    return torch.randn(rows, width), torch.randn(rows, width)


def unsharded(stages, micro_batches):
    """By step and shard the losses of the microbatches, and the parameters of each stage at the end: one model, whose gradient is the
    mean over shards and microbatches."""
    modules = [module_of(s) for s in range(stages)]
    model = torch.nn.Sequential(*modules)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    out = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses = []
        for shard in range(shards):
            inputs, targets = data(micro_batches, shard)
            parts = zip(inputs.tensor_split(micro_batches), targets.tensor_split(micro_batches))
            losses.append([torch.nn.functional.mse_loss(model(x), y) for x, y in parts])
        (sum(sum(part) for part in losses) / (micro_batches * shards)).backward()
        out.append([[float(loss.detach()) for loss in part] for part in losses])
        optimizer.step()
    return out, [list(module.parameters()) for module in modules]


def whole(stage):
    """Whether some of a stage's parameters are gathered."""
    return any(group.is_unsharded for module in stage.submod.modules() if isinstance(module, FSDPModule)
               if (group := module._get_fsdp_state()._fsdp_param_group))


def run_job(job, rank, mesh):
    rows = [line.split(",") for line in open(job["file"])]
    mine = sorted({int(stage) for stage in re.findall(r"(\d+)F\d", ",".join(rows[rank // shards]))})
    stages = []
    for s in mine:
        module = module_of(s)
        for half in module:
            fully_shard(half, mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        example = [torch.zeros(samples, width, requires_grad=newer and needs) for needs in (s > 0, True)]
        stages.append(pipelining.PipelineStage(module, s, job["stages"], torch.device("cpu"), input_args=example[0],
                                               output_args=example[1], group=mesh.get_group("pp")))
    runtime = torch_schedules._PipelineScheduleRuntime(stages, job["micro_batches"], loss_fn=torch.nn.functional.mse_loss)
    runtime._load_csv(job["file"], format="compute_comms")
    optimizers = [torch.optim.SGD(stage.submod.parameters(), lr=0.5) for stage in stages]
    seen = {"all_gathers": 0, "most": 0}
    own = _fsdp_param_group.foreach_all_gather

    def counted(*arguments, **named):
        result = own(*arguments, **named)
        seen["all_gathers"] += result is not None
        return result

    def look(*_):
        seen["most"] = max(seen["most"], sum(map(whole, stages)))

    for stage in stages:
        for half in stage.submod:
            half[0].register_forward_pre_hook(look)
            half[0].register_full_backward_pre_hook(look)
    _fsdp_param_group.foreach_all_gather = counted
    out = []
    try:
        inputs, targets = data(job["micro_batches"], rank % shards)
        for _ in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            losses = []
            runtime.step(*((inputs,) if 0 in mine else ()), target=targets, losses=losses)
            out.append([float(loss.detach()) for loss in losses])
            for optimizer in optimizers:
                optimizer.step()
    finally:
        _fsdp_param_group.foreach_all_gather = own
    found = []
    wanted_losses, wanted_parameters = unsharded(job["stages"], job["micro_batches"])
    for stage in stages:
        for number, (got, wanted) in enumerate(zip(stage.submod.parameters(), wanted_parameters[stage.stage_index], strict=True)):
            if not torch.allclose(got.full_tensor(), wanted, rtol=1e-5, atol=1e-6):
                found.append(f"stage {stage.stage_index}, parameter {number} differs after {steps} steps")
    if job["stages"] - 1 in mine:
        for step, (got, wanted) in enumerate(zip(out, wanted_losses, strict=True)):
            if not torch.allclose(torch.tensor(got), torch.tensor(wanted[rank % shards]), rtol=1e-5, atol=0) or \
                    (step == 0 and got != wanted[rank % shards]):
                found.append(f"step {step}: losses {got}, wanted {wanted[rank % shards]}")
    # The root of a stage has no parameters of its own: two groups a stage.
    unshards = sum(cell.strip().endswith("UNSHARD") for cell in rows[rank // shards])
    if seen["all_gathers"] != steps * unshards * 2:
        found.append(f"{seen['all_gathers']} all-gathers, the file has {unshards} UNSHARD in each of {steps} steps")
    if not 0 < seen["most"] <= job["resident"]:
        found.append(f"{seen['most']} stages were whole at once")
    return found


def rank_main(rank, jobs, folder):
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")  # the first stage's, whose inputs need no gradients
    pipelining.PipelineStage._get_init_p2p_neighbors_ops = lambda self: []  # 2.11 cannot greet a neighbour on its own rank
    with open(os.path.join(folder, f"result_{rank}.jsonl"), "w", buffering=1) as out:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2 * shards, timeout=timedelta(seconds=300))
        mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("pp", "dp"))
        for job in jobs:
            said = None
            try:
                found = run_job(job, rank, mesh)
            except Exception as problem:
                said = f"{type(problem).__name__}: {problem}"
                found = [said]
            if job["broken"] is not None:  # the rank of the missing UNSHARD refuses at once; the run ends with it
                right = rank // shards != job["broken"] or (said is not None and "sharded stage_idx" in said)
                out.write(json.dumps([] if right else [f"the runtime runs a file without an UNSHARD: {said}"]) + "\n")
                os._exit(0)
            out.write(json.dumps(found[:3]) + "\n")
            if said:
                os._exit(1)
        dist.destroy_process_group()


def run_world(jobs, folder, limit):
    """Runs all jobs in one set of processes, which are ended after `limit` seconds, and adds what is wrong to the problems."""
    context = processes.get_context("fork")
    started = [context.Process(target=rank_main, args=(rank, jobs, folder)) for rank in range(2 * shards)]
    for one in started:
        one.start()
    deadline = time.monotonic() + limit
    for rank, one in enumerate(started):
        one.join(max(0.0, deadline - time.monotonic()))
        if one.exitcode is None:
            one.kill()
            one.join()
            problems.append(f"process {rank} had not come to its end after {limit} s. Remedy, on a busy machine: --limit SECONDS")
        result = pathlib.Path(folder, f"result_{rank}.jsonl")
        written = result.read_text() if result.exists() else ""
        lines = [json.loads(line) for line in written.splitlines(keepends=True) if line.endswith("\n")]  # of an ended process the last may be cut
        problems.extend(f"{jobs[i]['title']}, process {rank}: {words}" for i, line in enumerate(lines) for words in line)
        if len(lines) < len(jobs):
            problems.append(f"process {rank} ended with {one.exitcode} after {len(lines)} of {len(jobs)} files")


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--limit", type=float, default=600)
    limit = options.parse_args().limit
    points, fewer = compare_counts()
    compare_makespans()
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for schedule, chunks, micro_batches, resident in (("Interleaved1F1B", 4, 4, 2), ("Interleaved1F1B", 4, 4, 3), ("LoopedBFS", 3, 4, 1),
                                                          ("ZBVZeroBubble", 2, 4, 1), ("ZBVZeroBubble", 2, 8, 2), ("DualPipeV", 2, 8, 2),
                                                          ("InterleavedZeroBubble", 3, 8, 2)):
            file = os.path.join(folder, f"{len(jobs)}.csv")
            done = chevron("lower", *size(schedule, 2, chunks, micro_batches), "--format", dialect, "--resident", resident, "-o", file)
            checked = chevron("check", file, "--resident", resident)
            if done.returncode or checked.returncode:
                problems.append(f"{schedule}: {done.stderr}{checked.stdout}{checked.stderr}")
                continue
            jobs.append({"title": f"{schedule} M={micro_batches} K={resident}", "file": file, "stages": 2 * chunks, "broken": None,
                         "micro_batches": micro_batches, "resident": resident})
        # Last, since the runtime's error ends the run: the file of the first job without an UNSHARD of rank 0, its second.
        with open(jobs[0]["file"]) as text:
            rows = text.read().splitlines(keepends=True)
        cells = [cell for cell in rows[0].split(",") if cell.endswith("UNSHARD")]
        rows[0] = rows[0].replace(cells[1] + ",", "", 1)
        broken = dict(jobs[0], title="without an UNSHARD", file=os.path.join(folder, "broken.csv"), broken=0)
        with open(broken["file"], "w") as text:
            text.write("".join(rows))
        said = chevron("check", broken["file"])
        if said.returncode != 5 or f"broken law 'resident': {broken['file']}, line 1" not in said.stdout:
            problems.append(f"check of a file without an UNSHARD ends with {said.returncode}: {said.stdout}{said.stderr}")
        run_world(jobs + [broken], folder, limit)
        print(f"{points} orders counted, {fewer} with fewer gathers than torch's pass; {len(jobs)} files in torch's runtime, "
              f"{2 * shards} processes, {len(problems)} problems")
        for line in problems[:20]:
            print(line[:2000])
        return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
