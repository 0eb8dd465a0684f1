"""`chevron_plan.__version__`, of the Python package around chevron-plan: in a checkout that of the headers, which the program prints, too;
of an installed package that of its metadata, whatever headers are installed on the machine."""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

source = pathlib.Path(__file__).resolve().parents[2]
packaging = source / "cmake" / "packaging" / "python"
program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")


def told(path, words="print(c.__version__)"):
    """What a Python prints that imports the package from a folder, beside no other package."""
    done = subprocess.run([sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(path)!r}); import chevron_plan as c; {words}"],
                          capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split()
assert told(packaging) in printed and told(packaging).count(".") == 2, (told(packaging), printed)
with tempfile.TemporaryDirectory() as folder:
    # As deep below `include` as in a prefix such as /usr.
    site = pathlib.Path(folder) / "lib" / "python3" / "dist-packages"
    shutil.copytree(packaging / "chevron_plan", site / "chevron_plan", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(source / "include" / "chevron", pathlib.Path(folder) / "include" / "chevron",
                    ignore=lambda at, names: [name for name in names if name != "version.hpp"])
    assert "PackageNotFoundError" in told(site), told(site)
    assert told(site, "print(c.Refused.__name__)") == "Refused"  # an import alone needs no metadata
    assert "has no attribute 'nothing'" in told(site, "c.nothing")
    (site / "chevron_plan-9.8.7.dist-info").mkdir()
    (site / "chevron_plan-9.8.7.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: chevron-plan\nVersion: 9.8.7\n")
    assert told(site) == "9.8.7", told(site)
