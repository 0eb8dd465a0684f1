"""Training that is right: the tool must find no difference, or one of the order of sums alone."""
import functools
import os

from torch.distributed.pipelining import schedules

import faults
import models
from chevron_plan.parity import Job

# PyTorch 2.15 requires that a file with messages also waits for them.
WAITS = (",0WAIT_SEND_F0,0WAIT_SEND_F1,0WAIT_REDUCE_GRAD",
         ",1WAIT_SEND_B0,1WAIT_SEND_B1,1WAIT_REDUCE_GRAD") if hasattr(schedules, "WAIT_REDUCE_GRAD") else ("", "")
# A V whose microbatches differ in order from PyTorch's, weight gradients in reverse, and an order with its messages.
FILES = {
    "v_half": (2, 4, 4, "0F0,0F1,3F0,3I0,0F2,3W0,0I0,0W0,3F1,3I1,0F3,3W1,0I1,0W1,3F2,3I2,3W2,0I2,0W2,3F3,3I3,3W3,0I3,0W3\n"
               "1F0,2F0,1F1,2I0,1I0,2W0,2F1,1W0,1F2,2I1,1I1,2W1,2F2,1W1,1F3,2I2,1I2,2W2,2F3,1W2,2I3,1I3,2W3,1W3\n"),
    "reversed_weights": (2, 2, 3, "0F0,0F1,0F2,0I0,0I1,0I2,0W2,0W1,0W0\n1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2\n"),
    "messages": (2, 2, 2, f"0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD{WAITS[0]}\n"
                 f"1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1REDUCE_GRAD{WAITS[1]}\n"),
}


def jobs(folder):
    """The jobs by name. folder: for files of schedules"""
    of = functools.partial
    named = {}

    def add(kind, schedule, ranks, microbatches, samples=24, build=None, **options):
        stages = {"1F1B": ranks, "GPipe": ranks}.get(schedule, 2 * ranks)
        build = build or of(models.regression, kind)
        named[f"{kind}, {schedule}, {ranks} ranks, {microbatches} microbatches"] = Job(of(build, stages=stages, samples=samples),
                                                                                       schedule,
                                                                                       ranks,
                                                                                       microbatches,
                                                                                       static_shapes=kind in ("batchnorm", "replicas"),
                                                                                       **options)

    several = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    for schedule in ("GPipe", "1F1B", *several):
        for kind in ("mlp", "attention", "dropout", "batchnorm"):
            add(kind, schedule, 2, 4, steps=2 if kind == "mlp" else 1)
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B"):
        add("pair", schedule, 2, 4)
        add("checkpoint", schedule, 2, 3)
        add("half", schedule, 2, 4)
    for schedule, ranks, microbatches in (("1F1B", 3, 6), ("GPipe", 4, 8), ("1F1B", 4, 8), ("Interleaved1F1B", 3, 6),
                                          ("LoopedBFS", 4, 4), ("InterleavedZeroBubble", 4, 8), ("ZBVZeroBubble", 3, 8),
                                          ("DualPipeV", 3, 8), ("GPipe", 2, 1)):
        add("mlp", schedule, ranks, microbatches)
    for schedule in ("1F1B", "ZBVZeroBubble"):
        add("adam", schedule, 2, 4, build=of(models.regression, "mlp", optimizer=models.adam), steps=3)
        add("clip", schedule, 2, 4, build=of(models.regression, "mlp", max_norm=0.01), steps=2)
        add("batches", schedule, 2, 6, build=of(models.regression_sum, batches=3))
        add("language", schedule, 2, 3, samples=12, build=of(models.language, unequal=True))
        tie = {"after_backward": faults.add_tied} if schedule == "1F1B" else {}  # on one rank, autograd adds the two gradients
        add("tied", schedule, 2, 3, samples=12, build=of(models.language, tied=True, **tie))
    for schedule in ("GPipe", "1F1B", "Interleaved1F1B"):
        # PyTorch 2.15 finds shapes by a forward and a backward, which leave gradients in stages under DistributedDataParallel.
        add("replicas", schedule, 2, 4, build=of(models.regression, "dropout"), replicas=2)
    for name, (ranks, stages, microbatches, text) in FILES.items():
        path = os.path.join(folder, name + ".csv")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        named[name] = Job(of(models.regression, "mlp", stages=stages), path, ranks, microbatches)
    return named
