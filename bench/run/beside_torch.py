"""Code of benchmarks beside torch.distributed.pipelining: its schedules, and its ranks as processes on Gloo."""
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed import pipelining

# One stage a rank, or two in a loop or a V.
layouts = {"GPipe": None, "1F1B": None, "LoopedBFS": "loop", "Interleaved1F1B": "loop", "InterleavedZeroBubble": "loop", "ZBVZeroBubble": "v",
           "DualPipeV": "v"}


class TorchPipeline:
    """One rank's part of a torch pipeline over the default group: its modules, and `step` on the whole batch."""

    def __init__(self, name, micro_batches, module_of, loss, device=torch.device("cpu"), package=pipelining):
        """`module_of(stage, stages)` makes a stage. `package` has the classes: torch.distributed.pipelining or chevron_pipelining."""
        # 2.11 sends itself a message at start-up where neighbouring stages share a rank, which Gloo refuses.
        pipelining.PipelineStage._get_init_p2p_neighbors_ops = lambda self: []
        rank, ranks = dist.get_rank(), dist.get_world_size()
        make, layout = getattr(package, "Schedule" + name), layouts[name]
        count = ranks if layout is None else 2 * ranks
        mine = {None: [rank], "loop": [rank, rank + ranks], "v": [rank, 2 * ranks - 1 - rank]}[layout]
        rank_of = {s: (s if s < ranks else 2 * ranks - 1 - s) if layout == "v" else s % ranks for s in range(count)}
        self.modules = [module_of(s, count) for s in mine]
        stages = [package.PipelineStage(m, s, count, device) for m, s in zip(self.modules, mine)]
        for stage in stages:
            stage.stage_index_to_group_rank = rank_of
        self.schedule = make(stages[0] if layout is None else stages, micro_batches, loss_fn=loss)
        self.first, self.last = 0 in mine, count - 1 in mine

    def parameters(self):
        return [p for m in self.modules for p in m.parameters()]

    def step(self, inputs, targets):
        self.schedule.step(*((inputs,) if self.first else ()), **({"target": targets} if self.last else {}))


def rank_main(rank, ranks, port, out, body, arguments):
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    result = body(*arguments)
    if rank == 0:
        out.put(result)
    dist.barrier()
    dist.destroy_process_group()


def on_torch_ranks(ranks, body, *arguments):
    """Runs `body(*arguments)` on so many processes; what rank 0's returns."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    out = processes.get_context("spawn").SimpleQueue()
    processes.spawn(rank_main, args=(ranks, port, out, body, arguments), nprocs=ranks, join=True)
    return out.get()
