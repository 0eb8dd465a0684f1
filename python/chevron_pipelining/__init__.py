"""Python models under Chevron's schedules, with the names of torch.distributed.pipelining: docs/guides/python.md."""
from typing import TYPE_CHECKING

from . import compiler

binding = compiler.load()

from .errors import DeadlineError, Error, NumericalError, PeerLostError, PreflightError, StageError, UsageError  # noqa: E402
from .job import close  # noqa: E402
from .runtime import StepReport  # noqa: E402
from .schedules import (  # noqa: E402
    Schedule,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from .stage import PipelineStage  # noqa: E402
from .trainer import Trainer  # noqa: E402

__all__ = [
    "DeadlineError", "Error", "NumericalError", "PeerLostError", "PipelineStage", "PreflightError", "Schedule", "Schedule1F1B",
    "ScheduleDualPipeV", "ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble", "StageError", "StepReport", "Trainer", "UsageError", "close",
]

_OF_THE_TRACER = ("Pipe", "pipe_split", "pipeline", "SplitPoint", "build_stage")

if not TYPE_CHECKING:  # with it, type checkers would take any name

    def __getattr__(name):
        if name in _OF_THE_TRACER:
            raise ImportError(f"chevron_pipelining has no `{name}`, which cuts a traced model. Remedy: import it from torch.distributed.pipelining, "
                              "and give its stage modules (`pipe.get_stage_module(i)`) to chevron_pipelining.PipelineStage")
        raise AttributeError(f"module 'chevron_pipelining' has no attribute '{name}'")
