"""The engine of lists of mutants: changes Chevron's headers in a copy, one mistake at a time, compiles one source of a test program with
them, and runs the program, which must fail. The lists stand beside their programs (tests/torture, tests/gpu_double)."""
import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Mutant:
    name: str
    header: str  # below include/chevron/run
    text: str  # a regular expression that occurs there once
    instead: str  # what stands in its place; \1 is the first group
    source: str  # of the program, as its path ends: what is compiled with the mistake
    arguments: list
    unseen: str = ""  # why it is not found, if it is not


def options(what):
    """The command line that all lists have."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--build", type=pathlib.Path, required=True, help="where the program has been built")
    return parser.parse_args()


def build_with(mutant, listed, build, place):
    """Compiles and links the program with the mistake; an error's words, or none."""
    shutil.copytree(ROOT / "include", place / "include")
    file = place / "include/chevron/run" / mutant.header
    words, changes = re.subn(mutant.text, mutant.instead, file.read_text(), flags=re.DOTALL)
    if changes != 1:
        return f"the header has this text {changes} times"
    file.write_text(words)
    compiles = next(c for c in listed if c.endswith(mutant.source))
    # Without the precompiled header, which holds the headers as they are.
    compiles = re.sub(r" -include \S+cmake_pch\S*| -Xclang -include(-pch)? -Xclang \S+| -Winvalid-pch", "", compiles)
    compiles = re.sub(r" -o \S+", f" -o {place}/mutant.o", compiles.replace(str(ROOT / "include"), str(place / "include")))
    if subprocess.run(compiles, shell=True, cwd=build).returncode != 0:
        return "does not compile"
    # The mutant's object comes before all others: functions of headers that others hold too must be the mutant's.
    links = listed[-1].replace(next(o for o in listed[-1].split() if o.endswith(mutant.source + ".o")), "")
    links = re.sub(r"(\S+\.o)", rf"{place}/mutant.o \1", links, count=1)
    subprocess.run(re.sub(r" -o \S+", f" -o {place}/program", links), shell=True, cwd=build, check=True)
    return ""


def run(program, mutants, how, told, longest=None):
    """\\param program as ninja calls it
    \\param told told(output): why the program has failed, in one line, or nothing
    \\param longest seconds that it may take: a mutant that hangs is found, too
    \\returns the exit code: 1 where a mutant is not found that should be, or the other way round"""
    listed = subprocess.run(["ninja", "-t", "commands", program], cwd=how.build, capture_output=True, text=True).stdout.splitlines()
    wrong = found = total = 0
    for mutant in mutants:
        if how.names and not any(n in mutant.name for n in how.names):
            continue
        total += 1
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder)
            if why := build_with(mutant, listed, how.build, place):
                print(f"{mutant.name}: {why}", flush=True)
                wrong += 1
                continue
            around = dict(os.environ, TORCH_FR_BUFFER_SIZE="0", OMP_NUM_THREADS="1")
            try:
                ran = subprocess.run([place / "program", *mutant.arguments], env=around, capture_output=True, text=True,
                                     errors="replace", timeout=longest)
                verdict = "" if ran.returncode == 0 else told(ran.stdout) or f"exit code {ran.returncode}"
            except subprocess.TimeoutExpired:
                verdict = "it hangs"
            found += verdict != ""
            wrong += (verdict == "") != (mutant.unseen != "")
            print(f"{mutant.name}: " + (f"found: {verdict}" if verdict else f"nothing: {mutant.unseen}" if mutant.unseen else "NOT FOUND"),
                  flush=True)
    print(f"\n{found} of {total} found")
    return 1 if wrong else 0
