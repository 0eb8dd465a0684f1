#!/usr/bin/env python3
# timeout: 600
"""What ranks agree on, as models that SPIN looks through: all orders, with crashes at any point, at small sizes.

    tests/model_checking/protocols.py [--full]

Each model must hold; each of its mutants, made by a macro, must be found, and so must what is known not to be promised. --full
looks at larger sizes, for minutes.
"""
import argparse
import pathlib
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "shared"))
import spin

# (model, property, macros, expected words; `nothing` where it holds). Words are of the assertion that is broken.
CASES = [
    ("failure_reports", "the launcher's store", "HOST=3 KILLS=0", "nothing"),
    ("failure_reports", "the launcher's store, a kill, SIGKILL", "N=2 HOST=2 SIGKILL", "nothing"),
    ("failure_reports", "rank 0's store", "HOST=0 KILLS=0", "nothing"),
    ("failure_reports", "rank 0's store, a kill", "HOST=0 KILLS=1", "nothing"),
    ("failure_reports", "mutant: the last cause counts", "MUTANT_1", "verdict"),
    ("failure_reports", "mutant: a rank ends before it has told why", "MUTANT_2 KILLS=0", "failure"),
    ("failure_reports", "mutant: the store's host does not linger", "HOST=0 KILLS=0 MUTANT_3", "alone"),
    ("failure_reports", "mutant: a busy rank is not ended", "HOST=0 MUTANT_4", "alive"),
    ("join_and_leave", "3 ranks", "N=3", "nothing"),
    ("join_and_leave", "3 ranks, a kill", "N=3 KILLS=1", "nothing"),
    ("join_and_leave", "a rank of another layout, a kill", "OTHER_SHAPE KILLS=1", "nothing"),
    ("join_and_leave", "mutant: connections are closed after the barrier", "MUTANT_1", "closed"),
    ("join_and_leave", "mutant: both transports have the same names", "MUTANT_2", "came"),
    ("join_and_leave", "mutant: the store's host does not wait", "MUTANT_3", "store_up"),
    ("join_and_leave", "mutant: layouts are not compared", "MUTANT_4 OTHER_SHAPE", "me==0"),
    ("join_and_leave", "mutant: rank 0 does not wait for all", "MUTANT_5", "failure"),
    ("join_and_leave", "mutant: the others do not wait for rank 0", "MUTANT_6", "failure"),
    ("post_validation", "2 ranks, 4 steps", "P=2 STEPS=4", "nothing"),
    ("post_validation", "3 ranks, 3 steps", "P=3", "nothing"),
    ("post_validation", "3 ranks, 2 steps in order before one is relied on", "P=3 STEPS=4 STABLE=2", "nothing"),
    ("post_validation", "mutant: a rank judges by its own numbers", "P=2 MUTANT_1", "parameters"),
    ("post_validation", "mutant: no copy is put back", "P=2 MUTANT_2", "parameters"),
    ("post_validation", "mutant: messages stay on the channel", "P=2 MUTANT_3", "got==parameters"),
    ("post_validation", "mutant: who knows better brings no numbers", "P=2 MUTANT_4", "end"),
    ("checkpoint_publication", "a kill or a loss of power", "STEPS=2 KEEP=1", "nothing"),
    ("checkpoint_publication", "two of them", "STEPS=2 CRASHES=2 KEEP=1", "nothing"),
    ("checkpoint_publication", "entries of folders reach the disk in any order", "STEPS=2 UNORDERED", "nothing"),
    ("checkpoint_publication", "a reader at any moment", "STEPS=2 CRASHES=0 READER", "nothing"),
    ("checkpoint_publication", "a step is saved again: it or the one before is there", "STEPS=2 AGAIN CRASHES=2 KEEP=2", "nothing"),
    ("checkpoint_publication", "not promised: the only checkpoint is saved again", "STEPS=2 AGAIN CRASHES=2 KEEP=1", "published"),
    ("checkpoint_publication", "a step is saved again, entries in any order", "STEPS=2 AGAIN CRASHES=2 KEEP=2 UNORDERED", "nothing"),
    ("checkpoint_publication", "mutant: a manifest's end is not on the disk", "STEPS=2 AGAIN CRASHES=2 KEEP=2 UNORDERED MUTANT_6", "now["),
    ("checkpoint_publication", "mutant: the manifest before the files", "STEPS=2 MUTANT_1", "now["),
    ("checkpoint_publication", "mutant: no bring_to_disk before the manifest", "STEPS=2 MUTANT_2 UNORDERED", "now["),
    ("checkpoint_publication", "mutant: old ones go before the new one is on the disk", "STEPS=2 MUTANT_3", "published"),
    ("checkpoint_publication", "mutant: fingerprints are not compared", "STEPS=1 AGAIN READER MUTANT_4", "wanted"),
    ("checkpoint_publication", "mutant: files go before their manifest", "STEPS=2 AGAIN CRASHES=2 KEEP=2 MUTANT_5", "now["),
]
FULL = [
    ("failure_reports", "the launcher's store, a kill", "HOST=3 KILLS=1", "nothing"),
    ("failure_reports", "rank 0's store, 2 kills", "HOST=0 KILLS=2", "nothing"),
    ("join_and_leave", "4 ranks", "N=4", "nothing"),
    ("post_validation", "4 ranks", "P=4 STEPS=3", "nothing"),
    ("checkpoint_publication", "3 steps, 2 kept", "STEPS=3 KEEP=2", "nothing"),
]


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("--full", action="store_true", help="larger sizes, too")
    asked = asked.parse_args()
    spin.need_spin()
    began = time.time()
    wrong = []
    total = 0
    for model, what, macros, expected in CASES + (FULL if asked.full else []):
        with tempfile.TemporaryDirectory() as folder:
            pan = spin.compiled(HERE / f"{model}.pml", folder, macros.split(), level="-O1")
            # In models with a judge process, which checks at the end which ranks have ended, processes may be left waiting.
            arguments = [] if model == "post_validation" else ["-E"]
            errors, states, words = spin.run(pan, arguments)
        total += states
        print(f"{model:23} {what:62} {states:9} states  {words.replace('assertion violated ', 'found: ')[:60]}", flush=True)
        if (words != "nothing") if expected == "nothing" else expected not in words:
            wrong.append(f"{model}, {what} ({macros}): {words}, not {expected}")
    for line in wrong:
        print(line)
    print(f"{len(CASES) + (len(FULL) if asked.full else 0)} searches, {total} states, {len(wrong)} wrong, {time.time() - began:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
