# timeout: 240
"""chevron-plan explain --flight-recorder on simulated jobs: the rank with the planted fault is named, and no rank of a slow job is.

    python3 tests/process/recorder_hangs.py [--jobs N]            N jobs for each fault (CTest: 4), and 4 N slow ones; prints a table
    python3 tests/process/recorder_hangs.py --public FOLDER       jobs of real GPUs instead: tests/attribution/unit/fr_traces of NVIDIA's
                                                                  nvidia-resiliency-ext, a folder of dumps for each job, and a file
                                                                  fault_injection.log in it that begins with `Fault ranks: [9, 14]`
"""
import argparse
import os
import pathlib
import random
import re
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import recorder_jobs as jobs
from explained_hangs import Verdicts, explained


def waits(told):
    return [(one["rank"], one["for"]) for one in told["waits"]]


def two_faults(verdicts, name, words, told, at_fault):
    """Of several ranks at fault one is named first, and no waits lead to another rank that waits for no rank."""
    verdicts.add(name, words, told, len(told["culprits"]) == 1 and set(told["culprits"] + told["further"]) <= set(at_fault))


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--jobs", type=int, default=4)
    options.add_argument("--public", metavar="FOLDER")
    asked = options.parse_args()
    count = asked.jobs
    verdicts = Verdicts()
    if asked.public:
        for log in sorted(pathlib.Path(asked.public).glob("*/fault_injection.log")):
            at_fault = [int(rank) for rank in re.findall(r"\d+", re.match(r"Fault ranks: \[(.*)\]", log.read_text())[1])]
            two_faults(verdicts, f"public, {log.parent.name}", f"ranks {at_fault}", explained(log.parent), at_fault)
        if not verdicts.rows:
            verdicts.wrong.append(f"{asked.public} has no folder with a fault_injection.log")
        return verdicts.report()
    with tempfile.TemporaryDirectory() as top:

        def told_of(name, job, fault=None, **more):
            posted, groups, last, rank, backend, words = job
            folder = os.path.join(top, name)
            jobs.write_dumps(folder, posted, groups, last + 30, backend, [rank] if fault == "dead" else [], **more)
            return words, rank, explained(folder)

        for fault in jobs.FAULTS:
            for seed in range(count):
                job = jobs.faulty_job(seed, fault)
                form = ["pickle2", "json", "pickle4", "pickle5", "pickle3"][seed % 5]
                words, rank, told = told_of(f"{fault}-{seed}", job, fault, form=form, version=["2.10", "2.9", "2.4"][seed % 3])
                verdicts.named(fault, words, told, rank)
                # Buffers that have lost the job's first steps: the waits are those of whole dumps; with fewer than two rounds the
                # rank may be named beside others, or be a suspect.
                keep = (12, 20, 30, 40)[seed % 4]
                words, rank, lost = told_of(f"wrapped-{fault}-{seed}", job, fault, keep=keep)
                good = rank in lost["culprits"] + lost["suspects"] and (keep < 20 or waits(lost) == waits(told))
                verdicts.add("wrapped buffers", f"{words}, {keep} operations kept", lost, good)
        # In the first step ranks have no rounds: the rank is among the named ones, and alone where it is silent or absent.
        for fault in jobs.FAULTS:
            for seed in (4, 12):
                words, rank, told = told_of(f"first-{fault}-{seed}", jobs.faulty_job(seed, fault, 0), fault)
                verdicts.add("first step", words, told, told["culprits"] == [rank] if fault in ("asleep", "dead", "exit") else rank in told["culprits"])
        # 4 jobs of 16 ranks, 4 stages of 4 tensor-parallel ranks, in the form of Megatron-LM's jobs, with two faults each.
        for seed in range(4):
            rng = random.Random(seed)
            programs, groups = jobs.megatron(4, 4, 8, 3, rng)
            pair = rng.sample(range(16), 2)
            for rank in pair:
                jobs.plant(rng.choice(["asleep", "no_send", "no_collective", "exit"]), programs, groups, rank, 2, 3, rng)
            posted, _, last = jobs.play(programs, groups, True, True)
            job = (posted, groups, last, None, "nccl", f"megatron {seed}, ranks {pair}")
            words, _, told = told_of(f"megatron-{seed}", job)
            two_faults(verdicts, "4 x 16, two faults", words, told, pair)
            # Without the rounds before, of which pending operations tell nothing, a cycle names all of its ranks.
            words, _, told = told_of(f"pending-{seed}", job, active=True)
            verdicts.add("the same, pending only", words, told, bool(set(told["culprits"]) & set(pair)))

        def slow(seed):
            posted, groups, moment, backend, words = jobs.healthy_job(seed)
            folder = os.path.join(top, f"healthy-{seed}")
            jobs.write_dumps(folder, posted, groups, moment, backend)
            return words, explained(folder)

        verdicts.quiet(range(4 * count), slow)
        for seed in range(4 * count):  # each rank's dump at a time of its own, as if they were asked for one after another
            posted, groups, _, backend, words = jobs.healthy_job(seed)
            folder, rng = os.path.join(top, f"apart-{seed}"), random.Random(seed)
            end = max(op.completed for operations in posted for op in operations)
            for rank in range(len(posted)):
                others = [other for other in range(len(posted)) if other != rank]
                jobs.write_dumps(folder, posted, groups, end * rng.uniform(0.3, 1.0), backend, others)
            told = explained(folder)
            verdicts.add("slow, dumps apart", words, told, not told["culprits"])
    return verdicts.report()


if __name__ == "__main__":
    sys.exit(main())
