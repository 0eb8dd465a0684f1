"""chevron-plan explain --flight-recorder, run on folders of dumps, and a table of whether it names the ranks that it should."""
import json
import os
import pathlib
import subprocess

PLAN = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve() / "bin" / "chevron-plan"
LONGEST = 600  # seconds of one command, which takes less than one on an idle machine


def explain(folder, *more):
    """The ended process."""
    return subprocess.run([PLAN, "explain", "--flight-recorder", folder, *more], capture_output=True, text=True, timeout=LONGEST, check=False)


def explained(folder, *more):
    """What it says as JSON; an error if it refuses the dumps."""
    done = explain(folder, "--format", "json", *more)
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


class Verdicts:
    """Counts right verdicts, a row for each kind of job, and keeps the wrong ones."""

    def __init__(self):
        self.rows, self.wrong = {}, []

    def add(self, kind, words, told, good):
        """`good`: whether the verdict `told` on the job of these words is right."""
        row = self.rows.setdefault(kind, {"good": 0, "of": 0, "causes": {}})
        row["good"] += good
        row["of"] += 1
        row["causes"][told["cause"]] = row["causes"].get(told["cause"], 0) + 1
        if not good:
            self.wrong.append(f"{words}: {told['cause']} {told['culprits']} {told['suspects']}: {told['sentence']}")
        return good

    def named(self, kind, words, told, rank):
        """A job in which this rank is at fault: it alone is named."""
        return self.add(kind, words, told, told["culprits"] == [rank])

    def quiet(self, jobs, explained_job):
        """Slow jobs without a fault, of which no rank may be named. `explained_job` runs one of `jobs`: its words and verdict."""
        for job in jobs:
            words, told = explained_job(job)
            self.add("slow, no fault", words, told, not told["culprits"])

    def report(self):
        """Prints the table and the wrong verdicts; gives the exit code."""
        for kind, row in self.rows.items():
            print(f"{kind:18} {row['good']:3} of {row['of']}  " + ", ".join(f"{n} {cause}" for cause, n in sorted(row["causes"].items())))
        for line in self.wrong:
            print("FAILED: " + line)
        return 1 if self.wrong else 0
