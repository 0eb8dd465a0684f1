#!/usr/bin/env python3
"""The compile cost of a file that trains: alone, with the precompiled headers and with the library of docs/guides/compile-times.md.

  run_side.py [--build FOLDER] [--compiler g++] [--level=-O0]     measure once, print the table

`./dev bench training-compile` measures the same for docs/reference/benchmarks.md.

The flags are those of `minimal_train` in the build folder (compile_commands.json), but optimised as a release is, so LibTorch is the one
that the build found. Rows of chevron_precompile are measured in tests/consumer/precompile, a project that calls it. Seconds are those
of the CPU, user and system, of one compiler process; ccache has no part in it.
"""
import argparse
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "minimal_train.cpp"
PLAIN = ROOT / "bench" / "compile" / "plain_loop.cpp"
CONSUMER = ROOT / "tests" / "consumer" / "precompile"
INTERFACES = ROOT / "cmake" / "compiled" / "interfaces.py"


def flags_of(build):
    """Include folders and definitions of a program on chevron::run."""
    entries = json.loads((build / "compile_commands.json").read_text())
    entry = next((e for e in entries if e["file"].endswith("/examples/minimal_train.cpp")), None)
    if entry is None:
        sys.exit(f"{build}/compile_commands.json knows no examples/minimal_train.cpp: configure with LibTorch")
    words, flags = iter(shlex.split(entry["command"])), []
    for word in words:
        if word in ("-isystem", "-I"):
            flags += [word, next(words)]
        elif re.match(r"-(I|D|std=|fconstexpr)", word):
            flags.append(word)
    return [f for f in flags if "cmake_pch" not in f] + ["-Winvalid-pch"]


def measure(command, cwd):
    """CPU seconds and peak MB of one compiler."""
    process = subprocess.Popen(command, cwd=cwd)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = status
    if status != 0:
        sys.exit(f"failed: {shlex.join(command)}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


def torch_headers():
    """The headers outside of Chevron that run.hpp and what it includes name."""
    seen, todo, found = set(), ["chevron/run.hpp"], []
    while todo:
        header = todo.pop(0)
        if header in seen:
            continue
        seen.add(header)
        for included in re.findall(r"^#include <([^>]+)>", (ROOT / "include" / header).read_text(), re.M):
            if included.startswith("chevron/"):
                todo.append(included)
            elif re.match(r"(ATen|c10|torch)/", included) and included not in found:
                found.append(included)
    return "".join(f"#include <{h}>\n" for h in found)


def precompiled(libtorch, compiler, level, where):
    """The compiler's commands of a program that calls chevron_precompile, each after those that it needs: {what: words}."""
    configure = ["cmake", "-S", CONSUMER, "-B", where, "-G", "Ninja", f"-DCMAKE_CXX_COMPILER={compiler}", f"-DCMAKE_CXX_FLAGS={level}",
                 f"-DCHEVRON_SOURCE={ROOT}", f"-DCHEVRON_TORCH_DIR={libtorch}", f"-DTRAINING_PROGRAM={EXAMPLE}"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    commands = {e["file"]: e["command"] for e in json.loads((where / "compile_commands.json").read_text())}
    header = re.search(r"(\S*/chevron-precompiled-\w+\.dir)/cmake_pch\.hxx\b", commands[str(EXAMPLE)])[1]
    found = {}
    for what, file in (
        ("the header of `chevron_precompile`: once", f"{header}/cmake_pch.hxx.cxx"),
        ("functions of this header: once", f"{header}/cmake_pch.hxx.pch"),
        ("`examples/minimal_train.cpp` with both", str(EXAMPLE)),
    ):
        if file in commands:
            found[what] = shlex.split(commands[file])
            made = where / found[what][found[what].index("-o") + 1]
            made.parent.mkdir(parents=True, exist_ok=True)
    return found


def linked(compiler, flags, level, where):
    """The compiler's commands of a program that links chevron::compiled, and of the library: {what: words}."""
    subprocess.run([sys.executable, INTERFACES, ROOT / "include", where], check=True, stdout=subprocess.DEVNULL)
    aliases = ["-Xclang", "-mno-constructor-aliases"] if "clang" in compiler else []

    def command(file, *folders):
        return [compiler, *(f"-I{where / f}" for f in (*folders, "interfaces")), *flags, level, "-c", str(file), "-o", "x.o"]

    found = {}
    for source in sorted(where.glob("*/*.cpp")):
        name = source.stem
        found[f"the library of `chevron::compiled`, its source `{name}`: once"] = command(source, f"{name}/bodies") + aliases
    found["`examples/minimal_train.cpp` with `chevron::compiled`"] = command(EXAMPLE)
    return found


def libtorch_of(flags):
    """The folder of LibTorch of a compiler's flags."""
    return next(pathlib.Path(f).parent for f in flags if f.endswith("/include") and (pathlib.Path(f) / "ATen/ATen.h").exists())


def rows(build, compiler, levels=("-O0", "-O2")):
    """What each way of compiling costs: {what, level, seconds, mb}, as they come."""
    flags = flags_of(build.resolve())
    text = EXAMPLE.read_text()
    recommended = "".join(re.findall(r"^#include <(?:torch|chevron)/.*>\n", text, re.M))
    with tempfile.TemporaryDirectory() as folder:
        where = pathlib.Path(folder)
        (where / "torch_alone.cpp").write_text(torch_headers())
        (where / "run.cpp").write_text("#include <chevron/run.hpp>\n")
        (where / "schedule.cpp").write_text("#include <chevron/schedule.hpp>\n")
        (where / "train.cpp").write_text(text)
        (where / "pch.hpp").write_text(recommended)

        def row(what, level, *command):
            seconds, memory = measure([compiler, *flags, level, *command], where)
            return {"what": what, "level": level, "seconds": seconds, "mb": memory}

        yield row("`<chevron/schedule.hpp>` alone", "-O0", "-c", "schedule.cpp", "-o", "x.o")
        yield row("the headers of LibTorch that `<chevron/run.hpp>` includes, alone", "-O0", "-c", "torch_alone.cpp", "-o", "x.o")
        yield row("`<chevron/run.hpp>` alone", "-O0", "-c", "run.cpp", "-o", "x.o")
        for level in levels:
            yield row("the loop of `examples/minimal_train.cpp` in plain LibTorch", level, "-c", str(PLAIN), "-o", "x.o")
            yield row("`examples/minimal_train.cpp`", level, "-c", "train.cpp", "-o", "x.o")
            yield row("the precompiled header: once", level, "-x", "c++-header", "pch.hpp", "-o", "pch.hpp.gch")
            yield row("`examples/minimal_train.cpp` with it", level, "-include", "pch.hpp", "-c", "train.cpp", "-o", "x.o")
            (where / "pch.hpp.gch").unlink()
            for what, words in linked(compiler, flags, level, where / "compiled").items():
                seconds, memory = measure(words, where)
                yield {"what": what, "level": level, "seconds": seconds, "mb": memory}
            project = where / f"project{level}"
            for what, words in precompiled(libtorch_of(flags), compiler, level, project).items():
                seconds, memory = measure(words, project)
                yield {"what": what, "level": level, "seconds": seconds, "mb": memory}


def main():
    words = argparse.ArgumentParser()
    words.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    words.add_argument("--compiler", default="g++")
    words.add_argument("--level", action="append", choices=["-O0", "-O1", "-O2", "-O3"], help="of optimisation; default: -O0 and -O2")
    asked = words.parse_args()
    for row in rows(asked.build, asked.compiler, asked.level or ("-O0", "-O2")):
        print("| %s | `%s` | %.1f | %.0f |" % (row["what"], row["level"], row["seconds"], row["mb"]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
