"""Tokens a second of a GPT on two processes over Gloo, beside torch.distributed.pipelining and one un-pipelined PyTorch process,
in one run, alternating: 8 pre-norm blocks, width 256, 8 heads, context 128, bytes, 8 microbatches of 4, AdamW, one thread a rank.
`searched` is what `chevron-plan search` makes of costs measured at the start, in no more memory than DualPipeV takes.

    .venv/bin/python bench/run/gpt_beside_torch.py [build folder] [rounds]
"""
import json
import os
import statistics
import subprocess
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn.functional as nn

from beside_torch import TorchPipeline, arguments, on_torch_ranks, torch_classes

ranks, layers, width, heads, context, vocabulary = 2, 8, 256, 8, 128, 256
micro_batches, micro_batch_size, steps, warm_up = 8, 4, 5, 1
(program, planner), rounds = arguments(__doc__, "chevron-train", "chevron-plan")
tokens = micro_batches * micro_batch_size * context


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.query_key_value = torch.nn.Linear(width, 3 * width, bias=False)
        self.project = torch.nn.Linear(width, width, bias=False)
        self.widen, self.narrow = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        samples, length, _ = x.shape
        q, k, v = self.query_key_value(self.norm_1(x)).view(samples, length, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        seen = nn.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(samples, length, width))
        return x + self.narrow(nn.gelu(self.widen(self.norm_2(x))))


class Stage(torch.nn.Module):
    """One of `count` equal parts of the model."""

    def __init__(self, number, count):
        super().__init__()
        self.first, self.last = number == 0, number == count - 1
        if self.first:
            self.bytes, self.positions = torch.nn.Embedding(vocabulary, width), torch.nn.Embedding(context, width)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(layers // count))
        if self.last:
            self.norm, self.head = torch.nn.LayerNorm(width), torch.nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        if self.first:
            x = self.bytes(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def loss_of(logits, targets):
    return nn.cross_entropy(logits.flatten(0, 1), targets.flatten())


def timed(one_step):
    seconds = []
    for step in range(warm_up + steps):
        begin = time.perf_counter()
        one_step()
        if step >= warm_up:
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def data():
    return (torch.randint(vocabulary, (micro_batches * micro_batch_size, context)) for _ in range(2))


def torch_alone():
    model = Stage(0, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs, targets = data()

    def step():
        for x, y in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches)):
            (loss_of(model(x), y) / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def torch_pipelined(name):
    pipeline = TorchPipeline(name, micro_batches, Stage, loss_of)
    optimizer = torch.optim.AdamW(pipeline.parameters())
    inputs, targets = data()

    def step():
        pipeline.step(inputs, targets)
        # The norm of the whole gradient, as a trainer needs it.
        gradients = [p.grad for p in pipeline.parameters()]
        total = torch.stack(torch._foreach_norm(gradients)).square().sum()
        dist.all_reduce(total)
        torch._foreach_mul_(gradients, (1.0 / (total.sqrt() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def torch_rate(name):
    if name in ("alone", "two alone"):
        count = 1 if name == "alone" else 2
        return count * tokens / on_torch_ranks(count, torch_alone)
    return tokens / on_torch_ranks(ranks, torch_pipelined, name)


def our_rate(name, text, *more):
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as metrics:
        pipeline = ["--ranks", "1", "--backend", "threads"] if name == "alone" else ["--ranks", str(ranks), "--backend", "gloo"]
        done = subprocess.run(
            [program, *pipeline, "--schedule", "1F1B" if name == "alone" else name, "--replicas", "1", "--layers", str(layers),
             "--width", str(width), "--heads", str(heads), "--context", str(context), "--microbatches", str(micro_batches),
             "--microbatch-size", str(micro_batch_size), "--steps", str(warm_up + steps), "--clip-grad-norm", "1", "--data", text,
             "--metrics", metrics.name, "--trace", "none", "--timeline", "none", *more],
            capture_output=True, text=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in metrics.read().decode().splitlines()][warm_up:]
        seconds = [line["time_metrics/end_to_end(s)"] - line["time_metrics/data_loading(s)"] for line in lines]
    return tokens / statistics.median(seconds)


def searched(text, folder):
    profile, schedule = (os.path.join(folder, name) for name in ("costs.json", "searched.csv"))
    our_rate("ZBVZeroBubble", text, "--profile", profile)
    subprocess.run([planner, "search", "--ranks", str(ranks), "--chunks", "2", "--placement", "vee", "--microbatches", str(micro_batches),
                    "--memory-limit", "5", "--profile", profile, "-o", schedule], check=True, stdout=subprocess.DEVNULL)
    return schedule


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        text = os.path.join(folder, "bytes.txt")
        with open(text, "w") as file:
            file.write("a pipeline has ranks, stages, microbatches and a schedule.\n" * 20000)
        names = ["alone", *torch_classes, "ZB-H1", "ZB-H2", "searched"]
        schedule_of = {"searched": searched(text, folder)}
        rates = {(side, name): [] for side in ("torch", "ours") for name in ["two alone", *names]}
        for _ in range(rounds):
            # Two at once, which say nothing to each other: more than that these cores do not give.
            rates["torch", "two alone"].append(torch_rate("two alone"))
            for name in names:
                if name == "alone" or name in torch_classes:
                    rates["torch", name].append(torch_rate(name))
                rates["ours", name].append(our_rate(schedule_of.get(name, name), text))
    middle = {key: statistics.median(values) for key, values in rates.items() if values}
    print(f"P={ranks}, M={micro_batches}: tokens a second, median of {rounds} rounds of {steps} steps")
    print(f"{'schedule':22} {'torch':>8} {'ours':>8} {'ratio':>7}")
    for name in names:
        theirs, ours = middle.get(("torch", name)), middle["ours", name]
        print(f"{name:22} " + (f"{theirs:8.0f} {ours:8.0f} {ours / theirs:7.3f}" if theirs else f"{'-':>8} {ours:8.0f} {'-':>7}"))
    best = max(middle[key] for key in middle if key[0] == "ours" and key[1] != "alone")
    torchs_best = max(middle[key] for key in middle if key[0] == "torch" and key[1] in torch_classes)
    print(f"our best is {best / torchs_best:.3f} of torch's best, and {best / (2 * middle['torch', 'alone']):.3f} of twice one "
          f"un-pipelined process; two of these at once reach {middle['torch', 'two alone'] / (2 * middle['torch', 'alone']):.3f} of that")
