# timeout: 300
"""Stages of Python on pretended GPUs, over NCCL: bits of the CPU, the caller's streams, draws, failures, and what is refused. Arguments: names
of the parts that run, as of tests/gpu_double/python_mutants.py; without, all do."""
import os
import pathlib
import signal
import subprocess
import sys
from unittest import mock

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support.gpus import communicators, contexts, fill_late  # noqa: E402
from support.kinds import case, on_cpu  # noqa: E402
from support.ranks import Block, check, data, equal, finish, join, made, run, start  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import chevron_pipelining as cp  # noqa: E402
from chevron_pipelining import compiler  # noqa: E402

loss = nn.functional.mse_loss


def given(rank, x, y):
    """The arguments of a step on two ranks."""
    return ((x,), {}) if rank == 0 else ((), {"target": y})


def refused(words, call):
    """Checks that a call raises an error with these words and a remedy."""
    try:
        call()
        check(False, f"not refused: {words}")
    except cp.Error as error:
        check(words in str(error) and "Remedy: " in str(error), f"`{words}` is not in: {error}")


def bits(rank):
    torch.cuda.set_device(rank)
    for kind, schedule, stages in (("block", "GPipe", 2), ("hooks", "1F1B", 2), ("block", "ZB-H1", 2), ("function", "ZBVZeroBubble", 4),
                                   ("norm", "V-Half", 4), ("checkpoint", "DualPipeV", 4)):
        case(rank, 2, schedule, kind, 4, stages, device=f"cuda:{rank}")
    check(contexts() == [rank], f"rank {rank} has contexts on the GPUs {contexts()}")
    finish()


class Operators(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.names.add(operator.overloadpacket.__name__)
        return operator(*args, **(kwargs or {}))


def optimizers(rank):
    """Optimizers and clipping as they are by default, which on a GPU compute all parameters by one kernel."""
    torch.cuda.set_device(rank)
    called = Operators()

    class Noted(torch.optim.AdamW):
        def step(self):
            with called:
                super().step()

    for make in (lambda p: Noted(p, lr=1e-2), lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, maximize=True),
                 lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True), lambda p: torch.optim.SGD(p, lr=1e-2),
                 lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)):
        case(rank, 2, "ZB-H1", "block", 4, 2, device=f"cuda:{rank}", largest=1e-3, optimizer=make)
    check({"_foreach_lerp_", "_foreach_addcdiv_"} <= called.names, f"AdamW calls {sorted(called.names)}")
    on_gpu, of_cpu = (trained(rank, device, clip=1e-3) for device in ("cuda", "cpu"))
    check(on_gpu[:1] == of_cpu[:1] and equal(on_gpu[1], of_cpu[1]), f"a Trainer that clips, rank {rank}: {on_gpu}, on the CPU {of_cpu}")
    check(on_gpu[2].clipped and abs(on_gpu[2].grad_norm / of_cpu[2].grad_norm - 1) < 1e-12, f"norms {on_gpu[2]}, on the CPU {of_cpu[2]}")
    finish()


def four(rank):
    torch.cuda.set_device(rank)
    case(rank, 4, "InterleavedZeroBubble", "block", 4, 8, device=f"cuda:{rank}")
    check(contexts() == [rank], f"rank {rank} of four has contexts on the GPUs {contexts()}")
    finish()


class Drawn(Block):
    """Draws by an operator that takes a generator, too: on the double, dropout draws from the CPU's."""

    def forward(self, x):
        return super().forward(x * (torch.rand_like(x) < 0.9))


def trained(rank, device, schedule="ZB-H1", replicas=1, dropout=0.0, clip=0.0, generator=0):
    """Three steps of a Trainer, with this seed of the GPU's generator: reports and states."""
    replica, place = divmod(rank, 2)
    module = made(Drawn if dropout else Block, 2, dropout=dropout)[place].to(device)
    torch.cuda.manual_seed(generator)
    trainer = cp.Trainer(schedule, cp.PipelineStage(module, place, 2, device), 4, loss, lambda p: torch.optim.AdamW(p, lr=1e-2),
                         replicas=replicas, seed=3, clip_grad_norm=clip)
    reports = []
    for number in range(3):
        args, named = given(place, *data(13, seed=10 * replica + number))
        reports.append(trainer.step(*args, **named))
    args, named = given(place, *data(13, seed=10 * replica))
    held_out = trainer.evaluate(*args, **named)
    return [(r.loss, r.samples) for r in reports] + [held_out], on_cpu(module.state_dict().values()), reports[-1], trainer


def trainer(rank):
    torch.cuda.set_device(rank)
    on_gpu, state, report, kept = trained(rank, "cuda")
    figures, expected, of_cpu, _ = trained(rank, "cpu")
    check(on_gpu == figures and equal(state, expected), f"a Trainer on GPUs, rank {rank}: {on_gpu}, on the CPU {figures}")
    most = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()  # since the last step began
    check(report.peak_reserved > report.peak_memory > sum(t.nbytes for t in expected), f"memory of the GPU: {report}")
    check(report.peak_memory == most[0] and report.peak_reserved == most[1], f"memory of the GPU: {report}, torch's figures {most}")
    check(of_cpu.peak_memory == of_cpu.peak_reserved == 0, f"memory on the CPU: {of_cpu}")
    check(all(end >= begin for _, begin, end in kept.trace()) and len(kept.trace()) >= 12, f"trace {kept.trace()}")
    saved = kept.state_dict()
    args, named = given(rank, *data(13, seed=7))
    kept.step(*args, **named)
    after = [p.detach().clone() for p in kept._stages[0].submod.parameters()]
    kept.load_state_dict(saved)  # no copy: the parameters are their own values
    check(all(p.is_cuda for p in after), "parameters leave the GPU")

    # Draws are the same under every schedule, whatever the generators' states, and leave them as they are.
    before, drawn = torch.get_rng_state(), []
    for number, schedule in enumerate(("GPipe", "ZB-H1")):
        drawn.append(trained(rank, "cuda", schedule, dropout=0.5, generator=number)[:2])
        after = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(number)
        check(equal([after, torch.get_rng_state()], [torch.cuda.get_rng_state(), before]), f"{schedule}: a generator has changed")
    check(drawn[0][0] == drawn[1][0] and equal(drawn[0][1], drawn[1][1]), f"dropout under two schedules: {drawn[0][0]}, {drawn[1][0]}")
    check(drawn[0][0] != on_gpu, "dropout draws nothing")

    check(communicators() > 0, "no communicator of NCCL")
    del kept
    cp.close()
    finish()


def replicated(rank):
    torch.cuda.set_device(rank)
    on_gpu, state, *_ = trained(rank, "cuda", "1F1B", replicas=2)
    figures, expected, *_ = trained(rank, "cpu", "1F1B", replicas=2)
    check(on_gpu == figures and equal(state, expected), f"two replicas on GPUs, rank {rank}: {on_gpu}, on the CPU {figures}")
    finish()


class Late(nn.Module):
    """Hands on its input, of which the last numbers are written on the current stream after a while."""

    value = 3.0

    def forward(self, x):
        self.given, self.stream = x.clone(), torch.cuda.current_stream()
        out = x * 1
        with torch.no_grad():
            fill_late(out, self.value)
        return out


def streams(rank):
    """The caller's current stream: the step runs after its earlier work, and its later work after the step."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    late = Late()
    schedule = cp.Schedule("GPipe", cp.PipelineStage(nn.Identity() if rank == 0 else late, rank, 2, device), 2)
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
    x = torch.zeros(4, 8, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        fill_late(x, 2.0)
        out = schedule.eval(*([x] if rank == 0 else []))
        if rank == 1:
            check(bool((out.cpu() == 3).all()), f"the caller's stream reads an output before it is written: {out}")
            check(late.stream not in (first, torch.cuda.default_stream()), f"a stage runs on a stream of the program: {late.stream}")
        fill_late(x, 5.0, 500)
    with torch.cuda.stream(second):  # results of the last run may still be read on the first stream
        schedule.eval(*([x] if rank == 0 else []))
        torch.cuda.current_stream().synchronize()
    check(first.query(), "a run on another stream begins before the work of the last run's stream")

    seen = cp.Schedule("GPipe", cp.PipelineStage(nn.Identity(), rank, 2, device), 2)
    x = torch.zeros(4, 8, device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        if rank == 0:
            fill_late(x, 2.0)
        out = seen.eval(*([x] if rank == 0 else []))
        if rank == 1:
            check(bool((out.cpu() == 2).all()), f"a stage reads its input before the caller's stream has written it: {out}")

    late = Late()
    handed = cp.Schedule("GPipe", cp.PipelineStage(late, rank, 2, device), 2)
    for value in (4.0, 5.0, 6.0):  # in the first run the transport copies what it sends
        late.value = value + rank * 10
        out = handed.eval(*([x] if rank == 0 else []))
        check(rank == 0 or bool((late.given == value).all()), f"a message is sent before it is written: {value}")
        check(rank == 0 or bool((out.cpu() == value + 10).all()), f"an output is read before it is written: {out}")

    linear = nn.Linear(8, 8).to(device)

    class Slow(torch.optim.SGD):
        """Writes a parameter after a while."""

        def step(self):
            super().step()
            fill_late(linear.weight, 7.0, 300)

    args, named = given(rank, *data(4, (8,)))
    cp.Trainer("GPipe", cp.PipelineStage(linear, rank, 2, device), 2, loss, lambda p: Slow(p, lr=1e-2)).step(*args, **named)
    check(bool((linear.weight.cpu() == 7).all()), f"the caller's stream reads a parameter before the optimizer has written it: {linear.weight}")
    with torch.autocast("cuda", torch.bfloat16):
        out = cp.Schedule("GPipe", cp.PipelineStage(nn.Linear(8, 8).to(device), rank, 2, device), 2).eval(*([x] if rank == 0 else []))
    check(rank == 0 or out.dtype == torch.bfloat16, f"the caller's autocast has no effect: {out}")
    finish()


def elsewhere(rank):
    """A program whose current GPU is another than its stages': it stays current, and gets no context."""
    device = torch.device("cuda", rank)
    case(rank, 2, "ZB-H1", "block", 4, 2, device=device)
    schedule = cp.Schedule("GPipe", cp.PipelineStage(nn.Identity(), rank, 2, device), 2)
    schedule.eval(*([torch.zeros(4, 8, device=device)] if rank == 0 else []))
    del schedule
    check(torch.cuda.current_device() == 0, f"a schedule on cuda:{rank} makes GPU {torch.cuda.current_device()} current")
    check(contexts() == [rank], f"stages on cuda:{rank}, and contexts on the GPUs {contexts()}")
    schedule = cp.Schedule("GPipe", cp.PipelineStage(nn.Identity(), rank, 2, device), 2)
    first, second = torch.cuda.Stream(device), torch.cuda.Stream(device)
    x = torch.zeros(4, 8, device=device)
    for stream in (first, second):  # on which the program waits while another GPU is current
        torch.cuda.set_stream(stream)
        torch.cuda.set_device(7)
        schedule.eval(*([x] if rank == 0 else []))
        if stream is first:
            fill_late(x, 5.0, 500)
    second.synchronize()
    check(first.query(), "a run on another stream of the stages' GPU begins before the work of the last run's stream")
    cp.close()
    check(contexts() == [rank, 7], f"stages on cuda:{rank}, cuda:7 is current, and contexts on the GPUs {contexts()}")
    finish()


def keywords(rank):
    """Arguments on the CPU, by position and by name, are brought to the stage's GPU."""
    torch.cuda.set_device(rank)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x, factor):
            check(factor.is_cuda, "a keyword argument stays on the CPU")
            return x * factor * self.weight

    schedule = cp.Schedule("GPipe", cp.PipelineStage(Scaled().cuda(), rank, 2, "cuda"), 2, loss_fn=lambda out, target: loss(out, target))
    x, y = data(4)
    losses = []
    out = schedule.eval(*([x] if rank == 0 else []), factor=torch.full((4, 1), 2.0), **({"target": y, "losses": losses} if rank == 1 else {}))
    if rank == 1:
        check(out.is_cuda and torch.equal(out.cpu(), x * 4), f"outputs {out}")
        check(all(one.is_cuda for one in losses) and len(losses) == 2, f"losses {losses}")
    finish()


def refusals(rank):
    torch.cuda.set_device(rank)
    block = made(Block, 2)[rank]
    refused("stage 0 on cuda:9: torch sees 8 GPUs", lambda: cp.PipelineStage(block, 0, 2, "cuda:9"))
    refused("stage 1 on xpu", lambda: cp.PipelineStage(block, 1, 2, "xpu"))
    refused(f"stage {rank}'s parameter `norm.weight` is on cpu, and the stage on cuda:{rank}",
            lambda: cp.Schedule("GPipe", cp.PipelineStage(block, rank, 2, "cuda"), 4, loss_fn=loss))
    refused(f"stage {rank}'s buffer `running_mean` is on cpu, and the stage on cuda:{rank}",
            lambda: cp.Schedule("GPipe", cp.PipelineStage(nn.BatchNorm1d(4, affine=False), rank, 2, "cuda"), 4, loss_fn=loss))
    with mock.patch.object(cp.stage.binding, "no_nccl", "a reason. Remedy: one"):
        refused("the binding was compiled without NCCL, since a reason", lambda: cp.PipelineStage(block, 0, 2, "cuda"))
    with mock.patch.dict(os.environ, CUDA_LAUNCH_BLOCKING="1"):
        refused("CUDA_LAUNCH_BLOCKING=1 has the host wait", lambda: cp.Schedule("GPipe", cp.PipelineStage(nn.Identity(), rank, 2, "cuda"), 2))
    two = [cp.PipelineStage(nn.Identity(), s, 4, f"cuda:{s % 2}") for s in (rank, 3 - rank)]
    refused("of this process on cuda:", lambda: cp.Schedule("ZBVZeroBubble", two, 4, loss_fn=loss))
    cp.Schedule("GPipe", cp.PipelineStage(nn.Identity(), rank, 2, f"cuda:{rank}"), 2)
    refused(f"stages on cuda:{2 + rank}, and this process has a pipeline on cuda:{rank}",
            lambda: cp.Schedule("GPipe", cp.PipelineStage(nn.Identity(), rank, 2, f"cuda:{2 + rank}"), 2))
    finish()


def mixed(rank):
    device = "cuda:0" if rank == 0 else "cpu"
    refused(f"rank {rank} is on {device}, rank {1 - rank} on {'cpu' if rank == 0 else 'cuda:0'}. Remedy: stages of all ranks on",
            lambda: cp.Schedule("GPipe", cp.PipelineStage(nn.Identity(), rank, 2, device), 2))
    finish()


def shared(rank):
    refused("the same GPU of one machine", lambda: cp.Schedule("GPipe", cp.PipelineStage(nn.Identity(), rank, 2, "cuda:0"), 2))
    finish()


def shared_by_name(rank):
    """Two ranks may share a GPU if NCCL takes them for ranks of two machines."""
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    case(rank, 2, "1F1B", "block", 4, 2, device="cuda:0")
    finish()


LATE_IMPORT = """
import sys
sys.path.insert(0, sys.argv[1])
import support.gpus
import torch
torch.zeros(1, device="cuda")
import support.ranks
import chevron_pipelining as cp
try:
    cp.Schedule("GPipe", cp.PipelineStage(torch.nn.Identity(), 0, 1, "cuda"), 1)
except cp.UsageError as error:
    print(error)
"""


def late_import():
    """A package that is imported after the first use of a GPU is refused, unless the environment has set the number of queues."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    for queues in ({}, {name: "32"}):
        around = {key: value for key, value in os.environ.items() if key != name} | queues
        ran = subprocess.run([sys.executable, "-c", LATE_IMPORT, str(pathlib.Path(__file__).parent)], env=around, capture_output=True, text=True)
        words = f"this process has used a GPU before chevron_pipelining was imported, so that {name}"
        right = ran.stdout == "" if queues else words in ran.stdout and "Remedy: " in ran.stdout
        check(ran.returncode == 0 and right, f"a late import with {queues}: {ran.returncode} {ran.stdout}{ran.stderr[-2000:]}")


def broken(way):
    """Rank 1 fails in its second step; returns the program of a rank."""

    class Faulty(Block):
        steps = 0

        def forward(self, x):
            if way and Faulty.steps == 1 and x.device.index == 1:
                if way == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("in the forward")
            return super().forward(x)

    def of_rank(rank):
        device = torch.device("cuda", rank)
        schedule = cp.Schedule("1F1B", cp.PipelineStage(made(Faulty, 2)[rank].to(device), rank, 2, device), 4, loss_fn=loss)
        args, named = given(rank, *data())
        for Faulty.steps in range(2):
            try:
                schedule.step(*args, **named)
            except cp.Error as error:
                print(f"{type(error).__name__} rank={error.rank} step={error.step}: {error} <- {error.__cause__!r}", flush=True)
                raise SystemExit(9) from None

    return of_rank


def unused():
    """Where the binding is compiled without NCCL, the reason and the remedy are known."""
    def reason():
        compiler.nccl.cache_clear()
        return compiler.nccl()[2]

    check(reason() == "" and compiler.stem() == "_binding-nccl", f"no NCCL beside this torch: {reason()}")
    version = torch.version.cuda
    torch.version.cuda = "99.0"
    check("there is no cuda_runtime_api.h" in reason() and "of CUDA 99. Remedy: pip install" in reason(), reason())
    torch.version.cuda = None
    check("is built without CUDA. Remedy: a torch for CUDA" in reason(), reason())
    torch.version.cuda = version
    os.environ["CHEVRON_PIPELINING_NCCL"] = "0"
    check("CHEVRON_PIPELINING_NCCL is 0. Remedy: unset it" in reason() and compiler.stem() == "_binding", reason())
    check(any(option.startswith("-DCHEVRON_NO_NCCL=") for option in compiler.options()), f"options {compiler.options()}")
    del os.environ["CHEVRON_PIPELINING_NCCL"]
    compiler.nccl.cache_clear()


def failures():
    """A rank that raises or is killed in its second step ends the other rank."""
    failing = {way: start(2, broken(way)) for way in ("raise", "kill")}
    for way, job in failing.items():
        one, other = join(job)[::-1]
        if way == "raise":
            check(one.code == 9 and "StageError rank=1 step=1" in one.out and "ValueError('in the forward')" in one.out, f"{way}: {one.code} {one.out}{one.err}")
        else:
            check(one.code == -signal.SIGKILL, f"{way}: {one.code}")
        check(other.code == 9 and "PeerLostError" in other.out and "rank 1" in other.out and (way == "kill" or "in the forward" in other.out),
              f"{way}, the other rank: {other.code} {other.out}{other.err}")


# The number of ranks of each part; 0: the part is a function of this process, which starts others.
PARTS = {unused: 0, failures: 0, late_import: 0, bits: 2, optimizers: 2, trainer: 2, streams: 2, elsewhere: 2, keywords: 2, refusals: 2, mixed: 2,
         shared: 2, shared_by_name: 2, four: 4, replicated: 4}
unknown = set(sys.argv[1:]) - {part.__name__ for part in PARTS}
check(not unknown, f"no part has the names {sorted(unknown)}")
for part, ranks in PARTS.items():
    if len(sys.argv) > 1 and part.__name__ not in sys.argv[1:]:
        continue
    if ranks == 0:
        part()
    else:
        run(ranks, part)
finish()
