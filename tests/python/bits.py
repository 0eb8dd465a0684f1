# timeout: 300
"""Gradients and states of a pipeline equal those of the plain loop over microbatches, bit for bit, for many kinds of modules."""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support.kinds import KINDS, case  # noqa: E402
from support.ranks import finish, run  # noqa: E402

import torch.distributed as dist  # noqa: E402


def two(rank):
    for kind in KINDS:
        for schedule, stages in (("GPipe", 2), ("ZB-H1", 2), ("ZBVZeroBubble", 4), ("V-Half", 4)):
            if kind != "compiled" or schedule in ("ZB-H1", "V-Half"):
                case(rank, 2, schedule, kind, 6, stages)
    finish()


def four(rank):
    for schedule, stages in (("1F1B", 4), ("InterleavedZeroBubble", 8), ("DualPipeV", 8)):
        case(rank, 4, schedule, "function", 8, stages)
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]  # two pipelines at the same time
    case(rank // 2, 2, "ZB-H1", "block", 4, 2, groups[rank % 2])
    finish()


run(2, two)
run(4, four)
finish()
