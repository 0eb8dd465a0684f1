# timeout: 400
"""Programs of Python drawn from seeds, beside the plain loop over microbatches: gradients, states, losses and outputs have equal bits.

A program is a chain of stages made of drawn pieces under a drawn schedule, and a row of steps and evaluations with drawn arguments. Each
seed gives one program with `Schedule` and one with `Trainer`, which adds norms and replicas in another order and is compared to 1e-9. By
hand: `random_programs.py --seed S --count N`. `support/mutants.py` puts mistakes into the package that these programs must find.
"""
import argparse
import copy
import pathlib
import random
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support.kinds import Function, Hooks, Norm  # noqa: E402
from support.ranks import Block, check, equal, finish, problems, run, where  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

import chevron_pipelining as cp  # noqa: E402

WIDTH = 8


class Checkpointed(Block):
    def __init__(self, width):
        super().__init__(width, checkpointed=True)


class Conditional(Block):
    """A block of which some microbatches use one half, and some none."""

    def forward(self, x):
        return super().forward(x) if x.detach().sum() > 0 else x * 1.5


class Unused(Block):
    """A block with a parameter that no forward uses."""

    def __init__(self, width):
        super().__init__(width)
        self.unused = nn.Parameter(torch.randn(width))


class Shared(nn.Module):
    """Two layers of one weight."""

    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Convolution(nn.Module):
    """A convolution over the width."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.Conv1d(1, 3, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.a(x.unsqueeze(1))).mean(1)


class Parametrized(nn.Module):
    """A weight that is computed of two parameters."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.utils.parametrizations.weight_norm(nn.Linear(width, width))

    def forward(self, x):
        return self.a(x)


class InPlace(nn.Module):
    """Operators that overwrite their inputs."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)

    def forward(self, x):
        return nn.functional.relu(self.a(x).add_(x), inplace=True)


class Recurrent(nn.Module):
    """A cell of a library, whose output is a tuple."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.GRU(width, width, batch_first=True)

    def forward(self, x):
        return self.a(x.unsqueeze(1))[0].squeeze(1)


class View(nn.Module):
    """No parameters: the output is a view of the input."""

    def __init__(self, width):
        super().__init__()

    def forward(self, x):
        return x.view(-1, 2, x.size(1) // 2).transpose(1, 2).flatten(1)


class Same(nn.Module):
    """No parameters: the output is the input."""

    def __init__(self, width):
        super().__init__()

    def forward(self, x):
        return x


class Counter(nn.Module):
    """A buffer that counts samples, and one that scales."""

    def __init__(self, width):
        super().__init__()
        self.a = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(width))

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            self.seen += len(x)
        return self.a(x) * self.scale


class Lookup(nn.Module):
    """An embedding of token ids."""

    def __init__(self, width):
        super().__init__()
        self.table = nn.Embedding(5, width)

    def forward(self, tokens):
        return self.table(tokens)


PIECES = [Block, Checkpointed, Conditional, Unused, Shared, Convolution, Parametrized, InPlace, Recurrent, View, Same, Counter, Function, Hooks, Norm]


class Stage(nn.Module):
    """Pieces one after another. `passes`: values beside the hidden state: "" none, "side" a second float tensor that gradients pass,
    "more" an integer tensor and None, too. `keyword`: whether the stage takes `scale`."""

    def __init__(self, pieces, passes, keyword):
        super().__init__()
        self.pieces = nn.ModuleList([kind(WIDTH) for kind in pieces])
        self.passes, self.keyword = passes, keyword

    def forward(self, x, *rest, scale=None, power=1):
        side = rest[0] if rest else None
        for piece in self.pieces:
            x = piece(x)
        if scale is not None:
            x = x * scale.to(x.dtype)
        if side is not None:
            x = x + torch.tanh(side) * (rest[1] if len(rest) > 1 else 1)
        x = x if power == 1 else x / power
        if not self.passes:
            return x
        return (x, x * 0.5) if self.passes == "side" else (x, x.sin(), torch.full((1,), 2), None)


class Program:
    """The program of a seed, the same on every rank."""

    def __init__(self, seed):
        draw = self.draw = random.Random(seed)
        self.ranks = draw.choice([2, 2, 2, 3, 4])
        self.schedule, chunks = draw.choice([("GPipe", 1), ("1F1B", 1), ("ZB-H1", 1), ("ZB-H2", 1), ("Interleaved1F1B", 2), ("LoopedBFS", 2),
                                             ("InterleavedZeroBubble", 2), ("ZBVZeroBubble", 2), ("DualPipeV", 2), ("V-Half", 2), ("V-Min", 2)])
        self.m = draw.choice(range(1, 10))
        if self.schedule in ("DualPipeV", "V-Half", "V-Min"):
            self.m = draw.choice([2, 4, 6]) * self.ranks
        if self.schedule.startswith("Interleaved"):
            self.m = draw.choice([1, 2, 3]) * self.ranks
        self.stages = self.ranks * chunks
        self.dtype = draw.choice([torch.float32, torch.float32, torch.float64])
        self.passes = [draw.choice(["", "", "", "side", "more"]) for _ in range(self.stages - 1)] + [""]
        self.pieces = [[draw.choice(PIECES) for _ in range(draw.choice([1, 1, 2]))] for _ in range(self.stages)]
        self.keyword = [draw.random() < 0.2 for _ in range(self.stages)]
        self.recompute = [draw.random() < 0.2 and not any(p in (Norm, Counter, Checkpointed) for p in pieces) for pieces in self.pieces]
        self.frozen = draw.choice(["", "", "", "some", "first", "whole"])
        self.optimizer = draw.choice(["sgd", "momentum", "adamw", "adam"])
        self.scale_grads = draw.random() < 0.8
        self.autocast = self.dtype is torch.float32 and draw.random() < 0.25
        self.tokens = draw.random() < 0.25
        kinds = ["step", "step", "step", "eval", "mode", "second", "touch", "reload", "inference"]
        self.acts = [draw.choice(kinds) for _ in range(draw.choice([3, 4, 6]))] + ["step"]

    def __str__(self):
        names = "|".join("+".join(p.__name__ for p in pieces) + ("/r" if r else "") + ("/k" if k else "") + (f"/{out}" if out else "")
                         for pieces, r, k, out in zip(self.pieces, self.recompute, self.keyword, self.passes))
        return (f"{self.schedule} P={self.ranks} M={self.m} {str(self.dtype)[6:]}{' autocast' * self.autocast}{' tokens' * self.tokens} {names} "
                f"frozen={self.frozen} {self.optimizer} scale={self.scale_grads} {' '.join(self.acts)}")

    def build(self):
        torch.manual_seed(3)
        pieces = [[Lookup, *self.pieces[0]], *self.pieces[1:]] if self.tokens else self.pieces
        out = [Stage(*of).to(self.dtype) for of in zip(pieces, self.passes, self.keyword)]
        choose = random.Random(1)
        for s, stage in enumerate(out):
            for p in stage.parameters():
                if self.frozen == "some" and choose.random() < 0.4 or self.frozen == "first" and s == 0 or \
                        self.frozen == "whole" and s == len(out) // 2:
                    p.requires_grad_(False)
        return out

    def make(self, parameters):
        parameters = [p for p in parameters if p.requires_grad] or [nn.Parameter(torch.zeros(1))]
        return {"sgd": lambda: torch.optim.SGD(parameters, lr=0.05), "momentum": lambda: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
                "adamw": lambda: torch.optim.AdamW(parameters, lr=1e-2), "adam": lambda: torch.optim.Adam(parameters, lr=1e-2)}[self.optimizer]()


def loss(output, target):
    return (output.to(target.dtype) - target).square().mean()


def plain_forward(modules, x, keywords):
    h = (x,)
    for s, module in enumerate(modules):
        h = module(*h, **keywords[s])
        h = h if isinstance(h, tuple) else (h,)
    return h[0]


def backward(of, costs):
    """The backwards of all microbatches, in the order in which the schedule adds gradients."""
    for cost in reversed(costs) if of.schedule == "LoopedBFS" else costs:
        cost.backward()


def between(act, draw, plain, modules):
    """Changes the mode or the parameters of both models, as a script may between two steps. Returns whether `act` is such a change."""
    if act == "mode":
        training = draw.random() < 0.5
        for module in plain + modules:
            module.train(training)
    elif act == "touch":
        with torch.no_grad():
            for p in parameters_of(plain) + parameters_of(modules):
                p.mul_(0.9)
    return act in ("mode", "touch")


def parameters_of(modules):
    """The parameters of a model, a shared one once."""
    return list(nn.ModuleList(modules).parameters())


def program(rank, seed):
    of = Program(seed)
    draw = of.draw
    plain, modules = of.build(), of.build()
    if not any(p.requires_grad for p in parameters_of(plain)):
        return  # no parameter to train, which is an error
    places = where(of.schedule, of.ranks, of.m, of.stages)
    mine = [s for s in range(of.stages) if places[s] == rank]
    first, last = 0 in mine, of.stages - 1 in mine
    given = [cp.PipelineStage(modules[s], s, of.stages, "cpu", recompute=of.recompute[s]) for s in mine]
    of_rank = cp.Schedule(of.schedule, given, of.m, loss_fn=loss, scale_grads=of.scale_grads)
    whole = of.make(parameters_of(plain))
    own = of.make([p for s in mine for p in modules[s].parameters()])
    name = f"seed {seed}: {of}\n    rank {rank}, "

    def casts():  # of one run: torch keeps casted weights until its context ends
        return torch.autocast("cpu", torch.bfloat16, enabled=of.autocast)

    def same_states(when):
        for s in mine:
            a, b = modules[s].state_dict(), plain[s].state_dict()
            bad = [key for key in a if not torch.equal(a[key], b[key])]
            check(not bad, f"{name}{when}: state of stage {s}: {bad}")

    for number, act in enumerate(of.acts):
        when = f"act {number} ({act})"
        if between(act, draw, plain, modules):
            continue
        if act == "reload":
            for module in plain + modules:
                module.load_state_dict(copy.deepcopy(module.state_dict()))
            continue
        samples = of.m * draw.choice([1, 2, 3]) + draw.choice([0, 0, draw.randrange(of.m)])
        form = draw.choice(["batch", "batch", "strided", "cut"])
        numbers = torch.Generator().manual_seed(100 * seed + number)
        x, y = (torch.randn(samples, WIDTH, generator=numbers, dtype=torch.float64).to(of.dtype) for _ in range(2))
        scale = 1 + 0.1 * torch.rand(samples, 1, generator=numbers, dtype=torch.float64).to(of.dtype)
        if form == "strided":
            x = x.t().contiguous().t()
        if of.tokens:
            x = torch.randint(5, (samples,), generator=numbers)
        if any(Norm in pieces for pieces in of.pieces) and samples < 2 * of.m:
            samples = 2 * of.m
            x, y, scale = (torch.cat([t, t])[:samples] for t in (x, y, scale))
            x = x if of.tokens else x * torch.arange(1, samples + 1, dtype=of.dtype).view(-1, 1)
        powered = draw.random() < 0.2
        # Keyword arguments are those of all stages of a rank.
        asks = [any(of.keyword[t] for t in range(of.stages) if places[t] == r) for r in range(of.ranks)]
        power = {"power": 2} if powered else {}
        keywords = {"scale": scale, **power} if asks[rank] else {}
        xs, ys, scales = (torch.tensor_split(t, of.m) for t in (x, y, scale))
        of_stage = [[{"scale": each, **power} if asks[places[s]] else {} for s in range(of.stages)] for each in scales]
        schedule = cp.Schedule(of.schedule, given, of.m, loss_fn=loss) if act == "second" else of_rank
        keep = draw.random() < 0.7
        onto = draw.random() < 0.3
        to_none = draw.random() < 0.5
        expected = []
        if act in ("eval", "inference"):
            mode = torch.inference_mode if act == "inference" else torch.no_grad if draw.random() < 0.5 else torch.enable_grad
            with torch.no_grad(), casts():
                outs = [plain_forward(plain, a, k) for a, k in zip(xs, of_stage)]
                expected = [loss(o, t) for o, t in zip(outs, ys)]
            losses = [torch.zeros(())]  # of another step
            with mode(), casts():
                out = schedule.eval(*([x] if first else []), target=y if last else None, losses=losses, **keywords)
            check((out is None) == (not last), f"{name}{when}: an output on the wrong rank")
            if last:
                check(torch.equal(out, torch.cat(outs)), f"{name}{when}: outputs")
                check(equal(losses, expected), f"{name}{when}: losses")
            same_states(when)
            continue
        if not onto:
            whole.zero_grad(set_to_none=to_none)
            own.zero_grad(set_to_none=to_none)
            for p in parameters_of(plain + modules):
                p.grad = None if to_none or p.grad is None else torch.zeros_like(p)
        before = [(p, p.grad.clone()) for p in parameters_of(plain) if p.grad is not None]
        for p, _ in before:
            p.grad = None
        outs, costs = [], []
        with casts():
            for a, b, k in zip(xs, ys, of_stage):
                outs.append(plain_forward(plain, a, k))
                costs.append(loss(outs[-1], b))
        expected = [cost.detach() for cost in costs]
        if not all(cost.requires_grad for cost in costs):
            return  # no parameter to train, which is an error
        backward(of, costs)
        for p in parameters_of(plain):
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
            if p.grad is not None and schedule.scale_grads:
                p.grad.div_(of.m)
        for p, gradient in before:
            p.grad.add_(gradient)
        losses = [torch.zeros(())]  # of another step
        with casts():
            if form == "cut":
                out = schedule.step(arg_mbs=[(a,) for a in xs] if first else None, target_mbs=list(ys) if last else None, losses=losses,
                                    kwarg_mbs=[of_stage[i][mine[0]] for i in range(of.m)] if keywords else None, return_outputs=keep)
            else:
                out = schedule.step(*([x] if first else []), target=y if last else None, losses=losses, return_outputs=keep, **keywords)
        if last:
            check(equal(losses, expected), f"{name}{when}: losses {losses}, plain {expected}")
            check(out is None or torch.equal(out, torch.cat(outs)), f"{name}{when}: outputs")
        for s in mine:
            bad = [key for (key, p), q in zip(modules[s].named_parameters(), plain[s].parameters()) if not equal([p.grad], [q.grad])]
            check(not bad, f"{name}{when}: gradients of stage {s}: {bad}")
        whole.step()
        own.step()
        same_states(when)


class Whole(Program):
    """A drawn program of a `Trainer`: whole steps, with clipping, rates, skipped steps, ties and replicas."""

    def __init__(self, seed):
        super().__init__(seed)
        draw = self.draw
        self.dtype, self.autocast = torch.float64, False
        self.replicas = draw.choice([1, 1, 2]) if self.ranks == 2 else 1
        if self.replicas > 1:  # buffers, and hooks that are no linear functions, see their own replica only
            self.pieces = [[Block if kind in (Norm, Counter, Hooks) else kind for kind in pieces] for pieces in self.pieces]
        if any(Norm in pieces for pieces in self.pieces):
            self.optimizer = "momentum"  # a bias before a normalization has a gradient of rounding errors, which Adam divides by itself
        self.tied = draw.random() < 0.3
        if self.tied:
            self.pieces[0], self.pieces[-1] = [Unused, *self.pieces[0]], [Unused, *self.pieces[-1]]
            self.recompute[0] = self.recompute[-1] = False
        self.clip = draw.choice([0.0, 0.0, 0.05, 100.0])
        self.rated = draw.random() < 0.5
        kinds = ["step", "step", "step", "evaluate", "mode", "infinite", "restore", "touch"]
        self.acts = [draw.choice(kinds) for _ in range(draw.choice([3, 4, 6]))] + ["step"]

    def __str__(self):
        return f"Trainer R={self.replicas} clip={self.clip} rated={self.rated} tied={self.tied} {super().__str__()}"


def near(a, b):
    return len(a) == len(b) and all(torch.allclose(x, y, rtol=1e-9, atol=1e-12, equal_nan=True) for x, y in zip(a, b))


def whole_steps(rank, seed):
    of = Whole(seed)
    draw = of.draw
    replica, place = divmod(rank, of.ranks)
    plain, modules = of.build(), of.build()
    if not any(p.requires_grad for p in parameters_of(plain)):
        return  # no parameter to train, which is an error
    if of.tied:
        plain[-1].pieces[0].up.weight = plain[0].pieces[of.tokens].up.weight
        with torch.no_grad():
            modules[-1].pieces[0].up.weight.copy_(modules[0].pieces[of.tokens].up.weight)
        for module in plain + modules:
            module.requires_grad_(True)
    places = where(of.schedule, of.ranks, of.m, of.stages)
    mine = [s for s in range(of.stages) if places[s] == place]
    first, last = 0 in mine, of.stages - 1 in mine
    given = [cp.PipelineStage(modules[s], s, of.stages, "cpu", recompute=of.recompute[s],
                              ties={f"pieces.{of.tokens * (s == 0)}.up.weight": "tied"} if of.tied and s in (0, of.stages - 1) else None) for s in mine]
    trainer = cp.Trainer(of.schedule, given, of.m, loss, of.make, clip_grad_norm=of.clip, when_not_finite="skip", replicas=of.replicas,
                         learning_rate=(lambda step: 0.02 / (1 + step)) if of.rated else None)
    whole = of.make(parameters_of(plain))
    name = f"whole {seed}: {of}\n    rank {rank}, "
    steps = 0
    for number, act in enumerate(of.acts):
        when = f"act {number} ({act})"
        if between(act, draw, plain, modules):
            continue
        if act == "restore":
            saved = copy.deepcopy(trainer.state_dict())
        every = []
        for r in range(of.replicas):
            samples = of.m * draw.choice([2, 3]) + draw.choice([0, 0, draw.randrange(of.m)])
            numbers = torch.Generator().manual_seed(1000 * seed + 10 * number + r)
            every.append([torch.randn(samples, WIDTH, generator=numbers, dtype=of.dtype) for _ in range(2)])
            if of.tokens:
                every[-1][0] = torch.randint(5, (samples,), generator=numbers)
        total = sum(len(x) for x, _ in every)
        keywords = [any(of.keyword[t] for t in range(of.stages) if places[t] == places[s]) for s in range(of.stages)]
        scale = torch.full((len(every[replica][0]), 1), 1.25, dtype=of.dtype)
        asked = {"scale": scale} if any(keywords[s] for s in mine) else {}
        x, y = every[replica]
        if act == "infinite":
            y = y * torch.inf
        arguments = dict(target=y if last else None, **asked)
        parts = [(len(a), a, b) for xs, ys in every for a, b in zip(xs.tensor_split(of.m), ys.tensor_split(of.m))]

        def forward(a):
            return plain_forward(plain, a, [{"scale": torch.full((len(a), 1), 1.25, dtype=of.dtype)} if k else {} for k in keywords])

        if act == "restore":
            trainer.step(*([x] if first else []), **arguments)
            trainer.load_state_dict(saved)
            continue
        if act == "evaluate":
            with torch.no_grad():
                expected = sum(count / total * loss(forward(a), b).item() for count, a, b in parts)
            mean = trainer.evaluate(*([x] if first else []), **arguments)
            check(near([torch.tensor(mean)], [torch.tensor(expected)]), f"{name}{when}: {mean}, plain {expected}")
            continue
        if act == "infinite":
            before = [copy.deepcopy(modules[s].state_dict()) for s in mine]
            report = trainer.step(*([x] if first else []), **arguments)
            check(report.skipped, f"{name}{when}: {report}")
            bad = [(s, key) for s, state in zip(mine, before) for key, v in modules[s].state_dict().items() if not torch.equal(v, state[key])]
            check(not bad, f"{name}{when}: state after a skipped step: {bad}")
            steps += 1
            continue
        whole.zero_grad()
        costs = [loss(forward(a), b) * (count / total) for count, a, b in parts]
        mean = sum(cost.item() for cost in costs)
        if not all(cost.requires_grad for cost in costs):
            return  # no parameter to train, which is an error
        backward(of, costs)
        trained = [p for p in parameters_of(plain) if p.requires_grad]
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norm = nn.utils.clip_grad_norm_(trained, of.clip or 1e30).item()
        for group in whole.param_groups:
            group["lr"] = 0.02 / (1 + steps) if of.rated else group["lr"]
        whole.step()
        report = trainer.step(*([x] if first else []), **arguments)
        check(report.step == steps and not report.skipped and report.samples == total, f"{name}{when}: {report}, plain {total} samples, step {steps}")
        check(near([torch.tensor([report.loss, report.grad_norm])], [torch.tensor([mean, norm])]), f"{name}{when}: {report}, plain loss {mean}, norm {norm}")
        steps += 1
        for s in mine:
            a, b = modules[s].state_dict(), plain[s].state_dict()
            bad = [key for key in a if not near([a[key]], [b[key]])]
            check(not bad, f"{name}{when}: state of stage {s}: {bad}")


def all_of(kind, seed):
    def body(rank):
        torch.set_num_threads(1)
        try:
            kind(rank, seed)
        except Exception as error:
            check(False, f"{'seed' if kind is program else 'whole'} {seed}: {Program(seed) if kind is program else Whole(seed)}\n    "
                         f"rank {rank}: {type(error).__name__}: {error}")
        finish()

    return body


if __name__ == "__main__":
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--count", type=int, default=12)
    arguments.add_argument("--until-failed", action="store_true", help="end at the first program that fails")
    asked = arguments.parse_args()
    for seed in range(asked.seed, asked.seed + asked.count):
        run(Program(seed).ranks, all_of(program, seed))
        one = Whole(seed)
        run(one.ranks * one.replicas, all_of(whole_steps, seed))
        if problems and asked.until_failed:
            break
    finish()
