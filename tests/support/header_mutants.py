"""The engine of lists of mutants: puts the mistakes of a list into a copy of Chevron's headers, each behind a number, compiles the
sources of a test program with the copy, and runs the program once with each mistake, which must fail. The lists stand beside their
programs (tests/run, tests/torture, tests/gpu_double)."""
import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Mutant:
    name: str
    header: str  # below include/chevron; of a mistake in the package of Python a file below the root
    text: str  # a regular expression that occurs there once; its groups are statements with their semicolon, or expressions
    instead: str | tuple  # what stands in place of the group, or of each group
    source: str  # of the program, as its path ends: what is compiled with the mistake
    arguments: list
    unseen: str = ""  # why it is not found, if it is not


def options(what):
    """The command line that all lists have."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--build", type=pathlib.Path, required=True, help="folder in which the program was built, or configured")
    parser.add_argument("--compile", action="store_true", help="only check that all mistakes compile: a file that includes the headers")
    parser.add_argument("--jobs", type=int, default=2, help="compilers and programs that run at a time (default: 2)")
    return parser.parse_args()


def doctest_error(output):
    """The first failure that doctest tells, with its test case, for `run`."""
    why = re.search(r"(FATAL )?ERROR: .*", output)
    if not why:
        return ""
    cases = re.findall(r"TEST CASE:  (.*)", output[:why.start()])
    return f"{cases[-1][:80] if cases else ''}: {why.group(0)[:120]}"


def of_tests(rows, abort_after=0):
    """Mutants from rows of a list: name, header, text, what stands in its place, the test below tests/run, and why it is not found."""
    flags = ["--no-colors", f"--abort-after={abort_after}"]
    return [Mutant(name, header, text, instead, f"run/{test}_test.cpp", [*flags, f"--source-file=*/{test}_test.cpp"], *unseen)
            for name, header, text, instead, test, *unseen in rows]


SWITCH = """#pragma once
#include <cstdlib>
/// Whether this mistake is the one that is made.
inline bool chevron_mutant(int number) {
  static int const chosen = std::getenv("CHEVRON_MUTANT") != nullptr ? std::atoi(std::getenv("CHEVRON_MUTANT")) : -1;
  return number == chosen;
}
"""


def put_in_all(mutants, include):
    """Puts each mistake behind its number, in place of the groups of its text: statements, or expressions without a semicolon.
    Several may be in one place. An error's words for each whose text is not there once."""
    wrong, places = [], {}
    for number, mutant in enumerate(mutants):
        found = list(re.finditer(mutant.text, (include / mutant.header).read_text(), flags=re.DOTALL))
        if len(found) != 1:
            wrong.append(f"{mutant.name}: the header has this text {len(found)} times")
            continue
        for group, instead in enumerate([mutant.instead] if isinstance(mutant.instead, str) else mutant.instead, start=1):
            places.setdefault(mutant.header, {}).setdefault(found[0].span(group), []).append((number, instead))
    for header, spans in places.items():
        words = (include / header).read_text()
        begun = len(words)
        for (begin, end), here in sorted(spans.items(), reverse=True):
            if end > begun:
                wrong.append(f"{mutants[here[0][0]].name}: its text holds a part of another mutant's. Remedy: both take the same text")
                continue
            begun = begin
            made = words[begin:end]
            if made.endswith(";"):
                made = "".join(f"if (chevron_mutant({n})) {{ {instead} }} else " for n, instead in here) + f"{{ {made} }}"
            else:
                made = "(" + "".join(f"chevron_mutant({n}) ? ({instead}) : " for n, instead in here) + f"({made}))"
            words = words[:begin] + made + words[end:]
        (include / header).write_text(words)
    return wrong


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


def with_copy(command, place, output):
    """\\returns a compiler's command that reads the copied headers: the precompiled header holds the headers as they are"""
    command = re.sub(r" -include \S+cmake_pch\S*| -Xclang -include(-pch)? -Xclang \S+| -Winvalid-pch| -MD -MT \S+ -MF \S+", "", command)
    if str(ROOT / "include") not in command:
        raise SystemExit(f"the build folder is of other sources than {ROOT}. Remedy: the list of those sources")
    command = command.replace(str(ROOT / "include"), str(place / "include"))
    return re.sub(r" -o \S+", f" -w -include {place}/switch.hpp {output}", command)


def run_all(commands, build, jobs):
    """Runs compilers. \\returns the lines that tell an error"""
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        ran = list(pool.map(lambda command: subprocess.run(command, shell=True, cwd=build, capture_output=True, text=True), commands))
    wrong = []
    for each in ran:
        errors = [line for line in each.stderr.splitlines() if "error:" in line]
        wrong += errors[:10] or ([each.stderr[-1000:]] if each.returncode != 0 else [])
    return wrong


def commands_of(program, build):
    """\\returns ninja's commands for a program; the last one links"""
    return subprocess.run(["ninja", "-t", "commands", program], cwd=build, capture_output=True, text=True).stdout.splitlines()


def copy_headers(mutants, place):
    """Copies the headers with all mistakes. \\returns the errors"""
    shutil.copytree(ROOT / "include", place / "include")
    (place / "switch.hpp").write_text(SWITCH)
    return put_in_all(mutants, place / "include/chevron")


def tell_errors(wrong, mutants, place):
    """\\returns the exit code"""
    print("\n".join([*(line.replace(str(place), "") for line in wrong), f"{len(mutants)} mutants, {len(wrong)} errors"]))
    return 1 if wrong else 0


def check_syntax(program, mutants, build):
    """Compiles a file that includes the changed headers, as a source of the program is compiled: functions that are no templates, and of
    templates all that depends on no argument. \\returns the exit code"""
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        wrong = copy_headers(mutants, place)
        (place / "all.cpp").write_text("".join(f"#include <chevron/{header}>\n" for header in sorted({m.header for m in mutants})))
        command = with_copy(command_of(mutants[-1].source, commands_of(program, build), build)[0], place, "-fsyntax-only")
        wrong += run_all([command.rsplit(" ", 1)[0] + f" {place}/all.cpp"], build, 1)
        return tell_errors(wrong, mutants, place)


def build_program(mutants, listed, build, place, jobs):
    """Compiles each source once, and links. \\returns the errors"""
    objects = {}
    for source in sorted({m.source for m in mutants}):
        command, replaced = command_of(source, listed, build)
        objects.setdefault(replaced, with_copy(command, place, f"-o {place}/{len(objects)}.o"))  # a batch compiles several sources
    if wrong := run_all(objects.values(), build, jobs):
        return wrong
    links = listed[-1]
    others = [name for name in re.findall(r"\S+\.o\b", links) if name not in objects]
    if wrong := run_all([" ".join(["ninja", *others])], build, 1):
        return wrong
    for number, replaced in enumerate(objects):
        # The mutants' objects come before all others: functions of headers that others hold too must be the mutants'.
        links = re.sub(r"(\S+\.o)", rf"{place}/{number}.o \1", links.replace(replaced, ""), count=1)
    return run_all([re.sub(r" -o \S+", f" -o {place}/program", links)], build, 1)


def package_with(mutant, source, place):
    """Copies the package of Python from the folder `source` to the folder `place`, beside a link to the headers, and puts a mistake into one
    of its files. Raises: ValueError where the file does not have the mistake's text once."""
    shutil.copytree(source / "python", place / "python", ignore=shutil.ignore_patterns("__pycache__"))
    (place / "include").symlink_to(source / "include")
    file = place / mutant.header
    text, count = re.subn(mutant.text, lambda _: mutant.instead, file.read_text(), flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"{mutant.name}: {mutant.header} has its text {count} times")
    file.write_text(text)


def verdict_of(command, told, number, longest, **environment):
    """\\returns why a command with a mistake fails, in one line, or nothing; and the seconds that it took"""
    around = dict(os.environ, TORCH_FR_BUFFER_SIZE="0", OMP_NUM_THREADS="1", CHEVRON_MUTANT=str(number), **environment)
    begun = time.monotonic()
    with subprocess.Popen(command, env=around, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          errors="replace", start_new_session=True) as ran:
        try:
            output, _ = ran.communicate(timeout=longest)
            verdict = "" if ran.returncode == 0 else told(output) or f"exit code {ran.returncode}"
        except subprocess.TimeoutExpired:
            verdict = f"it does not end within {longest:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ran.pid, signal.SIGKILL)  # the processes that the program has started, too
    return verdict, time.monotonic() - begun


def tell(mutant, verdict):
    """Prints what came of a mutant. \\returns whether that is wrong"""
    how = f"found: {verdict}" if verdict else f"nothing: {mutant.unseen}" if mutant.unseen else "NOT FOUND"
    print(f"{mutant.name}: {how}", flush=True)
    return (verdict == "") != (mutant.unseen != "")


def run(program, mutants, how, told):
    """\\param program as ninja calls it
    \\param told told(output): why the program has failed, in one line, or nothing
    \\returns the exit code: 1 where a mutant is not found that should be, or the other way round"""
    mutants = [m for m in mutants if not how.names or any(n in m.name for n in how.names)]
    if how.compile:
        return check_syntax(program, mutants, how.build)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as at_end:
        place = pathlib.Path(folder)
        wrong = copy_headers(mutants, place) or build_program(mutants, commands_of(program, how.build), how.build, place, how.jobs)
        if wrong:
            return tell_errors(wrong, mutants, place)

        pool = concurrent.futures.ThreadPoolExecutor(how.jobs)
        at_end.callback(pool.shutdown, cancel_futures=True)  # an interrupted list starts no more programs

        def tried(arguments, number, seconds):
            return pool.submit(verdict_of, [place / "program", *arguments], told, number, seconds)

        # A program that takes much longer with a mistake than without one hangs.
        longest = {}
        as_they_are = {arguments: tried(arguments, -1, 1000) for arguments in sorted({tuple(m.arguments) for m in mutants})}
        for arguments, ran in as_they_are.items():
            verdict, took = ran.result()
            longest[arguments] = 30 + 2 * took
            print(f"{' '.join(arguments)}: {took:.0f} s without a mistake{verdict and ', and fails: ' + verdict}", flush=True)
            wrong += [verdict] if verdict else []
        found = 0
        all_ran = [tried(m.arguments, number, longest[tuple(m.arguments)]) for number, m in enumerate(mutants)]
        for mutant, ran in zip(mutants, all_ran):
            verdict, _ = ran.result()
            found += verdict != ""
            wrong += [mutant.name] if tell(mutant, verdict) else []
    print(f"\n{found} of {len(mutants)} found")
    return 1 if wrong else 0
