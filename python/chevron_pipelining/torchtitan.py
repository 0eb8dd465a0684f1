"""Chevron's schedules for torchtitan's trainer: `pipelining_fn` of a ModelSpec or TrainSpec."""
import contextlib
import functools
from types import SimpleNamespace
from unittest import mock

import torch

from .errors import UsageError
from .schedules import Schedule
from .stage import PipelineStage


class TitanSchedule:
    """The schedule of torchtitan's trainer, over the stages of a rank. Chevron's `Schedule` is made by the first step, since torchtitan
    allocates parameters after pipelining_fn; from then on all attributes of `Schedule` (`report`, `trace()`) can be read."""

    def __init__(self, make):
        self._make, self._made = make, None

    def _run(self, method, *args, **kwargs):
        if self._made is None:
            self._made = self._make()
        return getattr(self._made, method)(*args, **kwargs)

    def step(self, *args, **kwargs):
        """As `Schedule.step`."""
        return self._run("step", *args, **kwargs)

    def eval(self, *args, **kwargs):
        """As `Schedule.eval`."""
        return self._run("eval", *args, **kwargs)

    def __getattr__(self, name):
        if self._made is None:
            raise AttributeError(f"`{name}` of a schedule before its first step")
        return getattr(self._made, name)


def _without_fsdp():
    """torchtitan 0.3 wraps stages in FSDP for one data-parallel rank, too, where FSDP only casts: stages then stay plain modules."""
    try:
        from torchtitan.distributed import fsdp
    except ImportError:  # torchtitan 0.2
        return contextlib.nullcontext()
    return mock.patch.object(fsdp, "fully_shard", lambda module, **_: module)


def _check(parallel_dims, parallelism, training):
    """Refuses what Chevron does not run under torchtitan."""
    if parallel_dims.world_size != parallel_dims.pp:
        raise UsageError(f"torchtitan runs {parallel_dims.world_size} ranks with pipeline_parallel_degree {parallel_dims.pp}: "
                         "chevron_pipelining runs no data, tensor, context or expert parallelism beside the pipeline. Remedy: "
                         f"parallelism.pipeline_parallel_degree={parallel_dims.world_size} and all other degrees 1")
    fsdp_casts = hasattr(parallelism, "spmd_backend")  # torchtitan 0.3, also on one data-parallel rank
    if fsdp_casts and training.mixed_precision_param != training.dtype:
        raise UsageError(f"training.mixed_precision_param is {training.mixed_precision_param} and training.dtype {training.dtype}: torchtitan casts "
                         f"through FSDP, which chevron_pipelining does not run. Remedy: training.mixed_precision_param='{training.dtype}'")


def over(pipeline, schedule=None, *, recompute=False, seed=0, deadline=300.0):
    """A pipelining_fn over one of torchtitan's (pipeline_llm, pipeline_vlm), which cuts the model into stages and parallelizes them.

    schedule: any name of Chevron's catalogue, a CSV file or its text, for the placement of parallelism.pipeline_parallel_schedule; None:
              that schedule itself, or parallelism.pipeline_parallel_schedule_csv
    recompute, seed, deadline: as of `PipelineStage` and `Schedule`
    """

    @functools.wraps(pipeline)
    def pipelining_fn(model, *args, **kwargs):
        bound = dict(zip(("parallel_dims", "job_config"), args), **kwargs)  # torchtitan 0.2 passes its job_config by position
        config = bound.get("job_config")
        parallelism, training = (config.parallelism, config.training) if config is not None else (bound["parallelism"], bound["training"])
        _check(bound["parallel_dims"], parallelism, training)
        with _without_fsdp():
            theirs, parts, has_first_stage, has_last_stage = pipeline(model, *args, **kwargs)
        stages = getattr(theirs, "_stages", None) or [theirs._stage]
        name = schedule or parallelism.pipeline_parallel_schedule_csv or type(theirs).__name__.removeprefix("Schedule")

        def make():
            ours = [PipelineStage(stage.submod, stage.stage_index, stage.num_stages, stage.device, group=stage.group, recompute=recompute)
                    for stage in stages]
            return Schedule(name, ours, theirs._n_microbatches, theirs._loss_fn, scale_grads=theirs.scale_grads, seed=seed, deadline=deadline)

        return TitanSchedule(make), parts, has_first_stage, has_last_stage

    return pipelining_fn


def pipelining_fn(model, *args, **kwargs):
    """torchtitan's pipeline_llm under Chevron: `model_spec.pipelining_fn = chevron_pipelining.torchtitan.pipelining_fn`. Returns the schedule,
    the parts of the model, and whether this rank has the first and the last stage."""
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    return over(pipeline_llm)(model, *args, **kwargs)


def on_cpu():
    """Lets torchtitan run on the CPU, over Gloo; called before torchtitan is imported. torchtitan takes a machine without an accelerator for one
    with CUDA, and asks the device's module for memory figures, which torch.cpu lacks, and for the device's number."""
    torch._utils._get_available_device_type = lambda: "cpu"
    figures = {"get_device_name": "CPU", "get_device_properties": SimpleNamespace(total_memory=1), "memory_stats": {},
               "reset_peak_memory_stats": None, "empty_cache": None}
    for name, value in figures.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, lambda *_, value=value: value)
    torch.cpu.current_device = lambda: 0
