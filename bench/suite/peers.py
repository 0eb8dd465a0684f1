"""PyTorch, beside which ours is measured: the one of .venv and the newest one, each as processes that wait for questions."""

import json
import os
import pathlib
import subprocess
import threading

ROOT = pathlib.Path(__file__).resolve().parents[2]
NEWEST = ROOT / "build" / "bench-venv"


class PeerFailed(Exception):
    pass


class Peer:
    """bench/run/torch_peer.py under one Python. It starts with the first question, and anew after a failure."""

    def __init__(self, python, ranks, log, environment):
        self.command = [str(python), str(ROOT / "bench" / "run" / "torch_peer.py"), "--ranks", str(ranks)]
        self.log, self.environment, self.process = log, environment, None

    def ask(self, do, limit=600, **arguments):
        """The answer; PeerFailed with what went wrong, also after `limit` seconds."""
        if self.process is None:
            with open(self.log, "a") as log:
                self.process = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    env={**os.environ, "OMP_NUM_THREADS": "1", **self.environment},
                )
            self.line(120)  # its version: it has started
        self.process.stdin.write(json.dumps({"do": do, "with": arguments}) + "\n")
        self.process.stdin.flush()
        answer = self.line(limit)
        if "failed" in answer:
            self.end(kill=True)  # its other ranks may still be in the middle of it
            raise PeerFailed(answer["failed"])
        return answer["result"]

    def line(self, limit):
        timer = threading.Timer(limit, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            self.end(kill=True)
            raise PeerFailed(f"it ended, or gave no answer in {limit} s; see {self.log}")
        return json.loads(line)

    def end(self, kill=False):
        process, self.process = self.process, None
        if process is None:
            return
        if kill:
            process.kill()
        try:
            process.stdin.close()
        except OSError:
            pass
        process.stdout.close()
        process.wait()


def version_of(python):
    """The version of the torch that a Python imports, without what it was built for; nothing where it has none."""
    if not pathlib.Path(python).exists():
        return ""
    done = subprocess.run(
        [str(python), "-c", "import torch.distributed.pipelining, torch; print(torch.__version__)"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    return done.stdout.strip().split("+")[0] if done.returncode == 0 else ""


def install_newest():
    """The newest torch that pip finds, about 5 GB, into an environment of its own; why not, where that fails. Delete the folder
    to have a newer one."""
    stamp = NEWEST / "installed"
    if stamp.exists():
        return ""
    print(f"== the newest PyTorch (about 5 GB) into {NEWEST.relative_to(ROOT)} ...", flush=True)
    commands = [
        ["python3", "-m", "venv", "--clear", str(NEWEST)],
        [str(NEWEST / "bin" / "pip"), "install", "--quiet", "--no-input", "--disable-pip-version-check", "torch", "numpy"],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip().splitlines()
            return "it could not be installed: " + (said[-1] if said else "pip said nothing")
    stamp.touch()
    return ""


def torch_sides(with_newest=True):
    """{side: {label, python} or {label, missing: why}}: `torch`, the one of .venv, and `newest`."""
    sides = {}
    python = ROOT / ".venv" / "bin" / "python"
    version = version_of(python)
    sides["torch"] = (
        {"label": f"PyTorch {version}", "python": str(python)}
        if version
        else {"label": "PyTorch", "missing": "there is no torch in .venv"}
    )
    why = install_newest() if with_newest else "it was not asked for"
    newest = "" if why else version_of(NEWEST / "bin" / "python")
    if newest and newest == version:
        why = f"it is {version}, the one of .venv"
    elif not why and not newest:
        why = f"{NEWEST.relative_to(ROOT)} holds no torch that can be imported; delete the folder to have it made anew"
    sides["newest"] = (
        {"label": "newest PyTorch", "missing": why}
        if why
        else {"label": f"PyTorch {newest}", "python": str(NEWEST / "bin" / "python")}
    )
    return sides
