#!/usr/bin/env python3
"""Times published training jobs with chevron-plan cluster, and writes docs/reference/published.md.

published.py            all rows, in some minutes; figures go to bench/planning/published.json, then the page is written
published.py NAME…      the rows of these tables; the others keep their figures
published.py --page     only writes the page anew, from the figures
published.py --check    exit status 1 if the page differs from the page that the figures give

--build FOLDER          build folder of Chevron; its bin/chevron-plan runs
"""

import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import sys
import tempfile

import page
import rows

ROOT = pathlib.Path(__file__).resolve().parents[2]
FIGURES = pathlib.Path(__file__).with_name("published.json")
PAGE = ROOT / "docs" / "reference" / "published.md"
ASSUMED = 0.6  # the efficiency that chevron-plan model assumes
ANY_MEMORY = "1048576GiB"
SEARCHED_SAMPLES, SEARCHED_CHUNKS = (1, 2, 4, 8), (1, 2, 4)


class Planner:
    """Runs chevron-plan; profiles are kept for further calls."""

    def __init__(self, build, folder):
        self.program = pathlib.Path(build) / "bin" / "chevron-plan"
        self.folder = pathlib.Path(folder)

    def run(self, *arguments):
        done = subprocess.run([self.program, *map(str, arguments)], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"chevron-plan {' '.join(map(str, arguments))}: {done.stderr.strip()}")
        return done.stdout

    def profile(self, row, machine, efficiency, samples=1):
        words = [
            *row.model.arguments(row.attention),
            "--gpu",
            machine.gpu,
            "--efficiency",
            efficiency,
            *machine.flags,
            "--samples",
            samples,
        ]
        file = self.folder / (str(abs(hash(tuple(map(str, words))))) + ".json")
        if not file.is_file():
            part = file.with_name(f"{file.stem}-{id(words)}.json")
            self.run("model", *words, "-o", part)
            part.rename(file)
        return file

    def cluster(self, row, machine, efficiency, *flags, memory=None):
        """\\returns the ways that chevron-plan cluster prints, the shortest first"""
        out = self.run(
            "cluster",
            self.profile(row, machine, efficiency),
            "--nodes",
            max(row.gpus // 8, 1),
            "--gpus",
            min(row.gpus, 8),
            "--memory",
            memory or machine.memory,
            "--link-inside",
            machine.inside,
            "--link-between",
            machine.between,
            "--batch-tokens",
            row.batch * row.model.tokens,
            "--slices",
            1,
            "--format",
            "json",
            "--threads",
            1,
            *flags,
        )
        return json.loads(out)["best"]


def choices(row):
    """Flags of chevron-plan cluster for each configuration that agrees with the source."""
    out = []
    schedules = [row.schedule] if row.schedule else ["1F1B", "Interleaved1F1B"]
    for schedule in schedules:
        per_rank = row.model.layers // row.ranks
        for chunks in (
            [row.chunks]
            if row.chunks
            else (
                [1]
                if schedule == "1F1B"
                else [2, 4] if row.even is None else [v for v in (2, 3, 4) if per_rank % v == 0]
            )
        ):
            for samples in [row.samples] if row.samples else SEARCHED_SAMPLES:
                count, rest = divmod(row.batch, row.replicas * samples)
                # Megatron-LM interleaves multiples of the number of ranks.
                if rest or (schedule == "Interleaved1F1B" and count % row.ranks):
                    continue
                layers = row.layers(chunks)
                out.append(
                    [
                        "--ranks",
                        row.ranks,
                        "--shards",
                        row.shards,
                        "--samples",
                        samples,
                        "--schedule",
                        schedule,
                        "--chunks",
                        chunks,
                        "--recompute",
                        "all" if row.recompute else "none",
                        "--shard",
                        "optimizer" if row.sharded and row.replicas > 1 else "nothing",
                        *(["--layers", ",".join(map(str, layers))] if layers else []),
                        *(["--post-validation", "yes"] if row.post_validated else []),
                    ]
                )
    return out


def configured(planner, row, machine, efficiency):
    """The published configuration; of what the source leaves open, the shortest way that fits, or the one with fewest bytes."""
    ways = [planner.cluster(row, machine, efficiency, *flags, memory=ANY_MEMORY)[0] for flags in choices(row)]
    fitting = [way for way in ways if way["bytes"] <= machine.bytes]
    return min(fitting, key=lambda way: way["time"]) if fitting else min(ways, key=lambda way: way["bytes"])


def shortest(planner, row, machine, efficiency, configuration):
    """The shortest way that the search finds, also with the microbatches and chunks of the published configuration."""
    extra = [[]]
    if configuration["samples"] not in SEARCHED_SAMPLES:
        extra.append(["--samples", configuration["samples"]])
    if configuration["chunks"] not in SEARCHED_CHUNKS:
        extra.append(["--chunks", configuration["chunks"], *(extra[-1])])
    overlap = ["--post-validation", "both"] if row.post_validated else []
    ways = (planner.cluster(row, machine, efficiency, *flags, *overlap)[0] for flags in extra)
    return min(ways, key=lambda way: way["time"])


def kept(way):
    """The figures of a way that the page shows."""
    names = (
        "pipeline_ranks",
        "shards",
        "replicas",
        "micro_batches",
        "samples",
        "schedule",
        "chunks",
        "recompute",
        "sharded_optimizer",
    )
    return {
        **{name: way[name] for name in names},
        **{name: round(way[name], 3) for name in ("time", "pipeline", "sums", "optimizer")},
        "shard_collectives": round(way["shard_collectives"], 3),
        "bubble": round(way["bubble"], 5),
        "bytes": way["bytes"],
        **({"post_validation": True} if way.get("post_validation") else {}),
    }


def calibrated(planner, gpu):
    """The efficiency with which the row that calibrates a GPU has its published throughput, to three digits."""
    name, place = rows.CALIBRATED_BY[gpu]
    table = next(t for t in rows.TABLES if t.name == name)
    row, low, high = table.rows[place], 0.05, 1.0
    while high - low > 0.0005:
        middle = (low + high) / 2
        time = configured(planner, row, table.machine, middle)["time"]
        low, high = (middle, high) if table.deviation(row, time) < 0 else (low, middle)
    return round((low + high) / 2, 3)


def stage_times(planner, efficiency):
    """Milliseconds of F, I and W of a stage without embedding and head, for each profiled model."""
    out = {}
    for name, (samples, layers, *_) in rows.PROFILED.items():
        row = next(r for r in rows.ZERO_BUBBLE.rows if r.model.name == name)
        costs = json.loads(planner.profile(row, rows.ZERO_BUBBLE.machine, efficiency, samples).read_text())
        out[name] = [round(layers * costs[kind][1], 3) for kind in ("forward", "backward_input", "backward_weight")]
    return out


def measure(build, jobs, names, before):
    """\param before figures of the other tables"""
    with tempfile.TemporaryDirectory() as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        planner = Planner(build, folder)
        efficiency = dict(zip(rows.CALIBRATED_BY, pool.map(lambda gpu: calibrated(planner, gpu), rows.CALIBRATED_BY)))
        print("efficiency", efficiency, flush=True)

        def of(table, row):
            machine = table.machine
            assumed = configured(planner, row, machine, ASSUMED)
            theirs = configured(planner, row, machine, efficiency[machine.gpu])
            ours = shortest(planner, row, machine, efficiency[machine.gpu], theirs)
            print(
                table.name,
                row.model.name,
                row.gpus,
                theirs["schedule"],
                f"{table.deviation(row, assumed['time']):+.1%}",
                f"{table.deviation(row, theirs['time']):+.1%}",
                f"{theirs['time'] / ours['time'] - 1:+.1%}",
                flush=True,
            )
            return {"assumed": kept(assumed), "theirs": kept(theirs), "ours": kept(ours)}

        figures = {
            "efficiency": efficiency,
            "tables": dict(before["tables"]),
            "stages": stage_times(planner, efficiency["a100"]),
        }
        for table in (t for t in rows.TABLES if t.name in names):
            figures["tables"][table.name] = list(pool.map(lambda row, table=table: of(table, row), table.rows))
        return figures


def check():
    """0 if the page is what the figures give."""
    if PAGE.is_file() and PAGE.read_text() == page.text(json.loads(FIGURES.read_text())):
        return 0
    print(
        "docs/reference/published.md is not what bench/planning/published.json makes of it. Remedy: "
        "python3 bench/planning/published.py --page"
    )
    return 1


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, usage=argparse.SUPPRESS
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", metavar="FOLDER")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="rows at a time")
    parser.add_argument("--page", action="store_true")
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    every = [table.name for table in rows.TABLES]
    for name in given.names:
        if name not in every:
            parser.error(f"there is no table '{name}'. Remedy: one of {', '.join(every)}")
    if given.check:
        return check()
    if not given.page:
        if not (given.build / "bin" / "chevron-plan").is_file():
            parser.error(f"{given.build}/bin/chevron-plan is not there. Remedy: ./dev build, or --build FOLDER")
        before = json.loads(FIGURES.read_text()) if given.names else {"tables": {}}
        figures = measure(given.build, given.jobs, given.names or every, before)
        FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    PAGE.write_text(page.text(json.loads(FIGURES.read_text())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
