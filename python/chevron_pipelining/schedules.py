"""Schedules with the names and signatures of torch.distributed.pipelining, and `Schedule`, which takes any."""
from __future__ import annotations

import os
from typing import Any

import torch

from .errors import UsageError
from .runtime import ArgsSpec, KwargsSpec, Loss, MergeSpec, Pipeline, Stages
from .stage import PipelineStage


class Schedule(Pipeline):
    """A schedule for any name of Chevron's catalogue ("V-Half"), a CSV file of PyTorch's runtime, or its text.

    Arguments after `schedule` are those of PyTorch's schedules. seed: of dropout and other draws, the same on all ranks. deadline: the
    longest wait for another rank, in seconds; that of the first schedule on these ranks counts. The constructor is collective, and raises
    UsageError for stages that are not those of the schedule on this rank, and for a schedule that would deadlock.
    """

    def __init__(self, schedule: str | os.PathLike[str], stages: Stages, n_microbatches: int, loss_fn: Loss | None = None,
                 args_chunk_spec: ArgsSpec = None, kwargs_chunk_spec: KwargsSpec = None, output_merge_spec: MergeSpec = None,
                 scale_grads: bool = True, backward_requires_autograd: bool = True, *, seed: int = 0, deadline: float = 300.0) -> None:
        if not backward_requires_autograd:
            raise UsageError("backward_requires_autograd=False: Chevron's backward is autograd's. Remedy: the default, True")
        self.scale_grads = scale_grads
        # A loss over the whole step (transformers.py) is a sum of its microbatches' losses.
        self._divisor = n_microbatches if scale_grads and not hasattr(loss_fn, "begin") else 1
        self._divided_by = torch.tensor(float(self._divisor))  # a number would be made a tensor, and converted, for each gradient
        super().__init__(schedule, stages, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, seed=seed,
                         deadline=deadline, weighed=False)

    def step(self, *args: torch.Tensor, target: torch.Tensor | None = None, losses: list[torch.Tensor] | None = None,
             return_outputs: bool = True, **kwargs: Any) -> Any:
        """Runs one step on a batch; the optimizer is the caller's. Gradients are added to `.grad`, divided by the number of microbatches
        with `scale_grads`. Without a loss_fn: only the forward.

        args: of the first stage, on its rank, [samples, …] each: cut into microbatches along dimension 0, or along that of args_chunk_spec
        target: on the rank of the last stage, [samples, …]
        losses: a list that is filled with each microbatch's loss, [] each, on the rank of the last stage
        kwargs: of the stages of this rank; tensors are cut as args are. As in PyTorch 2.15, `arg_mbs`, `kwarg_mbs` and `target_mbs` are a
                batch that is cut into microbatches, and `loss_kwargs` further arguments of loss_fn
        Returns the outputs of the whole batch, [samples, …], on the rank of the last stage, else None. Raises, on every rank, StageError or
        PeerLostError where a rank fails, and NumericalError for a loss or a gradient that is not finite.
        """
        if self._loss_fn is None:
            return self.eval(*args, target=target, losses=losses, **kwargs)
        before = [(p, p.grad.clone()) for p in self._trained if p.grad is not None]
        outputs = self._train(args, kwargs, target, losses, return_outputs)
        if self._divisor != 1:
            for p in self._trained:
                p.grad.div_(self._divided_by)
        for p, gradient in before:
            p.grad.add_(gradient)
        return outputs

    def eval(self, *args: torch.Tensor, target: torch.Tensor | None = None, losses: list[torch.Tensor] | None = None, **kwargs: Any) -> Any:
        """Runs the forwards on a batch, without gradients; modules keep their mode. Arguments, result and errors as of `step`."""
        given = self._begin(args, kwargs, target, losses, True)
        self._made.forward(given)
        if self._last is not None and self._loss_fn is not None and self._targets:
            with torch.no_grad():
                self._losses = [self._loss_fn(output, target, **self._loss_keywords) for output, target in zip(self._last.outputs, self._targets)]
        return self._end(losses)


class PipelineScheduleSingle(Schedule):
    """The base of PyTorch's schedules for one stage on each rank; `seed` and `deadline` as of `Schedule`."""

    schedule = ""  # the name in Chevron's catalogue

    def __init__(self, stage: PipelineStage, n_microbatches: int, loss_fn: Loss | None = None, args_chunk_spec: ArgsSpec = None,
                 kwargs_chunk_spec: KwargsSpec = None, output_merge_spec: MergeSpec = None, scale_grads: bool = True, *, seed: int = 0,
                 deadline: float = 300.0) -> None:
        super().__init__(self.schedule, stage, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads,
                         seed=seed, deadline=deadline)


class PipelineScheduleMulti(Schedule):
    """The base of PyTorch's schedules for several stages on each rank; `seed` and `deadline` as of `Schedule`."""

    schedule = ""  # the name in Chevron's catalogue

    def __init__(self, stages: Stages, n_microbatches: int, loss_fn: Loss | None = None, args_chunk_spec: ArgsSpec = None,
                 kwargs_chunk_spec: KwargsSpec = None, output_merge_spec: MergeSpec = None, scale_grads: bool = True,
                 backward_requires_autograd: bool = True, *, seed: int = 0, deadline: float = 300.0) -> None:
        super().__init__(self.schedule, stages, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads,
                         backward_requires_autograd, seed=seed, deadline=deadline)


class ScheduleGPipe(PipelineScheduleSingle):
    """GPipe, as `torch.distributed.pipelining.ScheduleGPipe`; `seed` and `deadline` as of `Schedule`."""

    schedule = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """1F1B, as `torch.distributed.pipelining.Schedule1F1B`; `seed` and `deadline` as of `Schedule`."""

    schedule = "1F1B"


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """Interleaved1F1B, as `torch.distributed.pipelining.ScheduleInterleaved1F1B`; `seed` and `deadline` as of `Schedule`."""

    schedule = "Interleaved1F1B"


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti):
    """InterleavedZeroBubble, as `torch.distributed.pipelining.ScheduleInterleavedZeroBubble`; `seed` and `deadline` as of `Schedule`."""

    schedule = "InterleavedZeroBubble"


class ScheduleZBVZeroBubble(PipelineScheduleMulti):
    """ZBVZeroBubble, as `torch.distributed.pipelining.ScheduleZBVZeroBubble`; `seed` and `deadline` as of `Schedule`."""

    schedule = "ZBVZeroBubble"


class ScheduleDualPipeV(PipelineScheduleMulti):
    """DualPipeV, as `torch.distributed.pipelining.ScheduleDualPipeV`; `seed` and `deadline` as of `Schedule`."""

    schedule = "DualPipeV"


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """LoopedBFS, as `torch.distributed.pipelining.ScheduleLoopedBFS`, which takes no chunk specs for arguments."""

    schedule = "LoopedBFS"

    def __init__(self, stages: Stages, n_microbatches: int, loss_fn: Loss | None = None, output_merge_spec: MergeSpec = None,
                 scale_grads: bool = True, backward_requires_autograd: bool = True, *, seed: int = 0, deadline: float = 300.0) -> None:
        super().__init__(stages, n_microbatches, loss_fn, None, None, output_merge_spec, scale_grads, backward_requires_autograd,
                         seed=seed, deadline=deadline)


def get_schedule_class(schedule_name: str) -> type[Schedule]:
    """The class of PyTorch's schedule by its name, in letters of any case: "1F1B", "ZBVZeroBubble", ..., "PipelineScheduleMulti".
    Raises: UsageError, a ValueError."""
    classes: dict[str, type[Schedule]] = {one.schedule: one for one in (Schedule1F1B, ScheduleInterleaved1F1B, ScheduleGPipe, ScheduleLoopedBFS,
                                             ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV)}
    classes.update({one.__name__: one for one in (PipelineScheduleSingle, PipelineScheduleMulti)})
    found = {name.lower(): one for name, one in classes.items()}.get(schedule_name.lower())
    if found is None:
        raise UsageError(f"get_schedule_class: no schedule of PyTorch is named {schedule_name!r}. Remedy: one of {', '.join(classes)}; or "
                         "Schedule(name, …), which takes any schedule of the catalogue")
    return found
