# timeout: 300
"""One script with either import: parameters, losses and outputs have equal bits under torch.distributed.pipelining and Chevron."""
import hashlib
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support.ranks import check, data, finish, made, run  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import chevron_pipelining  # noqa: E402
import torch.distributed.pipelining  # noqa: E402


class Part(nn.Module):
    """A stage with a keyword argument that is a tensor of samples, and one that is a number."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, x, scale=None, *, power=1):
        return torch.tanh(self.a(x if scale is None else x * scale)) ** power


def mark(tensors):
    return hashlib.sha1(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:12]


def script(package, rank, world):
    """The script; returns what it computed, by case."""
    found = {}
    #        name, stages of a rank, microbatches, samples
    for name, chunks, m, samples in (("GPipe", 1, 6, 24), ("1F1B", 1, 8, 24), ("Interleaved1F1B", 2, 8, 16), ("LoopedBFS", 2, 8, 16),
                                     ("InterleavedZeroBubble", 2, 6, 24), ("ZBVZeroBubble", 2, 6, 24), ("DualPipeV", 2, 12, 24)):
        stages = world * chunks
        mine = [rank] if chunks == 1 else [rank, 2 * world - 1 - rank] if name in ("ZBVZeroBubble", "DualPipeV") else [rank, rank + world]
        modules = made(Part, stages)
        x, y = data(samples)
        like = dict(input_args=x[:samples // m], output_args=x[:samples // m])
        parts = [package.PipelineStage(modules[s], s, stages, torch.device("cpu"), **like) for s in mine]
        schedule = getattr(package, "Schedule" + name)(parts[0] if chunks == 1 else parts, m, loss_fn=nn.functional.mse_loss)
        optimizer = torch.optim.AdamW([p for s in mine for p in modules[s].parameters()], lr=1e-2)
        split = "Zero" in name or "Dual" in name  # PyTorch's I takes each keyword argument for a tensor, and its eval needs B
        keywords = {"scale": data(samples, seed=9)[0], **({} if split else {"power": 2})}
        first, last = 0 in mine, stages - 1 in mine
        for _ in range(3):
            optimizer.zero_grad()
            losses = []
            output = schedule.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}), **keywords)
            optimizer.step()
        found[name] = [mark(p for s in mine for p in modules[s].parameters()), mark(losses), mark([output]) if output is not None else None]
        if split:
            continue
        with torch.no_grad():
            output = schedule.eval(*([x] if first else []), **({"target": y, "losses": losses} if last else {}), **keywords)
        found[name] += [mark(losses), mark([output]) if output is not None else None]
    return found


def body(package):
    def of_rank(rank):
        torch.set_num_threads(1)
        if package is torch.distributed.pipelining:
            package.PipelineStage._get_init_p2p_neighbors_ops = lambda self: []
        print(json.dumps(script(package, rank, 2)))
        if package is torch.distributed.pipelining:
            dist.barrier()
            sys.stdout.flush()
            os._exit(0)

    return of_rank


ours, theirs = run(2, body(chevron_pipelining)), run(2, body(torch.distributed.pipelining))
for rank in range(2):
    if not (ours[rank].out and theirs[rank].out):
        continue
    a, b = json.loads(ours[rank].out), json.loads(theirs[rank].out)
    check(len(b) == 7, f"PyTorch ran {list(b)}")
    for name in b:
        for what, one, other in zip(("parameters", "losses", "outputs", "losses of eval", "outputs of eval"), a[name], b[name]):
            check(one == other, f"{name}, rank {rank}: {what} {one}, by PyTorch {other}")
finish()
