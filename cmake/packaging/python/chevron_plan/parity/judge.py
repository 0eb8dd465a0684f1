"""Compares the records of the ranks with the plain loop, bit by bit, and names the first tensor that differs."""
from __future__ import annotations

import copy
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .case import Case, Job, as_tuple, built, once, same_bits, seed_of
from .plain import Trace, cut, run_batch, units
from .ranks import Ranks, Record, rank_of_stages
from .reasons import (ORDERS, Reason, close, explain_forward, explain_loss, explain_message, explain_sum, listed, reason,
                      running_sum, scaled)


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the plain loop's.

    step, batch, stage, micro_batch: where it was computed; -1 where a tensor belongs to none
    operation: PyTorch's spelling of the action, such as 1F0, 1RECV_F0, 1B0, 1REDUCE_GRAD, or "loss", "build", "clip", "optimizer"
    tensor: in words
    elements, of: how many elements differ, and how many the tensor has
    absolute, relative: the largest difference, and the same as a share of the plain tensor's largest element
    reason: the likely one
    """
    step: int
    batch: int
    stage: int
    micro_batch: int
    operation: str
    tensor: str
    elements: int
    of: int
    absolute: float
    relative: float
    reason: Reason


@dataclass
class Verdict:
    """outcome: "equal"; "order", where only sums were added in another order, each kind of them in `orders`; "differs", where
    `first` is the first tensor that differs. compared: how many tensors of each kind were equal before."""
    job: dict[str, Any]
    outcome: str = "equal"
    first: Difference | None = None
    orders: list[Difference] = field(default_factory=list)
    compared: dict[str, int] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def text(self) -> str:
        """In sentences, one a line."""
        lines = []
        for one in [*self.orders, *([self.first] if self.first else [])]:
            kind = "order of sums" if one.reason.code in ORDERS else "differs"
            place = [
                f"step {one.step}", *([f"batch {one.batch}"] if one.batch > 0 else []),
                *([f"stage {one.stage}"] if one.stage >= 0 else []),
                *([f"microbatch {one.micro_batch}"] if one.micro_batch >= 0 else []), f"operation {one.operation}"
            ]
            lines.append(f"{kind}: {one.tensor}")
            lines.append(f"  at: {', '.join(place)}")
            lines.append(f"  size: {one.elements} of {one.of} elements, at most {one.absolute:.3g} "
                         f"({one.relative:.3g} of the largest)")
            lines.append(f"  reason: {one.reason.code}: {one.reason.text}")
            lines.append(f"  remedy: {one.reason.remedy}")
        counts = ", ".join(f"{number} {kind}" for kind, number in self.compared.items() if number) or "nothing"
        heads = {"equal": "equal in every bit", "order": "equal but for the order of sums", "differs": "equal before"}
        lines += textwrap.wrap(f"{heads[self.outcome]}: {counts}", 118, subsequent_indent="  ")
        return "\n".join(lines)


class _Found(Exception):
    """Carries the first difference out of the walk."""
    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.tensor)
        self.difference = difference


def check(job: Job, ranks: Ranks | None = None) -> Verdict:
    """Trains a case in the plain loop and under PyTorch's pipeline, and compares them.

    ranks: processes that are used again for the next job; without, processes of this job alone
    Raises UsageError for a job that cannot be run, RunError for a rank that fails or hangs.
    """
    job.check()
    threads = torch.get_num_threads()
    own = Ranks() if ranks is None else ranks
    try:
        torch.set_num_threads(job.threads)
        with torch.random.fork_rng([]), torch.enable_grad():
            case = built(job)
            state = torch.get_rng_state()
            place = rank_of_stages(job.schedule, job.ranks, len(case.stages))
            seed = torch.initial_seed()
            record = own.run(job, _shapes(job, case) if job.static_shapes else {})
            torch.set_rng_state(state)
            return _Judge(job, case, record, place, seed).verdict()
    finally:
        torch.set_num_threads(threads)
        if ranks is None:
            own.close()


def _shapes(job: Job, case: Case) -> dict[int, Any]:
    """Of each stage, the inputs and outputs of a microbatch, on the meta device. Tensors between stages require gradients, as
    PyTorch 2.15 reads from their shapes whether a backward sends any."""
    shapes: dict[int, Any] = {}
    value: Any = cut(job, case, 0)[0][0]
    with torch.no_grad():
        for number, stage in enumerate(case.stages):
            given = as_tuple(value)
            value = copy.deepcopy(stage)(*given)
            shapes[number] = tuple(
                tuple(t.to("meta").requires_grad_(between and t.is_floating_point()) for t in tensors)
                for tensors, between in ((given, number > 0), (as_tuple(value), True)))
    return shapes


class _Judge:
    def __init__(self, job: Job, case: Case, record: Record, place: list[int], seed: int) -> None:
        self.job, self.case, self.record, self.place, self.seed = job, case, record, place, seed
        self.last = len(case.stages) - 1
        self.compared: Counter[str] = Counter()
        self.orders: list[Difference] = []
        holders = Counter(id(p) for stage in case.stages for p in {id(p): p for p in stage.parameters()}.values())
        self.tied = {(s, name)
                     for s, stage in enumerate(case.stages)
                     for name, p in stage.named_parameters()
                     if holders[id(p)] > 1}

    def verdict(self) -> Verdict:
        verdict = Verdict({
            "schedule": self.job.schedule,
            "ranks": self.job.ranks,
            "stages": len(self.place),
            "microbatches": self.job.microbatches,
            "steps": self.job.steps
        })
        try:
            self.walk()
            verdict.outcome = "order" if self.orders else "equal"
        except _Found as found:
            verdict.outcome, verdict.first = "differs", found.difference
        verdict.orders, verdict.compared = self.orders, dict(self.compared)
        return verdict

    # What the ranks recorded.

    def seen(self, step: int, batch: int, event: str, stage: int, micro_batch: int = -1, name: str = "", replica: int = 0) -> Any:
        """A value that a rank recorded. micro_batch: counted over all replicas; its replica is that of the record, too."""
        if micro_batch >= 0:
            replica, micro_batch = divmod(micro_batch, self.job.microbatches)
        return self.record.get((step, batch, event, stage + replica * len(self.place), micro_batch, name))

    def parameters(self) -> Iterator[tuple[int, str, torch.nn.Parameter]]:
        for s, stage in enumerate(self.case.stages):
            for name, parameter in stage.named_parameters():
                yield s, name, parameter

    def factors(self, batch: int, micro_batch: int | None = None) -> dict[str, float]:
        """Numbers by which losses and gradients are scaled, by mistake or not."""
        target = self.case.batches[batch][1]
        of = units(self.job, self.case, batch)
        counts = {
            "the number of microbatches": self.job.microbatches,
            "the number of ranks": self.job.ranks,
            "the number of replicas": self.job.replicas,
            "the samples of the batch": target.shape[0],
            "the samples of a microbatch": target.shape[0] / self.job.microbatches,
            "the target's elements": target.numel(),
            "the target's elements in a microbatch": target.numel() / self.job.microbatches,
            "the square of the number of microbatches": self.job.microbatches**2,
            "the number of batches": len(self.case.batches)
        }
        if self.case.units:
            counts["the tokens of the batch"] = sum(of)
            if micro_batch is not None:
                counts["the tokens of the microbatch"] = of[micro_batch]
        return {name: float(value) for name, value in counts.items()}

    def difference(self, where: tuple[int, int, int, int], operation: str, tensor: str, observed: Any, wanted: torch.Tensor,
                   why: Reason) -> Difference:
        if not isinstance(observed, torch.Tensor):
            return Difference(*where, operation, f"{tensor}, which is missing", wanted.numel(), wanted.numel(), 0.0, 0.0, why)
        if observed.shape != wanted.shape or observed.dtype != wanted.dtype:
            text = f"{tensor}: {list(observed.shape)} of {observed.dtype} instead of {list(wanted.shape)} of {wanted.dtype}"
            return Difference(*where, operation, text, observed.numel(), observed.numel(), 0.0, 0.0, why)
        apart = (observed.double() - wanted.double()).abs()
        largest = float(apart.max()) if apart.numel() else 0.0
        scale = float(wanted.double().abs().max()) if wanted.numel() else 0.0
        return Difference(*where, operation, tensor, int((observed != wanted).sum()), wanted.numel(), largest,
                          largest / scale if scale else float("inf") if largest else 0.0, why)

    def equal(self, kind: str, observed: Any, wanted: torch.Tensor) -> bool:
        same = isinstance(observed, torch.Tensor) and same_bits(observed, wanted)
        self.compared[kind] += same
        return same

    def stop(self, where: tuple[int, int, int, int], operation: str, tensor: str, observed: Any, wanted: torch.Tensor,
             why: Reason) -> None:
        raise _Found(self.difference(where, operation, tensor, observed, wanted, why))

    def only_order(self, where: tuple[int, int, int, int], operation: str, tensor: str, observed: torch.Tensor,
                   wanted: torch.Tensor, code: str, text: str) -> None:
        if not any(one.reason.code == code and one.step == where[0] for one in self.orders):  # one of each kind a step
            self.orders.append(self.difference(where, operation, tensor, observed, wanted, reason(code, text)))

    # The walk, in the order in which values depend on each other.

    def walk(self) -> None:
        optimizer = self.case.optimizer(once(p for stage in self.case.stages for p in stage.parameters()))
        self.built()
        for step in range(self.job.steps):
            optimizer.zero_grad(set_to_none=True)
            for batch in range(len(self.case.batches)):
                self.batch(step, batch)
            batch = len(self.case.batches) - 1
            if self.case.after_backward is not None:
                self.finished(step, batch)
            if self.case.max_norm is not None:
                self.clipped(step, batch)
            optimizer.step()
            for replica, (s, name, parameter) in ((r, place) for r in range(self.job.replicas) for place in self.parameters()):
                observed = self.seen(step, batch, "parameter", s, -1, name, replica)
                if not self.equal("parameters", observed, parameter.detach()):
                    why = reason("unknown", "the optimizer made another step from equal parameters and gradients")
                    self.stop((step, batch, s, -1), "optimizer", f"parameter {name} after the step", observed, parameter.detach(),
                              why)
            # The plain loop's buffers have seen the microbatches of all replicas, those of a replica its own.
            for s, stage in enumerate(self.case.stages) if self.job.replicas == 1 else ():
                for name, buffer in stage.named_buffers():
                    observed = self.seen(step, batch, "buffer", s, -1, name)
                    if not self.equal("buffers", observed, buffer):
                        self.stop((step, batch, s, -1), f"{s}F", f"buffer {name} after the step", observed, buffer,
                                  self.explain_buffer(step, s, name, observed, buffer))

    def built(self) -> None:
        for s, stage in enumerate(self.case.stages):
            for kind, event, tensors in (("initial parameters", "initial parameter", stage.named_parameters()),
                                         ("initial buffers", "initial buffer", stage.named_buffers())):
                for name, tensor in tensors:
                    observed = self.seen(0, 0, event, s, -1, name)
                    if not self.equal(kind, observed, tensor.detach()):
                        seed = self.record.get((0, 0, "seed", self.place[s], -1, ""))
                        why = reason("random_numbers",
                                     f"rank {self.place[s]} built the model with seed {seed}, the plain loop with {self.seed}")
                        if seed == self.seed:
                            why = reason("unknown", "the function builds another model on this rank, with the same seed")
                        self.stop((0, -1, s, -1), "build", f"{event} {name}", observed, tensor.detach(), why)

    def batch(self, step: int, batch: int) -> None:
        """Losses, outputs and gradients of a batch. The plain loop's `.grad` become those of the ranks, if only their order of
        sums differs, so that later comparisons start from equal values."""
        self.before = {
            (s, name): buffer.clone()
            for s, stage in enumerate(self.case.stages)
            for name, buffer in stage.named_buffers()
        }
        self.stages_before = [copy.deepcopy(stage) for stage in self.case.stages]
        start = {(s, name): None if p.grad is None else p.grad.clone() for s, name, p in self.parameters()}
        state = torch.get_rng_state()
        trace = run_batch(self.job, self.case, step, batch, weighted=False)
        with torch.no_grad():
            for s, stage in enumerate(self.case.stages):
                for name, buffer in stage.named_buffers():
                    buffer.copy_(self.before[s, name])
        torch.set_rng_state(state)
        run_batch(self.job, self.case, step, batch, weighted=True)

        right = True
        changed: list[tuple[int, str, torch.nn.Parameter, torch.Tensor, str]] = []
        for replica in range(self.job.replicas):
            losses = self.seen(step, batch, "losses", self.last, replica=replica) or []
            own = [trace.losses[m] for m in self.of_replica(replica)]
            right = right and len(losses) == len(own) and all(map(same_bits, losses, own))
            for number, output in enumerate(self.whole_outputs(trace, replica)):
                observed = self.seen(step, batch, "outputs", self.last, -1, str(number), replica)
                right = right and observed is not None and same_bits(observed, output)
            for s, name, p in self.parameters():
                if (s, name) in self.tied and self.case.after_backward is not None:
                    continue
                observed = self.seen(step, batch, "gradient", s, -1, name, replica)
                if p.grad is None or observed is None:
                    right = right and p.grad is None and observed is None
                elif not same_bits(observed, p.grad):
                    code = self.order_of(step, batch, s, name, observed, trace, start[s, name])
                    right = right and code is not None
                    changed.append((s, name, p, observed, code or ""))
        if not right:
            self.locate(step, batch, trace, start)
        self.compared["losses"] += len(trace.losses)
        self.compared["outputs"] += self.job.replicas * len(self.whole_outputs(trace, 0))
        self.compared["gradients"] += self.job.replicas * sum(1 for _ in self.parameters()) - len(changed)
        for s, name, p, observed, code in changed:
            assert p.grad is not None
            self.only_order((step, batch, s, -1), f"{s}REDUCE_GRAD", f"gradient of {name}", observed, p.grad, code, ORDERS[code])
            p.grad = observed.clone()

    def of_replica(self, replica: int) -> range:
        """The microbatches of a replica, counted over all."""
        return range(replica * self.job.microbatches, (replica + 1) * self.job.microbatches)

    def whole_outputs(self, trace: Trace, replica: int) -> list[torch.Tensor]:
        of = [trace.outputs[self.last, m] for m in self.of_replica(replica)]
        return [torch.cat(parts) for parts in zip(*of)] if all(t.dim() for t in of[0]) else []

    def order_of(self, step: int, batch: int, s: int, name: str, observed: torch.Tensor, trace: Trace,
                 start: torch.Tensor | None) -> str | None:
        """Whether PyTorch's arithmetic on the right gradients gives these bits: the sum in the schedule's order, then the
        division. Returns the code of the reason."""
        p = dict(self.case.stages[s].named_parameters())[name]
        if (s, name) in self.tied and len({self.place[other] for other, _, q in self.parameters() if q is p}) == 1:
            return "tied_order" if p.grad is not None and close(observed, p.grad,
                                                                1e-5) else None  # autograd adds the stages' gradients
        of = units(self.job, self.case, batch)
        orders = [[m for m, _ in self.seen(step, batch, "order", s, replica=r) or []] for r in range(self.job.replicas)]
        if any(sorted(order) != list(range(self.job.microbatches)) for order in orders):
            return None
        if self.case.reduction == "mean" and (len(set(of)) > 1 or batch > 0):
            return None
        for code in ("division_after_sum", "microbatch_order"):
            totals = []
            for r, order in enumerate(orders):
                sequence = [self.of_replica(r)[m] for m in (order if code == "microbatch_order" else sorted(order))]
                totals.append(running_sum(start,
                                          [trace.gradients[s, m][name] for m in sequence if name in trace.gradients[s, m]]))
            if self.is_total(totals, observed):
                return code if self.job.replicas == 1 else "replica_order"
        return None

    def is_total(self, totals: list[torch.Tensor | None], observed: torch.Tensor) -> bool:
        """Whether a gradient is that of PyTorch's arithmetic on the sums of the replicas: their mean, then the division."""
        known = [total for total in totals if total is not None]
        if len(known) != self.job.replicas:
            return False
        mean = known[0] if len(known) == 1 else known[0] / 2 + known[1] / 2
        divisor = self.job.microbatches if self.case.reduction == "mean" else 1
        return same_bits(mean / divisor if divisor > 1 else mean, observed)

    def locate(self, step: int, batch: int, trace: Trace, start: dict[tuple[int, str], torch.Tensor | None]) -> None:
        """Raises _Found with the first tensor of the batch that differs."""
        microbatches = range(self.job.parts)
        messages = {
            f"activation of stage {s}, microbatch {m}": value
            for (s, m), of in trace.outputs.items()
            for value in of
            if s < self.last
        }
        messages |= {
            f"gradient of stage {s}'s output, microbatch {m}": value
            for (s, m), of in trace.received.items()
            for value in of.values()
        }
        for m in microbatches:
            for s in range(self.last + 1):
                self.forward(step, batch, m, s, trace, messages)
        for m in microbatches:
            for s in range(self.last, -1, -1):
                self.backward(step, batch, m, s, trace, messages)
        for replica in range(self.job.replicas):
            for s in range(self.last + 1):
                self.sums(step, batch, s, replica, trace, start)
            self.returned(step, batch, replica, trace)
        self.reduced(step, batch, trace, start)
        p = next(p for _, _, p in self.parameters())
        self.stop((step, batch, -1, -1), "step", "a result of the batch", None, p.detach(),
                  reason("unknown", "all recorded tensors are equal, but not the results"))

    def forward(self, step: int, batch: int, m: int, s: int, trace: Trace, messages: dict[str, torch.Tensor]) -> None:
        where = (step, batch, s, m)
        for number, wanted in enumerate(trace.inputs[s, m]):
            observed = self.seen(step, batch, "input", s, m, str(number))
            if not self.equal("inputs of stages", observed, wanted):
                why = None
                if isinstance(observed, torch.Tensor):
                    if s == 0:
                        given = {
                            f"argument of microbatch {other}": part[0][number]
                            for other, part in enumerate(cut(self.job, self.case, batch))
                            if number < len(part[0])
                        }
                        why = explain_message(observed, given, f"argument of microbatch {m}")
                    else:
                        why = explain_message(observed, messages, f"activation of stage {s - 1}, microbatch {m}")
                self.stop(where, f"{s}F{m}" if s == 0 else f"{s}RECV_F{m}", f"input {number} of stage {s}", observed, wanted, why
                          or reason("unknown", "the input is no tensor that the plain loop passes between stages"))
        for number, wanted in enumerate(trace.outputs[s, m]):
            observed = self.seen(step, batch, "output", s, m, str(number))
            if not self.equal("outputs of stages", observed, wanted):
                why = None
                if isinstance(observed, torch.Tensor):
                    buffers = {
                        name: self.seen(step, batch, "buffer before", s, m, name)
                        for name, _ in self.case.stages[s].named_buffers()
                    }
                    stage = self.with_buffers_at(step, batch, m, s, trace)
                    why = explain_forward(stage, trace.inputs[s, m], observed, number, self.seen(step, batch, "state", s, m),
                                          self.job.seeded, {
                                              name: value
                                              for name, value in buffers.items()
                                              if value is not None
                                          })
                    why = why or scaled(observed, wanted, self.factors(batch, m))
                self.stop(where, f"{s}F{m}", f"output {number} of stage {s}", observed, wanted, why
                          or reason("unknown", "the stage computes another output from equal input"))
        if s == self.last:
            observed = self.seen(step, batch, "loss", s, m)
            if not self.equal("losses", observed, trace.losses[m]):
                why = reason("unknown", "the loss of the microbatch was not computed")
                if isinstance(observed, torch.Tensor):
                    output: Any = trace.outputs[s, m]
                    parts = cut(self.job, self.case, batch)
                    with torch.no_grad():
                        with_target = [self.case.loss(output if len(output) > 1 else output[0], target) for _, target in parts]
                    why = explain_loss(observed, with_target, m, self.factors(batch, m))
                self.stop(where, "loss", f"loss of microbatch {m}", observed, trace.losses[m], why)

    def with_buffers_at(self, step: int, batch: int, m: int, s: int, trace: Trace) -> torch.nn.Module:
        """A stage as it was before the batch, its buffers as they are in the plain loop before a microbatch."""
        stage = copy.deepcopy(self.stages_before[s])
        if any(True for _ in stage.buffers()):
            with torch.random.fork_rng([]), torch.no_grad():
                for earlier in range(m):
                    torch.manual_seed(seed_of(step, batch, earlier, s))
                    stage(*(t.clone() for t in trace.inputs[s, earlier]))
        return stage

    def backward(self, step: int, batch: int, m: int, s: int, trace: Trace, messages: dict[str, torch.Tensor]) -> None:
        letter = self.seen(step, batch, "backward", s, m) or "B"
        for event, at in (("received", s), ("sent", s - 1)):
            for number, wanted in trace.received.get((at, m), {}).items():
                observed = self.seen(step, batch, event, s, m, str(number))
                if observed is None and (event == "received" or self.seen(step, batch, "backward", s, m) is not None):
                    continue  # nothing was recorded there: stage 0 of a split backward
                if self.equal("gradients of activations", observed, wanted):
                    continue
                name = f"gradient of stage {at}'s output, microbatch {m}"
                if observed is None:
                    self.stop((step, batch, s, m), f"{s}{letter}{m}", name, None, wanted,
                              reason("lost_microbatch", f"the backward of microbatch {m} did not run"))
                if event == "received":
                    why = explain_message(observed, messages, name) or scaled(observed, wanted, self.factors(batch, m))
                    self.stop((step, batch, s, m), f"{s}RECV_B{m}", name, observed, wanted, why
                              or reason("unknown", "the gradient is no tensor that the plain loop passes between stages"))
                doubled = reason("doubled_microbatch", f"the input gradient of microbatch {m} was added twice") if close(
                    observed, wanted * 2, 1e-6) and self.job.parts != 2 else None
                others = {key: value for key, value in messages.items() if key.startswith("gradient")}
                why = doubled or scaled(observed, wanted, self.factors(batch, m)) or explain_message(observed, others, name)
                self.stop((step, batch, s, m), f"{s}{letter}{m}", f"input gradient {number} of stage {s}", observed, wanted, why
                          or reason("unknown", "the backward computes another gradient from equal tensors"))

    def sums(self, step: int, batch: int, s: int, replica: int, trace: Trace, start: dict[tuple[int, str],
                                                                                          torch.Tensor | None]) -> None:
        first_of = self.of_replica(replica)[0]
        order = [(m + first_of, letter) for m, letter in self.seen(step, batch, "order", s, replica=replica) or []]
        done = [m for m, _ in order]
        for k, (m, letter) in enumerate(order):
            if self.job.replicas > 1 and k + 1 == self.job.microbatches:
                break  # the last backward averages over the replicas, too
            for name, parameter in self.case.stages[s].named_parameters():
                if (s, name) in self.tied:
                    continue
                parts = {
                    other: trace.gradients[s, other][name]
                    for other in range(self.job.parts)
                    if name in trace.gradients[s, other]
                }
                first = start[s, name] if batch == 0 else self.seen(step, batch - 1, "gradient", s, -1, name, replica)
                wanted = running_sum(first, [parts[other] for other in done[:k + 1] if other in parts])
                observed = self.seen(step, batch, "sum", s, first_of + k, name)
                if wanted is None or self.equal("sums of gradients", observed, wanted):
                    continue
                doubles = [other for other in done[:k] if other == m]
                if doubles:
                    why = reason("doubled_microbatch", f"the backward of microbatch {m} ran twice")
                elif observed is None:
                    why = reason("lost_microbatch", f"the gradient of microbatch {m} was not added")
                else:
                    why = explain_sum(observed, first, done[:k + 1], parts, self.factors(batch, m),
                                      self.sites(step, batch, s, m, name, trace))
                self.stop((step, batch, s, m), f"{s}{letter}{m}", f"gradient of {name}, summed up to microbatch {m}", observed,
                          wanted, why)
            if m in done[:k]:
                wanted = next(iter(trace.gradients[s, m].values()))
                self.stop((step, batch, s, m), f"{s}{letter}{m}", "the sum of gradients", None, wanted,
                          reason("doubled_microbatch", f"the backward of microbatch {m} ran twice"))
        missing = [m for m in self.of_replica(replica) if m not in done]
        if missing and trace.gradients[s, missing[0]]:
            name, wanted = next(iter(trace.gradients[s, missing[0]].items()))
            self.stop((step, batch, s, missing[0]), f"{s}B{missing[0]}", f"gradient of {name}", None, wanted,
                      reason("lost_microbatch", f"the backward of {listed(missing)} did not run"))

    def replayed(self, step: int, batch: int, s: int, m: int, trace: Trace) -> tuple[torch.nn.Module, Any, Any]:
        """A copy of a stage, tied to no other, its output or loss for one microbatch, and the gradients that arrive there."""
        stage = copy.deepcopy(self.stages_before[s])
        for parameter in stage.parameters():
            parameter.grad = None
        with torch.random.fork_rng([]), torch.enable_grad():
            torch.manual_seed(seed_of(step, batch, m, s))
            given = [t.clone().requires_grad_(t.is_floating_point() and s > 0) for t in trace.inputs[s, m]]
            roots: Any = stage(*given)
            if s == self.last:
                roots = self.case.loss(roots, cut(self.job, self.case, batch)[m][1])
        arriving = [trace.received.get((s, m), {}).get(number) for number in range(len(as_tuple(roots)))]
        return stage, as_tuple(roots), None if s == self.last else arriving

    def sites(self, step: int, batch: int, s: int, m: int, name: str, trace: Trace) -> list[torch.Tensor]:
        """The gradients of a parameter from each node of the graph that reaches it, for one microbatch, in a run of the stage
        alone."""
        stage, roots, arriving = self.replayed(step, batch, s, m, trace)
        parameter = dict(stage.named_parameters())[name]
        found: dict[tuple[int, int], torch.Tensor] = {}
        todo = [t.grad_fn for t in roots if isinstance(t, torch.Tensor)]
        seen: set[Any] = set()
        uses = 0
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            for place, (following, _) in enumerate(node.next_functions):
                if getattr(following, "variable", None) is parameter:

                    def keep(inputs: Any, _: Any, key: tuple[int, int] = (uses, place)) -> None:
                        if inputs[key[1]] is not None:
                            found[key] = inputs[key[1]].detach().clone()

                    node.register_hook(keep)
                    uses += 1
                todo.append(following)
        if uses < 2:
            return []
        torch.autograd.backward(roots, arriving)
        return list(found.values())

    def divided_for_each(self, step: int, batch: int, p: torch.nn.Parameter, observed: torch.Tensor,
                         trace: Trace) -> Reason | None:
        """Whether a weight that two stages of a rank share was divided after the last backward of each of them."""
        holders = [(s, name) for s, name, q in self.parameters() if q is p]
        if len(holders) != 2:
            return None
        parts: dict[tuple[int, int], torch.Tensor] = {}
        for s, name in holders:
            for m in range(self.job.microbatches):
                stage, roots, arriving = self.replayed(step, batch, s, m, trace)
                torch.autograd.backward(roots, arriving)
                gradient = dict(stage.named_parameters())[name].grad
                parts[s, m] = torch.zeros_like(p, dtype=torch.double) if gradient is None else gradient.double()
        divisor = self.job.microbatches
        for first, last in ((holders[0][0], holders[1][0]), (holders[1][0], holders[0][0])):
            order = [m for m, _ in self.seen(step, batch, "order", last) or []]
            for before in range(len(order) + 1):
                early = [parts[first, m] for m in range(divisor)] + [parts[last, m] for m in order[:before]]
                late = [parts[last, m] for m in order[before:]]
                if close((sum(early, torch.zeros(())) / divisor + sum(late, torch.zeros(()))) / divisor, observed):
                    return reason(
                        "divided_again", f"the weight is in stages {first} and {last} of one rank, and {first}REDUCE_GRAD and "
                        f"{last}REDUCE_GRAD both divide its gradient by {divisor}")
        return None

    def returned(self, step: int, batch: int, replica: int, trace: Trace) -> None:
        losses = self.seen(step, batch, "losses", self.last, replica=replica) or []
        all_of = [trace.losses[m] for m in self.of_replica(replica)]
        for number, wanted in enumerate(all_of):
            if number < len(losses) and same_bits(losses[number], wanted):
                continue
            lost = [m for m, loss in enumerate(all_of) if not any(same_bits(loss, other) for other in losses)]
            if len(losses) < len(all_of) or lost:
                why = reason("loss_missing", f"the list has {len(losses)} losses, and lacks that of {listed(lost or [number])}")
            else:
                why = reason("microbatch_order", "the losses are listed in another order")
            m = self.of_replica(replica)[(lost or [number])[0]]
            self.stop((step, batch, self.last, m), "loss", "the list of losses", losses[number] if number < len(losses) else None,
                      wanted, why)
        for number, wanted in enumerate(self.whole_outputs(trace, replica)):
            observed = self.seen(step, batch, "outputs", self.last, -1, str(number), replica)
            if observed is None or not same_bits(observed, wanted):
                self.stop((step, batch, self.last, -1), "merge", f"the step's output {number}", observed, wanted,
                          reason("unknown", "the microbatches' outputs are equal, but not the merged one"))

    def reduced(self, step: int, batch: int, trace: Trace, start: dict[tuple[int, str], torch.Tensor | None]) -> None:
        of = units(self.job, self.case, batch)
        places = [(r, *place) for r in range(self.job.replicas) for place in self.parameters()]
        for replica, s, name, p in places:
            observed = self.seen(step, batch, "gradient", s, -1, name, replica)
            if (s, name) in self.tied and self.case.after_backward is not None or p.grad is None:
                continue
            if observed is not None and (same_bits(observed, p.grad)
                                         or self.order_of(step, batch, s, name, observed, trace, start[s, name])):
                continue
            why = None
            parts = [trace.gradients[s, m][name] for m in self.of_replica(replica) if name in trace.gradients[s, m]]
            order = [self.of_replica(replica)[m] for m, _ in self.seen(step, batch, "order", s, replica=replica) or []]
            added = [trace.gradients[s, m][name] for m in order if name in trace.gradients[s, m]]
            if isinstance(observed, torch.Tensor) and added:
                divisor = self.job.microbatches if self.case.reduction == "mean" else 1
                total = running_sum(None, added)
                again = running_sum(None if batch == 0 else self.seen(step, batch - 1, "gradient", s, -1, name, replica), added)
                assert total is not None and again is not None
                if (s, name) in self.tied:
                    copies = [
                        self.seen(step, batch, "gradient", other, -1, another)
                        for other, another, q in self.parameters()
                        if q is p
                    ]
                    if len(copies) > 1 and close(sum((c.double() for c in copies), torch.zeros(())), p.grad, 1e-5):
                        why = reason("tied_weight",
                                     "the gradients of the weight's stages are equal to the plain loop's only in their sum")
                    elif divisor > 1:
                        why = self.divided_for_each(step, batch, p, observed, trace)
                elif self.job.replicas > 1 and same_bits(total / divisor, observed):
                    why = reason("replica_alone", f"the gradient is that of replica {replica} alone")
                elif batch > 0 and same_bits(again / divisor, observed):
                    why = reason(
                        "divided_again",
                        f"the gradients of {batch} earlier {'batch' if batch == 1 else 'batches'} were divided by "
                        f"{divisor} again, together with those of batch {batch}")
                elif len(set(of)) > 1 and same_bits(total / divisor, observed):
                    why = reason("mean_of_means",
                                 f"microbatches of {', '.join(f'{one:g}' for one in of)} units were divided by {divisor} alike")
                why = why or scaled(observed, p.grad, self.factors(batch))
                for m in range(len(parts)) if why is None else ():
                    rest = running_sum(None, parts[:m] + parts[m + 1:])
                    if rest is not None and close(rest / divisor, observed, 1e-6):
                        why = reason("lost_microbatch", f"the gradient of microbatch {m} is missing from the sum")
            self.stop((step, batch, s, -1), f"{s}REDUCE_GRAD", f"gradient of {name} after the last microbatch", observed, p.grad,
                      why or reason("unknown", "the sum of the microbatches was equal; the gradient after it is not"))

    def finished(self, step: int, batch: int) -> None:
        for s, name, p in self.parameters():
            observed = self.seen(step, batch, "finished gradient", s, -1, name)
            if p.grad is None or self.equal("gradients after after_backward", observed, p.grad):
                continue
            where = (step, batch, s, -1)
            if isinstance(observed, torch.Tensor) and (s, name) in self.tied:
                if close(observed, p.grad, 1e-5):
                    self.only_order(where, "after_backward", f"gradient of {name}", observed, p.grad, "tied_order",
                                    ORDERS["tied_order"])
                    p.grad = observed.clone()
                    continue
                mine = self.seen(step, batch, "gradient", s, -1, name)
                if mine is not None and same_bits(mine, observed):
                    self.stop(where, "after_backward", f"gradient of {name}", observed, p.grad,
                              reason("tied_weight", f"the gradient is that of stage {s} alone"))
            why = scaled(observed, p.grad, self.factors(batch)) if isinstance(observed, torch.Tensor) else None
            self.stop(where, "after_backward", f"gradient of {name} after after_backward", observed, p.grad, why
                      or reason("unknown", "after_backward changed a gradient that was equal"))

    def clipped(self, step: int, batch: int) -> None:
        """The norm and the clipped gradients. Clips the plain loop's gradients by the ranks' norm, if only its order of sums
        differs."""
        assert self.case.max_norm is not None
        own = {id(p): p for _, _, p in self.parameters()}
        gradients = {key: p.grad for key, p in own.items() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        used = norm
        for s in range(self.last + 1):
            observed = self.seen(step, batch, "norm", s)
            if self.equal("norms", observed, norm):
                continue
            where, used = (step, batch, s, -1), observed
            if isinstance(observed, torch.Tensor) and observed.shape == norm.shape:
                by_rank = [[(s2, name)
                            for s2, name, _ in self.parameters()
                            if self.place[s2] == rank]
                           for rank in range(self.job.ranks)]
                named = {(s2, name): p.grad for s2, name, p in self.parameters() if p.grad is not None}
                of_ranks = [torch.nn.utils.get_total_norm([named[key] for key in keys if key in named]) for keys in by_rank]
                squares = torch.stack([one**2 for one in of_ranks])
                twice = squares.sum().sqrt()
                # Each square is rounded, and each addition: a bound of any order of the same terms.
                bound = float(norm) * torch.finfo(norm.dtype).eps * (2 * len(gradients) + 8)
                if abs(float(observed) - float(norm)) <= bound:
                    exact = " by rank" if same_bits(observed, twice) else ""
                    self.only_order(where, "clip", "norm of the gradients", observed, norm, "norm_order",
                                    f"the squares of all gradients are added in another order{exact}")
                    continue
                why = None
                mine = of_ranks[self.place[s]]
                if abs(float(observed) - float(mine)) <= bound:
                    why = reason(
                        "norm_of_one_rank", f"the norm is that of the gradients of rank {self.place[s]}, {float(mine):.6g}, "
                        f"instead of all, {float(norm):.6g}")
                elif self.tied and abs(float(observed) - float(twice)) <= bound:
                    why = reason("norm_counts_twice",
                                 "the norm adds the square of a tied weight's gradient once for each of its ranks")
                why = why or scaled(observed, norm, self.factors(batch))
                self.stop(
                    where, "clip", "norm of the gradients", observed, norm, why
                    or reason("unknown", "the norm is none of: in another order, of one rank, with a tied weight twice, scaled"))
            self.stop(where, "clip", "norm of the gradients", observed, norm, reason("unknown", "the norm was not returned"))
        torch.nn.utils.clip_grads_with_norm_(list(own.values()), self.case.max_norm, used)
        for s, name, p in self.parameters():
            observed = self.seen(step, batch, "clipped gradient", s, -1, name)
            if p.grad is not None and not self.equal("clipped gradients", observed, p.grad):
                why = scaled(observed, p.grad, self.factors(batch)) if isinstance(observed, torch.Tensor) else None
                self.stop(
                    (step, batch, s, -1), "clip", f"clipped gradient of {name}", observed, p.grad, why
                    or reason("unknown", "the norm is right; the gradients were not multiplied by max_norm / (norm + 1e-6)"))

    def explain_buffer(self, step: int, s: int, name: str, observed: Any, wanted: torch.Tensor) -> Reason:
        first = self.seen(step, 0, "buffer before", s, 0, name)
        before = self.before.get((s, name))
        if len(self.case.batches) == 1 and isinstance(first,
                                                      torch.Tensor) and before is not None and not same_bits(first, before):
            zeros = copy.deepcopy(self.stages_before[s])
            with torch.random.fork_rng([]), torch.no_grad():
                shape = self.seen(step, 0, "input", s, 0, "0")
                zeros(*(torch.zeros_like(shape), ))
            if same_bits(dict(zeros.named_buffers())[name], first):
                return reason(
                    "running_statistics",
                    "the stage ran on zeros before its first microbatch, and updated its statistics: PyTorch finds "
                    "shapes that way")
            return reason("running_statistics", "the buffer had changed before the stage's first microbatch")
        if isinstance(observed, torch.Tensor) and before is not None and same_bits(observed, before):
            return reason("running_statistics", "the buffer was not updated")
        if isinstance(observed, torch.Tensor) and not observed.is_floating_point() and before is not None and before.numel() == 1:
            return reason("running_statistics",
                          f"the stage counted {int(observed - before)} forwards instead of {int(wanted - before)}")
        return reason("running_statistics", "the stage's forwards left other statistics")
