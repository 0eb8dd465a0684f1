"""Python models under Chevron's schedules, with the names of torch.distributed.pipelining: docs/guides/python.md."""
from typing import TYPE_CHECKING

from . import compiler

binding = compiler.load()
__version__ = compiler.version()

from .errors import DeadlineError, Error, NumericalError, PeerLostError, PreflightError, StageError, UsageError  # noqa: E402
from .job import close  # noqa: E402
from .microbatch import TensorChunkSpec, merge_chunks, split_args_kwargs_into_chunks  # noqa: E402
from .runtime import StepReport  # noqa: E402
from .schedules import (  # noqa: E402
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from .stage import PipelineStage  # noqa: E402
from .tracing import Pipe, SplitPoint, build_stage, pipe_split, pipeline  # noqa: E402
from .trainer import Trainer  # noqa: E402

__all__ = [
    "DeadlineError", "Error", "NumericalError", "PeerLostError", "Pipe", "PipelineScheduleMulti", "PipelineScheduleSingle",
    "PipelineStage", "PreflightError", "Schedule", "Schedule1F1B", "ScheduleDualPipeV", "ScheduleGPipe", "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble", "ScheduleLoopedBFS", "ScheduleZBVZeroBubble", "SplitPoint", "StageError", "StepReport",
    "TensorChunkSpec", "Trainer", "UsageError", "build_stage", "close", "get_schedule_class", "merge_chunks", "pipe_split", "pipeline",
    "split_args_kwargs_into_chunks",
]

if TYPE_CHECKING:
    from .transformers import from_pretrained  # noqa: F401
else:  # type checkers would take any name

    def __getattr__(name):
        if name == "from_pretrained":  # imports transformers
            from .transformers import from_pretrained
            return from_pretrained
        raise AttributeError(f"module 'chevron_pipelining' has no attribute '{name}'")
