# timeout: 300
"""chevron_pipelining.Trainer: whole steps under a launcher's variables, clipped by the norm over all ranks, with skipped steps and rates."""
import copy
import math
import pathlib
import re
import shutil
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support.ranks import BUILD, Block, check, data, equal, finish, made, run  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

import chevron_pipelining as cp  # noqa: E402

loss = nn.functional.mse_loss


def near(a, b):
    return len(a) == len(b) and all(torch.allclose(x, y, rtol=1e-5, atol=1e-7) for x, y in zip(a, b))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def body(rank):
    plain, modules = made(Block, 2), made(Block, 2)
    stage = cp.PipelineStage(modules[rank], rank, 2, "cpu")
    trainer = cp.Trainer("ZB-H1", stage, 5, loss, adamw, clip_grad_norm=0.1, when_not_finite="skip",
                         learning_rate=lambda step: 0.01 / (1 + step))
    one = adamw([p for m in plain for p in m.parameters()])

    def step(x, y, by_name=False):
        if rank == 0 and by_name:
            return trainer.step(x=x)
        return trainer.step(*([x] if rank == 0 else []), target=y if rank == 1 else None)

    for number in range(3):
        x, y = data(13, seed=number)  # microbatches of three and of two samples
        one.zero_grad()
        cost = loss(plain[1](plain[0](x)), y)
        cost.backward()
        norm = nn.utils.clip_grad_norm_([p for m in plain for p in m.parameters()], 0.1)
        for group in one.param_groups:
            group["lr"] = 0.01 / (1 + number)
        one.step()
        report = step(x, y, by_name=number == 1)
        check(report.step == number and report.clipped and not report.skipped and report.samples == 13, f"report {report}")
        check(math.isclose(report.loss, cost.item(), rel_tol=1e-5), f"loss {report.loss}, plain {cost.item()}")
        check(math.isclose(report.grad_norm, norm.item(), rel_tol=1e-4), f"norm {report.grad_norm}, plain {norm.item()}")
        check(report.learning_rate == 0.01 / (1 + number) == trainer.optimizer.param_groups[0]["lr"], f"rate {report.learning_rate}")
        check(near(list(modules[rank].parameters()), list(plain[rank].parameters())), f"parameters after step {number}, rank {rank}")

    before = [p.detach().clone() for p in modules[rank].parameters()]
    x, y = data(13)
    report = step(x, y * math.inf)
    check(report.skipped and equal(before, list(modules[rank].parameters())), f"a step that is not finite: {report}")
    held_out = trainer.evaluate(*([x] if rank == 0 else []), target=y if rank == 1 else None)
    with torch.no_grad():
        expected = loss(plain[1](plain[0](x)), y).item()
    check(math.isclose(held_out, expected, rel_tol=1e-4), f"evaluate {held_out}, plain {expected}")
    step(x, y)
    check(trainer.next_step == 5, f"next_step {trainer.next_step}")
    saved = copy.deepcopy(trainer.state_dict())
    runs = []
    for _ in range(2):  # the second run begins at the saved state
        step(x, y)
        runs.append([p.detach().clone() for p in modules[rank].parameters()])
        trainer.load_state_dict(saved)
    check(equal(*runs) and trainer.next_step == 5, f"a restored state, next_step {trainer.next_step}")
    try:
        trainer.load_state_dict({**saved, "stages": {1 - rank: {}}})
        check(False, "the state of other stages is taken")
    except cp.UsageError as error:
        check(f"[{1 - rank}]" in str(error), str(error))
    step(x, y)
    actions = [name for name, begin, end in trainer.trace() if end >= begin]
    check([name for name in actions if re.fullmatch(r"\dW\d", name)] == [f"{rank}W{m}" for m in range(5)], f"trace {actions}")
    cp.close()
    finish()


def replicated(rank):
    """Two replicas with numbers of samples of their own: the gradient of the mean over all samples, and equal copies."""
    replica, place = divmod(rank, 2)
    plain, modules = made(Block, 2), made(Block, 2)
    trainer = cp.Trainer("1F1B", cp.PipelineStage(modules[place], place, 2, "cpu"), 4, loss, adamw, clip_grad_norm=0.1, replicas=2)
    check(trainer.replica == replica and f"2 ranks, 2 replicas, 4 microbatches; rank {rank} has stage {place} of 2" in repr(trainer), repr(trainer))
    one = adamw([p for m in plain for p in m.parameters()])
    for number in range(3):
        every = [data(13, seed=number), data(9, seed=10 + number)]
        x, y = (torch.cat(parts) for parts in zip(*every))
        one.zero_grad()
        cost = loss(plain[1](plain[0](x)), y)
        cost.backward()
        norm = nn.utils.clip_grad_norm_([p for m in plain for p in m.parameters()], 0.1)
        one.step()
        x, y = every[replica]
        report = trainer.step(*([x] if place == 0 else []), target=y if place == 1 else None)
        check(report.samples == 22 and math.isclose(report.loss, cost.item(), rel_tol=1e-5), f"{report}, plain {cost.item()}")
        check(math.isclose(report.grad_norm, norm.item(), rel_tol=1e-4), f"norm {report.grad_norm}, plain {norm.item()}")
        check(near(list(modules[place].parameters()), list(plain[place].parameters())), f"parameters after step {number}, rank {rank}")
    trainer.timeline(f"{folder}/step.svg")
    with open(f"{folder}/step.svg") as file:
        rows = {int(of) for of in re.findall(r", rank (\d), ", file.read())}
    check(rows == {0, 1, 2, 3}, f"the timeline has the rows {rows}")
    copies = [None] * 4
    torch.distributed.all_gather_object(copies, [p.detach() for p in modules[place].parameters()])
    check(equal(copies[rank], copies[(rank + 2) % 4]), "copies of the two replicas")
    try:
        cp.Trainer("1F1B", cp.PipelineStage(modules[place], place, 2, "cpu"), 4, loss, adamw, replicas=3)
        check(False, "3 replicas on 4 ranks are taken")
    except cp.UsageError as error:
        check("replicas=3 on 4 ranks" in str(error), str(error))
    if place == 0 and replica == 1:
        next(modules[0].parameters()).data.add_(1)  # replicas begin with other parameters
    try:
        cp.Trainer("GPipe", cp.PipelineStage(modules[place], place, 2, "cpu"), 4, loss, adamw, replicas=2).step(
            *([x] if place == 0 else []), target=y if place == 1 else None)
        check(False, "copies that begin different are taken")
    except cp.Error as error:
        check("values of stage 0 norm.weight" in str(error), str(error))
    finish()


def frozen(rank):
    """A rank that trains nothing, the first or the last, makes no optimizer of an empty list."""
    for still in range(2):
        plain, modules = made(Block, 2), made(Block, 2)
        for m in (plain[still], modules[still]):
            m.requires_grad_(False)
        trainer = cp.Trainer("1F1B", cp.PipelineStage(modules[rank], rank, 2, "cpu"), 4, loss, adamw, clip_grad_norm=0.1,
                             learning_rate=lambda step: 0.01 / (1 + step))
        one = adamw(list(plain[1 - still].parameters()))
        for number in range(3):
            x, y = data(13, seed=number)
            one.zero_grad()
            loss(plain[1](plain[0](x)), y).backward()
            nn.utils.clip_grad_norm_(plain[1 - still].parameters(), 0.1)
            one.param_groups[0]["lr"] = 0.01 / (1 + number)
            one.step()
            trainer.step(*([x] if rank == 0 else []), target=y if rank == 1 else None)
            trainer.load_state_dict(copy.deepcopy(trainer.state_dict()))
        check(near(list(modules[rank].parameters()), list(plain[rank].parameters())), f"parameters with stage {still} frozen, rank {rank}")
    cp.close()
    finish()


run(2, body, how="torchrun")
run(2, frozen)
folder = tempfile.mkdtemp(dir=BUILD)  # ranks are forks, which would remove a TemporaryDirectory
run(4, replicated)
shutil.rmtree(folder)
finish()
