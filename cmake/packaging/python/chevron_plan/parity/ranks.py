"""Ranks that are processes of this machine: each trains its stages under torch.distributed.pipelining, and records its tensors."""
from __future__ import annotations

import contextlib
import csv
import logging
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn.parallel import DistributedDataParallel

from .case import Case, Job, RunError, UsageError, as_tuple, built, once, resolved, seed_of

# (step, batch, event, stage, microbatch, name); a number is -1 where an event has none.
Key = tuple[int, int, str, int, int, str]
Record = dict[Key, Any]
SINGLE = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same bits and strides, without a graph."""
    return tensor.detach().clone()


def rank_of_stages(schedule: str, ranks: int, stages: int) -> list[int]:
    """The rank of each stage, [stages]. Raises UsageError where the schedule does not fit these numbers."""
    if schedule.endswith(".csv"):
        placed: dict[int, int] = {}
        try:
            with open(schedule, newline="", encoding="utf-8") as file:
                rows = [row for row in csv.reader(file) if row]
        except OSError as problem:
            raise UsageError(
                f"the schedule {schedule} cannot be read: {problem.strerror}. Remedy: the path of a CSV file") from problem
        for rank, row in enumerate(rows):
            for text in row:
                try:
                    action = schedules._Action.from_str(text)
                except (RuntimeError, ValueError) as problem:
                    raise UsageError(f"{schedule}, row {rank + 1}: {problem}. Remedy: chevron-plan check {schedule}") from problem
                for part in () if action is None else action.sub_actions or (action, ):
                    placed[part.stage_index] = rank
        if len(rows) != ranks or sorted(placed) != list(range(stages)):
            raise UsageError(
                f"{schedule} has {len(rows)} rows and stages {sorted(placed)}, the job {ranks} ranks and the case {stages} stages. "
                "Remedy: --ranks with the number of rows, and a model cut into as many stages")
        return [placed[stage] for stage in range(stages)]
    try:
        schedules.get_schedule_class(schedule)
    except ValueError as problem:
        raise UsageError(
            f"the schedule {schedule!r} is no name that this PyTorch knows. Remedy: one of GPipe, 1F1B, LoopedBFS, "
            "Interleaved1F1B, InterleavedZeroBubble, ZBVZeroBubble, DualPipeV, or the path of a .csv file") from problem
    if schedule.lower() in [name.lower() for name in SINGLE] and stages != ranks:
        raise UsageError(
            f"{schedule} has one stage a rank; the case has {stages} stages, the job {ranks} ranks. Remedy: --ranks {stages}")
    if schedule.lower() in [name.lower() for name in V_SHAPED] and stages != 2 * ranks:
        raise UsageError(f"{schedule} has two stages a rank; the case has {stages} stages, the job {ranks} ranks. "
                         f"Remedy: a model of {2 * ranks} stages")
    if stages % ranks:
        raise UsageError(f"{stages} stages cannot be divided evenly among {ranks} ranks. Remedy: another --ranks")
    if schedule.lower() in [name.lower() for name in V_SHAPED]:
        return [min(stage, stages - 1 - stage) for stage in range(stages)]
    return [stage % ranks for stage in range(stages)]


class RecordedStage(PipelineStage):
    """PyTorch's stage, which seeds and records around its own methods. Patches of PipelineStage's methods count."""
    record: Record
    order: list[tuple[int, str]]  # of backwards that add to gradients: microbatch, operation
    seeded = True
    replica = 0
    first = 0  # microbatch of the replica, counted over all replicas
    whole: torch.nn.Module  # of the stage, without DistributedDataParallel
    at: tuple[int, int] = (0, 0)  # step, batch
    current = -1

    def note(self, event: str, micro_batch: int, name: str, value: Any) -> None:
        self.record[(*self.at, event, self.stage_index + self.replica * self.num_stages, micro_batch, name)] = value

    def note_all(self, event: str, micro_batch: int, values: Any) -> None:
        for number, value in enumerate(as_tuple(values)):
            if isinstance(value, torch.Tensor):
                self.note(event, micro_batch, str(number), copied(value))

    def _get_init_p2p_neighbors_ops(self) -> Any:
        # A rank with two neighbouring stages would send to itself, which Gloo refuses.
        if os.environ.get("CHEVRON_PARITY_GREETINGS") == "0":
            return []
        return super()._get_init_p2p_neighbors_ops()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.current = fwd_chunk_id
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        finally:
            self.current = -1

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        if self.current < 0:
            return super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        if self.seeded:
            torch.manual_seed(seed_of(*self.at, self.current + self.first, self.stage_index))
        self.note_all("input", self.current, args)
        self.note("state", self.current, "", torch.get_rng_state())
        for name, buffer in self.whole.named_buffers():
            self.note("buffer before", self.current, name, copied(buffer))
        out = super().forward_maybe_with_nosync(*args, **kwargs)  # type: ignore[no-untyped-call]
        self.note_all("output", self.current, out)
        return out

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.current >= 0 and bwd_kwargs.get("output_grads") is not None:
            self.note_all("received", self.current, bwd_kwargs["output_grads"])
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        full = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
        self.current = bwd_chunk_id
        try:
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        finally:
            self.current = -1
        if not self.has_backward:
            return
        if not self.is_first and (full or self.stage_index > 0):
            self.note_all("sent", bwd_chunk_id, self.bwd_cache.get(bwd_chunk_id, ()))
        self.note("backward", bwd_chunk_id, "", "B" if full else "I")
        if full:
            self.note_sums(bwd_chunk_id, "B")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self.current = bwd_chunk_id
        try:
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)
        finally:
            self.current = -1
        self.note_sums(bwd_chunk_id, "W")

    def note_sums(self, micro_batch: int, operation: str) -> None:
        self.order.append((micro_batch, operation))
        for name, parameter in self.whole.named_parameters():
            if parameter.grad is not None:
                self.note("sum", len(self.order) - 1, name, copied(parameter.grad))


def _schedule(job: Job, stages: list[Any], case: Case) -> Any:
    """PyTorch's schedule of this rank's stages."""
    scaled = case.reduction == "mean"
    if job.schedule.endswith(".csv"):
        runtime: Any = schedules._PipelineScheduleRuntime
        made = runtime(stages, job.microbatches, loss_fn=case.loss, scale_grads=scaled)
        with open(job.schedule, encoding="utf-8") as file:
            text = file.read()
        made._load_csv(job.schedule, format="compute_comms" if "SEND" in text or "RECV" in text else "compute_only")
        return made
    kind = schedules.get_schedule_class(job.schedule)
    given = stages[0] if issubclass(kind, schedules.PipelineScheduleSingle) else stages
    return kind(given, job.microbatches, loss_fn=case.loss, scale_grads=scaled)


def _run_rank(job: Job, rank: int, folder: str, shapes: dict[int, Any]) -> Record:
    """Trains this rank's stages, and returns each tensor of the run on this rank.

    shapes: of each stage, its inputs and outputs on the meta device; empty where PyTorch finds them
    """
    torch.set_num_threads(job.threads)
    world = str(job.ranks * job.replicas)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    torch.distributed.init_process_group("gloo",
                                         init_method=f"file://{os.path.join(folder, 'store')}",
                                         rank=rank,
                                         world_size=job.ranks * job.replicas,
                                         timeout=timedelta(seconds=job.timeout))
    try:
        with resolved(job.within)() if job.within else contextlib.nullcontext():
            return _trained(job, rank, shapes)
    finally:
        torch.distributed.destroy_process_group()


def _trained(job: Job, rank: int, shapes: dict[int, Any]) -> Record:
    case = built(job)
    record: Record = {(0, 0, "seed", rank, -1, ""): torch.initial_seed()}
    place = rank_of_stages(job.schedule, job.ranks, len(case.stages))
    replica, position = divmod(rank, job.ranks)
    mine = {number: case.stages[number] for number in range(len(place)) if place[number] == position}
    pipelines: list[Any] = [None]
    copies: list[Any] = []
    if job.replicas > 1:
        everywhere = range(job.ranks)
        pipelines = [torch.distributed.new_group([r * job.ranks + p for p in everywhere]) for r in range(job.replicas)]
        copies = [torch.distributed.new_group([r * job.ranks + p for r in range(job.replicas)]) for p in everywhere]
    offset = replica * len(place)
    local = any(place[s] == place[s + 1] for s in range(len(place) - 1))
    os.environ["CHEVRON_PARITY_GREETINGS"] = "0" if local else "1"
    stages = []
    for number, module in mine.items():
        known = dict(zip(("input_args", "output_args"), shapes[number])) if shapes else {}
        wrapped = module if job.replicas == 1 else DistributedDataParallel(module, process_group=copies[position])
        stage = RecordedStage(wrapped, number, len(place), torch.device("cpu"), group=pipelines[replica], **known)
        stage.record, stage.seeded, stage.whole = record, job.seeded, module
        stage.replica, stage.first = replica, replica * job.microbatches
        stages.append(stage)
    schedule = _schedule(job, stages, case)
    computes_loss = schedule._maybe_compute_loss

    def note_loss(stage: Any, output: Any, target_mbs: Any, micro_batch: int, *loss_kwargs: Any) -> None:
        before = len(schedule._internal_losses)
        computes_loss(stage, output, target_mbs, micro_batch, *loss_kwargs)
        for loss in schedule._internal_losses[before:]:
            stage.note("loss", micro_batch, "", copied(loss))

    schedule._maybe_compute_loss = note_loss
    optimizer = case.optimizer(once(p for stage in mine.values() for p in stage.parameters()))
    for step in range(job.steps):
        optimizer.zero_grad(set_to_none=True)

        def note(event: str, stage: int, name: str, value: Any, batch: int = len(case.batches) - 1, step: int = step) -> None:
            record[(step, batch, event, stage + offset, -1, name)] = value

        for number, module in mine.items() if step == 0 else ():
            for name, parameter in module.named_parameters():
                note("initial parameter", number, name, copied(parameter), 0)
            for name, buffer in module.named_buffers():
                note("initial buffer", number, name, copied(buffer), 0)
        for batch in range(len(case.batches)):
            for stage in stages:
                stage.at, stage.order = (step, batch), []
            losses: list[torch.Tensor] = []
            last = len(place) - 1
            own = [
                torch.tensor_split(tensor, job.replicas)[replica] for tensor in (*case.arguments(batch), case.batches[batch][1])
            ]
            out = schedule.step(*(own[:-1] if 0 in mine else ()), **({
                "target": own[-1],
                "losses": losses
            } if last in mine else {}))
            for stage in stages:
                note("order", stage.stage_index, "", list(stage.order), batch)
                for name, parameter in stage.whole.named_parameters():
                    if parameter.grad is not None:
                        note("gradient", stage.stage_index, name, copied(parameter.grad), batch)
            if last in mine:
                note("losses", last, "", [copied(loss) for loss in losses], batch)
                for number, tensor in enumerate(as_tuple(out)):
                    note("outputs", last, str(number), copied(tensor), batch)
        if case.after_backward is not None:
            case.after_backward(mine)
            for number, module in mine.items():
                for name, parameter in module.named_parameters():
                    if parameter.grad is not None:
                        note("finished gradient", number, name, copied(parameter.grad))
        if case.max_norm is not None:
            norm = case.clip(mine, case.max_norm)
            for number, module in mine.items():
                note("norm", number, "", copied(torch.as_tensor(norm)))
                for name, parameter in module.named_parameters():
                    if parameter.grad is not None:
                        note("clipped gradient", number, name, copied(parameter.grad))
        optimizer.step()
        for number, module in mine.items():
            for name, parameter in module.named_parameters():
                note("parameter", number, name, copied(parameter))
            for name, buffer in module.named_buffers():
                note("buffer", number, name, copied(buffer))
    return record


def _serve(rank: int, pipe: Connection) -> None:
    """Runs jobs until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.disable(logging.ERROR)  # PyTorch prints whole schedules beside an exception, which is sent to the parent
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if message is None:
            return
        job, folder, shapes = message
        try:
            torch.save(_run_rank(job, rank, folder, shapes), os.path.join(folder, f"{rank}.pt"))
            pipe.send(None)
        except UsageError as problem:
            pipe.send(problem)
        except BaseException as problem:
            chain: list[str] = []
            inner: BaseException | None = problem
            while inner is not None and len(chain) < 8:
                chain.append(str(inner).strip() or type(inner).__name__)
                inner = inner.__cause__ or inner.__context__
            pipe.send(RunError(f"rank {rank}: {chain[-1]}\n{''.join(traceback.format_tb(problem.__traceback__, -3))}"))


class Ranks:
    """Processes that run jobs, one job after the other; kept between jobs, and started anew after a job that failed.

        with Ranks() as ranks:
            print(check(job, ranks))
    """
    def __init__(self) -> None:
        # A process that imported torch, and forks: each rank starts in milliseconds.
        self._context: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
        if sys.platform == "linux":
            self._context.set_forkserver_preload(["torch", "torch.distributed.pipelining", "chevron_plan.parity.ranks"])
        self._ranks: list[tuple[Any, Connection]] = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes."""
        for process, pipe in self._ranks:
            pipe.close()
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._ranks.clear()

    def run(self, job: Job, shapes: dict[int, Any]) -> Record:
        """Runs a job on its ranks; the result is the records of all. Raises RunError for a rank that fails or does not end in
        time."""
        world = job.ranks * job.replicas
        while len(self._ranks) < world:
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(len(self._ranks), there), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))
        folder = tempfile.mkdtemp(prefix="chevron-parity-")
        try:
            for rank, (_, pipe) in enumerate(self._ranks[:world]):
                try:
                    pipe.send((job, folder, shapes))
                except OSError as problem:
                    raise RunError(f"rank {rank}: the process ended before its first job. Remedy: in a script, call check under "
                                   "`if __name__ == \"__main__\":`, since ranks import the script") from problem
            self._wait(job)
            record: Record = {}
            for rank in range(world):
                record.update(torch.load(os.path.join(folder, f"{rank}.pt"), weights_only=True))
            return record
        except BaseException:
            for process, _ in self._ranks:
                process.kill()
            self.close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _wait(self, job: Job) -> None:
        world = job.ranks * job.replicas
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks[:world])}
        until, failed = time.monotonic() + job.timeout + 10, {}
        while waiting and (left := until - time.monotonic()) > 0:
            ready = wait(list(waiting), left)
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    problem = pipe.recv()
                except (EOFError, OSError):
                    problem = RunError(f"rank {rank}: the process ended, exit code {self._ranks[rank][0].exitcode}")
                if problem is not None:
                    failed[rank] = problem
                    until = min(until, time.monotonic() + 1)  # the others may wait for this rank
        if failed:
            # The cause, rather than a connection that another rank's end has closed.
            raise next((p for p in failed.values() if isinstance(p, UsageError) or "onnection" not in str(p)),
                       next(iter(failed.values())))
        if waiting:
            raise RunError(
                f"ranks {sorted(waiting.values())} did not end within {job.timeout:g} s. Remedy: --timeout, if they only are slow; "
                "chevron-plan check, for a schedule that may deadlock")
