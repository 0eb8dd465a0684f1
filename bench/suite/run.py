"""One section's measurement: rounds until its time is up, and their figures."""

import contextlib
import datetime
import os
import pathlib
import signal
import subprocess
import tempfile
import time

from . import machine
from .peers import Peer, PeerFailed

ONE_THREAD = {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "0"}


class ProgramFailed(Exception):
    pass


def wakes_at_once():
    """Asks for real-time priority, which the system grants to root: a thread then computes until it waits, whatever else the
    machine does. For `preexec_fn`. Returns whether the system grants it."""
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
    except PermissionError:
        return False
    return True


class Build:
    """A folder that Chevron was built in."""

    def __init__(self, path, suffix=""):
        self.path, self.suffix = pathlib.Path(path).resolve(), suffix
        self.source = pathlib.Path(machine.found(r"^CMAKE_HOME_DIRECTORY:\w+=(.+)", self.path / "CMakeCache.txt") or ".")
        self.commit = machine.commit_of(self.source)

    def program(self, name):
        path = self.path / "bin" / name
        if not os.access(path, os.X_OK):
            raise ProgramFailed(f"there is no program {path}. Remedy: cmake --build {self.path} --target {name}")
        return str(path)

    def run(self, name, *words, limit=600, before=None):
        """What a program prints; ProgramFailed with what it says where it fails. `before` runs in its process first."""
        done = subprocess.run(
            [self.program(name), *map(str, words)],
            capture_output=True,
            text=True,
            timeout=limit,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **ONE_THREAD},
            preexec_fn=before,
        )
        if done.returncode != 0:
            said = done.stderr.strip().splitlines()
            raise ProgramFailed(f"{name} ended with {done.returncode}: {said[-1] if said else 'it said nothing'}")
        return done.stdout

    def run_until(self, path, lines, name, *words, limit=600, before=None):
        """The lines that a program has written into a file as soon as there are so many; it and its ranks are then ended.
        `before` runs in its process first."""
        command, environment = [self.program(name), *map(str, words)], {**os.environ, **ONE_THREAD}
        with tempfile.TemporaryFile("w+") as said:
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env=environment,
                start_new_session=True,
                preexec_fn=before,
            )
            try:
                end = time.monotonic() + limit
                while True:
                    ended = started.poll() is not None
                    there = pathlib.Path(path)
                    written = there.read_text().splitlines(keepends=True) if there.exists() else []
                    written = [line for line in written if line.endswith("\n")]
                    if len(written) >= lines:
                        return written[:lines]
                    if ended or time.monotonic() > end:
                        said.seek(0)
                        last = (said.read().strip().splitlines() or ["it said nothing"])[-1]
                        raise ProgramFailed(f"{name} wrote {len(written)} of {lines} lines: {last}")
                    time.sleep(0.05)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(started.pid, signal.SIGKILL)
                started.wait()


class Run:
    """What a section is given: builds, sides, its time; and where it notes what it measured."""

    def __init__(self, name, builds, sides, seconds, most_rounds, quick, folder):
        self.name, self.builds, self.sides, self.quick, self.folder = name, builds, sides, quick, folder
        self.seconds, self.most_rounds = seconds, most_rounds
        self.rounds, self.longest, self.began, self.round_began = 0, 0.0, time.monotonic(), None
        self.values, self.failed, self.setting = {}, {}, {}
        self.others = [machine.busy_share()]
        self.load = os.getloadavg()[0]
        if self.others[0] > machine.QUIET:
            print(f"   this machine is not quiet: others use {self.others[0]:.0%} of it", flush=True)

    def another_round(self):
        """Whether there is time for a round; there is for the first."""
        now = time.monotonic()
        if self.round_began is not None:
            self.rounds += 1
            self.longest = max(self.longest, now - self.round_began)
            print(f"   round {self.rounds}: {now - self.round_began:.0f} s", flush=True)
        over = self.rounds > 0 and (self.rounds >= self.most_rounds or now - self.began + self.longest > self.seconds)
        self.round_began = now
        return not over

    def note(self, row, column, value):
        self.values.setdefault(row, {}).setdefault(column, []).append(
            value if isinstance(value, int) else float(f"{value:.6g}")
        )

    def fail(self, row, column, why):
        print(f"   {row}, {column}: {why}", flush=True)
        self.failed.setdefault(row, {})[column] = str(why)

    @contextlib.contextmanager
    def peers(self, ranks, **environment):
        """{side: Peer} of the sides of PyTorch that there are."""
        there = {
            side: Peer(of["python"], ranks, self.folder / f"{self.name}-{side}.log", environment)
            for side, of in self.sides.items()
            if "python" in of
        }
        try:
            yield there
        finally:
            for peer in there.values():
                peer.end()

    def ask(self, peer, row, column, do, **arguments):
        """The peer's answer, or nothing, where it failed; what failed once is not asked again."""
        if column in self.failed.get(row, {}):
            return None
        try:
            return peer.ask(do, **arguments)
        except PeerFailed as why:
            self.fail(row, column, why)
            return None

    def ours(self, build, row, column, *words):
        """What a program of ours prints, or nothing, where it failed: an older build may lack a program or an option."""
        return self.tried(build, row, column, lambda: build.run(*words))

    def tried(self, build, row, column, what):
        """What `what` gives, or nothing, where a program of the other build failed."""
        if column in self.failed.get(row, {}):
            return None
        try:
            return what()
        except (ProgramFailed, subprocess.TimeoutExpired) as why:
            if not build.suffix:
                raise
            self.fail(row, column, why)
            return None

    def result(self, where):
        """Everything, as it is kept in bench/results."""
        self.others.append(machine.busy_share())
        return {
            "section": self.name,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "seconds": round(time.monotonic() - self.began),
            "rounds": self.rounds,
            "quick": self.quick,
            "commit": self.builds[0].commit,
            "machine": where,
            "others": [round(max(0.0, share), 3) for share in self.others],
            "load": round(self.load, 2),
            "sides": {side: {key: of[key] for key in of if key != "python"} for side, of in self.sides.items()},
            "setting": self.setting,
            "values": self.values,
            "failed": self.failed,
        }
