# timeout: 300
"""The wheel has all that the binding's compilation includes of Chevron and Boost, and the package's modules of Python."""
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support.ranks import BUILD, SOURCE, check, finish  # noqa: E402

try:
    import scikit_build_core  # noqa: F401
except ImportError as problem:
    print(f"skipped: no scikit-build-core to build the wheel with ({problem}); remedy: pip install scikit-build-core")
    sys.exit(77)

with tempfile.TemporaryDirectory(dir=BUILD) as folder:
    made = subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "-w", folder,
                           str(SOURCE / "python")], capture_output=True, text=True,
                          env={name: value for name, value in os.environ.items() if name != "CXX"})  # a cache of CTest's is no compiler
    check(made.returncode == 0, f"pip wheel: {made.stdout}{made.stderr}")
    [wheel] = pathlib.Path(folder).glob("chevron_pipelining-*-py3-none-any.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    package = pathlib.Path(folder) / "chevron_pipelining"
    for file in (SOURCE / "python" / "chevron_pipelining").rglob("*"):
        check(file.is_dir() or (package / file.relative_to(SOURCE / "python" / "chevron_pipelining")).is_file(), f"the wheel lacks {file}")
    spec = importlib.util.spec_from_file_location("compiler", package / "compiler.py")
    compiler = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(compiler)
    line = compiler.command_lines(compiler.compiler(), pathlib.Path(folder) / "binding.so")[0]
    ran = subprocess.run(line[:line.index("-c")] + ["-M", str(package / "binding" / "binding.cpp")], capture_output=True, text=True)
    check(ran.returncode == 0, f"the wheel's headers: {ran.stderr[-2000:]}")
    included = re.findall(r"\S+/(?:boost|chevron)/\S+", ran.stdout)
    check(len(included) > 300, f"{len(included)} headers are included")
    strange = [name for name in included if not name.startswith(folder)]
    check(not strange, f"headers from outside of the wheel: {strange[:3]}")
finish()
