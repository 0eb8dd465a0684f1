"""Ways to divide a model over a cluster: predicted by chevron-plan cluster, and measured as layers that sleep (bench-order)."""

import json
import pathlib
import statistics

# Times of tens of milliseconds: a device of 0.2 GFLOP/s, and links on which a microbatch's stream takes milliseconds.
SETTING = {
    "layers": 8,
    "width": 64,
    "heads": 8,
    "vocabulary": 512,
    "tokens": 32,
    "tflops": 0.0002,
    "memory_rate": 0.1e9,
    "nodes": 2,
    "gpus": 4,
    "inside": 16e6,
    "between": 4e6,
    "latency_inside": 0.2,
    "latency_between": 1.0,
    "sequences": 16,
}


def model_words(setting, samples):
    """The flags of chevron-plan model."""
    names = ("layers", "width", "heads", "vocabulary", "tokens", "tflops")
    sizes = [word for key in names for word in ("--" + key, setting[key])]
    rate = f"{setting['memory_rate'] / 1e9:g}GB/s"
    return ["model", "--kind", "gpt", *sizes, "--dtype", "fp32", "--bandwidth", rate, "--samples", samples]


def cluster_words(setting, profile):
    """The flags of chevron-plan cluster: every way is judged, memory is no limit."""
    rates = {side: f"{setting[side] / 1e9:g}GB/s" for side in ("inside", "between")}
    words = ["cluster", profile, "--nodes", setting["nodes"], "--gpus", setting["gpus"], "--memory", "1GiB", "--exhaustive"]
    words += ["--slices", 1]  # bench-order runs whole sequences
    words += ["--link-inside", rates["inside"], "--link-between", rates["between"]]
    words += ["--latency-inside", setting["latency_inside"], "--latency-between", setting["latency_between"]]
    return [*words, "--batch-tokens", setting["sequences"] * setting["tokens"]]


def profiles(plan, setting, folder):
    """{samples of a microbatch: file}, the costs from which both sides start. \"plan\" runs chevron-plan with words."""
    files = {}
    for samples in (1, 2, 4, 8):
        files[samples] = pathlib.Path(folder) / f"profile-{samples}.json"
        plan(*model_words(setting, samples), "-o", files[samples])
    return files


def predicted(plan, setting, folder, files):
    """All ways, in the order of their predicted times."""
    told = pathlib.Path(folder) / "ways.json"
    plan(*cluster_words(setting, files[1]), "-o", told)
    ways = json.loads(told.read_text())["judged"]
    return sorted(ways, key=lambda way: way["time"])


def spread_over(ways, count, best=10):
    """The `best` shortest, and as many as are missing at even distances in the order of the others."""
    rest = ways[best:]
    missing = min(count - best, len(rest))
    return ways[:best] + [rest[i * (len(rest) - 1) // max(missing - 1, 1)] for i in range(missing)]


def name_of(way):
    """A way in words, the same for no other way."""
    words = f"P{way['pipeline_ranks']} T{way['shards']} R{way['replicas']} M{way['micro_batches']}x{way['samples']} "
    words += way["schedule"]
    words += f" V{way['chunks']}" if way["schedule"] == "Interleaved1F1B" else ""
    return words + (", recomputed" if way["recompute"] else "") + (", sharded" if way["sharded_optimizer"] else "")


def measuring_words(way, setting, files, steps):
    """The flags of bench-order."""
    words = ["--profile", files[way["samples"]], "--schedule", way["schedule"], "--ranks", way["pipeline_ranks"]]
    words += ["--shards", way["shards"], "--replicas", way["replicas"], "--microbatches", way["micro_batches"]]
    words += ["--layers", ",".join(map(str, way["layers"])), "--nodes", setting["nodes"], "--gpus", setting["gpus"]]
    words += ["--link-inside", setting["inside"], "--link-between", setting["between"]]
    words += ["--latency-inside", setting["latency_inside"], "--latency-between", setting["latency_between"], "--steps", steps]
    words += ["--chunks", way["chunks"]] if way["schedule"] == "Interleaved1F1B" else []
    return words + ["--recompute"] * way["recompute"] + ["--shard-optimizer"] * way["sharded_optimizer"]


def milliseconds(said):
    """The median step that bench-order printed."""
    return 1e3 * statistics.median(json.loads(said)["seconds"])


def ranks(values):
    """The place of each value among all, from 1; equal values share the mean of their places."""
    order = sorted(values)
    first = {value: order.index(value) for value in set(order)}
    return [first[value] + (order.count(value) + 1) / 2 for value in values]


def spearman(a, b):
    """The correlation of the places (Spearman, Am. J. Psychology 15, 1904)."""
    return statistics.correlation(ranks(a), ranks(b))


def kendall(a, b):
    """Pairs in the same order less pairs in the opposite one, as a share (Kendall, Biometrika 30, 1938; for ties, tau-b)."""
    pairs = [(a[i] - a[j], b[i] - b[j]) for i in range(len(a)) for j in range(i)]
    same = sum((x * y > 0) - (x * y < 0) for x, y in pairs)
    return same / (sum(x != 0 for x, _ in pairs) * sum(y != 0 for _, y in pairs)) ** 0.5


def above_best(predictions, measurements):
    """By how much the way with the least prediction takes longer than the shortest measured, as a share."""
    chosen = min(range(len(predictions)), key=predictions.__getitem__)
    return measurements[chosen] / min(measurements) - 1
