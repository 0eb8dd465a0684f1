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
import chevron_pipelining.microbatch  # noqa: E402
import torch.distributed.pipelining  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402


class Part(nn.Module):
    """A stage with a keyword argument that is a tensor of samples, and one that is a number."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, x, scale=None, *, power=1):
        return torch.tanh(self.a(x if scale is None else x * scale)) ** power


class Cut(nn.Module):
    """A model for the tracer, of two stages and two values between them."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Part(16), Part(16)])

    def forward(self, x, scale):
        h = self.parts[0](x, scale)
        one, two = torch.relu(h), h * 2
        torch.distributed.pipelining.pipe_split()
        return self.parts[1](one + two)


def gradients(modules):
    """The gradients as a mark; None where all of them are None."""
    found = [p.grad for module in modules for p in module.parameters()]
    return mark(found) if any(gradient is not None for gradient in found) else None


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


def pieces(package, rank):
    """Cases apart from the schedules; returns what each computed."""
    found, m = {}, 4
    x, y = data(24)
    scale = data(24, seed=9)[0]
    loss = nn.functional.mse_loss
    spec = package.microbatch.TensorChunkSpec
    last = rank == 1

    def of(modules, kind="1F1B", number=m, **options):
        return getattr(package, "Schedule" + kind)(package.PipelineStage(modules[rank], rank, 2, torch.device("cpu")), number,
                                                   loss_fn=loss, **options)

    def note(name, schedule, modules, *given, **keywords):
        losses = []
        output = schedule.step(target=y, losses=losses) if last else schedule.step(*given, **keywords)
        found[name] = [gradients(modules[rank:rank + 1]), mark(losses), mark([output]) if last else None]

    modules = made(Part, 2)
    note("keyword arguments alone", of(modules), modules, x=x, scale=scale)

    modules = made(Part, 2)
    schedule = of(modules, kwargs_chunk_spec={"scale": spec(0)}, args_chunk_spec=(spec(0),), output_merge_spec=spec(0))
    note("chunk specs", schedule, modules, x, scale=scale)

    modules = made(Part, 2)
    for p in modules[rank].parameters():
        p.grad = torch.ones_like(p)
    schedule = of(modules, scale_grads=False)
    found["a schedule is made"] = [gradients(modules[rank:rank + 1])]
    note("onto gradients", schedule, modules, x)
    sums = [p.grad.clone() for p in modules[rank].parameters()]
    modules[rank].zero_grad()
    note("onto none", schedule, modules, x)
    # The bits depend on the order of the sum.
    found["onto gradients"] = [torch.allclose(a, 1 + p.grad) for a, p in zip(sums, modules[rank].parameters())]
    modules[rank].zero_grad()
    other = of(modules, "GPipe", 2)
    found["another schedule is made"] = [gradients(modules[rank:rank + 1])]
    other.eval(*[] if last else [x], **{"target": y} if last else {})
    found["eval without gradients"] = [gradients(modules[rank:rank + 1])]
    note("a third schedule", of(modules, "GPipe", 2), modules, x)  # in PyTorch, no step follows an eval that was the first

    torch.manual_seed(1)
    pipe = package.pipeline(Cut(), (x[:6],), {"scale": scale[:6]})
    modules = [pipe.get_stage_module(s) for s in range(2)]
    note("a traced model", package.Schedule1F1B(pipe.build_stage(rank, torch.device("cpu")), m, loss_fn=loss), modules, x, scale=scale)
    modules = [pipe.get_stage_module(s).zero_grad() or pipe.get_stage_module(s) for s in range(2)]
    stage = package.build_stage(modules[rank], rank, pipe.info(), torch.device("cpu"))
    note("a traced stage", package.ScheduleGPipe(stage, m, loss_fn=loss), modules, x, scale=scale)
    found["attributes"] = [stage.group_rank, stage.group_size, stage.is_first, stage.is_last, schedule.scale_grads]

    for name in ("1f1b", "INTERLEAVED1F1B", "GPipe", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
        one = package.schedules.get_schedule_class(name)
        found["class " + name] = [one.__name__, issubclass(one, package.schedules.PipelineScheduleSingle),
                                  issubclass(one, package.schedules.PipelineScheduleMulti)]
    return found


def alone():
    """A pipeline of one rank under a process group without connections."""
    dist.init_process_group("fake", rank=0, world_size=1, store=FakeStore())
    modules = made(Part, 1)
    x, y = data()
    stage = chevron_pipelining.PipelineStage(modules[0], 0, 1, "cpu")
    output = chevron_pipelining.ScheduleInterleaved1F1B([stage], 2, loss_fn=nn.functional.mse_loss).step(x, target=y)
    found = [p.grad.clone() for p in modules[0].parameters()]
    modules[0].zero_grad()
    nn.functional.mse_loss(modules[0](x), y).backward()
    check(torch.allclose(output, modules[0](x)) and all(torch.allclose(a, p.grad) for a, p in zip(found, modules[0].parameters())),
          "a pipeline of one rank")


def body(package):
    def of_rank(rank):
        torch.set_num_threads(1)
        if package is torch.distributed.pipelining:
            package.PipelineStage._get_init_p2p_neighbors_ops = lambda self: []
        print(json.dumps({**script(package, rank, 2), **pieces(package, rank)}))
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
    check(len(b) == 25 and b.keys() == a.keys(), f"PyTorch ran {list(b)}, Chevron {list(a)}")
    for name in b:
        check(a[name] == b[name], f"{name}, rank {rank}: {a[name]}, by PyTorch {b[name]}")
alone()
finish()
