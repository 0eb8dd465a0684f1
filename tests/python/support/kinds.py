"""Kinds of modules, and a pipeline of each beside the plain loop over microbatches."""
from support.ranks import Block, check, data, equal, made, where

import torch
from torch import nn

import chevron_pipelining as cp

loss = nn.functional.mse_loss


class Own(torch.autograd.Function):
    """A function of Python with a parameter among its inputs."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x * w + x.sin()

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g * w + g * x.cos(), (g * x).sum(0)


class Function(Block):
    def __init__(self, width):
        super().__init__(width)
        self.w = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return super().forward(Own.apply(x, self.w))


def clip(parameter):
    parameter.grad.clamp_(-1e-3, 1e-3)


class Hooks(Block):
    def __init__(self, width):
        super().__init__(width)
        self.up.weight.register_hook(lambda g: g * 2)
        self.up.register_full_backward_hook(lambda m, gi, go: (gi[0] * 1.5,))
        self.down.weight.register_post_accumulate_grad_hook(clip)

    def forward(self, x):
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda g: g.clamp(-1, 1))
        return y


class Norm(nn.Module):
    """Buffers that a forward changes."""

    def __init__(self, width):
        super().__init__()
        self.a, self.n = nn.Linear(width, width), nn.BatchNorm1d(width)

    def forward(self, x):
        return torch.relu(self.n(self.a(x)))


class Several(nn.Module):
    """Two tensors, an integer tensor and None between stages."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x, y=None, n=None, none=None):
        h = self.a(x) if y is None else self.a(x) + self.b(y) * (1 + n)
        return h, torch.tanh(self.b(x)), torch.ones((), dtype=torch.long), none


def several_loss(output, target):
    return loss(output[0] + output[1], target)


KINDS = {"block": Block, "function": Function, "hooks": Hooks, "norm": Norm, "several": Several, "checkpoint": Block, "compiled": Block}


def on_cpu(tensors):
    return [None if each is None else each.cpu() for each in tensors]


def build(kind, count):
    modules = made(KINDS[kind], count, **({"checkpointed": True} if kind == "checkpoint" else {}))
    return [torch.compile(m, backend="aot_eager") for m in modules] if kind == "compiled" else modules


def case(rank, ranks, schedule, kind, m, stages, group=None, device="cpu", reference="cpu", largest=None,
         optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)):
    """Two steps of an optimizer of one model, pipelined on `device`, and plain on `reference`. `largest`: the norm to which a rank clips the
    gradients of its stages; None: no clipping."""
    plain, modules = build("block" if kind == "checkpoint" else kind, stages), build(kind, stages)
    places = where(schedule, ranks, m, stages)
    mine = [s for s in range(stages) if places[s] == rank]
    for s in mine:
        modules[s].to(device)
    for module in plain:
        module.to(reference)
    cost = several_loss if kind == "several" else loss
    pipeline = cp.Schedule(schedule, [cp.PipelineStage(modules[s], s, stages, device, group=group) for s in mine], m, loss_fn=cost)
    one = optimizer([p for module in plain for p in module.parameters()])
    own = optimizer([p for s in mine for p in modules[s].parameters()])
    for step in range(2):
        x, y = data(2 * m, seed=step)
        one.zero_grad()
        own.zero_grad()
        for a, b in zip(x.to(reference).chunk(m), y.to(reference).chunk(m)):
            h = (a,)
            for module in plain:
                h = module(*h)
                h = h if isinstance(h, tuple) else (h,)
            cost(h if kind == "several" else h[0], b).backward()
        for p in (p for module in plain for p in module.parameters()):
            p.grad.div_(m)
        pipeline.step(*([x] if 0 in mine else []), target=y if stages - 1 in mine else None, return_outputs=kind != "several")
        name = f"{kind} under {schedule} on {ranks} ranks on {device}, step {step}, rank {rank}: "
        for s in mine:
            check(equal(on_cpu(p.grad for p in modules[s].parameters()), on_cpu(p.grad for p in plain[s].parameters())), name + f"gradients of stage {s}")
        if largest is not None:
            of_ranks = [[p for s in range(stages) if places[s] == r for p in plain[s].parameters()] for r in range(ranks)]
            norms = [nn.utils.clip_grad_norm_(each, largest) for each in of_ranks]
            norm = nn.utils.clip_grad_norm_([p for s in mine for p in modules[s].parameters()], largest)
            check(equal(on_cpu([norm]), on_cpu([norms[rank]])) and norm > largest, name + f"norm {norm}, plain {norms[rank]}, clipped to {largest}")
        one.step()
        own.step()
        for s in mine:
            check(equal(on_cpu(modules[s].state_dict().values()), on_cpu(plain[s].state_dict().values())), name + f"state of stage {s}")
