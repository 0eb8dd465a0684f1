"""Schedules with the names and signatures of torch.distributed.pipelining, and `Schedule`, which takes any."""
import torch

from .errors import UsageError
from .runtime import Pipeline


class Schedule(Pipeline):
    """A schedule for any name of Chevron's catalogue ("V-Half"), a CSV file of PyTorch's runtime, or its text.

    Arguments after `schedule` are those of PyTorch's schedules. seed: of dropout and other draws, the same on all ranks. deadline: the
    longest wait for another rank, in seconds; that of the first schedule on these ranks counts.
    """

    def __init__(self, schedule, stages, n_microbatches, loss_fn=None, args_chunk_spec=None, kwargs_chunk_spec=None, output_merge_spec=None,
                 scale_grads=True, backward_requires_autograd=True, *, seed=0, deadline=300.0):
        if not backward_requires_autograd:
            raise UsageError("backward_requires_autograd=False: Chevron's backward is autograd's. Remedy: the default, True")
        self.scale_grads = scale_grads
        # A loss over the whole step (transformers.py) is a sum of its microbatches' losses.
        self._divisor = n_microbatches if scale_grads and not hasattr(loss_fn, "begin") else 1
        super().__init__(schedule, stages, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, seed=seed,
                         deadline=deadline, weighed=False)

    def step(self, *args, target=None, losses=None, return_outputs=True, **kwargs):
        """Runs one step on a batch; the optimizer is the caller's. Gradients are added to `.grad`, divided by the number of microbatches
        with `scale_grads`. Returns the outputs on the rank of the last stage. Without a loss_fn: only the forward. As in PyTorch 2.15,
        `arg_mbs`, `kwarg_mbs` and `target_mbs` are a batch that is cut into microbatches, and `loss_kwargs` arguments of loss_fn."""
        if self._loss_fn is None:
            return self.eval(*args, target=target, losses=losses, **kwargs)
        parameters = {id(p): p for stage in self._stages for _, p in stage.made_with if p.requires_grad}.values()
        before = [(p, p.grad.clone()) for p in parameters if p.grad is not None]
        outputs = self._train(args, kwargs, target, losses, return_outputs)
        if self._divisor != 1:
            for p in parameters:
                p.grad.div_(self._divisor)
            self._report.grad_norm /= self._divisor
        for p, gradient in before:
            p.grad.add_(gradient)
        return outputs

    def eval(self, *args, target=None, losses=None, **kwargs):
        """Runs the forwards on a batch, without gradients; modules keep their mode. Returns the outputs on the rank of the last stage."""
        given = self._begin(args, kwargs, target, True)
        self._made.forward(given)
        if self._last is not None and self._loss_fn is not None and self._targets:
            with torch.no_grad():
                self._losses = [self._loss_fn(output, target, **self._loss_keywords) for output, target in zip(self._last.outputs, self._targets)]
        return self._end(losses)


class PipelineScheduleSingle(Schedule):
    """The base of PyTorch's schedules for one stage on each rank; `seed` and `deadline` as of `Schedule`."""

    schedule = None  # the name in Chevron's catalogue

    def __init__(self, stage, n_microbatches, loss_fn=None, args_chunk_spec=None, kwargs_chunk_spec=None, output_merge_spec=None,
                 scale_grads=True, **options):
        super().__init__(self.schedule, stage, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads,
                         **options)


class PipelineScheduleMulti(Schedule):
    """The base of PyTorch's schedules for several stages on each rank; `seed` and `deadline` as of `Schedule`."""

    schedule = None  # the name in Chevron's catalogue

    def __init__(self, stages, n_microbatches, loss_fn=None, args_chunk_spec=None, kwargs_chunk_spec=None, output_merge_spec=None,
                 scale_grads=True, backward_requires_autograd=True, **options):
        super().__init__(self.schedule, stages, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads,
                         backward_requires_autograd, **options)


def _of(base, schedule):
    """The class of PyTorch's for a schedule of the catalogue."""
    name = "Schedule" + schedule
    return type(name, (base,), {"__doc__": f"{schedule}, as `torch.distributed.pipelining.{name}`.", "__module__": __name__,
                                "schedule": schedule})


ScheduleGPipe, Schedule1F1B = _of(PipelineScheduleSingle, "GPipe"), _of(PipelineScheduleSingle, "1F1B")
ScheduleInterleaved1F1B = _of(PipelineScheduleMulti, "Interleaved1F1B")
ScheduleInterleavedZeroBubble = _of(PipelineScheduleMulti, "InterleavedZeroBubble")
ScheduleZBVZeroBubble, ScheduleDualPipeV = _of(PipelineScheduleMulti, "ZBVZeroBubble"), _of(PipelineScheduleMulti, "DualPipeV")


class ScheduleLoopedBFS(PipelineScheduleMulti):
    """LoopedBFS, as `torch.distributed.pipelining.ScheduleLoopedBFS`, which takes no chunk specs for arguments."""

    schedule = "LoopedBFS"

    def __init__(self, stages, n_microbatches, loss_fn=None, output_merge_spec=None, scale_grads=True, backward_requires_autograd=True,
                 **options):
        super().__init__(stages, n_microbatches, loss_fn, None, None, output_merge_spec, scale_grads, backward_requires_autograd, **options)


def get_schedule_class(schedule_name):
    """The class of PyTorch's schedule by its name, in letters of any case: "1F1B", "ZBVZeroBubble", ..., "PipelineScheduleMulti".
    Raises: UsageError, a ValueError."""
    classes = {one.schedule: one for one in (Schedule1F1B, ScheduleInterleaved1F1B, ScheduleGPipe, ScheduleLoopedBFS,
                                             ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV)}
    classes.update({one.__name__: one for one in (PipelineScheduleSingle, PipelineScheduleMulti)})
    found = {name.lower(): one for name, one in classes.items()}.get(schedule_name.lower())
    if found is None:
        raise UsageError(f"get_schedule_class: no schedule of PyTorch is named {schedule_name!r}. Remedy: one of {', '.join(classes)}; or "
                         "Schedule(name, …), which takes any schedule of the catalogue")
    return found
