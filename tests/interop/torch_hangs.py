# timeout: 240
"""PyTorch's own pipelining on Gloo, in real processes, with faults planted on purpose: chevron-plan explain --flight-recorder names the rank.

PyTorch 2.11 records Gloo's collectives, but no Gloo messages. So each process wraps isend, irecv and the collectives of
torch.distributed, and writes a dump in the form of PyTorch's flight recorder. In two jobs PyTorch's own recorder writes the dumps, as
pickles and as JSON.

    python3 tests/interop/torch_hangs.py [--faults N --slow N]     N jobs in all (CTest: one for each fault, 3 slow ones); prints a table
"""
import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import pickle
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from datetime import timedelta

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

PLAN = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve() / "bin" / "chevron-plan"
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
        types = [{torch.float32: "Float", torch.float64: "Double"}[tensor.dtype]]
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
        dist.init_process_group("gloo", init_method=f"file://{folder}/.store", rank=rank, world_size=world, timeout=timedelta(seconds=100))
        kind, chunks = SCHEDULES[job["schedule"]]
        generator = random.Random(f"{job['seed']} {rank}")
        example = torch.zeros(2, WIDTH)
        stages = [pipelining.PipelineStage(Slow(generator.choice(job["seconds"])), rank + c * world, world * chunks, torch.device("cpu"),
                                           input_args=(example,), output_args=(example,)) for c in range(chunks)]
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
    time.sleep(100)


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
                break
        elif time.time() - begin > moment:
            break
    well = all(value == 1 for value in list(progress)[world:])
    if moment is not None and well:
        time.sleep(0.2)
    os.close(tell)
    os.close(listen)
    for one in ranks:
        one.join(10)
        if one.is_alive():
            one.kill()
    with contextlib.suppress(FileNotFoundError):
        os.remove(f"{folder}/.store")
    if moment is None:  # a watchdog would have waited for half a minute
        for name in os.listdir(folder):
            os.utime(f"{folder}/{name}", (time.time() + 30,) * 2)
    return well


def explained(folder):
    done = subprocess.run([PLAN, "explain", "--flight-recorder", folder, "--format", "json"], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


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
    dist.init_process_group("gloo", init_method=f"file://{folder}/.store", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    for _ in range(3):
        dist.all_reduce(torch.ones(4))
    if rank != late:
        threading.Thread(target=lambda: dist.all_reduce(torch.ones(4)), daemon=True).start()
    time.sleep(0.5)
    core = torch._C._distributed_c10d
    data = core._dump_fr_trace() if rank % 2 == 0 else core._dump_fr_trace_json()
    with open(f"{folder}/rank_{rank}" + (".json" if rank % 2 else ""), "wb") as file:
        file.write(data.encode() if isinstance(data, str) else data)
    os._exit(0)


def by_own_recorder(top, wrong):
    """Jobs whose dumps PyTorch wrote: a rank that leaves out a sum is named; where no rank does, none is."""
    if not hasattr(torch._C._distributed_c10d, "_dump_fr_trace"):
        return "PyTorch's own recorder: none in this version"
    for late in (2, None):
        folder = f"{top}/own-{late}"
        os.makedirs(folder)
        ranks = [multiprocessing.get_context("fork").Process(target=own_recorder, args=(r, 3, folder, late)) for r in range(3)]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join(60)
        os.remove(f"{folder}/.store")
        for name in os.listdir(folder):
            os.utime(f"{folder}/{name}", (time.time() + 30,) * 2)
        told = explained(folder)
        if told["culprits"] != ([] if late is None else [late]):
            wrong.append(f"PyTorch's own dumps, rank {late} left out a sum: {told['cause']} {told['culprits']}: {told['sentence']}")
    return "PyTorch's own recorder: 2 jobs"


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--faults", type=int, default=len(FAULTS))
    options.add_argument("--slow", type=int, default=3)
    options.add_argument("--verbose", action="store_true")
    options.add_argument("--keep", help="folder in which the dumps stay")
    asked = options.parse_args()
    wrong, tried, named, causes = [], {}, {}, {}
    top = tempfile.mkdtemp()
    lines = [by_own_recorder(top, wrong)]
    for n in range(asked.faults):
        fault = FAULTS[n % len(FAULTS)]
        for attempt in range(30):
            job = draw(fault, f"{n // len(FAULTS)} {attempt}")
            folder, began = f"{top}/{fault}-{n}-{attempt}", time.time()
            well = run_job(job, folder)
            if asked.verbose:
                print({key: value for key, value in job.items() if key != "struck"}, "struck", job["struck"][0], "well", well, round(time.time() - began, 1), flush=True)
            if job["struck"][0] and not well:
                break
        else:
            wrong.append(f"{fault}: no job hangs")
            continue
        told = explained(folder)
        tried[fault] = tried.get(fault, 0) + 1
        named[fault] = named.get(fault, 0) + (told["culprits"] == [job["rank"]])
        causes.setdefault(fault, {}).setdefault(told["cause"], []).append(n)
        if told["culprits"] != [job["rank"]]:
            words = {key: value for key, value in job.items() if key != "struck"}
            wrong.append(f"{words} in {folder}: {told['cause']} {told['culprits']}: {told['sentence']}")
    for fault in tried:
        lines.append(f"{fault:18} {named[fault]:3} of {tried[fault]}  " + ", ".join(f"{len(all_of)} {cause}" for cause, all_of in sorted(causes[fault].items())))
    quiet = 0
    for n in range(asked.slow):
        job = draw("none", n) | {"rank": None, "seconds": random.Random(n).choice([[0.005], [0.002, 0.05], [0, 0.2]])}
        folder = f"{top}/slow-{n}"
        run_job(job, folder, random.Random(n).uniform(0.5, 4))
        told = explained(folder)
        quiet += not told["culprits"]
        if told["culprits"]:
            wrong.append(f"slow {n} in {folder}: {told['cause']} {told['culprits']}: {told['sentence']}")
    lines.append(f"{'slow, no fault':18} {quiet:3} of {asked.slow}  no rank named")
    print("\n".join(lines))
    for line in wrong:
        print("FAILED: " + line)
    if asked.keep:
        shutil.copytree(top, asked.keep)
    shutil.rmtree(top)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
