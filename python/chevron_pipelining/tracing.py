"""Models that PyTorch's tracer cuts into stages: `pipeline` and `build_stage` with the signatures of torch.distributed.pipelining."""
import operator

from torch.distributed import pipelining
from torch.distributed.pipelining import SplitPoint, pipe_split  # noqa: F401

from .errors import UsageError
from .stage import PipelineStage


class Pipe(pipelining.Pipe):
    """A traced model, as `torch.distributed.pipelining.Pipe`, whose stages run under Chevron's schedules."""

    def build_stage(self, stage_index, device, group=None):
        """The stage of this rank."""
        return build_stage(self.get_stage_module(stage_index), stage_index, self.info(), device, group)


def pipeline(*args, **options):
    """Traces a model and cuts it, as `torch.distributed.pipelining.pipeline`."""
    pipe = pipelining.pipeline(*args, **options)
    pipe.__class__ = Pipe
    return pipe


def build_stage(stage_module, stage_index, pipe_info, device, group=None):
    """A stage of a traced model, from `pipe.get_stage_module(stage_index)` and `pipe.info()`.

    Raises: UsageError where values skip a stage: Chevron's stages hand all their outputs to the next stage, and to no further one."""
    before = None
    for node in pipe_info.graph.nodes:
        if node.op == "output":
            result = node.args[0]
            _check_handed("the result", list(result) if isinstance(result, (tuple, list)) else [result], before)
        if node.op == "call_module":
            if before is not None:
                _check_handed(f"`{node.name}`", [*node.args, *node.kwargs.values()], before)
            before = node
    return PipelineStage(stage_module, stage_index, pipe_info.num_stages, device, group=group)


def _check_handed(taker, values, giver):
    """Refuses a stage (or the result) that does not take exactly the outputs of the stage before, in their order."""
    items = [user for user in giver.users if user.target is operator.getitem]
    if values != (sorted(items, key=lambda item: item.args[1]) or [giver]):
        raise UsageError(f"{taker} of the traced model takes {[str(value) for value in values]}, and `{giver.name}`, the stage before, hands "
                         "on all its outputs, in their order. Remedy: another cut, or modules of one's own with PipelineStage")
