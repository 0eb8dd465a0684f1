"""Whole steps: forward, backward, one decision of all ranks, and the optimizer."""
from torch import nn

from .errors import UsageError
from .runtime import Pipeline


class Trainer(Pipeline):
    """Trains under a schedule with an optimizer of Python.

    optimizer: a `torch.optim.Optimizer` over the parameters of this rank's stages, or a function that makes it of a list of them
    clip_grad_norm: the largest norm of the gradient over all ranks' parameters; 0: no clipping
    when_not_finite: "stop" raises NumericalError on every rank, "skip" leaves out a step whose loss or gradient is not finite
    learning_rate: a function of the step's number that returns the rate of all groups; None: the rates in the optimizer's groups
    Other arguments as of `Schedule`. Microbatches weigh as many samples as they have, so gradients are those of the mean over the batch.
    """

    def __init__(self, schedule, stages, n_microbatches, loss_fn, optimizer, args_chunk_spec=None, kwargs_chunk_spec=None,
                 output_merge_spec=None, *, clip_grad_norm=0.0, when_not_finite="stop", learning_rate=None, seed=0, deadline=300.0):
        if when_not_finite not in ("stop", "skip"):
            raise UsageError(f"when_not_finite is {when_not_finite!r}. Remedy: 'stop' or 'skip'")
        if loss_fn is None:
            raise UsageError("a trainer without loss_fn. Remedy: a loss_fn, or Schedule(…).eval for the forward alone")
        if not hasattr(optimizer, "param_groups"):
            owned = stages if isinstance(stages, (list, tuple)) else [stages]
            optimizer = optimizer([p for p in nn.ModuleList([stage.submod for stage in owned]).parameters() if p.requires_grad])
        self.optimizer = optimizer
        super().__init__(schedule, stages, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, seed=seed,
                         deadline=deadline, weighed=True, optimizer=optimizer, clip_grad_norm=clip_grad_norm,
                         skip_not_finite=when_not_finite == "skip", learning_rate=learning_rate)

    def step(self, *args, target=None, losses=None, return_outputs=False, **kwargs):
        """Takes a step on a batch: gradients begin at zero. Returns the report; with `return_outputs` report and outputs."""
        outputs = self._train(args, kwargs, target, losses, return_outputs)
        return (self.report, outputs) if return_outputs else self.report

    def evaluate(self, *args, target=None, losses=None, **kwargs):
        """The mean loss over a batch, without gradients, on every rank; modules keep their mode."""
        given = self._begin(args, kwargs, target, False)
        mean = self._made.evaluate(given)
        self._end(losses)
        return mean
