"""The base of schedules and trainers: the stages of a rank under a program, and one step's way from arguments to outputs."""
import os
from types import SimpleNamespace

import torch
from torch.utils._pytree import tree_unflatten

from . import binding
from .errors import UsageError
from .job import job, place
from .microbatch import merge_chunks, split_args_kwargs_into_chunks
from .stage import PipelineStage


def text_of(schedule):
    """The name of a schedule, or the text of a CSV file that `schedule` names or is."""
    schedule = os.fspath(schedule)
    if "," in schedule or not os.path.isfile(schedule):
        return schedule
    with open(schedule) as file:
        return file.read()


class Pipeline:
    """The stages of this rank under a schedule. The constructor is collective over the ranks of the pipeline."""

    def __init__(self, schedule, stages, n_microbatches, loss_fn, args_chunk_spec=None, kwargs_chunk_spec=None, output_merge_spec=None, *,
                 seed=0, deadline=300.0, weighed, optimizer=None, clip_grad_norm=0.0, skip_not_finite=False, learning_rate=None):
        stages = list(stages) if isinstance(stages, (list, tuple)) else [stages]
        for stage in stages:
            if not isinstance(stage, PipelineStage):
                raise UsageError(f"a schedule was given a {type(stage).__module__}.{type(stage).__name__} as a stage. Remedy: "
                                 "chevron_pipelining's PipelineStage or build_stage")
        if not stages:
            raise UsageError("a rank without stages. Remedy: at least one stage on each rank")
        stages.sort(key=lambda stage: stage.stage_index)
        self._stages, self._n_microbatches, self._loss_fn = stages, n_microbatches, loss_fn
        self._specs, self._output_merge_spec = (args_chunk_spec, kwargs_chunk_spec), output_merge_spec
        self._first = next((stage for stage in stages if stage.is_first), None)
        self._last = next((stage for stage in stages if stage.is_last), None)
        group = stages[0].group
        rank, world = place(group)
        program = self._program(text_of(schedule), rank, world)
        # Compiled stages keep no buffers that a second run of the graph would need: I and W are two runs.
        torch._functorch.config.donated_buffer = False
        self._losses, self._targets, self._loss_keywords, self._report, self._weighed = [], [], {}, None, weighed
        self._job = job(group, deadline)
        before = [(p, p.grad) for stage in stages for _, p in stage.made_with]
        self._made = binding.Pipeline(
            self._job, program, {stage.stage_index: stage for stage in stages}, self._loss if loss_fn is not None else None, weighed,
            optimizer, seed=seed, clip_grad_norm=clip_grad_norm, skip_not_finite=skip_not_finite, learning_rate=learning_rate)
        for p, gradient in before:  # only steps change gradients
            p.grad = gradient

    def _program(self, schedule, rank, world):
        """The proved program, for exactly the stages that were given."""
        number, mine = self._stages[0].num_stages, [stage.stage_index for stage in self._stages]
        if number % world != 0:
            raise UsageError(f"{number} stages on {world} ranks: every rank has as many. Remedy: a multiple of {world} stages")
        program = binding.Program(schedule, world, self._n_microbatches, number // world)
        name = "the schedule" if "," in schedule else schedule
        if program.ranks != world or program.micro_batches != self._n_microbatches:
            raise UsageError(f"{name} is for {program.ranks} ranks and {program.micro_batches} microbatches, and here are {world} ranks and "
                             f"{self._n_microbatches} microbatches. Remedy: a schedule of this size")
        if program.slices > 1:
            raise UsageError(f"{name} cuts sequences into slices, which chevron_pipelining does not. Remedy: a schedule without slices, or C++ "
                             "(docs/guides/slices.md)")
        where = program.ranks_of_stages
        theirs = [stage for stage in range(len(where)) if where[stage] == rank]
        if mine != theirs or number != len(where):
            raise UsageError(f"rank {rank} was given the stages {mine} of {number}, and {name} on {world} ranks has {len(where)} stages, of which "
                             f"{theirs} belong to rank {rank}. Remedy: these stages, and num_stages={len(where)}")
        return program

    def _loss(self, number, *values):
        """The loss of a microbatch as a list; called by the binding with the last stage's outputs, then the target."""
        target = [values[-1]] if self._targets else []
        output = tree_unflatten(list(values[:len(values) - len(target)]), self._last.form)
        loss = self._loss_fn(output, *target, **self._loss_keywords)
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"loss_fn returns a {type(loss).__name__}. Remedy: a tensor of one element, with its graph")
        self._losses[number] = loss.detach()
        return [loss]

    def _split(self, args, kwargs, target):
        """Cuts the arguments of a step into microbatches, as PyTorch's runtime does, or takes microbatches that are cut already."""
        kwargs.pop("finalize_gradients", None)  # PyTorch's option for FSDP
        self._loss_keywords = kwargs.pop("loss_kwargs", None) or {}
        cut = {name: kwargs.pop(name, None) for name in ("arg_mbs", "kwarg_mbs", "target_mbs")}
        if all(given is None for given in cut.values()):
            parts, keywords, targets = self._cut(args, kwargs, target)
        elif args or kwargs or target is not None:
            raise UsageError("a step is given a batch and microbatches. Remedy: arg_mbs, kwarg_mbs and target_mbs alone")
        else:
            parts, keywords, targets = self._take(**cut)
        self._targets = targets if self._last is not None else []
        self._keywords_only = not any(parts)
        if self._first is not None and self._keywords_only:
            parts = [[v for v in each.values() if isinstance(v, torch.Tensor) and v.dim() > 0] for each in keywords]
        return [(list(parts[i]), self._targets[i:i + 1]) for i in range(self._n_microbatches)], keywords

    def _cut(self, args, kwargs, target):
        """The microbatches of a batch: positional arguments, keyword arguments and target of each."""
        m = self._n_microbatches
        if self._first is None:
            args = ()
        for value in args:
            if not isinstance(value, torch.Tensor):
                raise UsageError(f"the first stage is given a {type(value).__name__}. Remedy: tensors as positional arguments, and any value as a "
                                 "keyword argument")
        parts, keywords = [()] * m, [{}] * m
        if args or kwargs:
            parts, keywords = split_args_kwargs_into_chunks(args, kwargs, m, *self._specs)
            if len(keywords) != m:
                raise UsageError(f"the arguments can be cut into {len(keywords)} microbatches, and the schedule runs {m}. Remedy: at least {m} samples")
        return parts, keywords, list(torch.tensor_split(target, m)) if target is not None else []

    def _take(self, arg_mbs, kwarg_mbs, target_mbs):
        """Checks microbatches that are cut already, and returns them as `_cut` does."""
        m = self._n_microbatches
        for name, given, kind in (("arg_mbs", arg_mbs, tuple), ("kwarg_mbs", kwarg_mbs, dict), ("target_mbs", target_mbs, object)):
            if given is not None and (not isinstance(given, list) or len(given) != m or not all(isinstance(one, kind) for one in given)):
                size = f" of {len(given)}" if isinstance(given, (list, tuple)) else ""
                raise UsageError(f"{name} is a {type(given).__name__}{size}, and the schedule runs {m} microbatches. Remedy: a list of {m}" +
                                 (f", each a {kind.__name__}" if kind is not object else ""))
        return (arg_mbs or [()] * m) if self._first is not None else [()] * m, kwarg_mbs or [{}] * m, target_mbs or []

    def _begin(self, args, kwargs, target, keep):
        """Prepares a run of the program. Returns the arguments of the binding."""
        given, keywords = self._split(args, kwargs, target)
        self._losses = [None] * self._n_microbatches
        if self._targets and hasattr(self._loss_fn, "begin"):
            self._loss_fn.begin(self._targets, self._weighed)
        for stage in self._stages:
            stage.check_parameters()
            stage.begin(keywords, keep and stage.is_last, stage.is_first and self._keywords_only)
        return given

    def _end(self, losses):
        """Hands on the losses and merged outputs of a run."""
        if losses is not None and self._last is not None and all(loss is not None for loss in self._losses):
            losses[:] = self._losses
        kept = self._last.outputs if self._last is not None else None
        for stage in self._stages:
            stage.begin([], False)
        self._targets = []
        return merge_chunks(kept, self._output_merge_spec) if kept is not None else None

    def _train(self, args, kwargs, target, losses, return_outputs):
        """One step of the binding; its report is `report`."""
        if not torch.is_grad_enabled():
            raise UsageError("step() computes gradients, and runs under torch.no_grad(). Remedy: eval(), or no no_grad()")
        given = self._begin(args, kwargs, target, return_outputs)
        self._report = SimpleNamespace(**self._made.step(given))
        return self._end(losses)

    @property
    def report(self):
        """Figures of the last step, the same on every rank: step, loss, grad_norm (before clipping), learning_rate, clipped, skipped,
        samples, bubble; and of this rank seconds, peak_in_flight."""
        return self._report

    @property
    def next_step(self):
        """The number of the next step, on which random numbers depend: set it when a run is resumed."""
        return self._made.next_step

    @next_step.setter
    def next_step(self, step):
        self._made.next_step = step

    def trace(self):
        """The actions of this rank in its last step: (name, begin, end), in seconds."""
        return self._made.trace()
