#!/usr/bin/env python3
"""binary_wheel.py WHEEL FOLDER: a wheel of chevron_pipelining with the binding compiled for this torch, Python and machine.

WHEEL is the wheel that `pip wheel ./python` makes, which serves any torch and Python: the first import compiles the binding. The
wheel written to FOLDER is WHEEL with a binary in `chevron_pipelining/compiled`, and is named by this Python and machine. Under
another torch than that of the binary, its first import compiles as WHEEL's does. The binary needs this machine's C and C++
libraries or later ones, so it is made in the oldest system that is to run it. Run by a Python with torch; prints the wheel's path.
"""
import base64
import hashlib
import importlib.util
import pathlib
import sys
import sysconfig
import tempfile
import zipfile

PACKAGE = "chevron_pipelining"


def compiled(wheel, folder):
    """Compiles the binding of a wheel, whose files it unpacks to `folder`; returns the wheel's name of the binary, and the binary's path."""
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    spec = importlib.util.spec_from_file_location("compiler", folder / PACKAGE / "compiler.py")
    compiler = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiler)
    return compiler.shipped().relative_to(folder).as_posix(), compiler.binary()


def write(wheel, name, binary, folder):
    """Writes `wheel` with the file `binary` under `name` into `folder`, tagged with this Python and machine; returns its path."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    distribution, version, *_ = wheel.name.split("-")
    about = f"{distribution}-{version}.dist-info"
    out = folder / f"{distribution}-{version}-{tag}.whl"
    record = []
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        def add(file, content):
            new.writestr(file, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{file},sha256={digest},{len(content)}\n")

        for entry in old.infolist():
            if entry.is_dir() or entry.filename == f"{about}/RECORD":
                continue
            content = old.read(entry)
            if entry.filename == f"{about}/WHEEL":
                lines = [line for line in content.decode().splitlines() if not line.startswith(("Tag:", "Root-Is-Purelib:"))]
                content = "\n".join([*lines, "Root-Is-Purelib: false", f"Tag: {tag}", ""]).encode()
            add(entry.filename, content)
        add(name, binary.read_bytes())
        new.writestr(f"{about}/RECORD", "".join(record) + f"{about}/RECORD,,\n")
    return out


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: binary_wheel.py WHEEL FOLDER")
    wheel, folder = map(pathlib.Path, sys.argv[1:])
    if not wheel.name.endswith("-py3-none-any.whl") or not zipfile.is_zipfile(wheel):
        sys.exit(f"binary_wheel.py: {wheel} is no wheel of {PACKAGE} without a binary. Remedy: that of `pip wheel --no-deps ./python`")
    with tempfile.TemporaryDirectory() as unpacked:
        name, binary = compiled(wheel, pathlib.Path(unpacked).resolve())
        print(write(wheel, name, binary, folder))


if __name__ == "__main__":
    main()
