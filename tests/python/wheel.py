# timeout: 300
"""The wheel has all that the binding's compilation includes of Chevron and Boost, and the package's modules of Python. A binary
wheel is installed by pip, and imported without a compiler; its binary is left alone under other headers."""
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

    # The tests' cache has the binary, or is given it: the wheel's headers and sources are those of the checkout.
    made = subprocess.run([sys.executable, str(SOURCE / "python" / "binary_wheel.py"), str(wheel), folder], capture_output=True, text=True)
    check(made.returncode == 0, f"binary_wheel.py: {made.stdout}{made.stderr}")
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    check(f"-{python}-{python}-linux_" in made.stdout, f"the binary wheel's name: {made.stdout}")
    site = pathlib.Path(folder) / "site"
    ran = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(site), made.stdout.strip()],
                         capture_output=True, text=True)
    check(ran.returncode == 0, f"pip install of the binary wheel: {ran.stderr}")
    bare = {"PATH": str(pathlib.Path(folder) / "no-compiler"), "PYTHONPATH": str(site), "CHEVRON_PIPELINING_CACHE": str(pathlib.Path(folder) / "empty"),
            "OMP_NUM_THREADS": "1"}
    imports = [sys.executable, "-c", "import chevron_pipelining as c; print(c.compiler.load().__file__)"]
    ran = subprocess.run(imports, env=bare, capture_output=True, text=True)
    check(ran.returncode == 0 and ran.stdout.startswith(str(site)), f"the import without a compiler: {ran.stdout}{ran.stderr[-1000:]}")
    versions = [sys.executable, "-c", "import chevron_pipelining as c, importlib.metadata as m; print(c.__version__, m.version('chevron-pipelining'))"]
    ran = subprocess.run(versions, env=bare, capture_output=True, text=True)
    check(ran.stdout.split() == [wheel.name.split("-")[1]] * 2, f"versions of the package and of its metadata: {ran.stdout}{ran.stderr[-1000:]}, wheel {wheel.name}")
    with open(site / "chevron_pipelining" / "include" / "chevron" / "version.hpp", "a") as file:
        file.write("// changed\n")
    ran = subprocess.run(imports, env=bare, capture_output=True, text=True)
    check("no C++ compiler" in ran.stderr, f"a binary of other headers is used: {ran.stdout}{ran.stderr[-1000:]}")
    ran = subprocess.run([sys.executable, str(SOURCE / "python" / "binary_wheel.py"), made.stdout.strip(), folder], capture_output=True, text=True)
    check("is no wheel of chevron_pipelining without a binary. Remedy:" in ran.stderr, f"a binary wheel's binary wheel: {ran.stderr}")
finish()
