#!/usr/bin/env python3
"""The rooms of include/chevron and the arrows between them.

Every folder is a room. ORDER lists the rooms as docs/inside/contributing.md draws them; a header may include headers of its own
room and of rooms that stand before it, never of one behind it, and no header includes itself by way of others. Umbrellas
(include/chevron/*.hpp) may include everything, no header but another umbrella includes them, and every header with public
names is included by an umbrella, directly or by way of others. A line has at most 130
columns. Without arguments it checks the repository and then itself: a copy with an arrow turned round, a cycle and a wide
line must each be found.

    python3 tests/rooms.py [folder with include/chevron]
"""
import pathlib
import re
import shutil
import sys
import tempfile

ORDER = [
    "base", "plan", "prove", "prove/bounds", "describe", "catalogue", "lower", "csv",
    "run/core", "run/comm", "run/comm/threads", "run/stage/graph", "run/stage", "run/execute", "run/train",
    "jobs", "transports/shared_memory", "transports", "transports/gloo", "transports/streams", "transports/gpu", "checkpoint", "data",
    "tools/search/problem", "tools/search/refute", "tools/search", "tools/search/lengths", "tools/show", "tools/profile",
    "tools/replan",
]
MOST_COLUMNS = 130


def complaints(include):
    """What is wrong with the headers below include/chevron, a sentence each."""
    headers = {str(p.relative_to(include)): p.read_text() for p in sorted(include.rglob("*.hpp")) if "shim" not in p.parts}
    reads = {name: re.findall(r"^#include <chevron/([^>]+[.]hpp)>", text, re.M) for name, text in headers.items()}
    room = lambda name: str(pathlib.PurePath(name).parent)
    wrong = []
    for name, text in headers.items():
        here = room(name)
        if here != "." and here not in ORDER:
            wrong.append(f"{name} stands in no room that tests/rooms.py knows")
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > MOST_COLUMNS:
                wrong.append(f"{name}:{number} has {len(line)} columns, more than {MOST_COLUMNS}")
        for other in reads[name]:
            if other not in headers:
                wrong.append(f"{name} includes {other}, which is not there")
            elif here != "." and room(other) == "." and other != "version.hpp":
                wrong.append(f"{name} includes the umbrella {other}: name the header that is needed")
            elif here != "." and room(other) != "." and ORDER.index(room(other)) > ORDER.index(here):
                wrong.append(f"{name} includes {other}: an arrow from {here} back to {room(other)}")
    for one in ORDER:
        if not any(room(name) == one for name in headers):
            wrong.append(f"{one} is empty")
    done = set()

    def walk(name, way):
        if name in way:
            wrong.append("a cycle: " + " -> ".join(way[way.index(name):] + [name]))
        elif name in headers and name not in done:
            for other in reads[name]:
                walk(other, way + [name])
            done.add(name)

    for name in headers:
        walk(name, [])
    reached, left = set(), [name for name in headers if room(name) == "."]
    while left:
        name = left.pop()
        if name in headers and name not in reached:
            reached.add(name)
            left += reads[name]
    for name, text in headers.items():
        if name not in reached and re.search(r"^namespace chevron(?!::detail\b|::\w+::detail\b)", text, re.M):
            wrong.append(f"{name} has public names, and no umbrella (include/chevron/*.hpp) reaches it")
    return wrong


def misplaced(unit):
    """Which tests below tests/unit stand in no room of include/chevron. `accelerator` holds the judges of tests/accelerator, `programs` tests
    of headers of examples/common."""
    rooms = ORDER + ["run", "accelerator", "programs"]
    return [f"tests/unit/{one.relative_to(unit)} stands in no room of include/chevron: tests/unit/<room>/{one.name}"
            for one in sorted(unit.rglob("*.cpp")) if one.parent.relative_to(unit).as_posix() not in rooms]


def changed(include, words, name, change):
    """Is a fault that is put into a copy found, in these words?"""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "chevron"
        shutil.copytree(include, copy)
        file = copy / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(change(file.read_text() if file.exists() else "#pragma once\n"))
        return any(words in line for line in complaints(copy))


def main():
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else pathlib.Path(__file__).resolve().parents[1] / "include"
    include = root / "chevron"
    wrong = complaints(include) + misplaced(root.parent / "tests" / "unit")
    added = lambda line: lambda text: text + line + "\n"
    for words, name, change in [
        ("an arrow from plan back to run/core", "plan/shape.hpp", added("#include <chevron/run/core/error.hpp>")),
        ("an arrow from run/comm back to run/train", "run/comm/transport.hpp", added("#include <chevron/run/train/trainer.hpp>")),
        ("a cycle: ", "run/core/error.hpp", added("#include <chevron/run/core/error.hpp>")),
        ("includes the umbrella", "run/stage/stage.hpp", added("#include <chevron/run.hpp>")),
        ("which is not there", "run/stage/stage.hpp", added("#include <chevron/run/stage/stages.hpp>")),
        ("columns, more than 130", "plan/shape.hpp", added("//" + " x" * 65)),
        ("no umbrella", "run/stage/new.hpp", added("namespace chevron {\nint lost();\n}")),
        ("stands in no room", "run/other/new.hpp", added("")),
    ]:
        if not changed(include, words, name, change):
            wrong.append(f"this check does not find `{words}` in a copy where it is so")
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "new_test.cpp").touch()
        if not misplaced(pathlib.Path(folder)):
            wrong.append("this check does not find a test that stands in no room")
    for line in wrong:
        print(line)
    print(f"{len(wrong)} complaints" if wrong else "every arrow points one way")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
