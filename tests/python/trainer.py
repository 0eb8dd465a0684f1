# timeout: 300
"""chevron_pipelining.Trainer: whole steps under a launcher's variables, clipped by the norm over all ranks, with skipped steps and rates."""
import math
import pathlib
import re
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support.ranks import Block, check, data, equal, finish, made, run  # noqa: E402

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
    actions = [name for name, begin, end in trainer.trace() if end >= begin]
    check([name for name in actions if re.fullmatch(r"\dW\d", name)] == [f"{rank}W{m}" for m in range(5)], f"trace {actions}")
    cp.close()
    finish()


run(2, body, how="torchrun")
finish()
