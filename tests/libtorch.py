# timeout: 600
"""Chevron on other versions of LibTorch than the one it is built with.

    python3 tests/libtorch.py COMPILER VERSION                 its headers: the umbrellas of the run side and a trainer compile
    python3 tests/libtorch.py COMPILER VERSION --run SOURCE...  its library, too: tests are built on it and run

A wheel of LibTorch is nearly a gigabyte, of which a test reads a hundredth part: pip says where the wheel is, and only the wanted files
are read from there, in ranges of bytes. They are kept in build/libtorch/VERSION. Skipped where no wheel can be reached.
"""
import argparse
import io
import json
import os
import pathlib
import re
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile

SOURCE = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[1]))
BUILD = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve()
# Libraries of CUDA that libtorch_cpu links, with or without a GPU; the wheels of LibTorch that run here are of this CUDA.
CUDA = ["nvidia-cuda-runtime==13.*", "nvidia-cuda-cupti==13.*"]
UMBRELLAS = ["run", "multiprocess", "checkpoint", "data", "replan"]


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


class remote_file(io.RawIOBase):
    """A file that is read over HTTP, as far as it is asked for."""

    def __init__(self, address):
        self.address, self.position = address, 0
        self.trusted = ssl.create_default_context(cafile=os.environ.get("PIP_CERT"))
        with self.request(method="HEAD") as answer:
            self.size = int(answer.headers["Content-Length"])

    def request(self, **more):
        return urllib.request.urlopen(urllib.request.Request(self.address, **more), context=self.trusted, timeout=60)

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        return self.position

    def readinto(self, memory):
        end = min(self.position + len(memory), self.size)
        if end <= self.position:
            return 0
        with self.request(headers={"Range": f"bytes={self.position}-{end - 1}"}) as answer:
            if answer.status != 206:
                skip("the server of wheels sends whole files only")
            part = answer.read()
        memory[:len(part)] = part
        self.position += len(part)
        return len(part)


def addresses(requirements):
    """Where pip would get these from, without what they require themselves."""
    asked = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--only-binary=:all:", "--quiet",
             "--disable-pip-version-check", "--retries=1", "--report=-", *requirements]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=250, check=True).stdout
    except (subprocess.SubprocessError, OSError) as problem:
        words = (getattr(problem, "stderr", None) or str(problem)).strip().splitlines()
        skip(f"pip finds no {' '.join(requirements)}: {words[-1] if words else problem}")
    return [each["download_info"]["url"] for each in json.loads(answer)["install"]]


def get(folder, requirements, wanted):
    """Puts the wanted files of wheels there, once."""
    stamp = folder / f"{wanted.__name__}.there"
    if stamp.exists():
        return
    for address in addresses(requirements):
        local = urllib.parse.urlparse(address)
        try:
            wheel = open(urllib.request.url2pathname(local.path), "rb") if local.scheme == "file" else remote_file(address)
            files = zipfile.ZipFile(io.BufferedReader(wheel, 8 << 20))
            for each in sorted(files.infolist(), key=lambda each: each.header_offset):
                if wanted(each.filename):
                    files.extract(each, folder)
        except (urllib.error.URLError, TimeoutError, ConnectionError) as problem:
            skip(f"{pathlib.PurePath(local.path).name} cannot be reached: {problem}")
    stamp.touch()


def headers(name):
    return name.startswith("torch/include/")


def libraries(name):
    of_torch = re.match(r"torch/lib/[^/]*\.so|torch\.libs/", name) and not re.search("cuda|python|nvshmem|nvrtc|shm", name)
    return bool(of_torch or re.search(r"/lib(cudart|cupti)\.so", name))


def call(command):
    began = time.time()
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print((done.stdout + done.stderr)[-12000:])
        sys.exit(f"FAILED with {done.returncode}: {' '.join(str(word) for word in command)}")
    return done.stdout, f"{time.time() - began:.0f} s"


def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("compiler")
    flags.add_argument("version")
    flags.add_argument("--run", nargs="*", type=pathlib.Path)
    asked = flags.parse_args()
    folder = BUILD / "libtorch" / asked.version
    folder.mkdir(parents=True, exist_ok=True)
    get(folder, [f"torch=={asked.version}"], headers)
    limit = "-fconstexpr-steps" if "clang" in asked.compiler else "-fconstexpr-ops-limit"
    compile = [asked.compiler, "-std=c++20", "-O0", "-w", f"{limit}=268435456", "-DUSE_DISTRIBUTED", "-DUSE_C10D", "-DUSE_C10D_GLOO",
               f"-I{SOURCE}/include", f"-I{SOURCE}/tests", "-isystem", f"{SOURCE}/include/chevron/transports/gloo/shim",
               "-isystem", folder / "torch/include", "-isystem", folder / "torch/include/torch/csrc/api/include"]
    umbrellas = [word for name in UMBRELLAS for word in ("-include", f"chevron/{name}.hpp")]
    if not asked.run:
        _, took = call([*compile, *umbrellas, "-fsyntax-only", SOURCE / "examples/minimal_train.cpp"])
        print(f"LibTorch {asked.version}: the umbrellas and a trainer compile, {took}")
        return
    get(folder, [f"torch=={asked.version}", *CUDA], libraries)
    lib = folder / "torch/lib"
    program = folder / "tests"
    objects = []
    for source in asked.run:
        objects.append(folder / f"{source.stem}.o")
        _, took = call([*compile, *umbrellas, "-c", source, "-o", objects[-1]])
        print(f"LibTorch {asked.version}: {source.name} compiles, {took}")
    call([*compile, SOURCE / "tests/main.cpp", *objects, "-o", program, f"-L{lib}", f"-Wl,-rpath,{lib}",
          "-Wl,--allow-shlib-undefined", "-ltorch_cpu", "-lc10", "-pthread"])
    for chosen in (["--source-file=*stage_graph_test.cpp,*checkpoint_test.cpp,*processes_trainer_test.cpp"],
                   ["--test-case=forked ranks exchange*,torchrun starts*"]):
        said, took = call([program, "--no-colors", *chosen])
        print(said.strip(), took, sep="\n")
        if not re.search(r"test cases: +[1-9]\d* \|.* 0 failed", said):
            sys.exit("FAILED: no test was run")


if __name__ == "__main__":
    main()
