"""SPIN, as the tests of this folder use it: a model is compiled once and looked through by a program of its own, `pan`."""
import os
import pathlib
import re
import shutil
import subprocess
import sys

SKIPPED = 77


def need_spin():
    """Ends the test where SPIN is missing, or the C compiler for what it writes."""
    for tool in ["spin", compiler()]:
        if shutil.which(tool) is None:
            print(f"skipped: there is no {tool} here. Remedy: apt-get install spin gcc")
            sys.exit(SKIPPED)


def compiler():
    return os.environ.get("CC", "gcc")


def compiled(model, folder, defines=(), safety=True, level="-O2"):
    """The path of a pan for a model; `defines` are of the model. Errors of spin and of the compiler end the test."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = subprocess.run(["spin", *[f"-D{one}" for one in defines], "-a", str(model)], cwd=folder, text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if written.returncode != 0 or "Error" in written.stdout or not (folder / "pan.c").exists():
        sys.exit(f"spin does not take {model} {' '.join(defines)}:\n{written.stdout}")
    flags = ["-DSAFETY"] if safety else ["-DNFAIR=3"]
    subprocess.run([compiler(), level, "-w", *flags, "-DVECTORSZ=8192", "-o", "pan", "pan.c"], cwd=folder, check=True)
    return folder / "pan"


def run(pan, arguments=(), variables=None, seconds=300, depth=100000):
    """What pan found: (errors, states, words). Words: `nothing`, `end` (somebody waits for ever), or the assertion or the cycle."""
    done = subprocess.run([str(pan), f"-m{depth}", "-w18", *arguments], cwd=pan.parent, text=True, timeout=seconds,
                          env=dict(os.environ, **(variables or {})), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    errors = re.search(r"errors: (\d+)", done.stdout)
    states = re.search(r"(\d+) states, stored", done.stdout)
    # A search that was cut short has proved nothing.
    if errors is None or states is None or re.search(r"max search depth too small|out of memory|Search not completed.*\n.*memory",
                                                      done.stdout):
        sys.exit(f"pan did not come to its end in {pan.parent} {variables or ''}:\n{done.stdout}")
    broken = re.search(r"pan:\d+: (.*)", done.stdout)
    words = "nothing"
    if int(errors[1]) > 0:
        words = "end" if "invalid end state" in broken[1] else re.sub(r" \(at depth.*", "", broken[1])
    return int(errors[1]), int(states[1]), words
