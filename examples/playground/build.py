#!/usr/bin/env python3
"""The playground as one file: page.html with its styles, scripts and the engine, engine.cpp and
page.cpp compiled to WebAssembly.

    python3 examples/playground/build.py OUT.html [--work FOLDER]

Needs Debian's clang-16 lld-16 libc++-16-dev-wasm32 libc++abi-16-dev-wasm32 wasi-libc libclang-rt-16-dev-wasm32, Boost
and range-v3.
Compiles only what has changed since; exit status 77 where a compiler for WebAssembly is missing.
"""

import argparse
import base64
import gzip
import os
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
COMPILER, LINKER = "clang++-16", "wasm-ld-16"
CXX_HEADERS = pathlib.Path("/usr/lib/llvm-16/include/wasm32-wasi/c++/v1")
C_HEADERS, C_LIBRARY = pathlib.Path("/usr/include/wasm32-wasi"), pathlib.Path("/usr/lib/wasm32-wasi")
BUILTINS = pathlib.Path("/usr/lib/llvm-16/lib/clang/16/lib/wasi/libclang_rt.builtins-wasm32.a")
LIBRARIES = ["boost", "range", "concepts", "meta", "std"]


def missing():
    tools = [tool for tool in [COMPILER, LINKER] if not shutil.which(tool)]
    return tools + [str(path) for path in [CXX_HEADERS, C_HEADERS, BUILTINS] if not path.exists()]


def compiled(work):
    """The module. `work` keeps objects and what each was made from."""
    # /usr/include itself must not be on the path: its C library is another machine's.
    headers = work / "headers"
    headers.mkdir(parents=True, exist_ok=True)
    places = [pathlib.Path(p) for p in os.environ.get("CPLUS_INCLUDE_PATH", "").split(":") if p] + [
        pathlib.Path("/usr/include")
    ]
    for name in LIBRARIES:
        found = next((p / name for p in places if (p / name).is_dir()), None)
        link = headers / name
        if found and not link.exists():
            link.symlink_to(found)
    objects = []
    for source in ["engine.cpp", "page.cpp"]:
        to = work / (source + ".o")
        needs = to.with_suffix(".d")
        objects.append(to)
        if to.exists() and needs.exists():
            read = re.sub(r"\\\n", " ", needs.read_text()).partition(":")[2].split()
            if all(os.path.exists(p) and os.path.getmtime(p) <= to.stat().st_mtime for p in read + [__file__]):
                continue
        subprocess.run(
            [
                COMPILER,
                "--target=wasm32-wasi",
                "-std=c++20",
                "-O2",
                "-fexceptions",
                "-fconstexpr-steps=268435456",
                "-MMD",
                "-MF",
                needs,
                "-isystem",
                CXX_HEADERS,
                "-isystem",
                C_HEADERS,
                "-isystem",
                headers,
                "-I",
                ROOT / "include",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-c",
                HERE / source,
                "-o",
                to,
            ],
            check=True,
        )
    module = work / "page.wasm"
    subprocess.run(
        [
            LINKER,
            *objects,
            "-o",
            module,
            "--no-entry",
            "--export=_initialize",
            "--gc-sections",
            "--strip-all",
            f"-L{C_LIBRARY}",
            C_LIBRARY / "crt1-reactor.o",
            "-lc++",
            "-lc++abi",
            "-lc",
            BUILTINS,
        ],
        check=True,
    )
    return module.read_bytes()


def viewer(name):
    """A file of the viewer of reports, a raw string of C++ there."""
    lines = (ROOT / f"include/chevron/tools/show/viewer/{name}.inc").read_text().splitlines()
    assert lines[0] == 'R"js(' and lines[-1] == ')js"', name
    return "\n".join(lines[1:-1])


def page(module):
    text = lambda *names: "\n".join((HERE / name).read_text() if (HERE / name).exists() else viewer(name) for name in names)
    parts = {
        "style": text("viewer.css", "playground.css"),
        "script": text("viewer.js", "engine.js", "playground.js"),
        "worker": text("engine.js", "worker.js"),
        "wasm": base64.b64encode(gzip.compress(module, 9, mtime=0)).decode(),
    }
    assert all("</script" not in part for part in parts.values())
    return re.sub(r"\{\{(\w+)\}\}", lambda at: parts[at.group(1)], text("page.html"))


def main():
    asked = argparse.ArgumentParser()
    asked.add_argument("out", type=pathlib.Path)
    asked.add_argument("--work", type=pathlib.Path)
    given = asked.parse_args()
    if lacking := missing():
        print(
            "skipped: to compile for WebAssembly there is no",
            ", no ".join(lacking),
            "(Debian: clang-16 lld-16 libc++-16-dev-wasm32 " "libc++abi-16-dev-wasm32 wasi-libc libclang-rt-16-dev-wasm32)",
        )
        sys.exit(77)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    work = given.work or given.out.parent / "parts"
    module = compiled(work)
    text = page(module)
    given.out.write_text(text)
    print(f"{given.out}: {len(text)} bytes, of which the engine, {len(module)} bytes of WebAssembly, packed")


if __name__ == "__main__":
    main()
