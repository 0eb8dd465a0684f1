"""The connections of this process to the other ranks of its pipelines."""
import atexit
import os
import socket
import sys

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from . import binding
from .errors import Error, UsageError

# By the global ranks of a pipeline and its replicas (empty: of a launcher, without a process group), the number of replicas, and the device.
_jobs = {}


def ranks_of(group):
    """The global ranks of a process group; without torch.distributed, an empty tuple."""
    return tuple(dist.get_process_group_ranks(group)) if dist.is_initialized() else ()


def place(group):
    """This process's rank in a pipeline, and the number of the pipeline's ranks."""
    if dist.is_initialized():
        if dist.get_rank(group) < 0:
            raise UsageError(f"rank {dist.get_rank()} is not in the stage's process group. Remedy: stages on ranks of their group alone")
        return dist.get_rank(group), dist.get_world_size(group)
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def host_of_store(ranks):
    """The number, in a pipeline of these global ranks, of the rank whose process hosts the store of torch.distributed; -1: none."""
    store = _get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    hosted = isinstance(store, dist.TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return ranks.index(0) if hosted and 0 in ranks else -1


def job(group, replicas, deadline, device):
    """The job of the ranks of a pipeline and its replicas, made at the first call: over Gloo for stages on the CPU, over NCCL on a GPU.
    Collective over the group. A process that is a pipeline by itself has a new job after a failure; several ranks end, since their
    connections may hold messages of the failed step. Raises: UsageError."""
    ranks = ranks_of(group)
    key = ranks, replicas, device
    rank, world = place(group)
    known = _jobs.get(key)
    if known is not None and not known.failed:
        return known
    if known is not None and world > 1:
        raise UsageError(f"rank {rank}: a step or an evaluation of these ranks failed before, and no later schedule can run. Remedy: end this "
                         "program, and resume from a checkpoint in a new one")
    gpu = device.index if device.type == "cuda" else -1
    for other in (other for *_, other in _jobs if gpu >= 0 and other.type == "cuda" and other != device):
        raise UsageError(f"stages on {device}, and this process has a pipeline on {other}. Remedy: one process for each GPU")
    if dist.is_initialized():
        master = os.environ.get("MASTER_ADDR", "")
        if not master:
            names = [None] * world
            dist.all_gather_object(names, socket.gethostname(), group=group)
            if len(set(names)) > 1:
                raise UsageError(f"the ranks run on the machines {sorted(set(names))}, and MASTER_ADDR, which tells each its address on "
                                 "the common network, is not set. Remedy: MASTER_ADDR=<the name or address of rank 0's machine>")
        prefix = f"chevron/{','.join(map(str, ranks))}/{replicas}/"
        store = _get_default_store() if world > 1 else dist.HashStore()
        made = binding.Job(store, prefix, rank, world, replicas, host_of_store(ranks), master, deadline, gpu)
    else:
        made = binding.Job(None, "", rank, world, replicas, -1, "", deadline, gpu)
    _jobs[key] = made
    return made


def close() -> None:
    """Waits for the other ranks, and closes all connections; called at the end of the program. Collective."""
    while _jobs:
        _, one = _jobs.popitem()
        if not one.forked:
            one.close()


@atexit.register
def _at_exit():
    """Ends the pipelines of this process: an exception that ended the program is named to all ranks."""
    raised = getattr(sys, "last_value", None)
    for one in list(_jobs.values()):
        if one.forked:
            return
        if raised is not None and not isinstance(raised, Error):
            one.fail(f"{type(raised).__name__}: {raised}")
    if raised is None:
        try:
            close()
        except Error as problem:  # another rank failed, and reports it
            sys.stderr.write(f"chevron_pipelining: at the end of the program: {problem}\n")
