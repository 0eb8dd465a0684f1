"""Counts the functions of Chevron that steady steps of examples/minimal_train.cpp pass, and their headers; and the functions
from `trainer::step` to a module's forward. A step that needs none of the optional parts should pass none of their functions.

    cmake --build build --target chevron-step-functions
    python3 tests/step_functions.py [--list] build/bin/chevron-step-functions [FUNCTIONS HEADERS FRAMES]

The program is the example, compiled with -finstrument-functions. Fails if a count is above its limit (tests/CMakeLists.txt).
Each instantiation of a template is a function of its own, and so is each lambda. With --list, prints the functions by header, and
the functions from `trainer::step` to the forward.
"""
import argparse
import array
import collections
import os
import re
import subprocess
import sys
import tempfile

STEP = re.compile(r"^([0-9a-f]+) \w (chevron::trainer::step\(.*)$", re.M)
FORWARD = re.compile(r"torch::nn::SequentialImpl::forward<")
# Of 60 steps: the first compare ranks and record shapes. Several, as a rank passes more functions where it waits for another.
FIRST, LAST = "30", "49"


def traces_of(program):
    """The entries of each thread in each traced step; 0 is the end of a function."""
    symbols = subprocess.run(["nm", "-C", "--defined-only", program], capture_output=True, text=True, check=True).stdout
    steps = [address for address, _ in STEP.findall(symbols)]
    if not steps:
        sys.exit(f"{program} has no trainer::step")
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "trace")
        around = {**os.environ, "TRACED_FUNCTIONS": ",".join(steps), "FIRST_TRACED": FIRST, "LAST_TRACED": LAST, "TRACE_FILE": file}
        subprocess.run([program], env=around, check=True, stdout=subprocess.DEVNULL, timeout=100)
        words = array.array("Q")
        with open(file, "rb") as read:
            words.frombytes(read.read())
    out = []
    while words:
        out.append(words[1:words[0] + 1])
        words = words[words[0] + 1:]
    return out


def named(program, addresses):
    """Name, file and line of each function."""
    text = "".join(f"{address:#x}\n" for address in addresses)
    lines = subprocess.run(["addr2line", "-f", "-C", "-e", program], input=text, capture_output=True, text=True,
                           check=True).stdout.splitlines()
    return {address: (name, place) for address, name, place in zip(addresses, lines[::2], lines[1::2])}


def header_of(place):
    found = re.search(r"include/chevron/([^:]*)", place)
    return found[1] if found else None


def way_to_forward(trace, names):
    """The functions between `trainer::step` and the first forward of a module in a thread's trace; empty without a forward."""
    stack = []
    for entry in trace:
        if entry == 0:
            stack.pop()
        elif FORWARD.search(names[entry][0]):
            return stack
        else:
            stack.append(entry)
    return []


def main():
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--list", action="store_true")
    asked.add_argument("program")
    asked.add_argument("limits", type=int, nargs="*", metavar="LIMIT")
    asked = asked.parse_args()

    traces = traces_of(asked.program)
    names = named(asked.program, sorted({entry for trace in traces for entry in trace if entry != 0}))
    own = {entry: header_of(place) for entry, (_, place) in names.items() if header_of(place)}
    by_header = collections.defaultdict(list)
    for entry, header in own.items():
        by_header[header].append(names[entry])
    calls = sum(entry in own for trace in traces for entry in trace)
    ways = [[entry for entry in way_to_forward(trace, names) if entry in own] for trace in traces]
    frames = min(filter(None, ways), key=len)

    if asked.list:
        for header, inside in sorted(by_header.items()):
            print(f"{len(inside):3} {header}")
            for name, place in sorted(inside, key=lambda one: int(one[1].rsplit(":", 1)[-1].split()[0])):
                print(f"      {place.rsplit(':', 1)[-1]} {name}")
        print("from trainer::step to the forward of a module:")
        for entry in frames:
            print(f"    {names[entry][0]}  {os.path.basename(names[entry][1])}")
    counts = (len(own), len(by_header), len(frames))
    print("steady steps pass %d functions in %d headers; from trainer::step to the forward of a module: %d" % counts
          + f"; {calls // len(traces)} calls a step and rank")
    if any(count > limit for count, limit in zip(counts, asked.limits)):
        sys.exit(f"the limits are {asked.limits}: what does the step pass without need (--list)?")


main()
