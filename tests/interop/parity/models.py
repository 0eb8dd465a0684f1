"""Small models and batches, which torch_parity.py trains in a plain loop and under PyTorch's pipeline."""
import functools

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from chevron_plan.parity import Case

WIDTH = 8
WORDS = 11
IGNORED = -100


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.project, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3), nn.Tanh())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Pair(nn.Module):
    """Two tensors pass between stages."""
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, y=None):
        y = x if y is None else y
        return torch.tanh(self.a(x) + y), self.b(y)


class Twice(nn.Module):
    """One weight, used at two places of a stage."""
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


class Counted(nn.Module):
    """A forward that depends on how many there were."""
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        self.count += 1
        return self.layer(x) / float(self.count)


def mlp():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def block(kind):
    return {
        "mlp": mlp,
        "attention": Attention,
        "checkpoint": Checkpointed,
        "pair": Pair,
        "twice": Twice, "counted": Counted,
        "dropout": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)),
        "batchnorm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        "half": lambda: mlp().to(torch.bfloat16)
    }[kind]()


def first_of(output, target):
    """The loss of the first of a stage's tensors."""
    return nn.functional.mse_loss(output[0] if isinstance(output, tuple) else output, target)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def regression(kind="mlp", stages=2, samples=24, batches=1, seed=7, **options):
    """Stages of one kind, and targets of their outputs' shape."""
    torch.manual_seed(seed)
    shape = (samples, 5, WIDTH) if kind == "attention" else (samples, WIDTH)
    dtype = torch.bfloat16 if kind == "half" else torch.float32
    model = [block(kind) for _ in range(stages)]
    return Case(model, [(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)) for _ in range(batches)], first_of,
                **options)


def summed(divisor, output, target):
    return nn.functional.mse_loss(output, target, reduction="sum") / divisor


def regression_sum(stages=2, samples=24, batches=1, **options):
    """The loss is divided by the elements of the whole batch, so that microbatches add up."""
    case = regression("mlp", stages, samples, batches, reduction="sum", **options)
    case.loss = functools.partial(summed, samples * WIDTH)
    return case


def tokens_of(target):
    return int((target != IGNORED).sum())


def entropy(divisor, output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED, reduction="sum") / divisor


def mean_entropy(output, target):
    return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


def language(stages=2, samples=12, tied=False, reduction="sum", unequal=False, **options):
    """Words in, words out: an embedding, blocks of attention, a head; with `tied`, the head's weight is the embedding's."""
    torch.manual_seed(11)
    model = [
        nn.Sequential(nn.Embedding(WORDS, WIDTH)), *[nn.Sequential(Attention()) for _ in range(stages - 2)],
        nn.Sequential(Attention(), nn.Linear(WIDTH, WORDS, bias=False))
    ]
    if tied:
        model[-1][1].weight = model[0][0].weight
    words, target = torch.randint(WORDS, (samples, 5)), torch.randint(WORDS, (samples, 5))
    if unequal:
        for sample in range(samples):
            target[sample, 5 - sample % 5:] = IGNORED
    loss = functools.partial(entropy, tokens_of(target)) if reduction == "sum" else mean_entropy
    return Case(model, [(words, target)], loss, reduction=reduction, units=tokens_of, **options)
