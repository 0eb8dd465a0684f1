# timeout: 300
"""Failures of a rank: all ranks end, with the cause, the rank and the original traceback; and ends of a program without close()."""
import math
import os
import pathlib
import signal
import shutil
import sys
import tempfile
import threading
import time
import traceback

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support.ranks import Block, check, data, equal, finish, join, made, run, start  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

import chevron_pipelining as cp  # noqa: E402


def deep(text):
    raise ValueError(text)


interrupted = pathlib.Path(tempfile.mkdtemp()) / "interrupted"


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        deep("in the backward")


class Faulty(Block):
    """Fails in the second step, in one way."""

    way = ""
    step = 0

    def forward(self, x):
        y = super().forward(x)
        if not Faulty.step:
            return y
        if Faulty.way in ("forward", "uncaught", "raised in eval"):
            deep("in the forward")
        if Faulty.way == "backward":
            return Backward.apply(y)
        if Faulty.way == "hook":
            y.register_hook(lambda g: deep("in a hook"))
        if Faulty.way == "dictionary":
            return {"y": y}
        if Faulty.way in ("kill", "killed in eval"):
            os.kill(os.getpid(), signal.SIGKILL)
        while Faulty.way == "slow" and not interrupted.exists():  # so the other rank's wait ends by Ctrl-C alone
            time.sleep(0.01)
        if Faulty.way == "keyboard":
            raise KeyboardInterrupt
        return y


def faulty(output, target):
    if Faulty.way == "loss" and Faulty.step:
        deep("in the loss")
    return nn.functional.mse_loss(output, target)


def body(way, at):
    """The program of a rank; the rank `at` fails."""

    def of_rank(rank):
        Faulty.way = way if rank == at else ""
        modules, (x, y) = made(Faulty, 2), data()

        def schedule_of():
            return cp.Schedule("ZB-H1", cp.PipelineStage(modules[rank], rank, 2, "cpu"), 4, loss_fn=faulty)

        schedule = schedule_of()

        def step():
            inputs, target = [x] if rank == 0 else [], y if rank == 1 else None
            if way.endswith(" in eval") and Faulty.step:
                schedule.eval(*inputs, target=target)  # returns on rank 0 before its last sends end: the step after it finds rank 1 lost
            return schedule.step(*inputs, target=target)

        step()
        Faulty.step = 1
        if Faulty.way == "interrupt":  # waits for the other rank, which is slow
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        if way == "interrupt" and rank != at:
            Faulty.way = "slow"
        if Faulty.way == "between":
            raise OSError("between two steps")
        if Faulty.way == "early":
            sys.exit(0)
        if way == "end":
            return
        if way == "uncaught":
            step()
        try:
            step()
        except cp.Error as error:
            cause = "" if error.__cause__ is None else "".join(traceback.format_exception(error.__cause__))
            print(f"{type(error).__name__} rank={error.rank} step={error.step} action={error.action} code={error.code}: {error}\n{cause}")
            if way == "forward" and rank == at:
                try:
                    step()
                except cp.Error as second:
                    print(f"AGAIN {second}")
                try:
                    schedule_of()
                except cp.UsageError as third:
                    print(f"ANEW {third}")
            sys.stdout.flush()
            raise SystemExit(9) from None
        except KeyboardInterrupt:
            if way == "interrupt":
                interrupted.touch()
            print("KeyboardInterrupt")
            sys.stdout.flush()
            raise SystemExit(9) from None

    return of_rank


def alone(rank):
    """A pipeline of one process, as in a notebook: after a failure a schedule that is made again trains on."""
    plain, modules, (x, y) = made(Block, 2), made(Faulty, 2), data()

    def schedule_of():
        return cp.Schedule("Interleaved1F1B", [cp.PipelineStage(module, s, 2, "cpu") for s, module in enumerate(modules)], 4, loss_fn=faulty)

    for way, error in (("forward", cp.StageError), ("loss", cp.StageError), ("not finite", cp.NumericalError), ("keyboard", KeyboardInterrupt)):
        schedule = schedule_of()
        Faulty.way, Faulty.step = way, 1
        try:
            schedule.step(x, target=y * math.inf if way == "not finite" else y)
            check(False, f"alone, {way}: no error")
        except error:
            pass
        try:
            schedule.step(x, target=y)
            check(False, f"alone, {way}: a step after a failure")
        except cp.UsageError as again:
            check("failed on this rank" in str(again) and "Remedy" in str(again), f"alone, {way}: {again}")
    Faulty.way = ""
    for module in plain + modules:
        module.zero_grad()
    schedule_of().step(x, target=y)
    for a, b in zip(x.chunk(4), y.chunk(4)):
        faulty(plain[1](plain[0](a)), b).backward()
    grads = [[p.grad for module in each for p in module.parameters()] for each in (plain, modules)]
    check(equal([g / 4 for g in grads[0]], grads[1]), "alone: gradients after a failure")
    finish()


def not_finite(rank):
    """A loss that is not finite is an error on every rank, after which ranks of several processes make the schedule again."""
    Faulty.way = ""
    modules, (x, y) = made(Faulty, 2), data()
    found = []
    for infinite in (False, True, False):
        modules[rank].zero_grad()
        schedule = cp.Schedule("ZB-H1", cp.PipelineStage(modules[rank], rank, 2, "cpu"), 4, loss_fn=faulty)
        try:
            schedule.step(*([x] if rank == 0 else []), target=(y * math.inf if infinite else y) if rank == 1 else None)
            found.append([p.grad.clone() for p in modules[rank].parameters()])
        except cp.NumericalError as error:
            check(infinite and "microbatch 0" in str(error), f"not finite, rank {rank}: {error}")
    check(len(found) == 2 and equal(*found), f"rank {rank}: gradients after a step that was not finite")
    finish()


WAYS = [("forward", 0, "in the forward"), ("loss", 1, "in the loss"), ("backward", 1, "in the backward"), ("hook", 1, "in a hook")]
OTHERS = [("dictionary", 0), ("kill", 1), ("killed in eval", 1), ("raised in eval", 0), ("interrupt", 1), ("keyboard", 0), ("between", 0),
          ("early", 1), ("uncaught", 0), ("end", 0)]
jobs = {way: start(2, body(way, at)) for way, at, *_ in WAYS + OTHERS}
ended = {way: join(job) for way, job in jobs.items()}
shutil.rmtree(interrupted.parent)


def said(way, rank):
    return ended[way][rank].out + ended[way][rank].err


for way, at, words in WAYS:
    one, other = ended[way][at], ended[way][1 - at]
    check(one.code == 9 and f"StageError rank={at} step=1 action={at}" in one.out, f"{way}: {one.code} {said(way, at)}")
    check(f"ValueError: {words}" in one.out and "in deep" in one.out, f"{way}: no traceback of the cause: {said(way, at)}")
    check(other.code == 9 and "PeerLostError" in other.out and words in other.out and f"rank {at}" in other.out,
          f"{way}, the other rank: {other.code} {said(way, 1 - at)}")
check("AGAIN" in ended["forward"][0].out, f"a step after a failure is refused: {said('forward', 0)}")
check("ANEW rank 0: a step or an evaluation of these ranks failed before" in ended["forward"][0].out,
      f"a schedule after a failure is refused: {said('forward', 0)}")
check("returns a dict" in ended["dictionary"][0].out and "Remedy" in ended["dictionary"][0].out, f"a dictionary: {said('dictionary', 0)}")

for way in ("kill", "killed in eval"):
    killed, other = ended[way][1], ended[way][0]
    check(killed.code == -signal.SIGKILL, f"{way}: {killed.code}")
    check(other.code == 9 and "PeerLostError" in other.out and "rank 1" in other.out, f"{way}: {said(way, 0)}")

one, other = ended["raised in eval"]
check(one.code == 9 and "StageError rank=0" in one.out and "ValueError: in the forward" in one.out,
      f"raised in eval: {one.code} {said('raised in eval', 0)}")
check(other.code == 9 and "PeerLostError" in other.out and "in the forward" in other.out,
      f"raised in eval, the other rank: {other.code} {said('raised in eval', 1)}")

check(ended["interrupt"][1].code == 9 and "KeyboardInterrupt" in ended["interrupt"][1].out, f"Ctrl-C: {said('interrupt', 1)}")
check(ended["keyboard"][0].code == 9 and "KeyboardInterrupt" in ended["keyboard"][0].out, f"KeyboardInterrupt: {said('keyboard', 0)}")
check("KeyboardInterrupt" in ended["keyboard"][1].out, f"KeyboardInterrupt, the other rank: {said('keyboard', 1)}")

check(ended["between"][0].code == 1, f"an exception between two steps: {ended['between'][0].code}")
check(ended["between"][1].code == 9 and "OSError: between two steps" in ended["between"][1].out,
      f"an exception between two steps, the other rank: {said('between', 1)}")
check(ended["early"][0].code == 9 and "rank 1" in ended["early"][0].out, f"one rank ends early: {said('early', 0)}")
for rank in range(2):
    check(ended["uncaught"][rank].code == 1 and "in the forward" in ended["uncaught"][rank].err, f"an uncaught error: {said('uncaught', rank)}")
    check(ended["end"][rank].code == 0 and not ended["end"][rank].err, f"an end without close(): {ended['end'][rank].code} {said('end', rank)}")
for how in ("file", "torchrun"):
    run(1, alone, how)
run(2, not_finite)
finish()
