"""Reasons for a difference, each with a test that tells it from the others: the test computes the faulty value, and compares."""
from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .case import Tensors, as_tuple, same_bits


@dataclass(frozen=True)
class Reason:
    """code: one of REASONS; text: the numbers of this case; remedy: what to change."""
    code: str
    text: str
    remedy: str


# Order of sums: not a fault, but other bits than those of the plain loop.
ORDERS = {
    "division_after_sum": "PyTorch divides the sum of the microbatches' gradients, the plain loop each microbatch's loss",
    "microbatch_order": "the schedule adds the microbatches' gradients in another order",
    "replica_order": "each replica adds the gradients of its own microbatches, then their mean is taken",
    "norm_order": "the norm adds the same squares in another order",
    "tied_order": "a tied weight's gradients are added over the microbatches first, then over its stages",
}
FAULTS = {
    "scale": "multiplied by a constant: number of microbatches, tokens, samples, ranks",
    "mean_of_means": "microbatches of unequal numbers of tokens weigh the same",
    "divided_again": "gradients of earlier batches of the step are divided again",
    "lost_microbatch": "a microbatch's gradient is missing from the sum",
    "doubled_microbatch": "a microbatch's gradient is added twice, whole or in part",
    "loss_missing": "a microbatch's loss is missing from the list of losses",
    "other_target": "the loss was computed with another microbatch's target",
    "stale_receive": "a receive took another message, or none",
    "random_numbers": "the same computation with other random numbers",
    "running_statistics": "buffers, such as running statistics, were updated otherwise",
    "replica_alone": "the gradient is that of one replica, and was not averaged over the replicas",
    "norm_of_one_rank": "the norm is that of one rank's gradients alone",
    "norm_counts_twice": "the norm counts a tied weight more than once",
    "tied_weight": "a tied weight's gradient is that of one of its stages alone",
    "unknown": "none of the tests applies",
}
REASONS = {**ORDERS, **FAULTS}

REMEDIES = {
    "scale": "divide once: by scale_grads=True for a mean over microbatches, or in the loss for a sum",
    "mean_of_means": "divide each microbatch's sum by the tokens of the whole batch in the loss, with reduction \"sum\"",
    "divided_again": "scale_grads=False and a loss that is divided already, or one schedule step an optimizer step",
    "lost_microbatch": "search for code that clears or replaces .grad between the microbatches",
    "doubled_microbatch": "a schedule without split backward (1F1B, Interleaved1F1B), or a weight used once in a stage",
    "loss_missing": "add up all entries of `losses`",
    "other_target": "search for code that keeps targets between microbatches",
    "stale_receive": "chevron-plan check on the schedule's file; search for buffers that are kept between microbatches",
    "random_numbers": "one seed for all ranks when a model is built; for dropout, a generator seeded by microbatch and stage",
    "running_statistics": "static shapes: input_args and output_args of PipelineStage, so that no stage runs on zeros",
    "replica_alone": "a schedule without split backward under DistributedDataParallel, or fully_shard",
    "norm_of_one_rank": "add the squares of the ranks' norms by an all-reduce: chevron_plan.parity.clip_over_ranks",
    "norm_counts_twice": "count a tied weight on one of its ranks alone",
    "tied_weight": "add the copies' gradients after the backward (Case.after_backward)",
    "unknown": "compare the stage's module with that of the plain run: mode, dtype, threads, device",
}


def reason(code: str, text: str) -> Reason:
    """A reason with its remedy."""
    return Reason(code, text, REMEDIES.get(code, "none needed: both sums are right within rounding"))


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-4) -> bool:
    """Whether all elements are equal but for rounding, measured by the largest element."""
    if a.shape != b.shape or not a.numel():
        return False
    a, b = a.double(), b.double()
    return bool((a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-30))


def listed(numbers: Iterable[int]) -> str:
    """Microbatches, in words."""
    of = list(numbers)
    return f"microbatch {of[0]}" if len(of) == 1 else f"microbatches {', '.join(map(str, of))}"


def scaled(observed: torch.Tensor, wanted: torch.Tensor, factors: dict[str, float]) -> Reason | None:
    """Whether all elements are the wanted ones times one number, and which number of the run that is.

    factors: names and values of numbers by which gradients or losses are scaled
    """
    if observed.shape != wanted.shape or not wanted.numel():
        return None
    a, b = observed.double().reshape(-1), wanted.double().reshape(-1)
    largest = int(b.abs().argmax())
    if not b[largest] or not a[largest]:
        return None
    ratio = float(a[largest] / b[largest])
    # One element cannot show that a ratio is constant, unless it is a number of the run.
    if abs(ratio - 1) < 1e-3 or not close(observed, wanted.double() * ratio, 1e-3):
        return None
    names = [
        text for name, value in factors.items() if value not in (0.0, 1.0)
        for text, factor in ((f"multiplied by {name} ({value:g})", value), (f"divided by {name} ({value:g})", 1 / value))
        if abs(ratio / factor - 1) < 1e-4
    ]
    if not names and wanted.numel() < 4:
        return None
    return reason("scale", f"all elements are the plain loop's times {ratio:.6g}" + (": " + ", or ".join(names) if names else ""))


def running_sum(start: torch.Tensor | None, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Tensors added one after the other, as autograd adds them to .grad."""
    total = None if start is None else start.clone()
    for part in parts:
        total = part.clone() if total is None else total + part
    return total


def explain_sum(observed: torch.Tensor, start: torch.Tensor | None, done: Sequence[int], parts: dict[int, torch.Tensor],
                factors: dict[str, float], sites: Sequence[torch.Tensor]) -> Reason:
    """Why a parameter's gradient is not the sum of the microbatches that have been added.

    start: the gradient before the batch, of earlier batches
    done: microbatches in the order of their backwards, the last one being that after which the sum differs
    parts: each microbatch's gradient alone
    sites: where the last microbatch's backward reaches the parameter by several nodes of the graph, the gradient of each
    """
    added = [parts[m] for m in done if m in parts]
    now = done[-1]

    def is_(total: torch.Tensor | None) -> bool:
        return total is not None and same_bits(total, observed)

    before = running_sum(start, added[:-1])
    if is_(before):
        return reason("lost_microbatch", f"the gradient of microbatch {now} was not added")
    for first in range(1, len(done)):
        if is_(running_sum(None, added[first:])):
            return reason(
                "lost_microbatch", f"the sum holds {listed(done[first:])} alone: {listed(done[:first])} were lost" +
                (", and the batches before" if start is not None else ""))
    if start is not None and is_(running_sum(None, added)):
        return reason("lost_microbatch", "the gradients of the batches before were lost")
    for left in range(len(done) - 1):
        if is_(running_sum(start, added[:left] + added[left + 1:])):
            return reason("lost_microbatch", f"the gradient of microbatch {done[left]} is missing from the sum")
    if now in parts:
        if is_(running_sum(before, [parts[now], parts[now]])) or is_(running_sum(before, [parts[now] * 2])):
            return reason("doubled_microbatch", f"the gradient of microbatch {now} was added twice")
        for other, part in parts.items():
            if other != now and is_(running_sum(before, [part])):
                return reason("doubled_microbatch" if other in done else "lost_microbatch",
                              f"the gradient of microbatch {other} was added in place of that of microbatch {now}")
        change = observed if before is None else observed.double() - before.double()
        if len(sites) > 1:
            for number in range(4**min(len(sites), 4)):
                times = [number // 4**k % 4 for k in range(min(len(sites), 4))]
                if set(times) != {1} and close(change, sum((t * site.double() for t, site in zip(times, sites)), torch.zeros(
                    ()))):
                    return reason(
                        "doubled_microbatch",
                        f"the weight is used {len(sites)} times in the stage, and the gradients of its uses for "
                        f"microbatch {now} were added {' and '.join(map(str, times))} times")
        if found := scaled(change, parts[now], factors):
            return Reason(found.code, f"of the gradient that microbatch {now} adds, {found.text}", found.remedy)
    return reason("unknown", "the sum is none of: without a microbatch, with one twice, with another in its place, scaled")


def explain_message(observed: torch.Tensor, messages: dict[str, torch.Tensor], sent: str) -> Reason | None:
    """Why a received tensor is not the one that was sent.

    messages: all tensors that pass between stages in the plain loop, by a description; sent: the right one's
    """
    same = [name for name, value in messages.items() if name != sent and same_bits(value, observed)]
    if same:
        return reason("stale_receive", f"the receive of the {sent} holds the {same[0]}")
    if observed.numel() and not observed.any():
        return reason("stale_receive", f"the receive of the {sent} holds zeros: the buffer was never filled")
    # Messages of other shapes can share their first bytes.
    flat = observed.reshape(-1)
    for name, value in messages.items():
        n = min(flat.numel(), value.numel())
        if n > 1 and value.dtype == flat.dtype and name != sent and torch.equal(value.reshape(-1)[:n], flat[:n]):
            return reason("stale_receive", f"the receive of the {sent} holds the bytes of the {name}, which has another shape")
    return None


def explain_forward(stage: torch.nn.Module, given: Tensors, observed: torch.Tensor, number: int, state: torch.Tensor,
                    seeded: bool, buffers: dict[str, torch.Tensor]) -> Reason | None:
    """Why a stage computed another output from equal input: computes it again as the rank did, with one circumstance after the
    other.

    stage: of the plain run, with the parameters and buffers that it had
    number: of the output's tensor; state: of the rank's generator before the forward; seeded: it is that of the plain loop, too
    buffers: of the rank before the forward, by name
    """
    def again(with_buffers: bool) -> tuple[torch.Tensor, bool]:
        """The output, and whether the forward drew random numbers."""
        module = copy.deepcopy(stage)
        if with_buffers:
            for name, buffer in module.named_buffers():
                if name in buffers and buffers[name].shape == buffer.shape:
                    buffer.data.copy_(buffers[name])
        with torch.random.fork_rng([]), torch.no_grad():
            torch.set_rng_state(state)
            value = as_tuple(module(*(tensor.clone() for tensor in given)))[number]
            return value, not torch.equal(state, torch.get_rng_state())

    if same_bits(again(False)[0], observed):
        return reason("random_numbers", "the stage draws random numbers, and with those of the rank its output is the rank's")
    value, drew = again(True)
    if not same_bits(value, observed):
        return None
    if drew and not seeded:
        return reason("random_numbers", "the stage draws random numbers and has other buffers; with those of the rank its output "
                      "is the rank's")
    return reason("running_statistics", "the stage's buffers differ before the forward, and explain its output")


def explain_loss(observed: torch.Tensor, with_target: Sequence[torch.Tensor], micro_batch: int, factors: dict[str,
                                                                                                              float]) -> Reason:
    """Why a loss of an equal output differs. with_target: the loss of this output with each microbatch's target."""
    for other, value in enumerate(with_target):
        if other != micro_batch and same_bits(value, observed):
            return reason("other_target",
                          f"the loss is that of microbatch {micro_batch}'s output with microbatch {other}'s target")
    return scaled(observed, with_target[micro_batch], factors) or reason(
        "unknown", "the loss is none of: with another microbatch's target, scaled")
