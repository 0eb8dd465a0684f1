"""chevron-plan from Python: run it, give it times that were measured in PyTorch, read which stages a schedule puts on a rank.

Nothing here needs torch but `measure`, which is given modules of it; `chevron_plan.parity` does.
"""
from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


__version__: str  # Chevron's, such as `0.1.0`: of the package's metadata or, in a checkout, of the headers beside it


def __getattr__(name: str) -> str:
    """Finds `__version__` when it is asked for: an import of the package alone reads no file."""
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    sources = pathlib.Path(__file__).resolve().parents[1]
    if not (sources / "pyproject.toml").exists():
        return importlib.metadata.version("chevron-plan")
    text = (sources.parents[2] / "include" / "chevron" / "version.hpp").read_text(encoding="utf-8")
    return ".".join(re.findall(r"^#define CHEVRON_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", text, re.M))


class Refused(RuntimeError):
    """chevron-plan ended with another exit status than 0; the text is what it says."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


def program() -> str:
    """The path of the chevron-plan that was installed with this module."""
    name = "chevron-plan"
    beside = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bin", name)  # pip install --target
    for path in (beside, os.path.join(sysconfig.get_path("scripts"), name), shutil.which(name)):
        if path and os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(f"there is no {name} beside this module; remedy: pip install --force-reinstall chevron-plan")


def run(*arguments: object) -> str:
    """What `chevron-plan ARGUMENTS…` prints. Raises Refused with its words where it does not end with 0."""
    done = subprocess.run([program(), *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refused(done.returncode, (done.stderr or done.stdout).strip())
    return done.stdout


def stages_of(file: str | os.PathLike[str], rank: int) -> list[int]:
    """The stages that a schedule's CSV puts on a rank, in ascending order: what its PipelineStage objects are."""
    with open(file, encoding="utf-8") as rows:
        row = list(rows)[rank]
    return sorted({int(stage) for stage in re.findall(r"(\d+)(?=[FBIW]\d)", row)})


def profile(forward: Sequence[float], backward_input: Sequence[float], backward_weight: Sequence[float], *, micro_batches: int,
            communication: float | Sequence[float | None] | None = None) -> str:
    """The JSON text that `chevron-plan --profile FILE` reads. Times are in milliseconds, for one microbatch: of a forward, an input
    gradient and a weight gradient, one entry a stage, and of a message, one entry a boundary between stages or one number for all
    (None: give --communication to chevron-plan)."""
    stages = len(forward)
    for name, times in (("backward_input", backward_input), ("backward_weight", backward_weight)):
        if len(times) != stages:
            raise ValueError(f"{name} has {len(times)} entries, forward has {stages}: give one for each stage")
    if communication is None or isinstance(communication, (int, float)):
        communication = [communication] * (stages - 1)
    if len(communication) != stages - 1:
        raise ValueError(f"communication has {len(communication)} entries: give one for each of {stages - 1} boundaries between stages")
    backward = [i + w for i, w in zip(backward_input, backward_weight)]
    whole = sum(forward) + sum(backward)
    return json.dumps({
        "chevron_profile": 1, "unit": "ms", "schedule": "measured stage by stage", "ranks": stages, "chunks": 1, "stages": stages,
        "micro_batches": micro_batches, "replicas": 1, "steps": 1, "pipeline": whole * micro_batches, "step": whole * micro_batches,
        "forward": list(forward), "backward": backward, "backward_input": list(backward_input),
        "backward_weight": list(backward_weight), "communication": list(communication), "hidden": None}, indent=1)


def measure(stages: Sequence[torch.nn.Module], example: Any, *,
            repeats: int = 20) -> tuple[list[float], list[float], list[float]]:
    """(forward, backward_input, backward_weight): median times in milliseconds of torch modules that are called one after the other,
    each alone, for a microbatch `example` of the first: a tensor, or a tuple of a call's arguments. A tuple or list that a stage gives
    becomes the arguments of the next.

    The input gradient is timed by itself; the weight gradient is what the whole backward takes longer. What autograd need not
    differentiate costs 0: the input of stage 0 and of stages above frozen ones, and frozen weights. Modules, their gradients and torch's
    generators are as before afterwards. Raises ValueError, with the stage, for one that fails or cannot be trained; TypeError for one that
    refuses its arguments."""
    import torch
    from torch.utils import _pytree

    if not any(p.requires_grad for stage in stages for p in stage.parameters()):
        raise ValueError("no parameter of any stage needs a gradient: there is nothing to train")
    device = next((t.device for t in _pytree.tree_leaves(example) if isinstance(t, torch.Tensor)), torch.device("cpu"))

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def apart(tree: Any, differentiated: bool = True) -> Any:
        """The same tensors without the graph that they come from."""
        return _pytree.tree_map_only(torch.Tensor, lambda t: t.detach().requires_grad_(differentiated and t.requires_grad), tree)

    forward, backward_input, backward_weight = [], [], []
    given = apart(example, differentiated=False)
    with _as_found(torch, stages, device), torch.enable_grad():
        for number, stage in enumerate(stages):
            weights = [p for p in stage.parameters() if p.requires_grad]
            times = []
            for _ in range(3 + repeats):
                given = apart(given)
                inputs = [t for t in _pytree.tree_leaves(given) if isinstance(t, torch.Tensor) and t.requires_grad]
                copied = _pytree.tree_map_only(torch.Tensor, torch.clone, given)  # a stage may change its input in place
                arguments = copied if isinstance(copied, (tuple, list)) else (copied,)
                began = now()
                try:
                    y = stage(*arguments)
                except Exception as problem:
                    words = f"stage {number}, called with {len(arguments)} {'argument' if len(arguments) == 1 else 'arguments'}: {problem}"
                    if number > 0 and isinstance(given, dict):
                        words += (f". Stage {number - 1} gives a dict, which is passed as one argument. Remedy: give a tensor, or a tuple of "
                                  f"the arguments of stage {number}")
                    raise (TypeError if isinstance(problem, TypeError) else ValueError)(words) from problem
                made = now()
                outputs = [t for t in _pytree.tree_leaves(y) if isinstance(t, torch.Tensor) and t.requires_grad]
                if (inputs or weights) and not outputs:
                    raise ValueError(f"stage {number} gives no tensor with a gradient: neither it nor a stage before it can be trained")
                gradients = [torch.ones_like(t) for t in outputs]
                ready = now()
                try:
                    if inputs:
                        torch.autograd.grad(outputs, inputs, gradients, retain_graph=bool(weights), allow_unused=True)
                    half = now()
                    if weights:
                        torch.autograd.grad(outputs, [*inputs, *weights], gradients, allow_unused=True)
                except RuntimeError as problem:
                    remedy = ". Remedy: torch.utils.checkpoint.checkpoint(…, use_reentrant=False)" if "heckpoint" in str(problem) else ""
                    raise ValueError(f"the backward of stage {number} fails: {problem}{remedy}") from problem
                times.append((made - began, half - ready, now() - half))
            ahead, of_input, whole = (statistics.median(values) * 1e3 for values in zip(*times[3:]))  # the first ones also warm up
            forward.append(ahead)
            backward_input.append(of_input if inputs else 0.0)
            backward_weight.append(max(whole - backward_input[-1], 0.0) if weights else 0.0)
            given = y
    return forward, backward_input, backward_weight


@contextlib.contextmanager
def _as_found(torch: Any, stages: Sequence[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """Puts back, at the end, what forwards and backwards may change: attributes and buffers of modules, parameters' gradients, and the
    generators of the CPU and of `device`."""
    modules = list({id(m): m for stage in stages for m in stage.modules()}.values())
    parameters = [(p, p.grad, p.requires_grad) for stage in stages for p in stage.parameters()]
    if any(torch.nn.parameter.is_lazy(p) for p, _, _ in parameters):
        raise ValueError("a stage has lazy parameters, whose sizes are not known yet: call the stages once before")
    registered = ("_parameters", "_buffers", "_modules")
    attributes = [(m, dict(m.__dict__), [dict(getattr(m, name)) for name in registered]) for m in modules]
    kept = [(t, t.detach().clone()) for m in modules for t in (*m._buffers.values(), *m.__dict__.values()) if isinstance(t, torch.Tensor)]
    accelerator = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(accelerator, device_type="cuda" if device.type == "cpu" else device.type):
        try:
            yield
        finally:
            for m, own, held in attributes:
                m.__dict__.clear()
                m.__dict__.update(own)
                for name, before in zip(registered, held):
                    getattr(m, name).clear()
                    getattr(m, name).update(before)
            for p, gradient, needed in parameters:
                p.grad = gradient
                p.requires_grad_(needed)
            with torch.no_grad():
                for t, before in kept:
                    if not torch.equal(t, before):
                        t.copy_(before)
