"""A stage of a pipeline: a torch.nn.Module of Python on one rank."""
from __future__ import annotations

import os
from operator import is_
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import binding
from .errors import UsageError
from .job import place


def device_of(stage, device):
    """The device of a stage, with the number of its GPU: "cuda" is the current GPU. Raises UsageError where Chevron cannot compute."""
    device = torch.device(device)
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise UsageError(f"stage {stage} on {device}: chevron_pipelining computes on the CPU, over Gloo, and on NVIDIA GPUs, over NCCL. Remedy: "
                         "device=torch.device('cpu') or torch.device('cuda'), or torch.distributed.pipelining")
    if binding.no_nccl:
        raise UsageError(f"stage {stage} on {device}: the binding was compiled without NCCL, since {binding.no_nccl}")
    count = torch.cuda.device_count()
    if count == 0 or (device.index or 0) >= count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise UsageError(f"stage {stage} on {device}: torch sees {count} GPUs" + (f" with CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "") +
                         ". Remedy: " + (f"a GPU from 0 to {count - 1}" if count else "see whether nvidia-smi lists one, or device=torch.device('cpu')"))
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def same(registered, known):
    """Whether a module has registered exactly these parameters, or modules, in this order."""
    return len(registered) == len(known) and all(map(is_, registered.values(), known))


class PipelineStage:
    """As `torch.distributed.pipelining.PipelineStage`; `input_args` and `output_args` are not needed, as shapes are found in the first
    step. `device`: the CPU, or a GPU ("cuda": the current one), the same for all stages of a process; the module's parameters are there before
    the schedule is made. Raises UsageError for a device that is not there, a `dw_builder`, and a module wrapped by DistributedDataParallel or
    FSDP. In addition:

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
        if dw_builder is not None:
            raise UsageError(f"stage {stage_index} has a dw_builder: Chevron splits a backward along autograd's graph itself. Remedy: none")
        if isinstance(submodule, DistributedDataParallel) or hasattr(submodule, "set_requires_gradient_sync"):
            raise UsageError(f"stage {stage_index} is wrapped by {type(submodule).__name__}, whose hooks expect one backward in a step. Remedy: "
                             "the module itself, and Trainer(…, replicas=…), or an all_reduce of `.grad` over replicas after Schedule.step")
        self.submod, self.stage_index, self.num_stages = submodule, stage_index, num_stages
        self.device, self.group = device_of(stage_index, device), group
        self.group_rank, self.group_size = place(group)
        self.is_first, self.is_last = stage_index == 0, stage_index == num_stages - 1
        self.recompute, self.tied = recompute, list((ties or {}).items())
        self.made_with = list(submodule.named_parameters())
        self.registered = [(one, list(one._parameters.values()), list(one._modules.values())) for one in submodule.modules()]
        self.keywords: list[dict[str, Any]] = []  # of each microbatch of the running step
        self.keywords_only = False                # the module is called without positional arguments
        self.outputs: list[Any] | None = None     # of each microbatch, where they are kept
        self.form: Any = None                     # how the tensors of an output are nested; None: the output is one tensor

    def begin(self, keywords: list[dict[str, Any]], keep: bool, keywords_only: bool = False) -> None:
        """Begins a step. `keep`: whether outputs are kept. `keywords_only`: inputs are the keyword arguments' tensors."""
        self.keywords, self.keywords_only = keywords, keywords_only
        self.outputs = [None] * len(keywords) if keep else None

    def forward(self, number: int, *values: torch.Tensor | None) -> torch.Tensor | list[torch.Tensor | None]:
        """Computes microbatch `number`; the result is a tensor, or a list of tensors and Nones. Called by the binding."""
        result = self.submod(*(() if self.keywords_only else values), **self.keywords[number])
        if type(result) is torch.Tensor:  # without `tree_flatten`, as most stages return one tensor
            self.form = None
            if self.outputs is not None:
                self.outputs[number] = result.detach()
            return result
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

    def check_devices(self) -> None:
        """Refuses parameters and buffers on other devices than the stage's."""
        for kind, tensors in (("parameter", self.submod.named_parameters()), ("buffer", self.submod.named_buffers())):
            for name, tensor in tensors:
                if tensor.device != self.device:
                    raise UsageError(f"stage {self.stage_index}'s {kind} `{name}` is on {tensor.device}, and the stage on {self.device}. Remedy: "
                                     f"module.to('{self.device}') before the schedule is made, or device='{tensor.device}'")

    def check_parameters(self) -> None:
        """Refuses parameters that are other tensors than when the stage was made: they would not be trained."""
        if all(same(one._parameters, parameters) and same(one._modules, modules) for one, parameters, modules in self.registered):
            return  # as below, in a tenth of its time
        now = list(self.submod.named_parameters())
        if len(now) == len(self.made_with) and all(a[1] is b[1] for a, b in zip(now, self.made_with)):
            return
        before, after = dict(self.made_with), dict(now)
        name = next(name for name in {**after, **before} if after.get(name) is not before.get(name))
        change = "is new" if name not in before else "is gone" if name not in after else "is another tensor"
        raise UsageError(f"stage {self.stage_index}'s parameter `{name}` {change} since the schedule was made: it would not be trained. Remedy: "
                         "change values in place (load_state_dict without assign=True, `with torch.no_grad(): p.copy_(…)`), or make stage and "
                         "schedule again")
