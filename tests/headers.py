# timeout: 3000
"""Each public header of include/chevron compiles with nothing before it but its own includes, as for a user who includes it first;
and all headers compile without a warning that a strict project asks for.

    python3 tests/headers.py [--jobs N] COMPILER LIST      LIST is written by CMake: build/headers/list.json

Public are the headers that an umbrella (include/chevron/*.hpp) names. All others, and the umbrellas that only include, are compiled
together in one file, which includes each twice: a header without a guard is refused. Smaller headers come first, so each has before
it none of the headers that include it: most forgotten includes are found there, too, though not all.

The cost of a public header is mostly the cost of its includes, which are compiled once for all. Public headers stand in a tree: the
parent of each is the largest header that it includes, Chevron's own or LibTorch's. So a header includes all headers on its way from
the root, and a forgotten include stays missing. Clang precompiles each parent on top of its own parent; other compilers take the
way to each leaf of the tree as one file. A header that is refused there is compiled alone, and only that counts: clang 16 does not
get all such trees right. Only includes that stand before all other lines decide on the tree: an include after a macro, a condition
or code may mean another thing there.

Compiled headers are noted with the text of all their includes, and are compiled again when that text has changed.
"""
import argparse
import concurrent.futures
import functools
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

# A precompiled header is the compiler's main file, where #pragma once would be warned of, and clang 22 warns of functions of
# libstdc++ 12 that are deprecated.
STRICT = ["-Werror", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wsign-conversion", "-Wshadow", "-Wno-pragma-once-outside-header",
          "-Wno-deprecated-declarations"]
CONTINUED = re.compile(r"\\\n")
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
HEAD = re.compile(r'^[ \t]*(?:#[ \t]*include[ \t]*["<][^">]+[">]|#[ \t]*pragma[ \t]+once|)[ \t]*$')
INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(["<])([^">]+)[">]')
ERROR_IN = re.compile(r"^(/\S+?):\d+:\d+: (?:fatal )?error: ", re.M)


class tree:
    """Headers by path, the parent of each, and the headers below each."""

    def __init__(self, headers, folders):
        self.folders = folders
        self.headers = headers
        # A library's header is worth compiling by itself where two others stand on it.
        libraries = {p for h in headers for p, certain in self.includes(h) if certain} - set(headers)
        while True:
            self.nodes = headers + sorted(libraries)
            self.parent = self.parents()
            standing = [list(self.parent.values()).count(p) for p in sorted(libraries)]
            few = {p for p, count in zip(sorted(libraries), standing) if count < 2}
            if not few:
                break
            libraries -= few
        self.below = {n: [m for m in self.nodes if self.parent[m] == n] for n in self.nodes}

    @functools.cache
    def find(self, name, folder):
        for each in ([folder] if folder else []) + self.folders:
            if os.path.isfile(os.path.join(each, name)):
                return os.path.join(each, name)
        return None  # the compiler's own

    @functools.cache
    def includes(self, path):
        """What a file includes, and whether it does so before all other lines."""
        found, head = [], True
        for line in COMMENT.sub(" ", CONTINUED.sub("", pathlib.Path(path).read_text(errors="replace"))).split("\n"):
            head = head and HEAD.match(line) is not None
            include = INCLUDE.match(line)
            if include and (place := self.find(include[2], os.path.dirname(path) if include[1] == '"' else None)):
                found.append((place, head))
        return found

    @functools.cache
    def closure(self, path, certain=True):
        seen, left = {path}, [path]
        while left:
            for place, sure in self.includes(left.pop()):
                if (sure or not certain) and place not in seen:
                    seen.add(place)
                    left.append(place)
        return frozenset(seen)

    def only_includes(self, path):
        lines = COMMENT.sub(" ", CONTINUED.sub("", pathlib.Path(path).read_text())).split("\n")
        return all(HEAD.match(line) for line in lines)

    @functools.cache
    def size(self, path):
        return sum(os.path.getsize(p) for p in self.closure(path, certain=False))

    def parents(self):
        """The largest of what a header includes; none where two include each other."""
        nodes = set(self.nodes)
        return {n: max((p for p in self.closure(n) & nodes if p != n and n not in self.closure(p)),
                       key=lambda p: (self.size(p), p), default=None) for n in self.nodes}

    def way(self, node):
        return (self.way(self.parent[node]) if self.parent[node] else []) + [node]


class checker:
    def __init__(self, compiler, listed, folder, jobs):
        self.compiler, self.folder, self.jobs = compiler, folder, jobs
        self.include = os.path.join(listed["source"], "include")
        self.all = sorted(listed["headers"])
        folders = [*listed["folders"], "/usr/include"]
        self.tree = tree(self.public(tree([], folders)), folders)
        self.together = sorted(set(self.all) - set(self.tree.headers), key=lambda h: (self.tree.size(h), h))
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        self.precompiles = "clang" in version
        self.command = [compiler, "-std=c++20", "-O0", *STRICT, *(f"-D{d}" for d in listed["definitions"]), "-I" + self.include,
                        "-fconstexpr-steps=268435456" if self.precompiles else "-fconstexpr-ops-limit=268435456"]
        for each in listed["folders"]:
            if each not in (self.include, "/usr/include"):
                self.command += ["-isystem", each]
        self.told = version + " ".join(self.command) + pathlib.Path(__file__).read_text()
        self.refused = []

    def public(self, headers):
        """The headers that are compiled alone."""
        umbrellas = [h for h in self.all if pathlib.Path(h).parent.parent == pathlib.Path(self.include)]
        named = {place for umbrella in umbrellas for place, _ in headers.includes(umbrella)}
        return [h for h in self.all if (not headers.only_includes(h) if h in umbrellas else h in named)]

    def name(self, node):
        return next(os.path.relpath(node, f) for f in self.tree.folders if node.startswith(f + "/"))

    def file(self, node, ending):
        return self.folder / (self.name(node).replace("/", "_") + ending)

    @functools.cache
    def stamp(self, path):
        """Of Chevron's files the text, of the many others size and time."""
        if path.startswith(self.include + "/"):
            return pathlib.Path(path).read_text()
        status = os.stat(path)
        return f"{status.st_size} {status.st_mtime_ns}"

    def key(self, nodes):
        """Changes with each text on which the verdict about these headers depends."""
        read = frozenset().union(*(self.tree.closure(node, certain=False) for node in nodes))
        words = [self.told, *nodes, *(word for p in sorted(read) for word in (p, self.stamp(p)))]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()

    def noted(self, note, nodes):
        return note.exists() and note.read_text() == self.key(nodes)

    def compile(self, arguments, text=None):
        return subprocess.run([*self.command, *arguments], input=text, capture_output=True, text=True)

    def note(self, node, done):
        """Whether this header was accepted; what the compiler says of one that was not is kept."""
        if node in self.tree.headers:
            if done.returncode == 0:
                self.file(node, ".ok").write_text(self.key([node]))
            else:
                self.refused.append((self.name(node), done.stderr))
        return done.returncode == 0

    def look_at(self, node, wanted):
        """Compiles a header on top of its parent, or else alone, for those of the wanted that stand on it, which it returns."""
        below = [n for n in self.tree.below[node] if n in wanted]
        made = self.file(node, ".pch")
        how = ["-Xclang", "-fno-pch-timestamp", "-fpch-instantiate-templates", "-x", "c++-header", node, "-o", made,
               *([] if node in self.tree.headers else ["-w"])]  # warnings of libraries are not ours
        parent = self.tree.parent[node]
        for on in [self.file(parent, ".pch"), None] if parent and self.file(parent, ".pch").exists() else [None]:
            done = self.compile([*(["-include-pch", on] if on else []), *(how if below else ["-fsyntax-only", "-x", "c++", "-"])],
                                f"#include <{self.name(node)}>\n")
            if done.returncode == 0:
                break
        if not self.note(node, done):
            made.unlink(missing_ok=True)
        return below

    def look_at_way(self, leaf):
        """The same of all on the way to a leaf, as one file."""
        way = [n for n in self.tree.way(leaf) if n in self.tree.headers]
        as_file = ["-fsyntax-only", "-x", "c++", "-"]
        together = self.compile(as_file, "".join(f"#include <{self.name(n)}>\n" for n in way))
        for node in way:
            self.note(node, together if together.returncode == 0 else self.compile(as_file, f"#include <{self.name(node)}>\n"))
        return []

    def look_together(self):
        """Compiles all headers that are not public as one file."""
        limit = ["-ferror-limit=0"] if self.precompiles else []
        text = "".join(f"#include <{self.name(h)}>\n" * 2 for h in self.together)
        done = self.compile([*limit, "-fsyntax-only", "-x", "c++", "-"], text)
        if done.returncode == 0:
            (self.folder / "together.ok").write_text(self.key(self.together))
            return []
        places = [h for h in self.all if h in set(ERROR_IN.findall(done.stderr))]
        lines = done.stderr.splitlines()
        self.refused += [(self.name(h), "\n".join(line for line in lines if line.startswith(h + ":"))) for h in places]
        if not places:
            self.refused.append(("one of the headers that are not public", done.stderr))
        return []

    def release(self, node, standing):
        """Precompiled headers are large: each goes when nothing stands on it any more."""
        while node and standing[node] == 0:
            self.file(node, ".pch").unlink(missing_ok=True)
            node = self.tree.parent[node]
            if node:
                standing[node] -= 1

    def run(self):
        """How many headers were compiled. What is refused stands in `refused`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        left = [h for h in self.tree.headers if not self.noted(self.file(h, ".ok"), [h])]
        others = [] if not self.together or self.noted(self.folder / "together.ok", self.together) else self.together
        wanted = {n for h in left for n in self.tree.way(h)}
        with concurrent.futures.ThreadPoolExecutor(self.jobs) as pool:
            if self.precompiles:
                running = {pool.submit(self.look_at, n, wanted): n for n in wanted if not self.tree.parent[n]}
            else:
                leaves = [n for n in wanted if not any(m in wanted for m in self.tree.below[n])]
                running = {pool.submit(self.look_at_way, n): n for n in leaves}
            if others:
                running[pool.submit(self.look_together)] = None
            standing = {}  # on each of the tree: how many of those below are not done
            while running:
                for done in concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED).done:
                    node = running.pop(done)
                    below = done.result()
                    standing[node] = len(below)
                    running |= {pool.submit(self.look_at, n, wanted): n for n in below}
                    if self.precompiles:
                        self.release(node, standing)
        self.refused = list(dict(self.refused[::-1]).items())  # a public header once: an umbrella leads to it, too
        return len(left) + len(others)


# Below include/control. Public: the headers of parts/, which the umbrella names, and own.
CONTROLS = {
    "all": "",
    "own": "inline one not_only_includes() { return {}; }",
    "parts/one": "struct one {};",
    "parts/two": "#include <control/parts/one.hpp>\ninline one of_one() { return {}; }",
    "parts/three": "inline one forgotten() { return {}; }",
    "parts/four": "#include <control/parts/two.hpp>\n#if 0\n#include <control/parts/three.hpp>\n#endif\n"
                  "inline one of_two() { return of_one(); }",
    "parts/five": "#if 0\n#include <control/parts/two.hpp>\n#endif\ninline one not_included() { return of_one(); }",
    "parts/late": "inline one used_before() { return {}; }\n#include <control/parts/one.hpp>",
    "parts/comment": "/*\n#include <control/parts/one.hpp>\n*/ inline one commented() { return {}; }",
    "parts/macro": "#ifndef ONE\n#error\n#endif\n#include <control/parts/defines.hpp>",
    "parts/defines": "#define ONE",
    "parts/sign": "#include <control/parts/one.hpp>\ninline unsigned long changed(int number) { return number; }",
    "parts/six": "#include <control/parts/one.hpp>\n#include <control/parts/three.hpp>\n"
                 "inline one brought_along() { return forgotten(); }",
    "inside/right": "#include <control/parts/one.hpp>\ninline one of_inside() { return {}; }",
    "inside/sign": "inline unsigned long changed_inside(int number) { return number; }",
    "inside/shadow": "#include <control/parts/one.hpp>\ninline int hidden(int number) { { int number = 1; return number; } }",
    "inside/early": "inline larger forgotten_inside() { return {}; }",
    "inside/larger": "#include <control/inside/right.hpp>\nstruct larger : one {};",
    "inside/twice": "struct twice {};",
}
REFUSED = ["inside/early", "inside/shadow", "inside/sign", "inside/twice", "own", "parts/comment", "parts/five", "parts/late",
           "parts/macro", "parts/sign", "parts/three"]


def wrong_about_controls(compiler):
    """Small headers with planted faults: empty where just these are refused, and where right ones alone are accepted."""
    with tempfile.TemporaryDirectory() as folder:
        source = pathlib.Path(folder)
        for name, text in CONTROLS.items():
            file = source / f"include/control/{name}.hpp"
            file.parent.mkdir(parents=True, exist_ok=True)
            if name == "all":
                text = "".join(f"#include <control/{part}.hpp>\n" for part in ["parts/one", *CONTROLS] if part.startswith("parts/"))
            file.write_text(text if name == "inside/twice" else f"#pragma once\n{text}\n")

        def refused(names):
            listed = {"source": folder, "folders": [f"{folder}/include"], "definitions": [],
                      "headers": [f"{folder}/include/control/{name}.hpp" for name in names]}
            check = checker(compiler, listed, source / "made", 1)
            check.run()
            return sorted(name.removeprefix("control/").removesuffix(".hpp") for name, _ in check.refused)

        faulty, right = refused(CONTROLS), refused(["parts/one", "parts/two", "inside/right", "inside/larger"])
        return "" if faulty == REFUSED and not right else f"of the controls {faulty} are refused, and of right ones {right}"


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--jobs", type=int, default=1)
    flags.add_argument("compiler")
    flags.add_argument("list", type=pathlib.Path)
    asked = flags.parse_args()
    began = time.time()
    check = checker(asked.compiler, json.loads(asked.list.read_text()), asked.list.parent, asked.jobs)
    count = check.run()
    for name, words in check.refused:
        print(f"{name} does not compile: alone if it is public, without a warning, twice. Remedy: includes of all that it uses, casts, "
              "#pragma once. The compiler says:")
        print("\n".join(line[:300] for line in words.splitlines() if "error" in line)[:2000])
    wrong = wrong_about_controls(asked.compiler)
    print(wrong, end="\n" if wrong else "")
    print(f"{len(check.tree.headers)} headers alone and {len(check.together)} together, {count} of them new or changed: "
          f"{len(check.refused)} refused, {time.time() - began:.0f} s")
    return 1 if check.refused or wrong or not check.tree.headers or not check.together else 0


if __name__ == "__main__":
    sys.exit(main())
