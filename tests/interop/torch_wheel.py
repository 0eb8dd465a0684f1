# timeout: 900
# serial: it measures times, and runs two processes that wait for each other
"""The wheel of chevron-plan, built, installed and used as docs/guides/torch.md shows: its fences are written to files of their names, its
console's lines are typed, and the loss and gradients of the step must be those of the model without a pipeline.
"""
import contextlib
import io
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import zipfile

try:
    import torch  # noqa: F401
    import torch.distributed.pipelining  # noqa: F401
except ImportError as problem:
    print(f"skipped: no torch to run it in ({problem})")
    sys.exit(77)
try:
    import scikit_build_core  # noqa: F401
except ImportError as problem:
    print(f"skipped: no scikit-build-core to build the wheel with ({problem}); remedy: pip install scikit-build-core")
    sys.exit(77)

source = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[2]))
build = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve()
page = (source / "docs" / "guides" / "torch.md").read_text()
longest = 300  # seconds of one command; all together take 40 on an idle machine

# Appended to the page's script: compares each rank's gradients with those of the un-pipelined model.
COMPARED = """
import copy
whole = torch.nn.Sequential(*[copy.deepcopy(block) for block in model.blocks])
whole.zero_grad()
for a, b in zip(model.x.tensor_split(8), model.y.tensor_split(8)):
    (model.loss(whole(a), b) / 8).backward()
for s in mine:
    for ours, theirs in zip(model.blocks[s].parameters(), whole[s].parameters()):
        assert ours.grad is not None and torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7), f"stage {s}"
print(f"stages {mine} compared")
"""


def call(command, folder, **more):
    """What a command prints. A command that fails, or takes longer than any loaded machine needs, ends the script with its output; then
    all of its processes are ended, also those that a shell or torchrun started, which would else hold the output open."""
    started = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, **more)
    try:
        said, complained = started.communicate(timeout=longest)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        said, complained = started.communicate()
        sys.exit(f"FAILED: {command} takes longer than {longest} s:\n{said[-3000:]}{complained[-3000:]}")
    if started.returncode != 0:
        sys.exit(f"FAILED: {command} ended with {started.returncode}:\n{said[-3000:]}{complained[-3000:]}")
    return said


with tempfile.TemporaryDirectory() as name:
    folder = pathlib.Path(name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    call([*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-C", f"cmake.define.CHEVRON_PLAN={build}/bin/chevron-plan",
          "-w", name, str(source / "cmake" / "packaging" / "python")], folder)
    [wheel] = folder.glob("chevron_plan-*.whl")
    version = re.findall(r"#define CHEVRON_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", (source / "include/chevron/version.hpp").read_text())
    assert wheel.name.startswith(f"chevron_plan-{'.'.join(version)}-py3-none-linux_"), wheel.name
    with zipfile.ZipFile(wheel) as packed:
        assert not [n for n in packed.namelist() if "torch" in n or n.endswith(".so")], packed.namelist()
        assert {"chevron_plan/py.typed", "chevron_plan/parity/__main__.py"} <= set(packed.namelist()), packed.namelist()
    assert wheel.stat().st_size < 5e6, wheel.stat().st_size
    call([*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site"), str(wheel)], folder)
    needed = call(["ldd", str(folder / "site" / "bin" / "chevron-plan")], folder)
    assert "libstdc++" not in needed and "torch" not in needed, needed

    files = re.findall(r"^```python file (\S+)\n(.*?)^```$", page, re.M | re.S)
    assert [file for file, _ in files] == ["model.py", "measure.py", "train.py"], files
    for file, text in files:
        if file == "train.py":
            assert len([line for line in text.splitlines() if line]) <= 20, "the page promises a few lines"
            text = text.replace("dist.destroy_process_group()\n", COMPARED + "dist.destroy_process_group()\n")
        (folder / file).write_text(text)
    console = re.search(r"^```console\n((?:\$ .*\n)+)```$", page, re.M)[1].replace("$ ", "").splitlines()
    assert len(console) == 3, console
    environment = {**os.environ, "PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
                   "PATH": os.pathsep.join([str(folder / "site" / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]])}
    environment.pop("MASTER_PORT", None)
    # On this machine alone, whose own name need not lead anywhere. Each process writes into files of its own: in one stream a line of one may
    # begin within a line of the other, since Python writes the parts of a print one by one.
    console[-1] = console[-1].replace("torchrun ", "torchrun --standalone --local-addr 127.0.0.1 --redirects 3 --log-dir logs ")
    environment["PYTHONUNBUFFERED"] = "1"
    try:
        said = [call(line, folder, shell=True, env=environment) for line in console]
    finally:
        logs = {path: path.read_text() for path in sorted((folder / "logs").rglob("std*.log"))}
        print(*logs.values(), sep="")
    ranks = [text for path, text in logs.items() if path.name == "stdout.log"]
    assert len(ranks) == 2, list(logs)
    print(*said, sep="")
    assert "makespan" in said[1], said[1]
    sys.path.insert(0, str(folder / "site"))
    sys.path.insert(0, name)
    import chevron_plan
    assert chevron_plan.__version__ == ".".join(version), chevron_plan.__version__
    import model
    [loss] = [float(found) for text in ranks for found in re.findall(r"^loss (\S+)$", text, re.M)]
    wanted = model.loss(torch.nn.Sequential(*model.blocks)(model.x), model.y).item()
    assert abs(loss - wanted) < 1e-6 * wanted, (loss, wanted)
    compared = sorted(int(stage) for text in ranks for found in re.findall(r"^stages \[(.*)\] compared$", text, re.M) for stage in found.split(","))
    assert compared == [0, 1, 2, 3], ranks

    # The page's script without a file: PyTorch's validation refuses the 1F1B that PyTorch exports.
    [alone] = [text for text in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "_validate_schedule" in text]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(alone, {})
        sys.exit("FAILED: PyTorch takes its exported 1F1B after all: docs/guides/torch.md says otherwise")
    except AssertionError as refusal:
        shown = re.findall(r"# (.*)$", alone, re.M)
        assert printed.getvalue().strip() == shown[0], (printed.getvalue(), shown)
        assert shown[1].split("… ")[1] in str(refusal), (str(refusal), shown)

    # Wrong uses are told apart, in chevron-plan's words or the module's.
    faults = [(lambda: chevron_plan.run("check", name + "/nowhere.csv"), chevron_plan.Refused, "nowhere.csv"),
              (lambda: chevron_plan.profile([1, 2], [1], [1, 1], micro_batches=4), ValueError, "backward_input has 1 entries"),
              (lambda: chevron_plan.profile([1, 2], [1, 1], [1, 1], micro_batches=4, communication=[1, 1]), ValueError, "1 boundaries"),
              (lambda: chevron_plan.measure([torch.nn.Tanh()], torch.ones(2, 2)), ValueError, "nothing to train")]
    for what, kind, words in faults:
        try:
            what()
        except kind as said_so:
            assert words in str(said_so), said_so
        else:
            sys.exit(f"FAILED: nothing says {words}")
    (folder / "site" / "bin" / "chevron-plan").unlink()
    os.environ["PATH"] = "/nowhere"
    try:
        shutil.which("chevron-plan") or chevron_plan.program()
        sys.exit("FAILED: there is no program, and nobody says so")
    except FileNotFoundError as said_so:
        assert "remedy" in str(said_so)
