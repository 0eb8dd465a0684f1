# timeout: 240
"""chevron-plan explain --flight-recorder on simulated jobs: the rank with the planted fault is named, and no rank of a slow job is.

    python3 tests/process/recorder_hangs.py [--jobs N]     N jobs for each fault (CTest: 4), and 4 N slow ones; prints a table
"""
import argparse
import os
import pathlib
import random
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import recorder_jobs as jobs
from explained_hangs import Verdicts, explained


def waits(told):
    return [(one["rank"], one["for"]) for one in told["waits"]]


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--jobs", type=int, default=4)
    count = options.parse_args().jobs
    verdicts = Verdicts()
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
            words, _, told = told_of(f"megatron-{seed}", (posted, groups, last, None, "nccl", f"megatron {seed}, ranks {pair}"))
            verdicts.add("4 x 16, two faults", words, told, len(told["culprits"]) == 1 and told["culprits"][0] in pair)

        def slow(seed):
            posted, groups, moment, backend, words = jobs.healthy_job(seed)
            folder = os.path.join(top, f"healthy-{seed}")
            jobs.write_dumps(folder, posted, groups, moment, backend)
            return words, explained(folder)

        verdicts.quiet(range(4 * count), slow)
    return verdicts.report()


if __name__ == "__main__":
    sys.exit(main())
