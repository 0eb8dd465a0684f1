# timeout: 900
"""The binding is compiled once: the first process compiles, the next loads, and without a compiler the error names the remedy."""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support.ranks import BUILD, SOURCE, check, finish  # noqa: E402

environment = dict(os.environ, PYTHONPATH=str(SOURCE / "python"))
command = [sys.executable, "-m", "chevron_pipelining.build"]

both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
said = [one.communicate() for one in both]
for one, (out, err) in zip(both, said):
    check(one.returncode == 0, f"the build ended with {one.returncode}: {out}{err}")
check(said[0][0] == said[1][0] and pathlib.Path(said[0][0].strip()).is_file(), f"two processes have two binaries: {said}")
compiled = sum(err.count("compiling the binding") for _, err in said)
check(compiled <= 1, f"{compiled} processes compiled")

for old in pathlib.Path(said[0][0].strip()).parent.parent.iterdir():  # of other versions of the sources
    if old.is_dir() and str(old) not in said[0][0]:
        shutil.rmtree(old)

again = subprocess.run(command, env=environment, capture_output=True, text=True)
check(again.stdout == said[0][0] and "compiling" not in again.stderr, f"compiled again: {again.stdout}{again.stderr}")

ran = subprocess.run([sys.executable, "-c", "import chevron_pipelining as c; print('chevron-plan', c.__version__)"], env=environment, capture_output=True, text=True)
planned = subprocess.run([str(BUILD / "bin" / "chevron-plan"), "--version"], capture_output=True, text=True)
check(ran.stdout == planned.stdout and ran.stdout.count(".") == 2, f"the package's version is {ran.stdout}{ran.stderr}, the program's {planned.stdout}")

with tempfile.TemporaryDirectory(dir=BUILD) as folder:
    bare = {**environment, "PATH": folder, "CHEVRON_PIPELINING_CACHE": folder}
    bare.pop("CXX", None)
    none = subprocess.run(command, env=bare, capture_output=True, text=True)
    check(none.returncode != 0 and "no C++ compiler" in none.stderr and "apt install g++" in none.stderr, f"without a compiler: {none.stderr}")
    bare["CXX"] = f"{folder}/none"
    wrong = subprocess.run(command, env=bare, capture_output=True, text=True)
    check(wrong.returncode != 0 and "does not run" in wrong.stderr, f"a compiler that is none: {wrong.stderr}")
    bare["CHEVRON_PIPELINING_CACHE"] = environment["CHEVRON_PIPELINING_CACHE"]
    bare.pop("CXX")
    served = subprocess.run(command, env=bare, capture_output=True, text=True)
    check(served.returncode == 0, f"a node without a compiler, with the binary in the cache: {served.stderr}")
finish()
