"""A model and its batches, as the plain loop and the pipeline both train them."""
from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Tensors = tuple[torch.Tensor, ...]


class UsageError(ValueError):
    """A wrong argument; the text names the value, the place and a remedy."""


class RunError(RuntimeError):
    """A rank of the pipelined run failed or did not end in time; the text names the rank and its error."""


def once(parameters: Iterable[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Each parameter once, in the order of its first place: a tied weight has several."""
    return list({id(p): p for p in parameters}.values())


def _sgd(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def clip_over_ranks(stages: dict[int, torch.nn.Module], max_norm: float) -> torch.Tensor:
    """Clips by the norm of all ranks: each rank's norm is squared, the squares are added over the ranks, and the root is taken.

    stages: of this rank, by number
    Returns the norm, []. Collective over all ranks.
    """
    parameters = once(p for number in sorted(stages) for p in stages[number].parameters())
    squared = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])**2
    torch.distributed.all_reduce(squared)
    norm = squared.sqrt()
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


@dataclass
class Case:
    """A function without arguments returns a Case: once for the plain loop, and once on each rank.

    stages: the whole model, cut, in order; each takes the previous one's tensor, or its tuple of tensors
    batches: one entry for each batch of a step, ([samples, …] arguments of stage 0, [samples, …] target); gradients of the
      batches of a step are added before the optimizer steps
    loss: of a microbatch's output and target, []; a function of the last stage's output
    reduction: "mean": the step's loss is the mean over microbatches, weighted by `units`, and PyTorch divides gradients by the
      number of microbatches (scale_grads=True). "sum": the sum of the microbatches' losses (scale_grads=False)
    units: of a microbatch's target, its number of samples or of tokens, by which a mean weighs it (None: its samples)
    optimizer: of a list of parameters
    max_norm: gradients are clipped to this norm (None: not clipped); in the plain loop by torch.nn.utils.clip_grad_norm_
    clip: clips in the pipeline, on every rank: of this rank's stages by number and of max_norm; returns the norm
    after_backward: called on every rank after a step's last batch, before clipping, with this rank's stages by number: for
      example the sum of a tied weight's gradients
    """
    stages: Sequence[torch.nn.Module]
    batches: Sequence[tuple[Any, torch.Tensor]]
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    reduction: Literal["mean", "sum"] = "mean"
    units: Callable[[torch.Tensor], float] | None = None
    optimizer: Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] = field(default=_sgd)
    max_norm: float | None = None
    clip: Callable[[dict[int, torch.nn.Module], float], torch.Tensor] = field(default=clip_over_ranks)
    after_backward: Callable[[dict[int, torch.nn.Module]], None] | None = None

    def arguments(self, batch: int) -> Tensors:
        """The arguments of stage 0, [samples, …] each, of a batch of the step."""
        return as_tuple(self.batches[batch][0])

    def check(self, microbatches: int) -> None:
        """Raises UsageError for a case that cannot be cut into this number of microbatches."""
        if not self.stages or not self.batches:
            raise UsageError(
                f"the case has {len(self.stages)} stages and {len(self.batches)} batches. Remedy: at least one of each")
        if self.reduction not in ("mean", "sum"):
            raise UsageError(f"reduction is {self.reduction!r}. Remedy: \"mean\" or \"sum\"")
        for number in range(len(self.batches)):
            for tensor in (*self.arguments(number), self.batches[number][1]):
                if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0 or tensor.shape[0] % microbatches:
                    shape = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
                    raise UsageError(
                        f"batch {number} has a tensor of {shape}, which {microbatches} microbatches do not divide evenly "
                        "along dimension 0; PyTorch's stages take microbatches of one size. Remedy: another --microbatches")


@dataclass(frozen=True)
class Job:
    """How a case is run.

    build: the function that returns the Case, or its name, "module:function"
    schedule: a name of torch.distributed.pipelining, such as "1F1B", or the path of a CSV file
    ranks, microbatches: their numbers, in each replica
    steps: optimizer steps
    seeded: random generators are seeded before each stage's forward, in both runs, by step, batch, microbatch and stage. Without:
      each rank and the plain loop draw from generators that are seeded once, before the case is built
    static_shapes: stages are given the shapes of their inputs and outputs. Without: PyTorch runs each stage once on zeros to
      find them
    within: a context manager, or its name, entered on each rank around the case: for example patches of PyTorch
    threads: of an operation, in both runs
    replicas: pipelines that share a batch's samples; with two, stages are wrapped in DistributedDataParallel
    timeout: seconds that the ranks may take
    """
    build: Callable[[], Case] | str
    schedule: str
    ranks: int = 2
    microbatches: int = 4
    steps: int = 1
    seeded: bool = True
    static_shapes: bool = False
    within: Callable[[], Any] | str | None = None
    threads: int = 1
    timeout: float = 60.0
    replicas: int = 1

    @property
    def parts(self) -> int:
        """The microbatches of all replicas."""
        return self.microbatches * self.replicas

    def check(self) -> None:
        """Raises UsageError for numbers that cannot be run."""
        if self.replicas not in (1, 2):
            raise UsageError(f"replicas is {self.replicas}. Remedy: 1 or 2")
        for name, value in (("ranks", self.ranks), ("microbatches", self.microbatches), ("steps", self.steps), ("threads",
                                                                                                                self.threads)):
            if value < 1:
                raise UsageError(f"{name} is {value}. Remedy: at least 1")


def resolved(function: Callable[[], Any] | str) -> Callable[[], Any]:
    """The function of a name "module:function", looked for in the current folder, too."""
    if not isinstance(function, str):
        return function
    module, colon, name = function.partition(":")
    if not colon or not module or not name:
        raise UsageError(f"{function!r} names no function. Remedy: module:function, such as model:case")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(module)
    except ImportError as problem:
        raise UsageError(
            f"the module of {function!r} cannot be imported: {problem}. Remedy: run beside it, or set PYTHONPATH") from problem
    if not callable(getattr(found, name, None)):
        raise UsageError(f"the module {module} has no function {name}. Remedy: one of its functions")
    return getattr(found, name)  # type: ignore[no-any-return]


def built(job: Job) -> Case:
    """The case, built from generators in a state that is equal in the plain loop and on each rank. Raises UsageError for another
    result."""
    torch.manual_seed(0)
    case = resolved(job.build)()
    if not isinstance(case, Case):
        raise UsageError(f"{job.build!r} returns a {type(case).__name__}. Remedy: return chevron_plan.parity.Case(…)")
    case.check(job.parts)
    if job.replicas > 1 and (case.max_norm is not None or case.after_backward is not None):
        raise UsageError(
            f"replicas is {job.replicas}, and the case has a max_norm or an after_backward, which are for one replica. "
            "Remedy: without them, or --replicas 1")
    for stage in case.stages:
        stage.train()
    return case


def as_tuple(value: Any) -> Tensors:
    """A tensor, or a tuple or list of tensors, as a tuple."""
    return tuple(value) if isinstance(value, (tuple, list)) else (value, )


def seed_of(step: int, batch: int, micro_batch: int, stage: int) -> int:
    """The seed of a stage's forward; different for each place of a run."""
    return ((step * 1009 + batch) * 100003 + micro_batch) * 1009 + stage + 1


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes; so 0 and -0 differ, and a NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
