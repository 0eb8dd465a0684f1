"""Whole steps: forward, backward, one decision of all ranks, and the optimizer."""
from __future__ import annotations

import os
from typing import Any, Callable, Literal, overload

import torch
from torch import nn

from .errors import UsageError
from .runtime import ArgsSpec, KwargsSpec, Loss, MergeSpec, Pipeline, Stages, StepReport


class Trainer(Pipeline):
    """Trains under a schedule with an optimizer of Python.

    optimizer: a `torch.optim.Optimizer` over the parameters of this rank's stages, or a function that makes it of a list of them,
               which a rank that trains nothing does not call
    clip_grad_norm: the largest norm of the gradient over all ranks' parameters; 0: no clipping
    when_not_finite: "stop" raises NumericalError on every rank, "skip" leaves out a step whose loss or gradient is not finite
    learning_rate: a function of the step's number that returns the rate of all groups; None: the rates in the optimizer's groups
    replicas: copies of the pipeline, each with samples of its own: of N ranks the first N / replicas are replica 0, the next replica 1.
              Gradients, loss and norm are over all replicas' samples; parameters begin equal and stay equal
    Other arguments as of `Schedule`. Microbatches weigh as many samples as they have, so gradients are those of the mean over the batch.
    """

    def __init__(self, schedule: str | os.PathLike[str], stages: Stages, n_microbatches: int, loss_fn: Loss,
                 optimizer: torch.optim.Optimizer | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer],
                 args_chunk_spec: ArgsSpec = None, kwargs_chunk_spec: KwargsSpec = None, output_merge_spec: MergeSpec = None, *,
                 clip_grad_norm: float = 0.0, when_not_finite: Literal["stop", "skip"] = "stop",
                 learning_rate: Callable[[int], float] | None = None, replicas: int = 1, seed: int = 0,
                 deadline: float = 300.0) -> None:
        if when_not_finite not in ("stop", "skip"):
            raise UsageError(f"when_not_finite is {when_not_finite!r}. Remedy: 'stop' or 'skip'")
        if loss_fn is None:
            raise UsageError("a trainer without loss_fn. Remedy: a loss_fn, or Schedule(…).eval for the forward alone")
        if not hasattr(optimizer, "param_groups"):
            owned = stages if isinstance(stages, (list, tuple)) else [stages]
            trained = [p for p in nn.ModuleList([stage.submod for stage in owned]).parameters() if p.requires_grad]
            # torch's optimizers refuse an empty list; a rank that trains nothing takes no optimizer step.
            optimizer = optimizer(trained) if trained else torch.optim.Optimizer([{"params": []}], {"lr": 0.0})
        self.optimizer = optimizer
        super().__init__(schedule, stages, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, seed=seed,
                         deadline=deadline, replicas=replicas, weighed=True, optimizer=optimizer, clip_grad_norm=clip_grad_norm,
                         skip_not_finite=when_not_finite == "skip", learning_rate=learning_rate)

    @overload
    def step(self, *args: torch.Tensor, target: torch.Tensor | None = None, losses: list[torch.Tensor] | None = None,
             return_outputs: Literal[False] = False, **kwargs: Any) -> StepReport: ...

    @overload
    def step(self, *args: torch.Tensor, target: torch.Tensor | None = None, losses: list[torch.Tensor] | None = None,
             return_outputs: Literal[True], **kwargs: Any) -> tuple[StepReport, Any]: ...

    def step(self, *args: torch.Tensor, target: torch.Tensor | None = None, losses: list[torch.Tensor] | None = None,
             return_outputs: bool = False, **kwargs: Any) -> StepReport | tuple[StepReport, Any]:
        """Takes a step on a batch: gradients begin at zero. Arguments and errors as of `Schedule.step`. Returns the report; with
        `return_outputs` report and outputs."""
        outputs = self._train(args, kwargs, target, losses, return_outputs)
        return (self.report, outputs) if return_outputs else self.report

    def evaluate(self, *args: torch.Tensor, target: torch.Tensor | None = None, losses: list[torch.Tensor] | None = None,
                 **kwargs: Any) -> float:
        """The mean loss over a batch, without gradients, on every rank; modules keep their mode."""
        given = self._begin(args, kwargs, target, losses, False)
        mean = self._made.evaluate(given)
        self._end(losses)
        return float(mean)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state between two steps, for torch.save: of its stages and the optimizer, and the number of the next step."""
        return {"stages": {stage.stage_index: stage.submod.state_dict() for stage in self._stages},
                "optimizer": self.optimizer.state_dict(), "next_step": self.next_step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores `state_dict` of this rank. Raises UsageError for other stages than this rank's."""
        mine = [stage.stage_index for stage in self._stages]
        if sorted(state["stages"]) != mine:
            raise UsageError(f"a state of the stages {sorted(state['stages'])} for a rank with the stages {mine}. Remedy: the state of a rank with "
                             "these stages, under the same number of stages")
        for stage in self._stages:
            stage.submod.load_state_dict(state["stages"][stage.stage_index])
        self.optimizer.load_state_dict(state["optimizer"])
        self.next_step = state["next_step"]
