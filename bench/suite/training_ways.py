"""Ways to train chevron-train's GPT on threads of one machine: predicted from profiles of chevron-train, and measured."""

import json
import math
import pathlib
import statistics

from .order import name_of
from .shared_cores import actions_of, played

SETTING = {
    "layers": 8,
    "width": 256,
    "heads": 8,
    "vocabulary": 256,
    "tokens": 64,
    "sequences": 16,
    "samples_of": [1, 2, 4, 8],
    "ranks_of": [1, 2, 4],
    "cores": 2,
    # Before calibration, whose factors replace this rate of all products.
    "tflops": 0.04,
    # Steps of a run, and of these the first, which are not counted: memory is taken from the system, and caches fill.
    "steps": 6,
    "warm_up": 2,
}
WHOLE_BACKWARD = ("1F1B", "Interleaved1F1B")
# The bytes that AdamW moves for a parameter: gradient read; two moments and the parameter read and written.
OPTIMIZER_BYTES = 4 + 2 * 8 + 2 * 4


def ranks_of(way):
    """Threads that compute: pipeline ranks, their shards and replicas."""
    return way["pipeline_ranks"] * way["shards"] * way["replicas"]


def model_words(setting):
    """The flags of chevron-train for the model and for files that a measurement does not need."""
    words = ["--width", setting["width"], "--heads", setting["heads"], "--context", setting["tokens"], "--sample", 0]
    return [*words, "--trace", "none", "--timeline", "none", "--backend", "threads"]


def way_words(way, setting):
    """The flags of chevron-train for a way."""
    words = ["--schedule", way["schedule"], "--ranks", way["pipeline_ranks"], "--microbatches", way["micro_batches"]]
    words += ["--shards", way["shards"], "--replicas", way["replicas"], "--microbatch-size", way["samples"]]
    words += ["--layers", ",".join(map(str, way["layers"])), *model_words(setting)]
    words += ["--chunks", way["chunks"]] if way["chunks"] > 1 else []
    words += ["--sequence-parallel"] if way["shards"] > 1 else []
    words += ["--recompute"] if way["recompute"] else []
    return words + (["--shard", "optimizer"] if way["sharded_optimizer"] else [])


def profiled_ways(setting):
    """{name: way} of the runs that measure costs: for each microbatch size the costs of layers, with whole and with split
    backwards, and those of two shards; and once the sum over two replicas."""
    ways = {}
    for samples in setting["samples_of"]:

        def way(schedule, ranks, chunks, shards=1, replicas=1, samples=samples):
            layers = [setting["layers"] // (ranks * chunks)] * (ranks * chunks)
            micro_batches = setting["sequences"] // samples // replicas
            return {
                "schedule": schedule,
                "pipeline_ranks": ranks,
                "chunks": chunks,
                "shards": shards,
                "replicas": replicas,
                "samples": samples,
                "micro_batches": micro_batches,
                "layers": layers,
                "recompute": False,
                "sharded_optimizer": False,
            }

        ways[f"whole {samples}"] = way("Interleaved1F1B", 2, 2)
        ways[f"split {samples}"] = way("InterleavedZeroBubble", 2, 2)
        ways[f"shards {samples}"] = way("1F1B", 1, 1, shards=2)
    ways["replicas"] = way("1F1B", 1, 1, replicas=2, samples=setting["samples_of"][-2])
    return ways


def median_of(profiles):
    """One profile of several of the same way: the median of each time."""
    out = dict(profiles[0])
    for key in ("forward", "backward", "backward_input", "backward_weight", "communication"):
        out[key] = [None if None in times else statistics.median(times) for times in zip(*(one[key] for one in profiles))]
    out["pipeline"] = statistics.median(one["pipeline"] for one in profiles)
    out["step"] = out["pipeline"] + statistics.median(one["step"] - one["pipeline"] for one in profiles)
    return out


class Planner:
    """Predictions of chevron-plan from measured profiles. "plan" runs chevron-plan with words."""

    def __init__(self, plan, setting, profiles, folder):
        self.plan, self.setting, self.profiles, self.folder = plan, setting, profiles, pathlib.Path(folder)
        whole = [profiles[f"whole {samples}"] for samples in setting["samples_of"]]
        parameters = sum(whole[0]["gradient_bytes"]) / 4
        # Half of the parameters are each rank's in these runs, all of them in that of two replicas.
        behind = statistics.median(one["step"] - one["pipeline"] for one in whole)
        self.memory_rate = OPTIMIZER_BYTES * parameters / 2 / behind * 1e3
        of_replicas = profiles["replicas"]
        optimizer = OPTIMIZER_BYTES * parameters / self.memory_rate * 1e3
        # A ring of two sums 2 (2 - 1) / 2 of the bytes.
        self.link = 4 * parameters / max(of_replicas["step"] - of_replicas["pipeline"] - optimizer, 0.1) * 1e3
        # A message of few bytes takes as long as threads need to wake.
        self.latency = statistics.median(time for one in whole for time in one["communication"])
        self.layer_files, self.answers, self.orders = {}, {}, {}
        for samples in setting["samples_of"]:
            for backward in ("whole", "split"):
                self.layer_files[backward, samples] = self.calibrated(backward, samples)
        self.shard_latency = {samples: self.latency_of_shards(samples) for samples in setting["samples_of"]}

    def calibrated(self, backward, samples):
        """The profile of layers that chevron-plan model computes, with the factors of a measured profile."""
        name = f"{backward}-{samples}"
        measured, file = self.folder / f"measured-{name}.json", self.folder / f"layers-{name}.json"
        measured.write_text(json.dumps(self.profiles[f"{backward} {samples}"]))
        names = ("layers", "width", "heads", "vocabulary", "tokens", "tflops")
        sizes = [word for key in names for word in ("--" + key, self.setting[key])]
        rate = f"{self.memory_rate / 1e9:.6g}GB/s"
        words = ["--kind", "gpt", *sizes, "--dtype", "fp32", "--bandwidth", rate, "--samples", samples]
        self.plan("model", *words, "--calibrate", measured, "-o", file)
        return file

    def judged(self, backward, samples, devices, latency, *choices):
        """The answer of chevron-plan cluster for one microbatch size: every way is judged, memory is no limit."""
        setting, told = self.setting, self.folder / "told.json"
        words = ["--nodes", 1, "--gpus", devices, "--memory", "16GiB", "--exhaustive", "--samples", samples]
        words += ["--link-inside", f"{self.link / 1e9:.6g}GB/s", "--link-between", f"{self.link / 1e9:.6g}GB/s"]
        words += ["--latency-inside", f"{latency:.6g}", "--batch-tokens", setting["sequences"] * setting["tokens"]]
        self.plan("cluster", self.layer_files[backward, samples], "--slices", 1, *words, *choices, "-o", told)
        return json.loads(told.read_text())

    def latency_of_shards(self, samples):
        """The latency of a message in sums over shards with which the profile of two shards takes its measured time."""
        measured = self.profiles[f"shards {samples}"]
        choices = ["--shards", 2, "--ranks", 1, "--recompute", "none"]
        at = [self.judged("whole", samples, 2, latency, *choices)["best"][0]["pipeline"] for latency in (0, 1)]
        count = self.setting["sequences"] // samples
        took = count * (measured["forward"][0] + measured["backward"][0])
        return max((took - at[0]) / (at[1] - at[0]), 0)

    def space(self):
        """All ways: up to as many ranks as cores with shards, more without."""
        ways = []
        for devices in self.setting["ranks_of"]:
            for samples in self.setting["samples_of"]:
                for backward in ("whole", "split"):
                    if backward == "split" and devices == 1:
                        continue
                    every = self.judged(backward, samples, devices, self.latency, "--shards", 1)["judged"]
                    ways += [way for way in every if (way["schedule"] in WHOLE_BACKWARD) == (backward == "whole")]
                if devices == 2:
                    ways += self.judged("whole", samples, devices, 0, "--shards", 2)["judged"]
        keys = ("pipeline_ranks", "shards", "replicas", "micro_batches", "samples", "schedule", "chunks", "recompute")
        return [{key: way[key] for key in (*keys, "sharded_optimizer", "layers")} for way in ways]

    def told(self, way):
        """What chevron-plan cluster says of a way, its layers as they are given, with a core for each rank."""
        backward = "whole" if way["schedule"] in WHOLE_BACKWARD else "split"
        latency = self.latency if way["shards"] == 1 else self.shard_latency[way["samples"]]
        choices = ["--ranks", way["pipeline_ranks"], "--shards", way["shards"], "--replicas", way["replicas"]]
        choices += ["--schedule", way["schedule"], "--layers", ",".join(map(str, way["layers"]))]
        choices += ["--recompute", "all" if way["recompute"] else "none"]
        choices += ["--shard", "optimizer" if way["sharded_optimizer"] else "nothing"]
        choices += ["--chunks", way["chunks"]] if way["schedule"] == "Interleaved1F1B" else []
        if way_name(way) not in self.answers:
            self.answers[way_name(way)] = self.judged(backward, way["samples"], ranks_of(way), latency, *choices)["best"][0]
        return self.answers[way_name(way)]

    def time_of(self, way):
        """The predicted milliseconds of a way's step."""
        told, cores = self.told(way), self.setting["cores"]
        if ranks_of(way) <= cores:
            return told["time"]
        return self.on_cores(way, cores) + (told["time"] - told["pipeline"]) * ranks_of(way) / cores

    def on_cores(self, way, cores):
        """The milliseconds of the pipelines of all replicas, of whose ranks no more than `cores` compute at one time."""
        words = ["show", way["schedule"], "--ranks", way["pipeline_ranks"], "--microbatches", way["micro_batches"]]
        words += ["--chunks", way["chunks"]] if way["schedule"] == "Interleaved1F1B" else []
        if tuple(words) not in self.orders:
            self.orders[tuple(words)] = actions_of(self.plan(*words, "--format", "csv"))
        backward = "whole" if way["schedule"] in WHOLE_BACKWARD else "split"
        layers = json.loads(self.layer_files[backward, way["samples"]].read_text())
        cost, next_piece = {}, 1
        for stage, count in enumerate(way["layers"]):
            pieces = [0] * (stage == 0) + list(range(next_piece, next_piece + count))
            next_piece += count
            pieces += [next_piece] * (stage + 1 == len(way["layers"]))
            kinds = ("forward", "backward_input", "backward_weight")
            forward, of_input, of_weight = (sum(layers[key][i] for i in pieces) for key in kinds)
            of_input += forward if way["recompute"] else 0
            # The first stage has no input gradient: its I takes no time, its W that of the whole backward.
            cost[stage, "F"], cost[stage, "I"], cost[stage, "W"] = forward, of_input, of_weight
            if stage == 0:
                cost[stage, "I"], cost[stage, "W"] = 0, of_input + of_weight
        stream = 4 * way["samples"] * self.setting["tokens"] * self.setting["width"]
        return played(self.orders[tuple(words)], cost, stream / self.link * 1e3, self.latency, cores, way["replicas"])


def spread_in_time(ways, times, count, best=5):
    """The `best` shortest, and as many as are missing at even distances in the logarithm of their times, the longest among them."""
    order = sorted(range(len(ways)), key=times.__getitem__)
    tried, rest = order[:best], order[best:]
    low, high = math.log(times[rest[0]]), math.log(times[rest[-1]])
    for i in range(min(count - best, len(rest))):
        wanted = low + (high - low) * i / max(count - best - 1, 1)
        nearest = min(rest, key=lambda way: abs(math.log(times[way]) - wanted))
        rest.remove(nearest)
        tried.append(nearest)
    return [ways[i] for i in sorted(tried, key=times.__getitem__)]


def way_name(way):
    """A way in words, with the layers of its stages where several have some."""
    return name_of(way) + (" " + "-".join(map(str, way["layers"])) if len(way["layers"]) > 1 else "")


def milliseconds(lines, warm_up):
    """The median step of a run's file of metrics behind the first `warm_up`, without the time in which batches are read."""
    steps = [json.loads(line) for line in lines[warm_up:]]
    return 1e3 * statistics.median(one["time_metrics/end_to_end(s)"] - one["time_metrics/data_loading(s)"] for one in steps)
