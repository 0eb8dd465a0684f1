# timeout: 120
"""chevron-plan explain --flight-recorder on simulated jobs: the rank with the planted fault is named, and no rank of a slow job is.

    python3 tests/process/recorder_hangs.py [--jobs N]     N jobs for each fault (CTest: 4), and 4 N slow ones; prints a table
"""
import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import recorder_jobs as jobs

PLAN = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve() / "bin" / "chevron-plan"


def explained(folder, *more):
    done = subprocess.run([PLAN, "explain", "--flight-recorder", folder, "--format", "json", *more], capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--jobs", type=int, default=4)
    options.add_argument("--verbose", action="store_true")
    count = options.parse_args().jobs
    wrong, table = [], []
    with tempfile.TemporaryDirectory() as top:
        for fault in jobs.FAULTS:
            named, causes = 0, {}
            for seed in range(count):
                posted, groups, last, rank, backend, words = jobs.faulty_job(seed, fault)
                folder = os.path.join(top, f"{fault}-{seed}")
                jobs.write_dumps(folder, posted, groups, last + 30, backend, [rank] if fault == "dead" else [],
                                 ["pickle2", "json", "pickle4", "pickle5", "pickle3"][seed % 5], version=["2.10", "2.9", "2.4"][seed % 3])
                told = explained(folder)
                causes[told["cause"]] = causes.get(told["cause"], 0) + 1
                named += told["culprits"] == [rank]
                if told["culprits"] != [rank]:
                    wrong.append(f"{words}: {told['cause']} {told['culprits']}: {told['sentence']}")
            table.append(f"{fault:18} {named:3} of {count}  " + ", ".join(f"{n} {c}" for c, n in sorted(causes.items())))
        # In the first step ranks have no rounds: the rank is among the named ones, and alone where it is silent or absent.
        among = 0
        for fault in jobs.FAULTS:
            for seed in (4, 12):
                posted, groups, last, rank, backend, words = jobs.faulty_job(seed, fault, 0)
                folder = os.path.join(top, f"first-{fault}-{seed}")
                jobs.write_dumps(folder, posted, groups, last + 30, backend, [rank] if fault == "dead" else [])
                told = explained(folder)
                good = told["culprits"] == [rank] if fault in ("asleep", "dead", "exit") else rank in told["culprits"]
                among += good
                if not good:
                    wrong.append(f"{words}: {told['cause']} {told['culprits']}: {told['sentence']}")
        table.append(f"{'first step':18} {among:3} of {2 * len(jobs.FAULTS)}  the rank is among those named")
        # 4 jobs of 16 ranks, 4 stages of 4 tensor-parallel ranks, in the form of Megatron-LM's jobs, with two faults each.
        blamed = 0
        for seed in range(4):
            rng = random.Random(seed)
            programs, groups = jobs.megatron(4, 4, 8, 3, rng)
            pair = rng.sample(range(16), 2)
            for rank in pair:
                jobs.plant(rng.choice(["asleep", "no_send", "no_collective", "exit"]), programs, groups, rank, 2, 3, rng)
            posted, _, last = jobs.play(programs, groups, True, True)
            jobs.write_dumps(os.path.join(top, f"megatron-{seed}"), posted, groups, last + 30)
            told = explained(os.path.join(top, f"megatron-{seed}"))
            good = len(told["culprits"]) == 1 and told["culprits"][0] in pair
            blamed += good
            if not good:
                wrong.append(f"megatron {seed}, ranks {pair}: {told['cause']} {told['culprits']}: {told['sentence']}")
        table.append(f"{'4 x 16, two faults':18} {blamed:3} of 4  one of the two ranks is named")
        quiet = 0
        for seed in range(4 * count):
            posted, groups, moment, backend, words = jobs.healthy_job(seed)
            folder = os.path.join(top, f"healthy-{seed}")
            jobs.write_dumps(folder, posted, groups, moment, backend)
            told = explained(folder)
            quiet += not told["culprits"]
            if told["culprits"]:
                wrong.append(f"{words}: {told['cause']} {told['culprits']}: {told['sentence']}")
        table.append(f"{'slow, no fault':18} {quiet:3} of {4 * count}  no rank named")
    print("\n".join(table))
    for line in wrong:
        print("FAILED: " + line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
