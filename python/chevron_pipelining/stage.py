"""A stage of a pipeline: a torch.nn.Module of Python on one rank."""
from __future__ import annotations

from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from .errors import UsageError
from .job import place


class PipelineStage:
    """As `torch.distributed.pipelining.PipelineStage`; `input_args` and `output_args` are not needed, as shapes are found in the first
    step. Raises UsageError for a device other than the CPU, a `dw_builder`, and a module wrapped by DistributedDataParallel or FSDP. In
    addition:

    recompute: F keeps the stage's inputs only, and the backward computes the forward again
    ties: names of parameters that are one parameter with those of other stages, and the name of their group, the same on all ranks:
          {"head.weight": "embedding"}
    """

    def __init__(self, submodule: torch.nn.Module, stage_index: int, num_stages: int, device: torch.device | str,
                 input_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
                 output_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None, group: dist.ProcessGroup | None = None,
                 dw_builder: Callable[[], Callable[..., None]] | None = None, *, recompute: bool = False,
                 ties: dict[str, str] | None = None) -> None:
        if not 0 <= stage_index < num_stages:
            raise UsageError(f"stage_index {stage_index} of {num_stages} stages: the first stage is 0")
        if torch.device(device).type != "cpu":
            raise UsageError(f"stage {stage_index} on {device}: chevron_pipelining computes on the CPU, over Gloo. Remedy: "
                             "device=torch.device('cpu'); on GPUs a model in C++ (docs/guides/gpu.md), or torch.distributed.pipelining")
        if dw_builder is not None:
            raise UsageError(f"stage {stage_index} has a dw_builder: Chevron splits a backward along autograd's graph itself. Remedy: none")
        if isinstance(submodule, DistributedDataParallel) or hasattr(submodule, "set_requires_gradient_sync"):
            raise UsageError(f"stage {stage_index} is wrapped by {type(submodule).__name__}, whose hooks expect one backward in a step. Remedy: "
                             "the module itself, and Trainer(…, replicas=…), or an all_reduce of `.grad` over replicas after Schedule.step")
        self.submod, self.stage_index, self.num_stages = submodule, stage_index, num_stages
        self.device, self.group = torch.device(device), group
        self.group_rank, self.group_size = place(group)
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1
        self.recompute, self.tied = recompute, list((ties or {}).items())
        self.made_with = list(submodule.named_parameters())
        self.keywords: list[dict[str, Any]] = []  # of each microbatch of the running step
        self.keywords_only = False                # the module is called without positional arguments
        self.outputs: list[Any] | None = None     # of each microbatch, where they are kept
        self.form: Any = None                     # how the tensors of an output are nested

    def begin(self, keywords: list[dict[str, Any]], keep: bool, keywords_only: bool = False) -> None:
        """Begins a step. `keep`: whether outputs are kept. `keywords_only`: inputs are the keyword arguments' tensors."""
        self.keywords, self.keywords_only = keywords, keywords_only
        self.outputs = [None] * len(keywords) if keep else None

    def forward(self, number: int, *values: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Computes microbatch `number`; the result is a list of tensors and Nones. Called by the binding."""
        result = self.submod(*(() if self.keywords_only else values), **self.keywords[number])
        flat, self.form = tree_flatten(result)
        for value in flat:
            if value is not None and not isinstance(value, torch.Tensor):
                raise UsageError(f"stage {self.stage_index} returns a {type(value).__name__}. Remedy: tensors, None, and tuples or lists of them")
        if not self.is_last and not isinstance(result, (torch.Tensor, tuple, list)):
            raise UsageError(f"stage {self.stage_index} returns a {type(result).__name__}, and the next stage takes tensors in a row. Remedy: a "
                             "tensor, or a tuple of tensors")
        if self.outputs is not None:
            self.outputs[number] = tree_unflatten([v.detach() if v is not None else None for v in flat], self.form)
        return flat

    def check_parameters(self) -> None:
        """Refuses parameters that are other tensors than when the stage was made: they would not be trained."""
        now = list(self.submod.named_parameters())
        if len(now) == len(self.made_with) and all(a[1] is b[1] for a, b in zip(now, self.made_with)):
            return
        before, after = dict(self.made_with), dict(now)
        name = next(name for name in {**after, **before} if after.get(name) is not before.get(name))
        change = "is new" if name not in before else "is gone" if name not in after else "is another tensor"
        raise UsageError(f"stage {self.stage_index}'s parameter `{name}` {change} since the schedule was made: it would not be trained. Remedy: "
                         "change values in place (load_state_dict without assign=True, `with torch.no_grad(): p.copy_(…)`), or make stage and "
                         "schedule again")
