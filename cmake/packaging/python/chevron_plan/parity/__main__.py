"""The command line of chevron_plan.parity."""
from __future__ import annotations

import argparse
import json
import sys

from . import Job, RunError, UsageError, check

EXIT = """exit codes:
  0  equal in every bit, or but for the order of sums (without --strict)
  1  a tensor differs
  2  wrong options, or a case that cannot be run
  3  a rank failed, or did not end in time
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line, and returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m chevron_plan.parity",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EXIT,
        description=
        "Trains a model in a plain loop and under torch.distributed.pipelining, in processes of this machine over Gloo,\n"
        "compares losses, outputs, gradients, norm, parameters and buffers bit by bit, and names the first tensor that\n"
        "differs, with its stage, microbatch, operation and likely reason.")
    parser.add_argument("--target", required=True, metavar="MODULE:FUNCTION", help="returns a chevron_plan.parity.Case")
    parser.add_argument("--schedule",
                        required=True,
                        metavar="NAME",
                        help="a name of PyTorch, such as 1F1B or ZBVZeroBubble, or a CSV file")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (default: 2)")
    parser.add_argument("--replicas",
                        type=int,
                        default=1,
                        metavar="R",
                        help="pipelines that share a batch; with 2, stages are wrapped in DistributedDataParallel (default: 1)")
    parser.add_argument("--microbatches", type=int, default=4, metavar="M", help="of a replica's batch (default: 4)")
    parser.add_argument("--steps", type=int, default=1, metavar="N", help="optimizer steps (default: 1)")
    parser.add_argument("--own-random",
                        action="store_true",
                        help="random numbers as each process draws them, instead of a seed for each stage and microbatch")
    parser.add_argument("--static-shapes",
                        action="store_true",
                        help="give the stages their shapes, so that none runs on zeros to find them")
    parser.add_argument("--within",
                        metavar="MODULE:FUNCTION",
                        help="a context manager around each rank's run: patches of PyTorch")
    parser.add_argument("--strict", action="store_true", help="another order of sums also exits with 1")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="of an operation, in both runs (default: 1)")
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="seconds that the ranks may take (default: 60)")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    given = parser.parse_args(arguments)
    try:
        verdict = check(
            Job(given.target, given.schedule, given.ranks, given.microbatches, given.steps, not given.own_random,
                given.static_shapes, given.within, given.threads, given.timeout, given.replicas))
    except UsageError as problem:
        print(f"parity: {problem}", file=sys.stderr)
        return 2
    except RunError as problem:
        print(f"parity: {problem}", file=sys.stderr)
        return 3
    print(json.dumps(verdict.as_dict(), indent=1) if given.json else verdict.text())
    return 1 if verdict.outcome == "differs" or (given.strict and verdict.outcome == "order") else 0


if __name__ == "__main__":
    sys.exit(main())
