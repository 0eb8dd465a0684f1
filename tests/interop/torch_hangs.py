# timeout: 240
"""PyTorch's own pipelining on Gloo, in real processes, with faults planted on purpose: chevron-plan explain --flight-recorder names the rank.

No release of PyTorch records messages of Gloo. So each process wraps isend, irecv and the collectives of torch.distributed, and
writes a dump in the form of PyTorch's flight recorder. In two jobs PyTorch's own recorder writes the dumps, as pickles and as JSON:
of Gloo's collectives from 2.8 on; before, the recorder has those of NCCL alone, and dumps without operations are read.

    python3 tests/interop/torch_hangs.py [--faults N --slow N]     N jobs in all (CTest: one for each fault, 3 slow ones); prints a table
    python3 tests/interop/torch_hangs.py --python PATH             by another release of PyTorch, that of this Python
"""
import argparse
import contextlib
import multiprocessing
import os
import pathlib
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import warnings
from datetime import timedelta

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from explained_hangs import LONGEST, Verdicts, explained
from other_python import by_asked_python

by_asked_python()
os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"), TORCH_FR_BUFFER_SIZE="2000")
warnings.filterwarnings("ignore")
try:
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed import pipelining
except ImportError as problem:
    print(f"skipped: no torch whose jobs could hang ({problem})")
    sys.exit(77)

release = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
if release < (2, 7):
    os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] = "2000"
FAULTS = ["asleep", "dead", "exit", "no_send", "no_receive", "wrong_destination", "wrong_source", "order", "no_collective", "extra_collective",
          "other_collective", "other_size"]
STEPS, WIDTH = 4, 8
SCHEDULES = {"GPipe": (pipelining.ScheduleGPipe, 1), "1F1B": (pipelining.Schedule1F1B, 1), "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, 2),
             "LoopedBFS": (pipelining.ScheduleLoopedBFS, 2)}


class Done:
    def wait(self, *_):
        return True


class Recorder:
    """Wraps the functions of torch.distributed, records each call, and plants one fault."""

    def __init__(self, rank, world, progress, job):
        self.rank, self.world, self.progress, self.job = rank, world, progress, job
        self.entries, self.collectives, self.messages, self.step, self.in_step, self.held = [], 0, 0, -1, 0, None
        self.real = {name: getattr(c10d, name) for name in ("isend", "irecv", "all_reduce", "broadcast")}
        for name in ("isend", "irecv"):
            wrapper = self.message(name == "isend")
            for module in (c10d, dist):
                setattr(module, name, wrapper)

    def entry(self, name, tensor, is_p2p):
        self.progress[self.rank] += 1
        self.messages += is_p2p
        self.collectives += not is_p2p
        types = [{torch.float32: "Float", torch.float64: "Double", torch.int32: "Int", torch.int64: "Long"}[tensor.dtype]]
        made = {"record_id": len(self.entries), "pg_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 0 if is_p2p else self.collectives,
                "p2p_seq_id": self.messages if is_p2p else 0, "op_id": len(self.entries) + 1, "profiling_name": "gloo:" + name,
                "time_created_ns": time.time_ns(), "input_sizes": [list(tensor.shape)], "input_dtypes": types, "output_sizes": [list(tensor.shape)],
                "output_dtypes": types, "state": "scheduled", "time_discovered_started_ns": None, "time_discovered_completed_ns": None,
                "retired": False, "timeout_ms": 600000, "is_p2p": is_p2p, "frames": []}
        self.entries.append(made)
        return made

    def post(self, sends, tensor, peer, group):
        name = f"send {self.rank}->{peer}" if sends else f"recv {self.rank}<-{peer}"
        made = self.entry(name, tensor, True)
        work = self.real["isend" if sends else "irecv"](tensor, peer, group=group)
        recorder = self

        class Work:
            def wait(self, *_):
                work.wait()
                made["retired"] = True
                recorder.progress[recorder.rank] += 1
                return True
        return Work()

    def message(self, sends):
        def call(tensor, dst=None, group=None, tag=0, group_dst=None, src=None, group_src=None):
            peer = next(p for p in (dst, src, group_dst, group_src) if p is not None)
            fault = self.strikes("isend" if sends else "irecv")
            if fault in ("no_send", "no_receive"):
                return Done()
            if fault in ("wrong_destination", "wrong_source"):
                peer = next(p for p in self.job["others"] if p not in (self.rank, peer))
            if fault == "order":  # this send is put off until the next receive has ended
                self.held = (tensor, peer, group)
                return Done()
            work = self.post(sends, tensor, peer, group)
            if self.held and not sends:
                work.wait()
                held, self.held = self.held, None
                self.post(True, *held)
            return work
        call.__name__ = "isend" if sends else "irecv"
        return call

    def collective(self, name, tensor):
        made = self.entry(name, tensor, False)
        self.real[name](tensor, *([0] if name == "broadcast" else []))
        made["retired"] = True
        self.progress[self.rank] += 1

    def sum(self, tensor):
        fault = self.strikes("collective")
        if fault == "no_collective":
            return
        if fault == "extra_collective":
            self.collective("all_reduce", tensor)
        if fault == "other_size":
            tensor = torch.zeros(tensor.numel() + 5)
        self.collective("broadcast" if fault == "other_collective" else "all_reduce", tensor)

    def strikes(self, what):
        """The fault, if it is planted at this call."""
        job = self.job
        if self.rank != job.get("rank") or self.step != job["step"]:
            return None
        fault = job["fault"]
        wanted = {"no_send": "isend", "wrong_destination": "isend", "order": "isend", "no_receive": "irecv", "wrong_source": "irecv"}
        wanted = wanted.get(fault, "collective" if fault.endswith(("collective", "size")) else what)
        if what != wanted:
            return None
        self.in_step += 1
        if self.in_step != job["call"] + 1 and not (what == "collective" and wanted == what and fault not in ("asleep", "dead", "exit")):
            return None
        job["struck"][0] = 1
        if fault == "asleep":
            time.sleep(1000)
        if fault == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "exit":
            raise SystemExit
        return fault

    def dump(self, folder):
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(self.world)))}}
        with open(f"{folder}/.{self.rank}", "wb") as file:
            pickle.dump({"version": "2.10", "pg_config": config, "pg_status": {}, "entries": self.entries}, file, protocol=2)
        os.rename(f"{folder}/.{self.rank}", f"{folder}/nccl_trace_rank_{self.rank}")


class Slow(torch.nn.Module):
    def __init__(self, seconds):
        super().__init__()
        self.layer, self.seconds = torch.nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x):
        if self.seconds:
            time.sleep(self.seconds)
        return self.layer(x)


def train(rank, job, folder, progress, listen, tell):
    os.close(tell)
    sys.stderr = open(os.devnull, "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    torch.set_num_threads(1)
    world = job["world"]
    recorder = Recorder(rank, world, progress, job)

    def watch():
        os.read(listen, 1)
        recorder.dump(folder)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/.store", rank=rank, world_size=world, timeout=timedelta(seconds=300))
        kind, chunks = SCHEDULES[job["schedule"]]
        generator = random.Random(f"{job['seed']} {rank}")
        # From 2.15 on example tensors say which messages have gradients.
        example = lambda of_a_stage: torch.zeros(2, WIDTH, requires_grad=release >= (2, 15) and of_a_stage)
        stages = [pipelining.PipelineStage(Slow(generator.choice(job["seconds"])), rank + c * world, world * chunks, torch.device("cpu"),
                                           input_args=(example(rank + c > 0),), output_args=(example(True),)) for c in range(chunks)]
        loss = lambda out, target: (out - target).square().mean()
        schedule = kind(stages if chunks > 1 else stages[0], job["micro_batches"], loss_fn=loss)
        for step in range(STEPS):
            recorder.step, recorder.in_step = step, 0
            losses, batch = [], torch.ones(2 * job["micro_batches"], WIDTH)
            schedule.step(*([batch] if rank == 0 else []), **({"target": batch, "losses": losses} if rank == world - 1 else {}))
            recorder.sum(sum(losses).detach().reshape(1) if losses else torch.zeros(1))
        recorder.sum(torch.zeros(1))
        progress[world + rank] = 1
    except SystemExit:
        recorder.dump(folder)
        os._exit(0)
    except Exception:  # Gloo's own words for a lost or mismatched peer
        progress[world + rank] = 2
    time.sleep(300)


def run_job(job, folder, moment=None):
    """Runs a job until nothing moves for a while, or until a moment (s), and has all living ranks dump. False: the job ended well."""
    os.makedirs(folder)
    world = job["world"]
    fork = multiprocessing.get_context("fork")
    progress = fork.Array("q", 2 * world, lock=False)
    listen, tell = os.pipe()  # ranks dump once its end is closed here
    job["struck"] = fork.Array("b", 1, lock=False)
    ranks = [fork.Process(target=train, args=(r, job, folder, progress, listen, tell), daemon=True) for r in range(world)]
    for one in ranks:
        one.start()
    begin, before, since = time.time(), None, time.time()
    while True:
        time.sleep(0.02)
        now = list(progress)
        if now != before:
            before, since = now, time.time()
        ended = all(now[world + r] == 1 or not ranks[r].is_alive() for r in range(world))
        if ended and moment is None and all(now[world + r] == 1 for r in range(world)):
            break
        quiet = 1.2 if min(now[:world]) > 0 else 10
        if moment is None or min(now[:world]) == 0:
            if time.time() - since > quiet:
                if not any(is_running(one.pid) for one in ranks):
                    break
                since = time.time() - quiet + 0.3
        elif time.time() - begin > moment:
            break
    well = all(value == 1 for value in list(progress)[world:])
    if moment is not None and well:
        time.sleep(0.2)
    os.close(tell)
    os.close(listen)
    for one in ranks:
        one.join(60)
        if one.is_alive():
            one.kill()
            one.join()
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{folder}/.store")
    if moment is None:
        end_waits(folder)
    return well


def is_running(process):
    """Whether a thread of the process computes, or waits for a core of a busy machine."""
    for task in pathlib.Path(f"/proc/{process}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            if task.read_text().rpartition(")")[2].split()[0] in "RD":
                return True
    return False


def draw(fault, seed):
    rng = random.Random(f"{fault} {seed}")
    world = rng.choice([3, 4]) if fault in ("wrong_destination", "wrong_source") else rng.choice([2, 3, 4])
    schedule = rng.choice(list(SCHEDULES))
    return {"fault": fault, "seed": seed, "world": world, "schedule": schedule, "micro_batches": world * rng.choice([1, 2]),  # PyTorch refuses fewer
            "rank": rng.randrange(world), "seconds": [0],
            # A collective more at the end of the job would look like ranks that ended early; a loop ends between two steps.
            "step": 2 if fault == "extra_collective" else rng.randrange(2, STEPS), "call": 0 if fault == "exit" else rng.randrange(4),
            "others": rng.sample(range(world), world)}


def own_recorder(rank, world, folder, late):
    core = torch._C._distributed_c10d
    called = lambda: len(pickle.loads(dump(True, False)).get("entries", []))  # without stack traces
    dump = getattr(core, "_dump_fr_trace", core._dump_nccl_trace)
    dist.init_process_group("gloo", init_method=f"file://{folder}/.store", rank=rank, world_size=world, timeout=timedelta(seconds=300))
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    calls = called()
    if rank != late:
        threading.Thread(target=lambda: dist.all_reduce(torch.ones(4)), daemon=True).start()
        while calls and called() == calls:
            time.sleep(0.02)
    with_lines = release < (2, 12)  # newer releases first import the compiler, which takes 20 s
    if rank % 2 == 0:
        data = dump(True, with_lines)
    else:
        data = getattr(core, "_dump_fr_trace_json", core._dump_nccl_trace_json)()
    with open(f"{folder}/rank_{rank}" + (".json" if rank % 2 else ""), "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
    while len([name for name in os.listdir(folder) if name.startswith("rank_")]) < world:
        time.sleep(0.02)  # a rank that ends would end the sums of the others
    os._exit(0)


def by_own_recorder(top, verdicts):
    """Jobs whose dumps PyTorch wrote: a rank that leaves out a sum is named; where no rank does, none is."""
    versions, operations = set(), 0
    for late in (2, None):
        folder = f"{top}/own-{late}"
        os.makedirs(folder)
        ranks = [multiprocessing.get_context("fork").Process(target=own_recorder, args=(r, 3, folder, late)) for r in range(3)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(LONGEST)
        os.remove(f"{folder}/.store")
        end_waits(folder)
        told = explained(folder)
        versions |= {one["version"] for one in told["ranks"]}
        operations = sum(one["operations"] for one in told["ranks"])
        silent = late is not None and operations > 0
        verdicts.add("PyTorch's own", f"rank {late} left out a sum", told, told["culprits"] == ([late] if silent else []))
    print(f"PyTorch {torch.__version__}'s own recorder writes format {', '.join(sorted(versions))}" +
          ("" if operations else ", without Gloo's operations"))


def end_waits(folder):
    """Gives the dumps the time at which a watchdog would have written them, half a minute later."""
    for name in os.listdir(folder):
        os.utime(f"{folder}/{name}", (time.time() + 30,) * 2)


def wrapped(folder):
    """The verdict on the same dumps, of which each has lost the first half of its operations."""
    os.makedirs(folder + "-wrapped")
    for name in os.listdir(folder):
        dump = pickle.loads(pathlib.Path(folder, name).read_bytes())
        dump["entries"] = dump["entries"][len(dump["entries"]) // 2:]
        pathlib.Path(folder + "-wrapped", name).write_bytes(pickle.dumps(dump, protocol=2))
    end_waits(folder + "-wrapped")
    return explained(folder + "-wrapped")


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--faults", type=int, default=len(FAULTS))
    options.add_argument("--slow", type=int, default=3)
    options.add_argument("--keep", help="folder in which the dumps stay")
    asked = options.parse_args()
    verdicts = Verdicts()
    top = tempfile.mkdtemp()
    by_own_recorder(top, verdicts)
    for n in range(asked.faults):
        fault = FAULTS[n % len(FAULTS)]
        for attempt in range(30):
            job = draw(fault, f"{n // len(FAULTS)} {attempt}")
            folder = f"{top}/{fault}-{n}-{attempt}"
            well = run_job(job, folder)
            if job["struck"][0] and not well:
                break
        else:
            verdicts.wrong.append(f"{fault}: no job hangs")
            continue
        words = f"{ {key: value for key, value in job.items() if key != 'struck'} } in {folder}"
        verdicts.named(fault, words, explained(folder), job["rank"])
        told = wrapped(folder)
        # Gloo ends the process that gets another size; of a buffer without two rounds its missing dump is all that is known.
        ended = fault == "other_size" and told["cause"] == "absent_rank"
        verdicts.add("wrapped buffers", words + "-wrapped", told, job["rank"] in told["culprits"] + told["suspects"] or ended)

    def slow(n):
        job = draw("none", n) | {"rank": None, "seconds": random.Random(n).choice([[0.005], [0.002, 0.05], [0, 0.2]])}
        run_job(job, f"{top}/slow-{n}", random.Random(n).uniform(0.5, 4))
        return f"slow {n} in {top}/slow-{n}", explained(f"{top}/slow-{n}")

    verdicts.quiet(range(asked.slow), slow)
    if asked.keep:
        shutil.copytree(top, asked.keep)
    shutil.rmtree(top)
    return verdicts.report()


if __name__ == "__main__":
    sys.exit(main())
