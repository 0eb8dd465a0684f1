# timeout: 300
"""What differs silently unless it is taken care of: random numbers of recomputed forwards, hooks in half precision, replaced
parameters, forked processes, gradients that are there, the names that are refused."""
import gc
import math
import os
import pathlib
import sys
import weakref

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support.ranks import Block, check, data, equal, finish, made, run, where  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

import chevron_pipelining as cp  # noqa: E402

loss = nn.functional.mse_loss


def pipeline(rank, schedule, m, modules, **more):
    """The stages of a rank under a schedule."""
    places = where(schedule, 2, m, len(modules))
    mine = [s for s in range(len(modules)) if places[s] == rank]
    stages = [cp.PipelineStage(modules[s], s, len(modules), "cpu", recompute=more.pop("recompute", False)) for s in mine]
    return mine, cp.Schedule(schedule, stages, m, loss_fn=more.pop("loss_fn", loss), **more)


def step(made_by, x, y, modules):
    mine, schedule = made_by
    losses = []
    schedule.step(*([x] if 0 in mine else []), target=y if len(modules) - 1 in mine else None, losses=losses)
    return losses


class Noisy(Block):
    """A block with noise: an odd number of normal numbers, which are drawn in pairs, so that the generator stores one."""

    def forward(self, x):
        return super().forward(x) + 0.1 * torch.randn(3).sum()


def dropped(rank):
    """Dropout and noise: equal losses and gradients by all schedules, with checkpoints, recomputation and a compiled forward; other numbers in
    each step and for another seed; the process's generator stays as it was."""
    x, y = data()
    found = {}
    for schedule in ("1F1B", "ZB-H1"):
        for way in ("plain", "checkpoint", "recompute", "seed"):
            modules = made(Noisy, 2, dropout=0.5, checkpointed=way == "checkpoint")
            one = pipeline(rank, schedule, 4, modules, recompute=way == "recompute", seed=7 if way == "seed" else 3)
            torch.manual_seed(11 * rank)
            torch.randn(1)  # the generator stores the second number of the pair
            before = torch.get_rng_state()
            losses = [step(one, x, y, modules) for _ in range(2)]
            check(torch.equal(before, torch.get_rng_state()), f"{schedule}, {way}: the generator was changed")
            found[schedule, way] = sum(losses, []), [p.grad.clone() for p in modules[rank].parameters()]
    plain = found["1F1B", "plain"]
    for key, (losses, gradients) in found.items():
        if key[1] == "seed":
            check(rank == 0 or not equal(losses, plain[0]), f"{key}: the losses of another seed")
        else:
            check(equal(losses, plain[0]) and equal(gradients, plain[1]), f"{key} differs from 1F1B, rank {rank}: {losses} {plain[0]}")
    check(rank == 0 or not equal(plain[0][:4], plain[0][4:]), "both steps drop the same units")


def half(rank):
    """A user's hook on a parameter in bfloat16 is called."""
    for late in (False, True):
        modules, (x, y) = [m.to(torch.bfloat16) for m in made(nn.Linear, 2, out_features=16)], data()
        calls = []
        hook = lambda: modules[rank].weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))  # noqa: E731
        if not late:
            hook()
        one = pipeline(rank, "1F1B", 4, modules)
        if late:
            hook()
        step(one, x.bfloat16(), y.bfloat16(), modules)
        check(calls == [True] * 4, f"a hook in half precision, rank {rank}, registered {'after' if late else 'before'}: {calls}")


def replaced(rank):
    """A parameter that is another tensor than when the stage was made is refused, and so are the hidden forms of it."""
    modules, (x, y) = made(Block, 2), data()
    one = pipeline(rank, "1F1B", 4, modules)
    step(one, x, y, modules)
    kept = modules[rank].up.weight
    for new in (nn.Parameter(kept.detach().clone()), None):
        modules[rank].up.weight = new
        try:
            step(one, x, y, modules)
            check(False, f"a replaced parameter was taken: {new}")
        except cp.UsageError as error:
            check("`up.weight`" in str(error) and "Remedy" in str(error), str(error))
    modules[rank].up.weight = kept
    step(one, x, y, modules)
    up = modules[rank].up
    modules[rank].up = nn.Linear(up.in_features, up.out_features)
    try:
        step(one, x, y, modules)
        check(False, "a replaced module was taken")
    except cp.UsageError as error:
        check("`up.weight`" in str(error), str(error))
    modules[rank].up = up
    step(one, x, y, modules)


def touched(rank):
    """Hooks that double a loss's gradient in place, or empty those of earlier losses, leave the other microbatches alone."""
    kept = []

    def doubles(gradient):
        gradient.mul_(2)

    def empties(gradient):
        for one in kept:
            one.zero_()
        kept.append(gradient)

    for hook in (doubles, empties):
        def hooked(output, target):
            value = loss(output, target)
            if value.requires_grad:
                value.register_hook(hook)
            return value

        modules, plain, (x, y) = made(Block, 2), made(Block, 2), data()
        step(pipeline(rank, "1F1B", 4, modules, loss_fn=hooked), x, y, modules)
        kept.clear()
        for part, target in zip(x.chunk(4), y.chunk(4)):
            hooked(plain[1](plain[0](part)), target).backward()
        kept.clear()
        both = zip(modules[rank].parameters(), plain[rank].parameters())
        check(all(torch.allclose(a.grad * 4, b.grad, rtol=1e-4, atol=1e-6) for a, b in both),
              f"a hook that {hook.__name__} a loss's gradient, rank {rank}")


def tied(rank):
    """A weight that the stages of two ranks share has the sum of both gradients on both."""
    modules, plain, (x, y) = made(nn.Linear, 2, out_features=16), made(nn.Linear, 2, out_features=16), data()
    with torch.no_grad():
        modules[1].weight.copy_(modules[0].weight)
    plain[1].weight = plain[0].weight
    stage = cp.PipelineStage(modules[rank], rank, 2, "cpu", ties={"weight": "shared"})
    step(([rank], cp.Schedule("ZB-H1", stage, 4, loss_fn=loss)), x, y, modules)
    loss(plain[1](plain[0](x)), y).backward()
    check(torch.allclose(modules[rank].weight.grad, plain[0].weight.grad, rtol=1e-4, atol=1e-7), "the gradient of a tied weight")


def forward_only(rank):
    """Without a loss_fn, and in eval: outputs of the forward, with a nested structure, and no gradient; modes are the caller's."""

    class Nested(Block):
        def forward(self, x):
            y = super().forward(x)
            return {"y": y, "more": (y * 2,)} if self.last else y

    modules, (x, y) = made(Nested, 2, dropout=0.5), data()
    for number, module in enumerate(modules):
        module.last = number == 1
        module.eval()
    stage = cp.PipelineStage(modules[rank], rank, 2, "cpu")
    schedule = cp.Schedule("ZB-H1", stage, 4)
    given = [x] if rank == 0 else []
    with torch.no_grad():
        plain = [modules[1](modules[0](part)) for part in x.chunk(4)]
    for output in (schedule.step(*given), schedule.eval(*given)):
        if rank == 0:
            check(output is None, f"rank 0 has {output}")
            continue
        check(equal([output["y"], output["more"][0]], [torch.cat([p["y"] for p in plain]), torch.cat([p["more"][0] for p in plain])]), "outputs")
        check(not output["y"].requires_grad and not modules[1].training, "a graph or a mode")
    trained = cp.Schedule("ZB-H1", stage, 4, loss_fn=lambda output, target: loss(output["y"], target))
    losses = []
    trained.eval(*given, target=y if rank else None, losses=losses)
    check(rank == 0 or equal(losses, [loss(p["y"], t) for p, t in zip(plain, y.chunk(4))]), f"losses of eval {losses}")
    for words, call in (("no_grad", lambda: torch.no_grad()(trained.step)()), ("no loss_fn", lambda: schedule.next_step)):
        try:
            call()
            check(False, f"{words}: not refused")
        except cp.UsageError as error:
            check(words in str(error), str(error))


def infinite(rank):
    """A loss that is not finite is an error on every rank."""
    modules, (x, y) = made(Block, 2), data()
    try:
        step(pipeline(rank, "1F1B", 4, modules), x, y * float("inf"), modules)
        check(False, "an infinite loss")
    except cp.NumericalError as error:
        check("microbatch" in str(error) and error.code == 6, str(error))


def forked(rank):
    """A fork that ends leaves the parent's connections; a step in it is refused."""
    modules, (x, y) = made(Block, 2), data()
    one = pipeline(rank, "1F1B", 4, modules)
    step(one, x, y, modules)
    child = os.fork()
    if child == 0:
        try:
            step(one, x, y, modules)
        except cp.UsageError as error:
            if "fork of rank" not in str(error):
                os._exit(3)
            raise SystemExit(5) from None
        os._exit(4)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    check(code == 5, f"a forked child ended with {code}")
    step(one, x, y, modules)


def added(rank):
    """A step adds to the gradients that are there; without scale_grads, the sum over microbatches."""
    modules, (x, y) = made(Block, 2), data()
    one = pipeline(rank, "1F1B", 4, modules)
    step(one, x, y, modules)
    first = [p.grad.clone() for p in modules[rank].parameters()]
    step(one, x, y, modules)
    check(equal([p.grad for p in modules[rank].parameters()], [g * 2 for g in first]), "a second step adds")
    other = made(Block, 2)
    whole = pipeline(rank, "1F1B", 4, other, scale_grads=False)
    step(whole, x, y, other)
    check(equal([p.grad for p in other[rank].parameters()], [g * 4 for g in first]), "scale_grads=False")
    norms = [one[1].report.grad_norm, one[1].report.grad_norm, whole[1].report.grad_norm / 4]
    check(norms[0] == norms[1] and math.isclose(norms[0], norms[2], rel_tol=1e-6), f"norms of the report {norms}")


class Skips(nn.Module):
    """A model of three traced stages, of which the last takes the outputs of both others."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x):
        first = self.parts[0](x)
        cp.pipe_split()
        second = self.parts[1](first)
        cp.pipe_split()
        return self.parts[2](second) + first


def cut(rank):
    """Microbatches that are cut already, and arguments of the loss: the bits of a whole batch, in step, eval and a trainer."""
    def weighed(output, target, weight=1.0):
        return weight * loss(output, target)

    x, y = data()
    found = []
    for already in (False, True):
        modules = made(Scaled, 2)
        stage, losses = cp.PipelineStage(modules[rank], rank, 2, "cpu"), []
        schedule = cp.Schedule("ZB-H1", stage, 4, loss_fn=weighed if already else lambda output, target: weighed(output, target, 3.0))
        given = {"arg_mbs": [(part,) for part in x.chunk(4)] if rank == 0 else None, "kwarg_mbs": [{"scale": part} for part in y.chunk(4)],
                 "target_mbs": list(y.chunk(4)) if rank == 1 else None, "loss_kwargs": {"weight": 3.0}}
        whole = ([x] if rank == 0 else []), {"scale": y, "target": y if rank == 1 else None}
        run_with = (lambda call: call(losses=losses, **given)) if already else (lambda call: call(*whole[0], losses=losses, **whole[1]))
        outputs = run_with(schedule.step)
        found.append([*losses, outputs, *(p.grad.clone() for p in modules[rank].parameters())])
        found[-1] += [run_with(schedule.eval), *losses]
        trainer = cp.Trainer("1F1B", stage, 4, schedule._loss_fn, lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        run_with(trainer.step)
        found[-1] += [p.detach().clone() for p in modules[rank].parameters()]
    check(equal(*found), f"cut already, rank {rank}: {found}")
    check(len(found[0]) == (14 if rank == 1 else 6), f"cut already, rank {rank}: {len(found[0])} results")
    for words, more in (("each a tuple", {"arg_mbs": [x] * 4}), ("of 3", {"kwarg_mbs": [{}] * 3}), ("alone", {"target_mbs": [y] * 4, "target": y})):
        try:
            schedule.step(**more)
            check(False, f"{words}: not refused")
        except cp.UsageError as error:
            check(words in str(error), f"{words}: {error}")


class Scaled(nn.Linear):
    """A stage with a keyword argument."""

    def __init__(self, width):
        super().__init__(width, width)

    def forward(self, x, scale):
        return super().forward(x * scale)


def refused(rank):
    """What is left out names itself."""
    module = nn.Linear(4, 4)
    for words, call in (("device", lambda: cp.PipelineStage(module, 0, 2, "cuda")),
                        ("dw_builder", lambda: cp.PipelineStage(module, 0, 2, "cpu", dw_builder=lambda: None)),
                        ("belong to rank", lambda: cp.Schedule1F1B(cp.PipelineStage(module, 1 - rank, 2, "cpu"), 4, loss_fn=loss)),
                        ("torch.distributed.pipelining.stage.PipelineStage",
                         lambda: cp.Schedule1F1B(torch.distributed.pipelining.PipelineStage(module, rank, 2, torch.device("cpu")), 4)),
                        ("`submod_pp_2` of the traced model takes", lambda: cp.pipeline(Skips(), (data()[0],)).build_stage(rank, "cpu")),
                        ("2F2", lambda: cp.get_schedule_class("2F2")),
                        ("did you mean", lambda: cp.Schedule("1FB1", cp.PipelineStage(module, rank, 2, "cpu"), 4, loss_fn=loss)),
                        ("rank 0 has", lambda: cp.Schedule("0F0,0B0,\n1F0,1B1,\n", cp.PipelineStage(module, rank, 2, "cpu"), 1, loss_fn=loss))):
        try:
            call()
            check(False, f"{words}: not refused")
        except (cp.UsageError, ValueError) as error:
            check(words in str(error) or words == "rank 0 has", f"{words}: {error}")


def csv(rank):
    """A CSV of PyTorch's runtime, as text and as a file."""
    text = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    file = pathlib.Path(os.environ["CHEVRON_PIPELINING_CACHE"]) / f"order-{os.getpid()}.csv"
    file.write_text(text)
    x, y = data()
    found = []
    for schedule in (text, file, "1F1B"):
        modules = made(Block, 2)
        stage = cp.PipelineStage(modules[rank], rank, 2, "cpu")
        step(([rank], cp.Schedule(schedule, stage, 2, loss_fn=loss)), x, y, modules)
        found.append([p.grad.clone() for p in modules[rank].parameters()])
    file.unlink()
    check(equal(found[0], found[1]) and equal(found[0], found[2]), "a CSV")


class Pool(nn.Linear):
    """A stage that takes the mean over the tokens of a sequence."""

    def forward(self, x):
        return super().forward(x.mean(1) if x.dim() == 3 else x)


def lengths(rank):
    """Inputs whose shapes change from step to step, also where targets, on another rank, keep theirs."""
    modules, plain = ([made(nn.Linear, 1, out_features=16)[0], made(Pool, 1, out_features=16)[0]] for _ in range(2))
    schedule = cp.Schedule1F1B(cp.PipelineStage(modules[rank], rank, 2, "cpu"), 4, loss_fn=loss)
    y = data()[1]
    for x in (data()[0], data(shape=(3, 16))[0], data(shape=(5, 16))[0], data()[0]):
        modules[rank].zero_grad(), plain[0].zero_grad(), plain[1].zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        loss(plain[1](plain[0](x)), y).backward()
        check(all(torch.allclose(a.grad, b.grad, rtol=1e-4, atol=1e-6) for a, b in zip(modules[rank].parameters(), plain[rank].parameters())),
              f"inputs of {x.dim()} dimensions, rank {rank}")


def ended(rank):
    """A schedule ends where the caller drops it, without the collector of cycles: its memory and threads go."""
    modules, (x, y) = made(nn.Linear, 2, out_features=16), data()
    stage = cp.PipelineStage(modules[rank], rank, 2, "cpu")
    for make in (lambda: cp.Schedule1F1B(stage, 4, loss_fn=loss),
                 lambda: cp.Trainer("1F1B", stage, 4, loss_fn=loss, optimizer=torch.optim.SGD(modules[rank].parameters(), lr=0.1))):
        schedule = make()
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        watched = weakref.ref(schedule)
        del schedule
        check(watched() is None, f"rank {rank}: a schedule lives on, held by {[type(one) for one in gc.get_referrers(watched())] if watched() else ''}")


def body(rank):
    for one in (lengths, ended, dropped, half, replaced, touched, added, cut, refused, csv, tied, forward_only, infinite):
        one(rank)
    finish()


def fork_of(rank):
    forked(rank)
    finish()


run(2, body)
run(2, fork_of, how="torchrun")  # with a process group over Gloo, torch itself hangs where a fork ends by sys.exit
finish()
