"""chevron-plan from Python: run it, give it times that were measured in PyTorch, read which stages a schedule puts on a rank.

Nothing here needs torch but `measure`, which is given modules of it.
"""
import json
import os
import re
import shutil
import statistics
import subprocess
import sysconfig
import time


class Refused(RuntimeError):
    """chevron-plan ended with another exit status than 0; the text is what it says."""

    def __init__(self, status, words):
        super().__init__(words)
        self.status = status


def program():
    """The path of the chevron-plan that was installed with this module."""
    name = "chevron-plan"
    beside = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "bin", name)  # pip install --target
    for path in (beside, os.path.join(sysconfig.get_path("scripts"), name), shutil.which(name)):
        if path and os.access(path, os.X_OK):
            return path
    raise FileNotFoundError(f"there is no {name} beside this module; remedy: pip install --force-reinstall chevron-plan")


def run(*arguments):
    """What `chevron-plan ARGUMENTS…` prints. Raises Refused with its words where it does not end with 0."""
    done = subprocess.run([program(), *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Refused(done.returncode, (done.stderr or done.stdout).strip())
    return done.stdout


def stages_of(file, rank):
    """The stages that a schedule's CSV puts on a rank, in ascending order: what its PipelineStage objects are."""
    with open(file, encoding="utf-8") as rows:
        row = list(rows)[rank]
    return sorted({int(stage) for stage in re.findall(r"(\d+)(?=[FBIW]\d)", row)})


def profile(forward, backward_input, backward_weight, *, micro_batches, communication=None):
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


def measure(stages, example, *, repeats=20):
    """(forward, backward_input, backward_weight): median times in milliseconds of torch modules that are called one after the other,
    each alone, for a microbatch `example` of the first, with the split of the backward that torch's own runtime uses. Stage 0 has no
    input gradient: its weight gradient is its whole backward."""
    import torch
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    def now():
        if example.is_cuda:
            torch.cuda.synchronize(example.device)
        return time.perf_counter()

    forward, backward_input, backward_weight = [], [], []
    x = example.detach()
    for number, stage in enumerate(stages):
        weights = [p for p in stage.parameters() if p.requires_grad]
        times = []
        for _ in range(3 + repeats):
            x = x.detach().requires_grad_(number > 0 and x.is_floating_point())
            began = now()
            y = stage(x)
            made = now()
            if not y.requires_grad:
                raise ValueError(f"stage {number} gives a tensor without a gradient: there is nothing to train in it")
            gradient = torch.ones_like(y)
            ready = now()
            if x.requires_grad:
                _, groups = stage_backward_input([y], [gradient], [x], iter(weights))
                half = now()
                stage_backward_weight(iter(weights), groups)
            else:
                half = ready
                y.backward(gradient)
            times.append((made - began, half - ready, now() - half))
        for out, values in zip((forward, backward_input, backward_weight), zip(*times[3:])):  # the first ones also warm up
            out.append(statistics.median(values) * 1e3)
        stage.zero_grad(set_to_none=True)
        x = y.detach()
    return forward, backward_input, backward_weight
