# timeout: 900
"""Schedules of chevron-plan inside torch's own pipeline runtime, on Gloo, in real processes. Of 2.11, or of 2.15 where that is here.

Every schedule of the catalogue is written twice, as computations only (torch adds the messages as it loads the file) and with its
messages (torch runs them as they stand), and trains one step of a small model. The losses must be those of the un-pipelined
model bit for bit, and so must the gradients, added up in the order of the file; where torch has the schedule itself, its own
gives the same too. What torch's runtime cannot run is listed with the reason, and tried, so that the list stays true.

And the other way round: receives put off until they are used, as torch 2.15 does when asked to, are refused by chevron-plan, and
torch's runtime shows why: it runs them without a word and ends with other gradients.

    python tests/interop/torch_runs.py [--limit SECONDS]     after which a job's processes are ended
"""
import argparse
import contextlib
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

try:
    import torch
    import torch.distributed as dist
    import torch.multiprocessing as processes
    from torch.distributed import pipelining
    from torch.distributed.pipelining import schedules as torch_schedules
except ImportError as problem:
    print(f"skipped: no torch to compare with ({problem})")
    sys.exit(77)

plan_program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")
# From 2.15 on: sends are waited for in the file, example inputs require gradients, no rank greets itself.
newer = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2])) >= (2, 15)
comms_dialect = "csv-comms-2.15" if newer else "csv-comms"
width = 8
samples = 3  # of a microbatch

# Lawful schedules that torch's runtime cannot run, and its messages.
cannot = {
    # Evaluation goes through eval() there, with a schedule that has backwards all the same.
    "forwards only": "expected 2 total backwards",
    # 2.11 reads the waits of 2.15 as a W without a microbatch; 2.15 wants them.
    "the other's messages": "REDUCE_GRAD without WAIT_REDUCE_GRAD" if newer else "Running Backward Weight .* without first running Backward Input",
    # It finds a microbatch's loss by counting the last stage's forwards, so these must come in the microbatches' order.
    "last microbatch first": "Loss for microbatch 1 is not available",
}
# With microbatches to spare, so that each schedule reaches its steady state; and few, where warm-up is all there is.
shapes = [(2, 2), (2, 5), (2, 8), (4, 4), (4, 8)]
torchs_own = {
    "GPipe": pipelining.ScheduleGPipe,
    "1F1B": pipelining.Schedule1F1B,
    "LoopedBFS": pipelining.ScheduleLoopedBFS,
    "Interleaved1F1B": pipelining.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": pipelining.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": pipelining.ScheduleZBVZeroBubble,
    "DualPipeV": pipelining.ScheduleDualPipeV,
}


def chevron(*arguments):
    return subprocess.run([plan_program, *map(str, arguments)], capture_output=True, text=True, timeout=400)


def catalogue():
    """Every name, whether or not it can be had at this shape."""
    listed = chevron("compare", "--ranks", 4, "--microbatches", 8, "--format", "json")
    assert listed.returncode == 0, listed.stderr
    return [row["schedule"] for row in json.loads(listed.stdout)]


def lowered(name, dialect):
    return chevron("lower", name, "--ranks", 2, "--microbatches", 2, "--format", dialect).stdout


class Job:
    """One schedule at one shape: its files by form, and what stands in them."""

    def __init__(self, name, ranks, micro_batches, files):
        self.name, self.ranks, self.micro_batches, self.files = name, ranks, micro_batches, files
        with open(next(iter(files.values()))) as text:
            rows = [re.findall(r"(\d+)([FBIW])(\d+)", line) for line in text]
        self.rank_of = {int(stage): rank for rank, row in enumerate(rows) for stage, _, _ in row}
        self.stages = len(self.rank_of)
        # The microbatches of each stage's weight gradients, in the order in which they are added.
        self.added = {s: [int(m) for stage, kind, m in rows[self.rank_of[s]] if int(stage) == s and kind in "BW"]
                      for s in range(self.stages)}
        self.neighbours_share_a_rank = any(self.rank_of[s] == self.rank_of[s + 1] for s in range(self.stages - 1))

    @staticmethod
    def of_catalogue(name, ranks, micro_batches, folder):
        """The job, or in words why there is none."""
        shape = ["--ranks", ranks, "--microbatches", micro_batches]
        files = {}
        for form, command in [("compute_only", ["show", name, *shape, "--format", "csv"]),
                              ("compute_comms", ["lower", name, *shape, "--format", comms_dialect])]:
            files[form] = os.path.join(folder, f"{name}_{ranks}_{micro_batches}_{form}.csv")
            done = chevron(*command, "-o", files[form])
            if done.returncode != 0:
                return done.stderr.strip()
        return Job(name, ranks, micro_batches, files)

    @staticmethod
    def by_hand(name, form, text, folder):
        file = os.path.join(folder, name + ".csv")
        with open(file, "w") as out:
            out.write(text)
        legal = chevron("check", file)
        assert legal.returncode == 0, legal.stdout + legal.stderr
        return Job(name, text.count("\n"), 2, {form: file})

    def put_off_receives(self, folder):
        """The file with messages, each receive moved to just before its use; but the lower rank of a pair posts what it has put off
        before it sends to the higher, as torch 2.15's `defer_pp_recv=True` does."""
        with open(self.files["compute_comms"]) as text:
            rows = [line.strip().split(",") for line in text]

        def sender_of(receive):
            return self.rank_of[int(re.match(r"\d+", receive)[0]) + (-1 if "RECV_F" in receive else 1)]

        for rank, row in enumerate(rows):
            put_off, moved = [], []
            for cell in row:
                stage, kind, micro_batch = re.fullmatch(r"(\d+)([A-Z_]+)(\d*)", cell).groups()
                if kind.startswith("RECV"):
                    put_off.append(cell)
                    continue
                ready = []
                if kind in "FIB":
                    ready = [receive for receive in put_off if receive == f"{stage}RECV_{'F' if kind == 'F' else 'B'}{micro_batch}"]
                elif kind.startswith("SEND"):
                    peer = self.rank_of[int(stage) + (1 if kind == "SEND_F" else -1)]
                    ready = [receive for receive in put_off if peer > rank and sender_of(receive) == peer]
                put_off = [receive for receive in put_off if receive not in ready]
                moved += ready + [cell]
            rows[rank] = moved
        self.files = {"put off": os.path.join(folder, f"put_off_{self.name}_{self.ranks}_{self.micro_batches}.csv")}
        with open(self.files["put off"], "w") as out:
            out.write("".join(",".join(row) + "\n" for row in rows))

    def title(self):
        return f"{self.name} P={self.ranks} M={self.micro_batches}"


def module_of(stage):
    torch.manual_seed(100 + stage)
    return torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, width), torch.nn.Tanh(),
                               torch.nn.Linear(width, width))


def data(job):
    torch.manual_seed(7)
    rows = samples * job.micro_batches
    return torch.randn(rows, width), torch.randn(rows, width)


def unpipelined(job):
    """Losses, and the gradients of each stage, without any pipeline: microbatch by microbatch, added in the file's order."""
    modules = [module_of(s) for s in range(job.stages)]
    model = torch.nn.Sequential(*modules)
    inputs, targets = data(job)
    losses, gradients = [], []
    for x, y in zip(inputs.tensor_split(job.micro_batches), targets.tensor_split(job.micro_batches)):
        loss = torch.nn.functional.mse_loss(model(x), y)
        losses.append(loss.detach())
        found = torch.autograd.grad(loss, list(model.parameters()))
        each = iter(found)
        gradients.append([[next(each) for _ in module.parameters()] for module in modules])
    sums = {}
    for s in range(job.stages):
        sums[s] = []
        for p in range(len(gradients[0][s])):
            total = gradients[job.added[s][0]][s][p].clone()
            for m in job.added[s][1:]:
                total += gradients[m][s][p]
            sums[s].append(total.div_(job.micro_batches))
    return losses, sums


def make_stages(job, rank):
    def example(of_a_stage):
        return torch.zeros(samples, width, requires_grad=newer and of_a_stage)

    return [pipelining.PipelineStage(module_of(s), s, job.stages, torch.device("cpu"), input_args=example(s > 0),
                                     output_args=example(True))
            for s in range(job.stages) if job.rank_of[s] == rank]


def one_step(job, schedule, stages):
    inputs, targets = data(job)
    losses = []
    first = any(stage.is_first for stage in stages)
    schedule.step(*((inputs,) if first else ()), target=targets, losses=losses)
    gradients = {stage.stage_index: [p.grad for p in stage.submod.parameters()] for stage in stages}
    return [loss.detach() for loss in losses], gradients


def difference(job, stages, got, wanted):
    """What differs in the bits, if anything."""
    if any(stage.is_last for stage in stages):
        if len(got[0]) != job.micro_batches or not all(torch.equal(a, b) for a, b in zip(got[0], wanted[0])):
            return f"losses {[float(x) for x in got[0]]}, wanted {[float(x) for x in wanted[0]]}"
    for stage in stages:
        for number, (a, b) in enumerate(zip(got[1][stage.stage_index], wanted[1][stage.stage_index])):
            if a is None or not torch.equal(a, b):
                distance = "none" if a is None else float((a - b).abs().max())
                return f"stage {stage.stage_index}, parameter {number}: gradients differ by {distance}"
    return None


@contextlib.contextmanager
def greeting(job):
    """torch 2.11 greets its neighbours before the first step, and dies of greeting itself (2.15 does not)."""
    if newer:
        yield
        return
    own = pipelining.PipelineStage._get_init_p2p_neighbors_ops
    if job.neighbours_share_a_rank:
        pipelining.PipelineStage._get_init_p2p_neighbors_ops = lambda self: []
    try:
        yield
    finally:
        pipelining.PipelineStage._get_init_p2p_neighbors_ops = own


def load(job, form, file, stages):
    runtime = torch_schedules._PipelineScheduleRuntime(stages, job.micro_batches, loss_fn=torch.nn.functional.mse_loss)
    runtime._load_csv(file, format=form)
    return runtime


def run_job(job, rank):
    """Lines about what is wrong; how many runs were compared."""
    wanted = unpipelined(job)
    problems, compared = [], 0
    for form, file in job.files.items():
        stages = make_stages(job, rank)
        compared += 1
        if wrong := difference(job, stages, one_step(job, load(job, form, file, stages), stages), wanted):
            problems.append(f"{form}: {wrong}")
    if own := torchs_own.get(job.name):
        stages = make_stages(job, rank)
        single = issubclass(own, torch_schedules.PipelineScheduleSingle)
        try:
            schedule = own(stages[0] if single else stages, job.micro_batches, loss_fn=torch.nn.functional.mse_loss)
        except ValueError:  # torch's has fewer shapes
            return problems, compared
        compared += 1
        if wrong := difference(job, stages, one_step(job, schedule, stages), wanted):
            problems.append(f"torch's own: {wrong}")
    return problems, compared


def run_what_cannot(job, rank):
    """torch must say what the list says of it."""
    [(form, file)] = job.files.items()
    stages = make_stages(job, rank)
    try:
        one_step(job, load(job, form, file, stages), stages)
    except (AssertionError, RuntimeError, ValueError) as said:
        expected = re.search(cannot[job.name], str(said))
        return [] if expected else [f"expected torch to say '{cannot[job.name]}', but it says: {said}"], 1
    return ["torch can run this after all: strike it off the list"], 1


def run_put_off(job, rank):
    """torch must take the file, run it to its end, and be wrong."""
    stages = make_stages(job, rank)
    runtime = load(job, "compute_comms", job.files["put off"], stages)
    wrong = difference(job, stages, one_step(job, runtime, stages), unpipelined(job))
    ranks_that_are_wrong = torch.tensor([float(wrong is not None)])
    dist.all_reduce(ranks_that_are_wrong)
    return [] if ranks_that_are_wrong > 0 else ["swapped messages, but the right gradients"], 1


def rank_main(rank, ranks, jobs, folder):
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)  # what it says is read from the exception
    result = os.path.join(folder, f"result_{ranks}_{rank}.jsonl")
    with open(result, "w", buffering=1) as out:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet_{ranks}", rank=rank, world_size=ranks,
                                timeout=timedelta(seconds=300))
        for number, job in enumerate(jobs):
            try:
                run = run_put_off if "put off" in job.files else run_what_cannot if job.name in cannot else run_job
                with greeting(job):
                    problems, compared = run(job, rank)
            except Exception as problem:  # the others lose their peer and stop too
                out.write(json.dumps({"job": number, "problems": [f"{type(problem).__name__}: {problem}"[:2000]], "compared": 0}) + "\n")
                os._exit(1)
            out.write(json.dumps({"job": number, "problems": problems, "compared": compared}) + "\n")
            dist.barrier()
        dist.destroy_process_group()


def run_world(ranks, jobs, folder, limit):
    """Lines about what is wrong; how many runs of a rank were compared."""
    context = processes.get_context("fork")  # torch is imported once
    started = [context.Process(target=rank_main, args=(rank, ranks, jobs, folder)) for rank in range(ranks)]
    for one in started:
        one.start()
    deadline = time.monotonic() + limit
    problems, compared = [], 0
    for rank, one in enumerate(started):
        one.join(max(0.0, deadline - time.monotonic()))
        if one.exitcode is None:
            one.kill()
            one.join()
            problems.append(f"P={ranks}: rank {rank} had not come to its end after {limit} s. Remedy, on a busy machine: --limit SECONDS")
    for rank, one in enumerate(started):
        lines = []
        name = os.path.join(folder, f"result_{ranks}_{rank}.jsonl")
        if os.path.exists(name):
            with open(name) as text:
                lines = [json.loads(line) for line in text if line.endswith("\n")]  # of an ended process the last may be cut
        for line in lines:
            compared += line["compared"]
            problems += [f"{jobs[line['job']].title()}, rank {rank}: {words}" for words in line["problems"]]
        if one.exitcode != 0 or len(lines) < len(jobs):
            problems.append(f"P={ranks}: rank {rank} ended with {one.exitcode} after {len(lines)} of {len(jobs)} schedules")
    return problems, compared


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--limit", type=float, default=400)
    limit = options.parse_args().limit
    with tempfile.TemporaryDirectory() as folder:
        names = catalogue()
        jobs, not_to_be_had = [], []
        for ranks, micro_batches in shapes:
            for name in names:
                job = Job.of_catalogue(name, ranks, micro_batches, folder)
                (not_to_be_had if isinstance(job, str) else jobs).append(job)
        problems = [f"{name} is not to be had at any shape of {shapes}" for name in names if all(job.name != name for job in jobs)]
        schedules = len(jobs)
        for micro_batches in [4, 8]:
            job = Job.of_catalogue("ZBVZeroBubble", 2, micro_batches, folder)
            job.put_off_receives(folder)
            jobs.append(job)
            said = chevron("check", job.files["put off"])
            if said.returncode != 5 or not re.search(r"\d(RECV_[FB])\d+ is posted where this edge delivers \d(?!\1)RECV", said.stdout):
                problems.append(f"{job.title()}, receives put off: check ended with {said.returncode}: {said.stdout}{said.stderr}")
        jobs += [Job.by_hand("forwards only", "compute_only", "0F0,0F1\n1F0,1F1\n", folder),
                 Job.by_hand("the other's messages", "compute_comms", lowered("1F1B", "csv-comms" if newer else "csv-comms-2.15"), folder),
                 Job.by_hand("last microbatch first", "compute_only", "0F1,0B1,0F0,0B0\n", folder)]
        compared = 0
        for ranks in sorted({job.ranks for job in jobs}):
            found, runs = run_world(ranks, [job for job in jobs if job.ranks == ranks], folder, limit)
            problems += found
            compared += runs
        print(f"{schedules} schedules of {len(names)} names in torch's runtime, {len(jobs) - schedules} that it cannot run or runs "
              f"wrongly, {compared} runs of a rank compared, {len(problems)} problems")
        for words in not_to_be_had:
            print(f"not to be had: {words}")
        for line in problems[:30]:
            print(line[:2000])
        return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
