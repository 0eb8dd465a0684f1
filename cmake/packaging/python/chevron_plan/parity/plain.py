"""The plain loop: the whole model in one process, a microbatch after the other, with a record of each tensor between stages."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from .case import Case, Job, Tensors, as_tuple, seed_of

Place = tuple[int, int]  # stage, microbatch


@dataclass
class Trace:
    """The tensors of one batch.

    inputs, outputs: of a stage and microbatch
    received: the gradients of the outputs of a stage that is not the last
    losses: [] each, before they are weighted
    gradients: of a stage's parameters by name, of one microbatch's loss alone
    """
    inputs: dict[Place, Tensors] = field(default_factory=dict)
    outputs: dict[Place, Tensors] = field(default_factory=dict)
    received: dict[Place, dict[int, torch.Tensor]] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[Place, dict[str, torch.Tensor]] = field(default_factory=dict)


def copies(tensors: Any) -> Tensors:
    """Copies of tensors, without their graph."""
    return tuple(t.detach().clone() for t in as_tuple(tensors) if isinstance(t, torch.Tensor))


def cut(job: Job, case: Case, batch: int) -> list[tuple[Tensors, torch.Tensor]]:
    """The arguments of stage 0 and the target of each microbatch: views, as PyTorch's schedules cut them."""
    parts = [torch.tensor_split(argument, job.parts) for argument in case.arguments(batch)]
    targets = torch.tensor_split(case.batches[batch][1], job.parts)
    return [(tuple(part[m] for part in parts), targets[m]) for m in range(job.parts)]


def units(job: Job, case: Case, batch: int) -> list[float]:
    """The units of each microbatch: of its target, or its samples."""
    return [float(case.units(target)) if case.units else float(target.shape[0]) for _, target in cut(job, case, batch)]


def weights(job: Job, case: Case, batch: int) -> list[float]:
    """The weight of each microbatch's loss."""
    of = units(job, case, batch)
    return [1.0] * len(of) if case.reduction == "sum" else [one / sum(of) for one in of]


def run_batch(job: Job, case: Case, step: int, batch: int, weighted: bool) -> Trace:
    """Forward, loss and backward of each microbatch of a batch.

    weighted: losses are weighted, and gradients added to `.grad`, as in a training loop; else each microbatch's gradients are
    recorded alone, and `.grad` is left as it was.
    """
    trace = Trace()
    of = weights(job, case, batch)
    kept = [(p, p.grad) for stage in case.stages for p in stage.parameters()]
    for m, (arguments, target) in enumerate(cut(job, case, batch)):
        if not weighted:
            for p, _ in kept:
                p.grad = None
        value: Any = arguments
        for s, stage in enumerate(case.stages):
            if job.seeded:
                torch.manual_seed(seed_of(step, batch, m, s))
            trace.inputs[s, m] = copies(value)
            value = stage(*as_tuple(value))
            trace.outputs[s, m] = copies(value)
            if s + 1 < len(case.stages):
                seen = trace.received.setdefault((s, m), {})
                for number, tensor in enumerate(as_tuple(value)):
                    if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                        tensor.register_hook(  # type: ignore[no-untyped-call]
                            lambda g, seen=seen, number=number: seen.__setitem__(number,
                                                                                 g.detach().clone()))
        loss = case.loss(value, target)
        trace.losses.append(loss.detach().clone())
        (loss * of[m] if weighted and of[m] != 1.0 else loss).backward()  # type: ignore[no-untyped-call]
        if not weighted:
            for s, stage in enumerate(case.stages):
                trace.gradients[s, m] = {
                    name: p.grad.detach().clone()
                    for name, p in stage.named_parameters()
                    if p.grad is not None
                }
    if not weighted:
        for p, gradient in kept:
            p.grad = gradient
    return trace
