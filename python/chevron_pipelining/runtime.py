"""The base of schedules and trainers: the stages of a rank under a program, and one step's way from arguments to outputs."""
from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

import torch
from torch.utils._pytree import tree_map, tree_unflatten

from . import binding
from .errors import UsageError
from .job import job, place
from .microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks
from .stage import PipelineStage

Stages = Union[PipelineStage, Sequence[PipelineStage]]  # of this rank
Loss = Callable[..., torch.Tensor]                      # of the last stage's output and, where a step is given a target, of its part
ArgsSpec = Optional[tuple[TensorChunkSpec, ...]]        # the dimension along which each positional argument is cut
KwargsSpec = Optional[dict[str, TensorChunkSpec]]
MergeSpec = Union[dict[str, Any], tuple[Any], None]     # as of PyTorch's `merge_chunks`


@dataclass
class StepReport:
    """Figures of a step: equal on every rank, but `seconds` and the peaks, which are of this rank."""

    step: int             # from 0
    loss: float           # over all microbatches
    grad_norm: float      # over all ranks' parameters, before clipping
    learning_rate: float
    clipped: bool
    skipped: bool         # the loss or a gradient was not finite, and the optimizer did not step
    samples: int
    seconds: float
    bubble: float         # share of the step in which ranks do not compute, 0 to 1
    peak_in_flight: int   # the most chunks between their F and their B or W
    peak_memory: int      # bytes of tensors on this rank's GPU at the most; 0 on the CPU
    peak_reserved: int    # bytes that torch's allocator held of that GPU at the most; 0 on the CPU


def text_of(schedule):
    """The name of a schedule, or the text of a CSV file that `schedule` names or is."""
    schedule = os.fspath(schedule)
    if "," in schedule or not os.path.isfile(schedule):
        return schedule
    with open(schedule) as file:
        return file.read()


class Pipeline:
    """The stages of this rank under a schedule. The constructor is collective over the ranks of the pipeline."""

    _divisor = 1  # of the gradients, after a step

    def __init__(self, schedule: str | os.PathLike[str], stages: Stages, n_microbatches: int, loss_fn: Loss | None,
                 args_chunk_spec: ArgsSpec = None, kwargs_chunk_spec: KwargsSpec = None, output_merge_spec: MergeSpec = None, *,
                 seed: int = 0, deadline: float = 300.0, replicas: int = 1, weighed: bool, optimizer: Any = None, clip_grad_norm: float = 0.0,
                 skip_not_finite: bool = False, learning_rate: Callable[[int], float] | None = None) -> None:
        given = list(stages) if isinstance(stages, (list, tuple)) else [stages]
        for stage in given:
            if not isinstance(stage, PipelineStage):
                raise UsageError(f"a schedule was given a {type(stage).__module__}.{type(stage).__name__} as a stage. Remedy: "
                                 "chevron_pipelining's PipelineStage or build_stage")
        if not given:
            raise UsageError("a rank without stages. Remedy: at least one stage on each rank")
        stages = sorted(given, key=lambda stage: stage.stage_index)
        self._stages, self._n_microbatches, self._loss_fn = stages, n_microbatches, loss_fn
        self._specs, self._output_merge_spec = (args_chunk_spec, kwargs_chunk_spec), output_merge_spec
        self._first = next((stage for stage in stages if stage.is_first), None)
        self._last = next((stage for stage in stages if stage.is_last), None)
        self._device = stages[0].device
        for stage in stages:
            if stage.device != self._device:
                raise UsageError(f"stage {stages[0].stage_index} is on {self._device}, and stage {stage.stage_index} of this process on {stage.device}. "
                                 "Remedy: one device for the stages of a process, and a process for each GPU")
            stage.check_devices()
        self._stream: Any = None  # of the caller, in the last run on a GPU
        group = stages[0].group
        rank, world = place(group)
        if replicas < 1 or world % replicas != 0:
            raise UsageError(f"replicas={replicas} on {world} ranks. Remedy: as many processes as ranks of the pipeline times replicas")
        ranks = world // replicas
        self.replica = rank // ranks  # of this rank's pipeline, for a sampler
        self._program = self._proved(text_of(schedule), rank % ranks, ranks)
        # Compiled stages keep no buffers that a second run of the graph would need: I and W are two runs.
        torch._functorch.config.donated_buffer = False
        self._trained = list({id(p): p for stage in stages for _, p in stage.made_with if p.requires_grad}.values())
        self._loss_begins = hasattr(loss_fn, "begin")
        self._losses: list[Any] | None = None  # of each microbatch, where the caller of a step asks for them
        self._targets: list[torch.Tensor] = []
        self._loss_keywords: dict[str, Any] = {}
        self._weighed = weighed
        self._report: StepReport | None = None
        self._job = job(group, replicas, deadline, self._device)
        before = [(p, p.grad) for stage in stages for _, p in stage.made_with]
        weak = weakref.ref(self)  # Python cannot collect a cycle through the binding

        def loss(number, *values):
            return weak()._loss(number, *values)

        self._made = binding.Pipeline(
            self._job, self._program, {stage.stage_index: stage for stage in stages}, loss if loss_fn is not None else None, weighed,
            optimizer, seed=seed, clip_grad_norm=clip_grad_norm, skip_not_finite=skip_not_finite, learning_rate=learning_rate)
        for p, gradient in before:  # only steps change gradients
            p.grad = gradient

    def _proved(self, schedule, rank, world):
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
        """The loss of a microbatch; the binding calls it with the last stage's outputs, then the target."""
        outputs, target = (values[:-1], values[-1:]) if self._targets else (values, ())
        output = outputs[0] if self._last.form is None else tree_unflatten(outputs, self._last.form)
        loss = self._loss_fn(output, *target, **self._loss_keywords)
        if not isinstance(loss, torch.Tensor):
            raise UsageError(f"loss_fn returns a {type(loss).__name__}. Remedy: a tensor of one element, with its graph")
        if self._losses is not None:
            self._losses[number] = loss.detach()
        return loss

    def _brought(self, given):
        """Arguments with their tensors on this rank's device."""
        if self._device.type == "cpu":
            return given
        return tree_map(lambda value: value.to(self._device) if isinstance(value, torch.Tensor) else value, given)

    def _follow(self):
        """Lets the caller's current stream wait for the stream that was current in the last run, whose results may still be read there: the
        memory of results is given out again in the order of runs. Within a run, Chevron's streams wait for the caller's, and at its end the
        caller's for Chevron's (compute_streams.hpp)."""
        if self._device.type == "cpu":
            return
        now = torch.cuda.current_stream(self._device)
        if self._stream not in (None, now):
            now.wait_stream(self._stream)
        self._stream = now

    def _split(self, args, kwargs, target):
        """Cuts the arguments of a step into microbatches, as PyTorch's runtime does, or takes microbatches that are cut already."""
        args, kwargs, target = self._brought((args, kwargs, target))
        cut, self._loss_keywords = {}, {}
        if kwargs:
            kwargs.pop("finalize_gradients", None)  # PyTorch's option for FSDP
            self._loss_keywords = kwargs.pop("loss_kwargs", None) or {}
            named = ((name, kwargs.pop(name, None)) for name in ("arg_mbs", "kwarg_mbs", "target_mbs"))
            cut = {name: given for name, given in named if given is not None}
        if not cut:
            parts, keywords, targets = self._cut(args, kwargs, target)
        elif args or kwargs or target is not None:
            raise UsageError("a step is given a batch and microbatches. Remedy: arg_mbs, kwarg_mbs and target_mbs alone")
        else:
            parts, keywords, targets = self._take(**cut)
        self._targets = targets if self._last is not None else []
        self._keywords_only = not any(parts)
        if self._first is not None and self._keywords_only:
            parts = [[v for v in each.values() if isinstance(v, torch.Tensor) and v.dim() > 0] for each in keywords]
        return [(parts[i], self._targets[i:i + 1]) for i in range(self._n_microbatches)], keywords

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
        if args and not kwargs and self._specs[0] is None and all(value.dim() > 0 and value.size(0) >= m for value in args):
            parts = list(zip(*(torch.tensor_split(value, m) for value in args)))  # as the function below, in 6 in place of 51 µs
        elif args or kwargs:
            parts, keywords = split_args_kwargs_into_chunks(args, kwargs, m, *self._specs)
            if len(keywords) != m:
                raise UsageError(f"the arguments can be cut into {len(keywords)} microbatches, and the schedule runs {m}. Remedy: at least {m} samples")
        return parts, keywords, list(torch.tensor_split(target, m)) if target is not None else []

    def _take(self, arg_mbs=None, kwarg_mbs=None, target_mbs=None):
        """Checks microbatches that are cut already, and returns them as `_cut` does."""
        m = self._n_microbatches
        for name, given, kind in (("arg_mbs", arg_mbs, tuple), ("kwarg_mbs", kwarg_mbs, dict), ("target_mbs", target_mbs, object)):
            if given is not None and (not isinstance(given, list) or len(given) != m or not all(isinstance(one, kind) for one in given)):
                size = f" of {len(given)}" if isinstance(given, (list, tuple)) else ""
                raise UsageError(f"{name} is a {type(given).__name__}{size}, and the schedule runs {m} microbatches. Remedy: a list of {m}" +
                                 (f", each a {kind.__name__}" if kind is not object else ""))
        return (arg_mbs or [()] * m) if self._first is not None else [()] * m, kwarg_mbs or [{}] * m, target_mbs or []

    def _begin(self, args, kwargs, target, losses, keep):
        """Prepares a run of the program. Returns the arguments of the binding."""
        self._follow()
        given, keywords = self._split(args, kwargs, target)
        self._losses = None if losses is None else [None] * self._n_microbatches
        if self._loss_begins and self._targets:
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
        if kept is None:
            return None
        if self._output_merge_spec is None and all(type(one) is torch.Tensor for one in kept):
            return torch.cat(kept)  # as the function below, in a quarter of its time
        return merge_chunks(kept, self._output_merge_spec)

    def _train(self, args, kwargs, target, losses, return_outputs):
        """One step of the binding; its report is `report`."""
        if not torch.is_grad_enabled():
            raise UsageError("step() computes gradients, and runs under torch.no_grad(). Remedy: eval(), or no no_grad()")
        given = self._begin(args, kwargs, target, losses, return_outputs)
        self._report = StepReport(**self._made.step(given))
        self._report.grad_norm /= self._divisor
        return self._end(losses)

    @property
    def report(self) -> StepReport:
        """Figures of the last step. Raises UsageError before the first."""
        if self._report is None:
            raise UsageError("no step has run. Remedy: a step, then its report")
        return self._report

    @property
    def next_step(self) -> int:
        """The number of the next step, on which random numbers depend: set it when a run is resumed."""
        return int(self._made.next_step)

    @next_step.setter
    def next_step(self, step: int) -> None:
        self._made.next_step = step

    def trace(self) -> list[tuple[str, float, float]]:
        """The actions of this rank in its last step: (name, begin, end), in seconds."""
        return list(self._made.trace())

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Draws the last step of all ranks, predicted from its measured times above measured. Collective.

        path: of the file, which rank 0 writes; the ending names the form. ".svg": a picture; ".html": a page to pan, zoom and point at;
              ".json": a trace for ui.perfetto.dev. A link at the path is replaced, and its target stays.
        Raises UsageError on every rank before the first step, and where rank 0 cannot write the file. For ranks of one machine:
        clocks of several machines have no common zero.
        """
        self._made.timeline(os.fspath(path))

    def __repr__(self) -> str:
        mine = ", ".join(str(stage.stage_index) for stage in self._stages)
        replicas = self._job.world // self._program.ranks
        copies = f" {replicas} replicas," if replicas > 1 else ""
        return (f"<{type(self).__name__} {self._program.name}: {self._program.ranks} ranks,{copies} {self._n_microbatches} microbatches; "
                f"rank {self._job.rank} has {'stage' if len(self._stages) == 1 else 'stages'} {mine} of {self._stages[0].num_stages}; "
                f"{100 * self._program.bubble:.1f} % idle by the plan>")

    def _repr_html_(self) -> str:
        """For notebooks: the plan, and after a step this rank's times. Local: other ranks need not call it."""
        return str(self._made.svg())
