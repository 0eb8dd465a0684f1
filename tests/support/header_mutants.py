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
    parser.add_argument("--build", type=pathlib.Path, required=True, help="folder in which the program was built, or configured")
    parser.add_argument("--compile", action="store_true", help="only check that all mistakes compile, several at a time")
    return parser.parse_args()


def doctest_error(output):
    """What doctest says of the first failure, for `run`."""
    why = re.search(r"(ERROR|FATAL ERROR): .*", output)
    return why.group(0)[:150] if why else ""


def of_tests(rows, abort_after=0):
    """Mutants from rows of a list: name, header, text, what stands in its place, the test below tests/run, and why it is not found."""
    flags = ["--no-colors", f"--abort-after={abort_after}"]
    return [Mutant(name, header, text, instead, f"run/{test}_test.cpp", [*flags, f"--source-file=*/{test}_test.cpp"], *unseen)
            for name, header, text, instead, test, *unseen in rows]


def verdict_of(program, arguments, told, longest, **environment):
    """\\returns why a program with a mistake fails, in one line; empty where it does not"""
    around = dict(os.environ, TORCH_FR_BUFFER_SIZE="0", OMP_NUM_THREADS="1", **environment)
    try:
        ran = subprocess.run([program, *arguments], env=around, capture_output=True, text=True, errors="replace", timeout=longest)
        return "" if ran.returncode == 0 else told(ran.stdout) or f"exit code {ran.returncode}"
    except subprocess.TimeoutExpired:
        return "it hangs"


def tell(mutant, verdict):
    """Prints what came of a mutant. \\returns whether that is wrong"""
    how = f"found: {verdict}" if verdict else f"nothing: {mutant.unseen}" if mutant.unseen else "NOT FOUND"
    print(f"{mutant.name}: {how}", flush=True)
    return (verdict == "") != (mutant.unseen != "")


def command_of(source, listed, build):
    """\\returns the command that compiles a source, alone or in a batch, and the command's object file"""
    for command in listed:
        compiled = command.split()[-1]
        if not compiled.endswith((".cpp", ".cxx")):
            continue
        if not compiled.endswith("/" + source) and f"/{source}\"" not in (build / compiled).read_text():
            continue
        return command, re.search(r" -o (\S+)", command).group(1)
    raise SystemExit(f"{build}: no command of ninja compiles {source}. Remedy: the folder of a configured build")


def without_precompiled(command, place):
    """\\returns a compiler's command that reads the copied headers: the precompiled header holds the headers as they are"""
    command = re.sub(r" -include \S+cmake_pch\S*| -Xclang -include(-pch)? -Xclang \S+| -Winvalid-pch", "", command)
    return command.replace(str(ROOT / "include"), str(place / "include"))


def rounds_of(mutants, include):
    """Mutants that one copy of the headers can hold together: no two change the same characters. \\returns lists of (header, begin, end,
    words in place of these characters, the mutant's source); and an error's words for each mutant whose text is not there once"""
    rounds, wrong = [], []
    for mutant in mutants:
        found = list(re.finditer(mutant.text, (include / mutant.header).read_text(), flags=re.DOTALL))
        if len(found) != 1:
            wrong.append(f"{mutant.name}: the header has this text {len(found)} times")
            continue
        change = (mutant.header, *found[0].span(), found[0].expand(mutant.instead), mutant.source)
        for one in rounds:
            if not any(header == change[0] and begin < change[2] and change[1] < end for header, begin, end, *_ in one):
                one.append(change)
                break
        else:
            rounds.append([change])
    return rounds, wrong


def compile_all(program, mutants, how):
    """Sees whether all mistakes compile, as many together as fit into one copy of the headers, in a file that includes the changed ones:
    a function that is no template is then compiled. \\returns the exit code"""
    listed = subprocess.run(["ninja", "-t", "commands", program], cwd=how.build, capture_output=True, text=True).stdout.splitlines()
    rounds, wrong = rounds_of(mutants, ROOT / "include/chevron")
    for changes in rounds:
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder)
            shutil.copytree(ROOT / "include", place / "include")
            for header, begin, end, words, _ in sorted(changes, key=lambda change: -change[1]):
                file = place / "include/chevron" / header
                text = file.read_text()
                file.write_text(text[:begin] + words + text[end:])
            (place / "all.cpp").write_text("".join(f"#include <chevron/{header}>\n" for header in sorted({header for header, *_ in changes})))
            command = without_precompiled(command_of(changes[0][-1], listed, how.build)[0], place)
            command = re.sub(r" -o \S+", " -fsyntax-only -w", command).rsplit(" ", 1)[0] + f" {place / 'all.cpp'}"
            compiled = subprocess.run(command, shell=True, cwd=how.build, capture_output=True, text=True)
            if compiled.returncode != 0:
                errors = [line.replace(folder, "") for line in compiled.stderr.splitlines() if "error:" in line]
                wrong += [f"{len(changes)} mistakes: {line}" for line in errors[:10] or [compiled.stderr[-1000:]]]
    print("\n".join(wrong), end="\n" if wrong else "")
    print(f"{len(mutants)} mutants in {len(rounds)} copies of the headers, {len(wrong)} errors")
    return 1 if wrong else 0


def build_with(mutant, listed, build, place):
    """Compiles and links the program with the mistake; an error's words, or none."""
    shutil.copytree(ROOT / "include", place / "include")
    file = place / "include/chevron" / mutant.header
    words, changes = re.subn(mutant.text, mutant.instead, file.read_text(), flags=re.DOTALL)
    if changes != 1:
        return f"the header has this text {changes} times"
    file.write_text(words)
    compiles, replaced = command_of(mutant.source, listed, build)
    compiles = re.sub(r" -o \S+", f" -o {place}/mutant.o", without_precompiled(compiles, place))
    if subprocess.run(compiles, shell=True, cwd=build).returncode != 0:
        return "does not compile"
    # The mutant's object comes before all others: functions of headers that others hold too must be the mutant's.
    links = listed[-1].replace(replaced, "")
    links = re.sub(r"(\S+\.o)", rf"{place}/mutant.o \1", links, count=1)
    subprocess.run(re.sub(r" -o \S+", f" -o {place}/program", links), shell=True, cwd=build, check=True)
    return ""


SWITCH = """#pragma once
#include <cstdlib>
/// Whether this mistake is the one that is made.
inline bool chevron_mutant(int number) {
  static int const chosen = std::getenv("CHEVRON_MUTANT") != nullptr ? std::atoi(std::getenv("CHEVRON_MUTANT")) : -1;
  return number == chosen;
}
"""


def put_in_all(mutants, include):
    """Puts each mistake behind its number, in place of the first group of its text: a statement, or an expression without a semicolon.
    Several may be in one place. An error's words for each whose text is not there once."""
    wrong, places = [], {}
    for number, mutant in enumerate(mutants):
        found = list(re.finditer(mutant.text, (include / mutant.header).read_text(), flags=re.DOTALL))
        if len(found) != 1:
            wrong.append(f"{mutant.name}: the header has this text {len(found)} times")
            continue
        places.setdefault(mutant.header, {}).setdefault(found[0].span(1), []).append(number)
    for header, spans in places.items():
        words = (include / header).read_text()
        begun = len(words)
        for (begin, end), numbers in sorted(spans.items(), reverse=True):
            if end > begun:
                wrong.append(f"{mutants[numbers[0]].name}: its text holds a part of another mutant's. Remedy: both take the same text")
                continue
            begun = begin
            made = words[begin:end]
            if made.endswith(";"):
                made = "".join(f"if (chevron_mutant({n})) {{ {mutants[n].instead} }} else " for n in numbers) + f"{{ {made} }}"
            else:
                made = "(" + "".join(f"chevron_mutant({n}) ? ({mutants[n].instead}) : " for n in numbers) + f"({made}))"
            words = words[:begin] + made + words[end:]
        (include / header).write_text(words)
    return wrong


def run_together(program, mutants, how, told, longest=None):
    """As `run`, with all mistakes in one copy of the headers, so that each source is compiled once."""
    if how.compile:
        raise SystemExit("--compile is for lists whose mistakes are compiled one by one. Remedy: leave it away")
    listed = subprocess.run(["ninja", "-t", "commands", program], cwd=how.build, capture_output=True, text=True).stdout.splitlines()
    found = total = 0
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        shutil.copytree(ROOT / "include", place / "include")
        (place / "switch.hpp").write_text(SWITCH)
        errors = put_in_all(mutants, place / "include/chevron")
        links, running = listed[-1], []
        for number, source in enumerate(sorted({m.source for m in mutants})):
            compiles, replaced = command_of(source, listed, how.build)
            compiles = re.sub(r" -o \S+", f" -include {place}/switch.hpp -o {place}/{number}.o", without_precompiled(compiles, place))
            running.append(subprocess.Popen(compiles, shell=True, cwd=how.build))
            if len(running) % 2 == 0:
                running[-2].wait()
            # The mutants' objects come before all others: functions of headers that others hold too must be the mutants'.
            links = links.replace(replaced, "")
            links = re.sub(r"(\S+\.o)", rf"{place}/{number}.o \1", links, count=1)
        if any([r.wait() != 0 for r in running]):
            print("the mutants do not compile")
            return 1
        subprocess.run(re.sub(r" -o \S+", f" -o {place}/program", links), shell=True, cwd=how.build, check=True)

        for arguments in {tuple(m.arguments) for m in mutants}:
            if verdict := verdict_of(place / "program", arguments, told, longest, CHEVRON_MUTANT="-1"):
                errors.append(f"{' '.join(arguments)} fails without a mistake: {verdict}")
        print("\n".join(errors), flush=True)
        for number, mutant in enumerate(mutants):
            if how.names and not any(n in mutant.name for n in how.names):
                continue
            total += 1
            verdict = verdict_of(place / "program", mutant.arguments, told, longest, CHEVRON_MUTANT=str(number))
            found += verdict != ""
            if tell(mutant, verdict):
                errors.append(mutant.name)
    print(f"\n{found} of {total} found")
    return 1 if errors else 0


def run(program, mutants, how, told, longest=None):
    """\\param program as ninja calls it
    \\param told told(output): why the program has failed, in one line, or nothing
    \\param longest seconds that it may take: a mutant that hangs is found, too
    \\returns the exit code: 1 where a mutant is not found that should be, or the other way round"""
    if how.compile:
        return compile_all(program, mutants, how)
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
            verdict = verdict_of(place / "program", mutant.arguments, told, longest)
            found += verdict != ""
            wrong += tell(mutant, verdict)
    print(f"\n{found} of {total} found")
    return 1 if wrong else 0
