# timeout: 120
"""chevron-plan cluster with choices that the user makes: the ways are those of the whole search that agree with them, with
the same times, bytes and bounds; given layers have the times that `show` plays; wrong choices by their words."""

import itertools
import json
import os
import pathlib
import subprocess
import tempfile

PLAN = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve() / "bin" / "chevron-plan"
MACHINE = [
    "--nodes",
    2,
    "--gpus",
    4,
    "--link-inside",
    "20GB/s",
    "--link-between",
    "4GB/s",
    "--memory",
    "4GiB",
    "--batch-tokens",
    "32k",
]
SIZE = [
    "--layers",
    8,
    "--width",
    1024,
    "--heads",
    8,
    "--vocabulary",
    8000,
    "--tokens",
    1024,
    "--tflops",
    100,
    "--bandwidth",
    "1TB/s",
    "--masters",
]


def run(*arguments, code=0):
    done = subprocess.run([PLAN, *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, (arguments, done.returncode, done.stdout, done.stderr)
    return done.stdout if code == 0 else done.stderr


def cluster(*flags, machine=MACHINE):
    return json.loads(run("cluster", "profile.json", *machine, *flags, "--format", "json"))


def refused(words, *flags):
    said = run("cluster", "profile.json", *MACHINE, *flags, code=2)
    assert words in said and said.count("\n") == 1, (words, said)


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    run("model", *SIZE, "-o", "profile.json")
    whole = cluster("--exhaustive")
    name = lambda w: tuple(
        w[k]
        for k in (
            "pipeline_ranks",
            "shards",
            "replicas",
            "samples",
            "slices",
            "schedule",
            "chunks",
            "recompute",
            "sharded_optimizer",
        )
    )
    every = {name(w): w for w in whole["judged"]}
    assert len(every) == len(whole["judged"]) > 200

    # Each choice alone, and pairs of choices: the whole search's ways with these values, and no others.
    grid = {
        "--ranks": ("pipeline_ranks", (1, 2, 4, 8)),
        "--shards": ("shards", (1, 2, 4)),
        "--replicas": ("replicas", (1, 2, 8)),
        "--samples": ("samples", (1, 4)),
        "--slices": ("slices", (1, 4)),
        "--schedule": ("schedule", ("1F1B", "Interleaved1F1B", "ZB-H1", "V-Min", "Seq1F1B")),
        "--chunks": ("chunks", (1, 2, 4)),
        "--recompute": ("recompute", ("none", "all")),
        "--shard": ("sharded_optimizer", ("nothing", "optimizer")),
    }
    values = {"none": False, "all": True, "nothing": False, "optimizer": True}
    singles = [((flag, value),) for flag, (_, of) in grid.items() for value in of]
    pairs = [
        (("--ranks", 2), ("--schedule", "ZB-H1")),
        (("--shards", 2), ("--replicas", 4)),
        (("--chunks", 2), ("--recompute", "all")),
        (("--schedule", "Interleaved1F1B"), ("--chunks", 4)),
        (("--samples", 4), ("--shard", "optimizer")),
    ]
    for chosen in singles + pairs:
        agree = lambda w: all(w[grid[flag][0]] == values.get(value, value) for flag, value in chosen)
        told = cluster("--exhaustive", *itertools.chain(*chosen))
        assert {name(w): w for w in told["judged"]} == {n: w for n, w in every.items() if agree(w)}, chosen
        fitting = sorted(w["time"] for w in every.values() if agree(w) and w["bytes"] <= 4 << 30)[:10]
        assert fitting and [w["time"] for w in told["best"]] == fitting, (chosen, fitting)
        # Bounds find the same ways.
        few = cluster(*itertools.chain(*chosen))
        assert few["best"] == told["best"], chosen

    # Each of the ten best, by all of its choices and its layers: the same way.
    word = lambda value, words: words[1] if value else words[0]
    for w in whole["best"]:
        told = cluster(
            "--ranks",
            w["pipeline_ranks"],
            "--shards",
            w["shards"],
            "--replicas",
            w["replicas"],
            "--samples",
            w["samples"],
            "--slices",
            w["slices"],
            "--schedule",
            w["schedule"],
            "--chunks",
            w["chunks"],
            "--recompute",
            word(w["recompute"], ("none", "all")),
            "--shard",
            word(w["sharded_optimizer"], ("nothing", "optimizer")),
            "--layers",
            ",".join(map(str, w["layers"])),
        )
        assert told["best"] == [w] and told["ways"] == 1, (w, told)

    # Numbers that the whole search does not try.
    for flags, wanted in (
        (("--samples", 16, "--replicas", 1), {"samples": 16}),
        (("--chunks", 3, "--ranks", 2, "--slices", 1), {"chunks": 3, "schedule": "Interleaved1F1B"}),
        (("--slices", 3, "--chunks", 1), {"slices": 3, "chunks": 1}),
        (("--slices", 2, "--chunks", 3), {"slices": 2, "schedule": "SeqInterleaved1F1B", "chunks": 3}),
        (("--samples", 16, "--chunks", 5, "--ranks", 2, "--slices", 1), {"samples": 16, "chunks": 5, "schedule": "Interleaved1F1B"}),
    ):
        told = cluster("--exhaustive", *flags)
        assert told["judged"] and all(w[k] == v for w in told["judged"] for k, v in wanted.items()), (flags, told)
        assert all(
            len(w["layers"]) == w["pipeline_ranks"] * w["chunks"] and sum(w["layers"]) == 8 for w in told["judged"]
        ), flags
        assert all(
            w["micro_batches"] * w["samples"] * w["replicas"] == 32 and w["lower_bound"] <= w["time"]
            for w in told["judged"]
        ), flags

    # The bound that is printed counts microbatches of the given size alone; of larger ones W adds fewer gradients to their sums.
    bounds = [cluster("--samples", samples)["bound"] for samples in (1, 2, 4, 8)]
    assert min(bounds) == whole["bound"] and bounds == sorted(set(bounds), reverse=True), (bounds, whole["bound"])

    # Layers of the user, not of the search: the pipeline as `show` plays it.
    two = ["--nodes", 1, "--gpus", 2, "--link-inside", "20GB/s", "--memory", "80GiB", "--batch-tokens", "32k"]
    for schedule, layers in (
        ("1F1B", "3,5"),
        ("1F1B", "7,1"),
        ("ZB-H1", "2,6"),
        ("Interleaved1F1B", "0,3,5,0"),
        ("ZBVZeroBubble", "1,4,2,1"),
    ):
        chunks = layers.count(",") // 2 + 1
        [w] = cluster(
            "--ranks",
            2,
            "--samples",
            2,
            "--schedule",
            schedule,
            "--chunks",
            chunks,
            "--layers",
            layers,
            "--recompute",
            "none",
            machine=two,
        )["best"]
        assert ",".join(map(str, w["layers"])) == layers, w
        run("model", *SIZE, "--samples", 2, "-o", "two.json")
        traced = json.loads(
            run(
                "show",
                "--schedule",
                schedule,
                "--ranks",
                2,
                "--microbatches",
                16,
                "--profile",
                "two.json",
                "--layers",
                layers,
                "--bandwidth",
                "20GB/s",
                "--message-bytes",
                2 * 1024 * 1024 * 2,
                "--format",
                "trace",
            )
        )
        end = max((one["ts"] + one["dur"]) / 1e3 for one in traced["traceEvents"] if one["ph"] == "X")
        assert abs(end / w["pipeline"] - 1) < 2e-3, (schedule, layers, end, w["pipeline"])

    refused(
        "--ranks 3 --shards 2: ranks, shards and replicas multiply to the GPUs; shards divide the 4 GPUs of a machine "
        "and the 8 heads",
        "--ranks",
        3,
        "--shards",
        2,
    )
    refused("no way on 8 GPUs has --samples 5", "--samples", 5)
    refused("of which --layers numbers each", "--layers", "4,4", "--ranks", 4)
    refused("--ranks '0'", "--ranks", 0)
    refused(
        "--schedule 'GPipe' is not known: choose one of 1F1B, Interleaved1F1B, ZB-H1",
        "--schedule",
        "GPipe",
    )
    refused("--recompute 'some' is not known: choose one of none, all", "--recompute", "some")
    refused("--shard 'gradients' is not known: choose one of nothing, optimizer", "--shard", "gradients")
    refused("--layers '4,5' are 9 layers, and the profile has 8", "--layers", "4,5")
    refused(
        "--layers '4,0,4': stage 1 has no layer, and neither the embedding nor the head. Remedy:", "--layers", "4,0,4"
    )
    refused("no way on 8 GPUs has --ranks 1 --schedule ZB-H1", "--ranks", 1, "--schedule", "ZB-H1")
