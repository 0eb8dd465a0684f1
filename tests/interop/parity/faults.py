"""Faults that users reported, which end without an error, planted into PyTorch's pipeline or into the code around it.

Each entry has the thread, the planted form, and where the first tensor differs.
"""
import contextlib
import dataclasses
import functools
import itertools
import os

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining.stage import _PipelineStageBase as Stage

import models
from chevron_plan.parity import Job, clip_over_ranks


@dataclasses.dataclass(frozen=True)
class Fault:
    """outcome, code, stage, micro_batch, operation: of the first difference; words: of its reason; corrected: the release of
    PyTorch since which the job trains right."""
    thread: str
    job: Job
    code: str
    stage: int
    micro_batch: int
    operation: str
    words: str
    outcome: str = "differs"
    corrected: tuple = (99,)


@contextlib.contextmanager
def replaced(owner, name, change):
    """A method that calls change(<the old one>, …)."""
    old = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: change(old, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, old)


# torchtitan#2972: the schedule's loss is the sum; the division by the valid tokens comes after the backward.
TOKENS = models.tokens_of(models.language(unequal=True).batches[0][1])


def undivided():
    return replaced(schedules._PipelineSchedule, "_compute_loss", lambda old, *a: old(*a) * TOKENS)


# AReaL#1273: microbatches are weighted already, and the schedule divides by their number.
def divided_by_m():
    return replaced(Stage, "perform_reduce_grad", lambda old, self, factor: old(self, 4))


# torchtitan#596, modalities#313, pytorch#162638: each rank clips by the norm of its own stages.
def clip_alone(stages, max_norm):
    return torch.nn.utils.clip_grad_norm_([p for stage in stages.values() for p in stage.parameters()], max_norm)


# Automodel#3530: the stages are initialised again between accumulated batches, which sets gradients to None.
def initialised_again():
    def forget(old, self, *args, **kwargs):
        for p in self._stage.submod.parameters():
            p.grad = None
        return old(self, *args, **kwargs)

    return replaced(schedules.PipelineScheduleSingle, "step", forget)


# The same between the microbatches of a step.
def forgotten():
    def forget(old, self, number, *args, **kwargs):
        if self.stage_index == 1 and number == 3:
            for p in self.submod.parameters():
                p.grad = None
        return old(self, number, *args, **kwargs)

    return replaced(Stage, "backward_one_chunk", forget)


# torchtitan#514, #771: each rank seeds its stages' weights by its own number.
def seeded_by_rank():
    case = models.regression()
    torch.manual_seed(100 + int(os.environ.get("RANK", "0")))
    for stage in case.stages:
        for layer in stage:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
    return case


# DeepSpeed#5696: a stage computes with the hidden states of the microbatch before.
def kept_activation():
    kept = {}

    def stale(old, self, m):
        kept[self.stage_index, m] = old(self, m)  # PyTorch 2.15 gives each buffer once
        return kept[self.stage_index, m - 1 if m == 2 else m]

    return replaced(Stage, "_retrieve_recv_activations", stale)


# DeepSpeed#5729: outputs of one microbatch, labels of another.
def shifted_targets():
    return replaced(
        schedules._PipelineSchedule, "_maybe_compute_loss",
        lambda old, self, stage, output, targets, *rest: old(self, stage, output, targets and targets[1:] + targets[:1], *rest))


# defer_pp_recv of PyTorch 2.15: each receive comes just before its use, but the lower rank of a pair posts those that it has put
# off before it sends to the higher; sends stay where their tensors are made. So messages of one shape are exchanged.
def put_off():
    def defer(old, self, *args, **kwargs):
        old(self, *args, **kwargs)
        receives = (schedules.RECV_F, schedules.RECV_B)
        row, waiting = [], []

        def peer(action):
            ahead = action.computation_type in (schedules.RECV_B, schedules.SEND_F)
            return self.stage_index_to_group_rank[action.stage_index + (1 if ahead else -1)]

        for action in self.pipeline_order_with_comms[self.rank]:
            kind, m = action.computation_type, action.microbatch_index
            if kind in receives:
                waiting.append(action)
                continue
            if kind in (schedules.SEND_F, schedules.SEND_B):
                ready = [one for one in waiting if peer(one) == peer(action) and self.rank < peer(action)]
            else:
                wanted = schedules.RECV_F if kind == schedules.FORWARD else schedules.RECV_B
                ready = [
                    one for one in waiting
                    if (one.stage_index, one.computation_type, one.microbatch_index) == (action.stage_index, wanted, m)
                ]
            row += [*ready, action]
            waiting = [one for one in waiting if one not in ready]
        self.pipeline_order_with_comms[self.rank] = row + waiting

    return replaced(schedules._PipelineScheduleRuntime, "_prepare_schedule_with_comms", defer)


# A training loop that reports the losses of all microbatches but the last.
def loss_left_out():
    return replaced(schedules._PipelineSchedule, "_update_losses", lambda old, self, stages, losses:
                    (old(self, stages, losses), losses.pop() if losses else None))


# A backward whose result is not added: a microbatch's gradients go to a copy.
def not_added():
    def drop(old, self, number, *args, **kwargs):
        before = [None if p.grad is None else p.grad.clone() for p in self.submod.parameters()]
        old(self, number, *args, **kwargs)
        if self.stage_index == 0 and number == 1:
            for p, kept in zip(self.submod.parameters(), before):
                p.grad = kept

    return replaced(Stage, "backward_one_chunk", drop)


# A message that is taken before it has arrived: the wait for a gradient is left out, and the buffer is empty.
def gradient_of_zeros():
    def zeros(old, self, number):
        found = old(self, number)
        return tuple(torch.zeros_like(t) for t in found) if self.stage_index == 0 and number == 2 else found

    return replaced(Stage, "_retrieve_recv_grads", zeros)


def clip_twice(stages, max_norm):
    norm = clip_over_ranks(stages, max_norm)
    clip_over_ranks(stages, max_norm / 2)
    return norm


# One rank steps with another rate.
def another_rate():
    def changed(old, self, *args, **kwargs):
        old(self, *args, **kwargs)
        if os.environ["RANK"] == "1":
            self.param_groups[0]["lr"] = 0.11

    return replaced(torch.optim.SGD, "__init__", changed)


# The step's output is put together in another order.
def merged_in_reverse():
    return replaced(schedules._PipelineSchedule, "_merge_outputs", lambda old, self, chunks: old(self, chunks[::-1]))


def nothing_added(stages):
    """Leaves the gradients of a tied weight as they are."""


def add_tied(stages):
    """Adds the gradients of an embedding and a head of one weight."""
    [stage] = stages.values()
    mine = stage[-1].weight  # the embedding's, or the head's
    dist.all_reduce(mine.grad)


@functools.cache
def seed_of_orders():
    """The first seed with which the norm of four ranks differs from the plain loop's, in whatever order ranks add their squares. The
    seed depends on how this machine's kernels round."""
    for seed in range(1000):
        case = models.regression(stages=4, seed=seed)
        [(inputs, targets)] = case.batches
        for x, y in zip(inputs.chunk(4), targets.chunk(4)):
            (case.loss(torch.nn.Sequential(*case.stages)(x), y) / 4).backward()
        gradients = [[p.grad for p in stage.parameters()] for stage in case.stages]
        norm = torch.nn.utils.get_total_norm(sum(gradients, []))
        orders = itertools.permutations(torch.nn.utils.get_total_norm(each)**2 for each in gradients)
        if all(norm not in (((a + b) + c + d).sqrt(), ((a + b) + (c + d)).sqrt()) for a, b, c, d in orders):
            return seed
    raise AssertionError("the norm is the same in every order, with 1,000 seeds")


def norm_by_rank():
    return models.regression(stages=4, max_norm=0.001, seed=seed_of_orders())


tied_language = functools.partial(models.language, tied=True, after_backward=add_tied, max_norm=0.01)

FAULTS = [
    Fault("torchtitan#2972", Job(functools.partial(models.language, unequal=True), "1F1B", within=undivided), "scale", 1, 0,
          "loss", f"({TOKENS})"),
    Fault("AReaL#1273", Job(models.regression_sum, "1F1B", within=divided_by_m), "scale", 0, -1, "0REDUCE_GRAD",
          "number of microbatches (4)"),
    Fault("torchtitan#4312", Job(norm_by_rank, "1F1B", ranks=4), "norm_order", 0, -1, "clip", "by rank", "order"),
    Fault("pytorch#162638", Job(functools.partial(models.regression, max_norm=0.001, clip=clip_alone), "1F1B"),
          "norm_of_one_rank", 0, -1, "clip", "of rank 0"),
    Fault("Automodel#3530", Job(functools.partial(models.regression_sum, batches=3), "1F1B", within=initialised_again),
          "lost_microbatch", 0, 0, "0B0", "batches before were lost"),
    Fault("Automodel#3530, within a step", Job(models.regression, "GPipe", within=forgotten), "lost_microbatch", 1, 3, "1B3",
          "microbatches 0, 1, 2 were lost"),
    Fault("torchtitan#771", Job(seeded_by_rank, "1F1B"), "random_numbers", 1, -1, "build", "seed 101"),
    Fault("DeepSpeed#5696", Job(models.regression, "1F1B", within=kept_activation), "stale_receive", 1, 2, "1RECV_F2",
          "activation of stage 0, microbatch 1"),
    Fault("DeepSpeed#5729", Job(models.regression, "1F1B", within=shifted_targets), "other_target", 1, 0, "loss",
          "microbatch 1's target"),
    Fault("torchtitan#1732", Job(functools.partial(models.regression, batches=2), "1F1B"), "divided_again", 0, -1, "0REDUCE_GRAD",
          "divided by 4 again"),
    Fault("pytorch, defer_pp_recv", Job(functools.partial(models.regression, stages=4), "ZBVZeroBubble", within=put_off),
          "stale_receive", 1, 2, "1RECV_F2", "holds the gradient of stage 2's output, microbatch 0"),
    Fault("pytorch#55036", Job(functools.partial(models.regression, "dropout"), "1F1B", seeded=False, static_shapes=True),
          "random_numbers", 1, 0, "1F0", "draws random numbers, and with those"),
    Fault("PyTorch's search for shapes", Job(functools.partial(models.regression, "batchnorm"), "1F1B"), "running_statistics", 0,
          -1, "0F", "ran on zeros", corrected=(2, 15)),
    Fault("the same, where the forward reads them", Job(functools.partial(models.regression, "counted"), "1F1B"),
          "running_statistics", 0, 0, "0F0", "buffers differ before the forward", corrected=(2, 15)),
    Fault("pytorch#180952", Job(functools.partial(models.regression, "twice", stages=4), "InterleavedZeroBubble"),
          "doubled_microbatch", 1, 0, "1W0", "used 2 times", corrected=(2, 15)),
    Fault("pytorch#144530",
          Job(functools.partial(models.regression, stages=4), "InterleavedZeroBubble", replicas=2, microbatches=2,
              static_shapes=True),
          "replica_alone", 1, -1, "1REDUCE_GRAD", "replica 0 alone"),
    Fault("transformers#34191", Job(functools.partial(models.language, unequal=True, reduction="mean"), "1F1B"), "mean_of_means",
          0, -1, "0REDUCE_GRAD", "divided by 4 alike"),
    Fault("Megatron-LM#7452", Job(tied_language, "1F1B"), "norm_counts_twice", 0, -1, "clip", "tied weight"),
    Fault("torchtitan#1409", Job(functools.partial(models.language, tied=True), "1F1B"), "tied_weight", 0, -1, "0REDUCE_GRAD",
          "only in their sum"),
    # Both stages of a tied weight on one rank: PyTorch divides the weight's gradient for each of them.
    Fault("PyTorch's tied stages",
          Job(functools.partial(models.language, stages=4, tied=True, reduction="mean"), "ZBVZeroBubble", microbatches=3),
          "divided_again", 0, -1, "0REDUCE_GRAD", "3REDUCE_GRAD and 0REDUCE_GRAD both divide"),
    Fault("a loss left out", Job(models.regression, "1F1B", within=loss_left_out), "loss_missing", 1, 3, "loss",
          "lacks that of microbatch 3"),
    Fault("a gradient not added", Job(models.regression, "1F1B", within=not_added), "lost_microbatch", 0, 1, "0B1", "not added"),
    Fault("a gradient not waited for", Job(models.regression, "1F1B", within=gradient_of_zeros), "stale_receive", 0, 2,
          "0RECV_B2", "zeros"),
    Fault("a tied weight not added", Job(functools.partial(models.language, tied=True, after_backward=nothing_added), "1F1B"),
          "tied_weight", 0, -1, "after_backward", "stage 0 alone"),
    Fault("gradients clipped twice", Job(functools.partial(models.regression, max_norm=0.001, clip=clip_twice), "1F1B"), "scale",
          0, -1, "clip", "times 0.4995"),
    Fault("another rate on a rank", Job(models.regression, "1F1B", within=another_rate), "unknown", 1, -1, "optimizer",
          "another step"),
    Fault("outputs in reverse", Job(models.regression, "1F1B", within=merged_in_reverse), "unknown", 1, -1, "merge",
          "but not the merged one"),
]


def flip(tensor):
    """Changes one bit of a tensor's largest element: not the lowest, so that the change is not rounded away."""
    with torch.no_grad():
        flat = tensor.detach().view(-1) if tensor.is_contiguous() else tensor.detach().reshape(-1)
        at = int(flat.abs().argmax())
        flat[at] = (flat[at:at + 1].view(torch.int32) ^ (1 << 3)).view(torch.float32)[0]


def flipped(event, stage, micro_batch):
    """One bit of one tensor of the run is another: the input, output or loss of a stage and microbatch, the gradient that it
    receives or sends, its sum of gradients, or the gradient at the end."""
    def here(self, number):
        return self.stage_index == stage and number == micro_batch

    def changed(old, self, number, *args, **kwargs):
        found = old(self, number, *args, **kwargs)
        if here(self, number):
            if event in ("input", "received"):
                flip(found[0])
            elif event == "sent":
                flip(self.bwd_cache[number][0])
            elif event == "sum":
                flip(next(self.submod.parameters()).grad)
        return found

    def computed(old, self, *args, **kwargs):
        found = old(self, *args, **kwargs)
        if here(self, self.current):
            flip(found)
        return found

    def lost(old, self, one, output, targets, number, *rest):
        old(self, one, output, targets, number, *rest)
        if here(one, number):
            flip(self._internal_losses[-1])

    def reduced(old, self, factor):
        old(self, factor)
        if self.stage_index == stage:
            flip(next(self.submod.parameters()).grad)

    return {
        "input": lambda: replaced(Stage, "_retrieve_recv_activations", changed),
        "received": lambda: replaced(Stage, "_retrieve_recv_grads", changed),
        "sent": lambda: replaced(Stage, "backward_one_chunk", changed),
        "sum": lambda: replaced(Stage, "backward_one_chunk", changed),
        "output": lambda: replaced(Stage, "forward_maybe_with_nosync", computed),
        "loss": lambda: replaced(schedules._PipelineSchedule, "_maybe_compute_loss", lost),
        "gradient": lambda: replaced(Stage, "perform_reduce_grad", reduced)
    }[event]()


def flips():
    """A job for each tensor between two stages that exchange four microbatches, and the operation that must be named."""
    made = []
    for schedule, stages in (("1F1B", 2), ("Interleaved1F1B", 4)):
        for stage in range(stages):
            for m in range(4):
                last = stage == stages - 1
                of = {"output": f"{stage}F{m}", "sum": f"{stage}B{m}"}
                of.update({"input": f"{stage}RECV_F{m}", "sent": f"{stage}B{m}"} if stage else {})
                of.update({"loss": "loss"} if last else {"received": f"{stage}RECV_B{m}"})
                of.update({"gradient": f"{stage}REDUCE_GRAD"} if m == 0 else {})
                for event, operation in of.items():
                    job = Job(functools.partial(models.regression, stages=stages),
                              schedule,
                              within=functools.partial(flipped, event, stage, m))
                    made.append((job, event, stage, -1 if event == "gradient" else m, operation))
    return made
