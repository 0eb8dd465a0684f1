"""PyTorch's side of ./dev bench: one process group that stays, so that measurements of both sides can alternate.

    PYTHON bench/run/torch_peer.py --ranks N      reads requests, lines of JSON, from standard input; answers each with one

Rank 0 is this process, which starts the other ranks. Between requests all ranks sleep. With 0 ranks there is no group, for requests
that need none. bench/suite/peers.py is the other end; what is asked for is the name of a function below, and its arguments.
"""
import argparse
import ctypes
import datetime
import gc
import importlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
import traceback

import torch
import torch.distributed as dist
import torch.nn.functional as nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from beside_torch import TorchPipeline


# --- planning -----------------------------------------------------------------------------------------------------------------


def planning(schedule, ranks, micro_batches):
    """Milliseconds of CPU time for what torch does when it builds a schedule, without its stages: orders, validation, sends and
    receives."""
    chunks = 1 if schedule == "GPipe" else 2
    bare = object.__new__(getattr(pipelining, "Schedule" + schedule))
    bare.pp_group_size, bare.n_local_stages, bare._n_microbatches = ranks, chunks, micro_batches
    bare._num_stages = bare.num_stages = ranks * chunks
    bare._stages = [None] * chunks
    bare.number_of_rounds = max(1, micro_batches // ranks)
    bare.microbatches_per_round = micro_batches // bare.number_of_rounds
    zig_zag = schedule in ("ZBVZeroBubble", "DualPipeV")
    rank_of = {s: (s if s < ranks else 2 * ranks - 1 - s) if zig_zag else s % ranks for s in range(ranks * chunks)}
    begin = time.process_time()
    orders = {}
    if schedule == "GPipe":
        made = bare._get_pipeline_order()
        orders = {rank: [a for a in made[rank] if a is not None] for rank in range(ranks)}
    else:
        for rank in range(ranks):
            bare.rank = rank
            orders[rank] = [a for a in bare._calculate_single_rank_operations(rank) if a is not None]
    schedules._validate_schedule(orders, ranks, ranks * chunks, micro_batches)
    schedules._add_send_recv(orders, stage_to_rank=lambda s: rank_of[s], num_stages=ranks * chunks)
    return (time.process_time() - begin) * 1e3


# --- steps --------------------------------------------------------------------------------------------------------------------


def median_seconds(one_step, warm_up, steps):
    seconds = []
    for step in range(warm_up + steps):
        begin = time.perf_counter()
        one_step()
        if step >= warm_up:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def step(schedule, micro_batches, width, samples, steps, package="torch.distributed.pipelining"):
    """Milliseconds of a step of stages of one linear layer, SGD's included."""
    pipeline = TorchPipeline(schedule, micro_batches, lambda stage, stages: torch.nn.Linear(width, width), nn.mse_loss,
                             package=importlib.import_module(package))
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)
    inputs, targets = torch.randn(micro_batches * samples, width), torch.randn(micro_batches * samples, width)

    def one():
        pipeline.step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()

    return median_seconds(one, 3, steps) * 1e3


# --- memory -------------------------------------------------------------------------------------------------------------------


def process_size(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name + ":"))


def memory(schedule, micro_batches, samples, width, blocks):
    """By how many MB each rank's process grows in its second step, and its largest size, as bench-memory --resident does."""

    def stage(number, count):
        own = range(blocks * number // count, blocks * (number + 1) // count)
        return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(width, 4 * width), torch.nn.GELU(),
                                                         torch.nn.Linear(4 * width, width)) for _ in own))

    pipeline = TorchPipeline(schedule, micro_batches, stage, nn.mse_loss)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.01)
    x = torch.ones(micro_batches * samples, width)

    def one():
        pipeline.step(x, x)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # gradients stay, as ours do

    one()
    gc.collect()
    dist.barrier()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM starts anew
    before = process_size("VmRSS")
    dist.barrier()
    one()
    peak = process_size("VmHWM")
    all_ranks = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, ((peak - before) / 1e6, peak / 1e6))
    return {"grown_mb": [grown for grown, _ in all_ranks], "in_all_mb": [whole for _, whole in all_ranks]}


# --- a GPT --------------------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.query_key_value = torch.nn.Linear(width, 3 * width, bias=False)
        self.project = torch.nn.Linear(width, width, bias=False)
        self.widen, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        samples, length, width = x.shape
        both = self.query_key_value(self.norm_1(x)).view(samples, length, 3, self.heads, width // self.heads)
        q, k, v = both.permute(2, 0, 3, 1, 4)
        seen = nn.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(samples, length, width))
        return x + self.narrow(nn.gelu(self.widen(self.norm_2(x))))


class Stage(torch.nn.Module):
    """One of `count` equal parts of the model, which reads bytes."""

    def __init__(self, number, count, layers, width, heads, context):
        super().__init__()
        self.first, self.last = number == 0, number == count - 1
        if self.first:
            self.bytes, self.positions = torch.nn.Embedding(256, width), torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers // count))
        if self.last:
            self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, 256, bias=False)

    def forward(self, x):
        if self.first:
            x = self.bytes(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def loss_of(logits, targets):
    return nn.cross_entropy(logits.flatten(0, 1), targets.flatten())


def gpt(schedule, micro_batches, samples, steps, fused, package="torch.distributed.pipelining", **model):
    """Tokens a second, AdamW and the clipping of the gradient's norm included. `alone`: this process does all of it, and the
    others wait; `all alone`: each process does all of it at once, and their tokens are added up. `fused`: AdamW with
    `fused=True`, else with what PyTorch takes by itself."""

    def adamw(parameters):
        return torch.optim.AdamW(parameters, fused=fused or None)

    batch = [torch.randint(256, (micro_batches * samples, model["context"])) for _ in range(2)]
    if schedule == "alone" and dist.get_rank() != 0:
        return None
    if schedule.endswith("alone"):
        whole = Stage(0, 1, **model)
        optimizer = adamw(whole.parameters())

        def one():
            for x, y in zip(*(part.chunk(micro_batches) for part in batch)):
                (loss_of(whole(x), y) / micro_batches).backward()
            torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    else:
        pipeline = TorchPipeline(schedule, micro_batches, lambda number, count: Stage(number, count, **model), loss_of,
                                 package=importlib.import_module(package))
        optimizer = adamw(pipeline.parameters())

        def one():
            pipeline.step(*batch)
            # The norm of the whole gradient, as a trainer needs it.
            gradients = [p.grad for p in pipeline.parameters()]
            total = torch.stack(torch._foreach_norm(gradients)).square().sum()
            dist.all_reduce(total)
            torch._foreach_mul_(gradients, (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0))
            optimizer.step()
            optimizer.zero_grad()

    rate = batch[0].numel() / median_seconds(one, 1, steps)
    if schedule == "all alone":
        rates = [None] * dist.get_world_size()
        dist.all_gather_object(rates, rate)
        return sum(rates)
    return rate


# --- the group ----------------------------------------------------------------------------------------------------------------

measurements = {f.__name__: f for f in (planning, step, memory, gpt)}


def serve(ranks, requests, answers):
    """Rank 0: does what each line asks for, and writes what came of it."""
    for line in requests:
        asked = json.loads(line)
        if ranks > 1:
            dist.broadcast_object_list([asked])
        try:
            answer = {"result": measurements[asked["do"]](**asked["with"])}
        except Exception as problem:  # the other end says which measurement it was
            traceback.print_exc()
            said = str(problem).strip().splitlines()
            answer = {"failed": f"{type(problem).__name__}: {said[0] if said else ''}"}
        gc.collect()
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    if ranks > 1:
        dist.broadcast_object_list([None])
    close()


def close():
    """Ends Chevron's connections, which all ranks do together, before rank 0 waits for the end of the others."""
    if "chevron_pipelining" in sys.modules:
        sys.modules["chevron_pipelining"].close()


def follow():
    """The other ranks: the same, with nobody to tell."""
    while True:
        asked = [None]
        dist.broadcast_object_list(asked)
        if asked[0] is None:
            return close()
        measurements[asked[0]["do"]](**asked[0]["with"])
        gc.collect()


def main():
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--ranks", type=int, required=True)
    words.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    words.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = words.parse_args()
    # Answers go to the original standard output; output of libraries goes to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    others = []
    if given.ranks > 0:
        if given.rank == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                given.port = probe.getsockname()[1]
            mine = [sys.executable, __file__, "--ranks", str(given.ranks), "--port", str(given.port), "--rank"]
            others = [subprocess.Popen([*mine, str(r)], stdin=subprocess.DEVNULL, stdout=2) for r in range(1, given.ranks)]
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(given.port))
        dist.init_process_group("gloo", rank=given.rank, world_size=given.ranks, timeout=datetime.timedelta(hours=3))
    if given.rank != 0:
        return follow()
    answers.write(json.dumps({"torch": torch.__version__}) + "\n")
    answers.flush()
    serve(given.ranks, sys.stdin, answers)
    for other in others:
        other.wait()


if __name__ == "__main__":
    main()
