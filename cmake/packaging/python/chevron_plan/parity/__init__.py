"""Whether training under torch.distributed.pipelining equals a plain loop bit by bit, and the first tensor that does not.

    python -m chevron_plan.parity --target model:case --schedule 1F1B

The function `case` of model.py returns a `Case`: the model's stages, its batches and its loss. From a program, `check` runs a
`Job`.
"""
from .case import Case, Job, RunError, UsageError, clip_over_ranks
from .judge import Difference, Verdict, check
from .ranks import Ranks
from .reasons import FAULTS, ORDERS, REASONS, Reason

__all__ = [
    "Case", "Difference", "FAULTS", "Job", "ORDERS", "REASONS", "Ranks", "Reason", "RunError", "UsageError", "Verdict", "check",
    "clip_over_ranks"
]
