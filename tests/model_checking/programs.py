#!/usr/bin/env python3
# timeout: 600
"""SPIN and the prover say the same of programs: of every schedule of the catalogue, of mutants, and of known faults.

    CHEVRON_BUILD=build tests/model_checking/programs.py [--most 4] [--mutants 300] [--of-channels 80] [--jobs 1]

Schedules go up to `most` ranks and as many microbatches. Every program is looked through twice, with rendezvous and with buffered
channels. The prover speaks of rendezvous: there its verdict must be SPIN's. Buffered channels let more programs come to their end,
so there SPIN may accept what is refused as a deadlock, and nothing else. Mutants of the order of messages are looked through over
all four sorts of channels, with streams and with hosts that wait; some have small sends, which end without their receives.
"""
import argparse
import collections
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "shared"))
import spin

KINDS = ["rendezvous", "buffered"]
# Mutants of the order of messages: their own rules say which sends are buffered.
OF_CHANNELS = [model + hosts for hosts in ("", ", hosts wait") for model in ("edge", "pair", "group", "batched")]
# Schedule, ranks, microbatches, flags of `lower`, whether the program runs.
EXPORTED = [("1F1B", 3, 3, "", True), ("1F1B-R", 3, 3, "", True), ("ZBVZeroBubble", 2, 3, "", True),
            ("GPipe", 2, 2, "--channels pair", False), ("1F1B", 2, 1, "--hosts-wait", False),
            ("ForwardOnly", 3, 3, "--channels group --hosts-wait --buffered-below 1KiB --message-bytes 1KiB,1000", True)]


def read_programs(file):
    """(sort, name, ranks, law, expected words, byte at which its numbers stand) of each line."""
    out, at = [], 0
    for line in file.read_bytes().splitlines(keepends=True):
        *fields, numbers = line.split(b"\t")
        sort, name, ranks, law, expected = (field.decode() for field in fields)
        out.append((sort, name, int(ranks), law, expected, at + len(line) - len(numbers)))
        at += len(line)
    return out


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("--most", type=int, default=4, help="most ranks, and most microbatches, of the catalogue's schedules")
    asked.add_argument("--mutants", type=int, default=300, help="number of mutants of plans and programs to draw")
    asked.add_argument("--of-channels", type=int, default=80, help="number of mutants to draw for each sort of channels")
    asked.add_argument("--jobs", type=int, default=1)
    asked = asked.parse_args()
    spin.need_spin()
    began = time.time()
    build = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        subprocess.run([build / "bin/chevron-model-programs", folder, str(asked.most), str(asked.mutants), str(asked.of_channels)],
                       check=True)
        programs = read_programs(folder / "programs.tsv")
        pans = {ranks: spin.compiled(folder / f"programs-{ranks}.pml", folder / str(ranks)) for ranks in {p[2] for p in programs}}

        def look(task):
            (sort, name, ranks, law, expected, offset), buffered = task
            return spin.run(pans[ranks], depth=2000, variables={
                "PROGRAM": str(folder / "programs.tsv"), "OFFSET": str(offset), "BUFFERED": str(buffered)})

        tasks = [(program, buffered) for program in programs for buffered in ((0,) if program[0] in OF_CHANNELS else (0, 1))]
        with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
            results = list(pool.map(look, tasks))

        table = collections.defaultdict(collections.Counter)
        said = {}
        for ((sort, name, ranks, law, expected, _), buffered), (errors, states, words) in zip(tasks, results):
            kind = KINDS[buffered]
            said[name, kind] = states
            row = table[sort, kind]
            row["programs"] += 1
            row["states"] += states
            row["refused"] += errors > 0
            row["only rendezvous"] += buffered and not errors and law == "deadlock"
            accepted = law == "none" or (buffered and law == "deadlock" and not errors)
            if (errors == 0) != accepted:
                wrong.append(f"{name}, {kind}: SPIN says {words}, the prover {law}")
            if sort == "fault" and (expected.split() * 2)[buffered] not in words:
                wrong.append(f"{name}, {kind}: SPIN says {words}, not {(expected.split() * 2)[buffered]}")
            if sort in OF_CHANNELS and words not in ("nothing", "end"):
                wrong.append(f"{name}: SPIN says {words} of a program whose messages match")
            if sort == "schedule" and states < 3 * ranks:
                wrong.append(f"{name}, {kind}: only {states} states")

        # chevron-plan writes the same model, with the tables in it.
        for number, (name, ranks, micro_batches, flags, runs) in enumerate(EXPORTED):
            file = folder / f"exported-{number}.pml"
            subprocess.run([build / "bin/chevron-plan", "lower", name, "--ranks", str(ranks), "--microbatches", str(micro_batches),
                            "--format", "promela", *flags.split(), "-o", file], check=True)
            for kind, defines in zip(KINDS, [()] if flags else [(), ("BUFFERED",)]):
                errors, states, words = spin.run(spin.compiled(file, folder / f"exported-{number}" / kind, defines,
                                                              level="-O0"))
                if words != ("nothing" if runs else "end"):
                    wrong.append(f"{name} {flags} as chevron-plan writes it, {kind}: {words}")
                if not flags and states != said.get((f"{name} {ranks} {micro_batches}", kind), states):
                    wrong.append(f"{name} as chevron-plan writes it, {kind}: {states} states")

    laws = collections.Counter(p[3] for p in programs if p[0] == "mutant")
    for model in OF_CHANNELS:
        of_model = collections.Counter(p[3] for p in programs if p[0] == model)
        print(f"mutants over {model}: " + ", ".join(f"{law} {count}" for law, count in of_model.most_common()))
        if min(of_model["none"], of_model["deadlock"]) < asked.of_channels / 20:
            wrong.append(f"too few mutants over {model} run, or hang: {of_model}")
    schedules = {p[1].rsplit(" ", 2)[0] for p in programs if p[0] == "schedule"}
    print(f"{len(schedules)} schedules, {asked.most * asked.most} shapes up to {asked.most} ranks and {asked.most} microbatches")
    print(f"{'':20}{'channels':12}{'programs':>9}{'refused':>9}{'states':>12}")
    for (sort, kind), row in table.items():
        print(f"{sort:20}{kind:12}{row['programs']:9}{row['refused']:9}{row['states']:12}")
    print("mutants by the prover's verdict: " + ", ".join(f"{law} {count}" for law, count in laws.most_common()))
    print(f"deadlocks with rendezvous that buffers end: {table['mutant', 'buffered']['only rendezvous']}")
    # A comparison in which one side never says no shows nothing.
    for law in ["none", "order", "deadlock", "matched", "slots", "complete", "in_flight"]:
        if laws[law] < asked.mutants / 100:
            wrong.append(f"only {laws[law]} mutants of '{law}'")
    for line in wrong[:20]:
        print(line)
    print(f"{len(wrong)} disagreements, {time.time() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
