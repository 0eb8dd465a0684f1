# timeout: 120
"""chevron_plan.measure on models of all sorts: stages whose outputs are views, tuples, nested or integers, stages that are frozen, that
draw at random, change their input in place or keep statistics. Whatever is measured costs something, what is frozen costs 0, and the
model, its gradients and torch's generator are as before in every bit. What cannot be trained is refused with its stage.
"""
import copy
import os
import pathlib
import sys

try:
    import torch
    import torch.utils.checkpoint
    from torch import nn
except ImportError as problem:
    print(f"skipped: no torch to measure with ({problem})")
    sys.exit(77)

source = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(source / "cmake" / "packaging" / "python"))
import chevron_plan  # noqa: E402

torch.set_num_threads(1)
torch.manual_seed(1)
wrong = []


def expect(holds, what):
    if not holds:
        wrong.append(what)
        print("FAILED: " + what, flush=True)


class Nested(nn.Module):
    """Gives a tuple that holds a tuple, a dictionary, an integer tensor and None; takes what it gives."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x, rest=None, nothing=None):
        if rest is not None:
            x = x + rest["both"][0]
        y = self.map(x)
        return y, {"both": (y[:, ::2].repeat(1, 2), torch.arange(3))}, None


class Counting(nn.Module):
    """Keeps a number, a list's length by rebinding and a tensor that is no buffer."""

    def __init__(self):
        super().__init__()
        self.map, self.calls, self.seen, self.mean = nn.Linear(8, 8), 0, (), torch.zeros(8)

    def forward(self, x):
        self.calls += 1
        self.seen = (*self.seen, self.calls)
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return self.map(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(8, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x)[0]


class Eager(nn.Module):
    """Writes into gradients itself, in its backward, as fused accumulation does."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 8)

    def forward(self, x):
        y = self.map(x)
        y.register_hook(lambda g: setattr(self.map.bias, "grad", g.sum(0)))
        return y


def frozen(module):
    return module.requires_grad_(False)


def norm():
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))


# Name, stages, example, the stages whose I costs 0, the stages whose W costs 0.
rows, tokens, samples = torch.randn(4, 8), torch.randint(10, (4, 6)), torch.randn(4, 6, 8)
models = [
    ("statistics and dropout", [norm(), nn.Linear(8, 8)], rows, [0], []),
    ("evaluation", [norm().eval(), nn.Linear(8, 8)], rows, [0], []),
    ("a language model's head", [nn.Embedding(10, 8), nn.Linear(8, 8), nn.Linear(8, 10)], tokens, [0], []),
    ("views", [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Flatten(0), nn.Unflatten(0, (4, 8))), nn.Linear(8, 8)], rows, [0], []),
    ("nested outputs", [Nested(), Nested(), Nested()], rows, [0], []),
    ("an argument more", [Nested(), Nested()], (rows, {"both": (rows, tokens)}), [0], []),
    ("a frozen first stage", [frozen(nn.Linear(8, 8)), nn.Linear(8, 8), nn.Linear(8, 8)], rows, [0, 1], [0]),
    ("a frozen last stage", [nn.Linear(8, 8), frozen(nn.Linear(8, 8))], rows, [0], [1]),
    ("no parameters", [nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)], rows, [0], [1]),
    ("changed in place", [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8)), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))], rows, [0], []),
    ("attributes", [Counting(), Counting()], rows, [0], []),
    ("several outputs of a node", [nn.Linear(8, 8), Recurrent(), nn.Linear(8, 8)], samples, [0], []),
    ("weight norm", [nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))], rows, [0], []),
    ("gradients written by itself", [Eager(), Eager()], rows, [0], []),
    ("half precision", [nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8).bfloat16()], rows.bfloat16(), [0], []),
    ("a layer of attention", [nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)], samples, [0], []),
]


def state(stages, example):
    """All that measuring could change, and the objects that hold it."""
    values, objects = [torch.get_rng_state()], []
    values += [t for t in (example if isinstance(example, tuple) else (example,)) if isinstance(t, torch.Tensor)]
    for stage in stages:
        for m in stage.modules():
            objects += [m.training, *(id(v) for v in (*m._parameters.values(), *m._buffers.values(), *m._modules.values()))]
            objects += [(name, v) for name, v in m.__dict__.items() if isinstance(v, (int, tuple, bool))]
            values += [v for v in m.__dict__.values() if isinstance(v, torch.Tensor)]
        for t in (*stage.parameters(), *stage.buffers()):
            objects += [t.requires_grad, id(t.grad)]
            values += [t, torch.zeros(()) if t.grad is None else t.grad]
    return [v.detach().clone() for v in values], copy.copy(objects)


for name, stages, example, no_input, no_weight in models:
    first = next((p for stage in stages for p in stage.parameters() if p.requires_grad))
    first.grad = torch.ones_like(first)
    before = state(stages, example)
    times = chevron_plan.measure(stages, example, repeats=3)
    after = state(stages, example)
    expect(before[1] == after[1], f"{name}: an attribute, a mode or a gradient is another one than before")
    expect(len(before[0]) == len(after[0]) and all(map(torch.equal, before[0], after[0])), f"{name}: a tensor or the generator changed")
    forward, of_input, of_weight = times
    expect(all(len(t) == len(stages) for t in times) and all(t > 0 for t in forward), f"{name}: {times}")
    expect([i for i, t in enumerate(of_input) if t == 0] == no_input, f"{name}: input gradients take {of_input}, 0 only at {no_input}")
    expect(all(of_weight[i] == 0 for i in no_weight) and all(t >= 0 for t in of_weight), f"{name}: weight gradients take {of_weight}")
    with torch.no_grad():
        expect(all(t > 0 for t in chevron_plan.measure(stages, example, repeats=1)[1][2:]), f"{name}: without gradients around it nothing is differentiated")

# Work is told apart: a W of a stage of many weights is longer than that of one of few, and the first stage's W is its whole backward.
large = [nn.Linear(8, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 8)]
_, of_input, of_weight = chevron_plan.measure(large, torch.randn(64, 8))
expect(of_weight[1] > of_weight[2] and of_input[1] > of_input[0], f"a large stage costs less than a small one: {of_input}, {of_weight}")

def module(forward):
    """A stage with one trained parameter, `scale`, and this forward."""
    made = type("Made", (nn.Module,), {"forward": forward})()
    made.scale = nn.Parameter(torch.ones(8))
    return made


def recomputed(self, x):
    return torch.utils.checkpoint.checkpoint(lambda y: y * self.scale, x, use_reentrant=True)


for stages, kind, words in [([nn.Tanh()], ValueError, "no parameter of any stage needs a gradient"),
                            ([frozen(nn.Linear(8, 8))], ValueError, "no parameter of any stage needs a gradient"),
                            ([nn.Linear(8, 8), nn.LazyLinear(3)], ValueError, "lazy parameters"),
                            ([Nested(), nn.Linear(8, 8)], TypeError, "stage 1, called with 3 arguments"),
                            ([nn.Linear(8, 8), type("Whole", (nn.Module,), {"forward": lambda self, x: x.detach().long()})()], ValueError,
                             "stage 1 gives no tensor with a gradient"),
                            ([module(lambda self, x: {"hidden": x * self.scale}), nn.Linear(8, 8)], TypeError,
                             "Stage 0 gives a dict, which is passed as one argument. Remedy: give a tensor, or a tuple of the arguments of stage 1"),
                            ([module(lambda self, x: {"hidden": x * self.scale}), module(lambda self, x: x["other"])], ValueError,
                             "stage 1, called with 1 argument: 'other'. Stage 0 gives a dict"),
                            ([nn.Linear(8, 8), nn.Linear(4, 8)], ValueError, "stage 1, called with 1 argument: "),
                            ([nn.Linear(8, 8), module(recomputed)], ValueError, "the backward of stage 1 fails: "),
                            ([nn.Linear(8, 8), module(recomputed)], ValueError, "Remedy: torch.utils.checkpoint.checkpoint(…, use_reentrant=False)")]:
    try:
        chevron_plan.measure(stages, rows)
        expect(False, f"nothing says {words}")
    except kind as said:
        expect(words in str(said), f"{words}: {said}")

print(f"{len(models)} models measured, {len(wrong)} wrong")
sys.exit(1 if wrong else 0)
