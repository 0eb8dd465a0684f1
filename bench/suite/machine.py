"""The conditions of figures: the machine, the compiler, versions, the commit, and the load of the processors by other programs."""

import os
import pathlib
import platform
import re
import subprocess
import time

QUIET = 0.05  # of all processors: what others may use while nothing of ours runs

ROOT = pathlib.Path(__file__).resolve().parents[2]


def said_by(*command, cwd=None):
    """What a program prints; nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def found(pattern, path):
    try:
        match = re.search(pattern, pathlib.Path(path).read_text(errors="replace"), re.M)
    except OSError:
        return ""
    return match.group(1).strip() if match else ""


def processor():
    threads = os.cpu_count()
    name = found(r"^model name\s*: (.*)", "/proc/cpuinfo") or platform.machine()
    listed = said_by("lscpu", "-p=CORE,SOCKET").splitlines()
    cores = len({line for line in listed if line and not line.startswith("#")}) or threads
    many = f"{cores} core" + ("s" if cores > 1 else "")
    return f"{name}, " + (many if cores == threads else f"{threads} hyperthreads of {many}")


def libtorch_of(build):
    """The version of the LibTorch that a build folder was configured with."""
    folder = found(r"^CHEVRON_TORCH_DIR:\w+=(.+)", build / "CMakeCache.txt")
    for torch in [pathlib.Path(folder)] if folder else sorted((ROOT / ".venv" / "lib").glob("python3*/site-packages/torch")):
        version = found(r"^__version__ = '([^']+)'", torch / "version.py") or found(r"(\S+)", torch / "build-version")
        if version:
            return version
    return "of unknown version"


def machine(build):
    name = r'^PRETTY_NAME="?([^"\n]+)'
    kib = int(found(r"^MemTotal:\s*(\d+)", "/proc/meminfo") or 0)
    compiler = found(r"^CMAKE_CXX_COMPILER:\w+=(.+)", build / "CMakeCache.txt") or os.environ.get("CXX", "c++")
    return {
        "processor": processor(),
        "memory": f"{kib / 2**20:.0f} GiB",
        "system": f"{found(name, '/etc/os-release') or platform.system()}, Linux {platform.release().split('-')[0]}",
        "compiler": (said_by(compiler, "--version").splitlines() or ["unknown"])[0],
        "libtorch": libtorch_of(build),
    }


def commit_of(folder):
    """The short hash of a source tree, and whether what is measured differs from it."""
    short = said_by("git", "rev-parse", "--short", "HEAD", cwd=folder)
    changed = said_by("git", "status", "--porcelain", "--", "include", "examples", "bench/run", cwd=folder)
    return short + (", with changes" if changed else "") if short else "no commit"


def busy_share(seconds=2.0):
    """The share of all processors that was in use, or taken by other guests of the host, while this program slept."""

    def ticks():
        with open("/proc/stat") as file:
            fields = [int(x) for x in file.readline().split()[1:9]]
        return sum(fields), fields[3] + fields[4]  # all; idle or waiting for a disk

    whole, idle = ticks()
    time.sleep(seconds)
    whole_then, idle_then = ticks()
    return 1 - (idle_then - idle) / max(1, whole_then - whole)
