"""Compiles the binding of Chevron to this Python's torch, once for each of their versions, and loads it.

A binary is stored in a cache folder: CHEVRON_PIPELINING_CACHE, else `chevron_pipelining` in the user's cache folder. Its name
contains a hash of Chevron's headers, the binding's sources, the versions of torch and Python, the compiler and its options. Of
several processes that need the same binary, one compiles; the others wait. A binary wheel contains the binary for one torch.

Under a torch built for CUDA the binding has NCCL, too, where the headers of CUDA's runtime and of NCCL are found (`nccl`).
"""
import contextlib
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time

import torch

HERE = pathlib.Path(__file__).resolve().parent
OPTIONS = ["-std=c++20", "-O1", "-w", "-fPIC", "-DUSE_C10D", "-DUSE_C10D_GLOO", "-DUSE_DISTRIBUTED"]
OLDEST_TORCH = (2, 9)
CUDA_HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h", "nv/target", "nccl.h")
CUDA_LIBRARIES = {"c10_cuda": "libc10_cuda.so", "cudart": "libcudart.so.{major}", "nccl": "libnccl.so.2"}  # those that torch has loaded


class BuildError(ImportError):
    """The binding cannot be compiled here."""


def headers():
    """The folder of Chevron's headers: beside the sources in an installed package, else of the checkout."""
    for folder in (HERE / "include", HERE.parent.parent / "include"):
        if (folder / "chevron" / "version.hpp").is_file():
            return folder
    raise BuildError(f"chevron_pipelining: no headers of Chevron in {HERE / 'include'}. Remedy: install the package again")


def version():
    """Chevron's version, `0.1.0`, read from the headers as the package's metadata is; a checkout has no metadata."""
    text = (headers() / "chevron" / "version.hpp").read_text()
    return ".".join(re.search(rf"^#define CHEVRON_VERSION_{part} (\d+)$", text, re.M)[1] for part in ("MAJOR", "MINOR", "PATCH"))


def cache():
    """The folder of compiled bindings."""
    named = os.environ.get("CHEVRON_PIPELINING_CACHE")
    return pathlib.Path(named or pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "chevron_pipelining")


def compiler():
    """The command of a C++ compiler: of CXX, else the first that is found; None: none."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    for name in ("g++", "clang++", "c++"):
        if shutil.which(name):
            return [name]
    return None


def cuda_folders(major):
    """Folders that may hold CUDA's `include` and `lib`: of CHEVRON_CUDA_DIR, the packages beside torch, a toolkit. Those with another CUDA
    are left out, as cmake/FindLibTorchCUDA.cmake does."""
    nvcc = shutil.which("nvcc")
    given = [folder for name in ("CHEVRON_CUDA_DIR", "CUDA_HOME", "CUDA_PATH") for folder in os.environ.get(name, "").split(":") if folder]
    wheels = sorted((pathlib.Path(torch.__file__).resolve().parent.parent / "nvidia").glob("*"))
    toolkits = ([pathlib.Path(nvcc).resolve().parent.parent] if nvcc else []) + ["/usr/local/cuda", f"/usr/local/cuda-{major}", "/usr"]
    for folder in map(pathlib.Path, [*given, *wheels, *toolkits]):
        runtime = folder / "include" / "cuda_runtime_api.h"
        number = re.search(r"^#define +CUDART_VERSION +(\d+)", runtime.read_text(errors="replace"), re.M) if runtime.is_file() else None
        if folder.is_dir() and (number is None or int(number[1]) // 1000 == major):
            yield folder


@functools.lru_cache(1)
def nccl():
    """What the binding needs for GPUs: (folders of headers, libraries, reason). `reason`: why it is compiled without, and the remedy; else empty."""
    if os.environ.get("CHEVRON_PIPELINING_NCCL") == "0":
        return [], [], "CHEVRON_PIPELINING_NCCL is 0. Remedy: unset it"
    if torch.version.cuda is None:
        return [], [], f"torch {torch.__version__} is built without CUDA. Remedy: a torch for CUDA"
    major = int(torch.version.cuda.split(".")[0])
    folders, includes, libraries, missing = list(cuda_folders(major)), [], [], []
    for header in CUDA_HEADERS:
        found = [folder / part for folder in folders for part in ("include", "include/cccl") if (folder / part / header).is_file()]
        includes += found[:1]
        missing += [] if found else [header]
    base = pathlib.Path(torch.__file__).resolve().parent
    for name in CUDA_LIBRARIES.values():
        name = name.format(major=major)
        found = [folder / part / name for folder in (base, *folders) for part in ("lib", "lib64", "lib/x86_64-linux-gnu", "lib/aarch64-linux-gnu")
                 if (folder / part / name).is_file()]
        libraries += found[:1]
        missing += [] if found else [name]
    if missing:
        return [], [], (f"torch is built for CUDA {torch.version.cuda}, and there is no {', '.join(missing)} of CUDA {major}. Remedy: pip install "
                        "'cuda-toolkit[crt,cccl]' beside torch, or CHEVRON_CUDA_DIR=<folder that holds include/ and lib/>")
    return list(dict.fromkeys(includes)), libraries, ""


def options():
    """The compiler's options, those of the user (CHEVRON_PIPELINING_CXXFLAGS) last."""
    reason = nccl()[2]
    gpus = [f"-DCHEVRON_NO_NCCL={json.dumps(reason, ensure_ascii=False)}"] if reason else ["-DUSE_C10D_NCCL"]
    return OPTIONS + gpus + shlex.split(os.environ.get("CHEVRON_PIPELINING_CXXFLAGS", ""))


def stem():
    """How a binary's name begins."""
    return "_binding" if nccl()[2] else "_binding-nccl"


def sources_hash():
    """A hash of a binary's inputs beside the compiler: sources, headers, torch, Python, machine."""
    mark = hashlib.sha256()
    for one in (torch.__version__, sysconfig.get_config_var("EXT_SUFFIX"), platform.machine()):
        mark.update(one.encode() + b"\0")
    for folder in (HERE / "binding", headers() / "chevron"):
        for file in sorted(folder.rglob("*.[hci]*")):
            mark.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return mark.hexdigest()[:16]


def compiler_hash(command):
    """A hash of a compiler's version and options."""
    try:
        version = subprocess.run(command + ["--version"], capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as problem:
        raise BuildError(f"chevron_pipelining: the compiler {shlex.join(command)} does not run ({problem}). Remedy: CXX=<a C++20 compiler>") from problem
    return hashlib.sha256(version + repr(command + options()).encode()).hexdigest()[:8]


def command_lines(command, target):
    """The commands that compile and link the binding into `target`."""
    base = pathlib.Path(torch.__file__).resolve().parent
    version = subprocess.run(command + ["--version"], capture_output=True, text=True).stdout
    limit = "-fconstexpr-steps=268435456" if "clang" in version else "-fconstexpr-ops-limit=268435456"
    system = [headers() / "chevron" / "transports" / "gloo" / "shim", HERE / "include" / "third_party", base / "include",
              base / "include" / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"], *nccl()[0]]
    part = target.with_suffix(".o")
    return [command + [limit] + options() + [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-I{headers()}"]
            + [word for folder in system for word in ("-isystem", str(folder))] + ["-c", str(HERE / "binding" / "binding.cpp"), "-o", str(part)],
            command + ["-shared", str(part), "-o", str(target), f"-Wl,-rpath,{base / 'lib'}", f"-L{base / 'lib'}",
                       "-ltorch_cpu", "-ltorch_python", "-lc10", "-ltorch", "-lpthread", *map(str, nccl()[1])]]


def needs(command):
    """Checks torch, compiler and Python.h; the BuildError names the missing one."""
    if tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]) < OLDEST_TORCH:
        raise BuildError(f"chevron_pipelining: torch {torch.__version__} is too old. Remedy: torch {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]} or later")
    if command is None:
        raise BuildError("chevron_pipelining: no C++ compiler (g++, clang++ or CXX), which compiles the binding for this torch once. Remedy: "
                         "`apt install g++`; or `python -m chevron_pipelining.build` on a machine of the same kind with a compiler, and its "
                         f"cache folder here: CHEVRON_PIPELINING_CACHE (now {cache()})")
    if not (pathlib.Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        raise BuildError(f"chevron_pipelining: no Python.h in {sysconfig.get_paths()['include']}. Remedy: `apt install python3-dev`")


@contextlib.contextmanager
def one_process(lock):
    """Lets one process of the machine at a time into the block; the kernel frees the lock of a process that ends."""
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text):
    """Prints a line of progress."""
    sys.stderr.write(f"chevron_pipelining: {text}\n")
    sys.stderr.flush()


def compile_to(command, target):
    """Compiles the binding; `target` appears once it is whole."""
    needs(command)
    say(f"compiling the binding for torch {torch.__version__} by {shlex.join(command)}, once on this machine: one to four minutes …")
    began = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = pathlib.Path(folder) / target.name
        for line in command_lines(command, made):
            ran = subprocess.run(line, capture_output=True, text=True)
            if ran.returncode == 0:
                continue
            missing = "boost/" in ran.stderr and "No such file" in ran.stderr or "'boost/" in ran.stderr
            without = "" if nccl()[2] else ", or for the CPU alone CHEVRON_PIPELINING_NCCL=0"
            raise BuildError(f"chevron_pipelining: the compiler failed: {shlex.join(line)}\n{ran.stderr[-4000:]}"
                             + ("\nRemedy: `apt install libboost-dev`" if missing else f"\nRemedy: CXX=<g++ 12 or later, or clang++ 16 or later>{without}"))
        os.replace(made, target)
    say(f"compiled in {time.monotonic() - began:.0f} s: {target}")


def shipped():
    """The path of the binary that a binary wheel has for this torch, Python and machine; other wheels have no such file."""
    return HERE / "compiled" / f"_binding-{sources_hash()}.so"


def binary():
    """The path of the compiled binding; compiles it where neither wheel nor cache has it. Options of the user's are compiled."""
    if shipped().is_file() and not os.environ.get("CHEVRON_PIPELINING_CXXFLAGS"):
        return shipped()
    folder = cache() / sources_hash()
    command = compiler()
    if command is None:  # as on a node that only computes: any compiler's binary serves
        for found in sorted(folder.glob("_binding-*.so"), reverse=True):  # with NCCL first
            return found
        needs(command)
    target = folder / f"{stem()}-{compiler_hash(command)}.so"
    if not target.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with one_process(folder / "lock"):
            if not target.is_file():
                compile_to(command, target)
    return target


def load():
    """The binding as a module."""
    path = str(binary())
    loader = importlib.machinery.ExtensionFileLoader("_binding", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_file_location("_binding", path, loader=loader))
    loader.exec_module(module)
    return module
