# timeout: 170
# serial: it compares times
"""Ways to divide a decoder over four devices: the order of the steps that chevron-plan cluster predicts is the order of the steps of
layers that sleep on threads (bench-order), and the way with the least prediction is among the shortest. A planner that ignores the
times of links ranks the same ways wrongly and chooses one that takes far longer. Ways whose measured times other work on the machine
made longer are measured again; wrong flags of bench-order are refused in words."""
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ["CHEVRON_BUILD"]) / "bin"
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))
from suite import order  # noqa: E402

if not (BUILD / "bench-order").is_file():
    print("skipped: bench-order is not built")
    sys.exit(77)

# Links on which sums over shards take longer than the products that shards save.
SETTING = {**order.SETTING, "layers": 4, "nodes": 1, "inside": 1.5e6, "latency_inside": 1, "sequences": 8, "tflops": 0.0005}
LIMIT = 0.9
chosen_limit = 0.1  # above the shortest measured; a wrong planner's choice takes more than twice as long
began = time.monotonic()


def called(program, *words):
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([BUILD / program, *map(str, words)], capture_output=True, text=True, timeout=100, env=one_thread)


def plan(*words):
    done = called("chevron-plan", *words)
    assert done.returncode == 0, done.stderr


def measure(way):
    done = called("bench-order", *order.measuring_words(way, SETTING, files, 2))
    assert done.returncode == 0, (order.name_of(way), done.stderr)
    if not json.loads(done.stdout)["real_time"]:
        # Other work of the machine delays wake-ups.
        global chosen_limit
        chosen_limit = 0.3
    return order.milliseconds(done.stdout)


# Rank correlations of lists whose places are known: 1, -1, one swap of neighbours, ties.
assert order.spearman([1, 5, 9], [2, 3, 4]) == 1 and order.kendall([1, 5, 9], [4, 3, 2]) == -1
assert abs(order.spearman([1, 2, 3, 4], [1, 2, 4, 3]) - 0.8) < 1e-12
assert abs(order.kendall([1, 2, 3, 4], [1, 2, 4, 3]) - 2 / 3) < 1e-12
assert order.ranks([7, 5, 7, 9]) == [2.5, 1, 2.5, 4] and abs(order.above_best([3, 2, 9], [10, 12, 11]) - 0.2) < 1e-12

with tempfile.TemporaryDirectory() as folder:
    files = order.profiles(plan, SETTING, folder)
    ways = order.predicted(plan, SETTING, folder, files)
    # The mutant: links so fast that sums over shards, which nothing hides, take no time.
    fast = order.predicted(plan, {**SETTING, "inside": 1e12, "latency_inside": 0}, folder, files)
    blind = {order.name_of(way): way["time"] for way in fast}
    tried = order.spread_over(ways, 8, best=2)
    names = [order.name_of(way) for way in tried]
    if (chosen := order.name_of(fast[0])) not in names:
        tried.append(next(way for way in ways if order.name_of(way) == chosen))
        names.append(chosen)
    predictions = [way["time"] for way in tried]
    measurements = [measure(way) for way in tried]
    while True:
        right = order.spearman(predictions, measurements), order.above_best(predictions, measurements)
        if right[0] >= LIMIT and right[1] <= chosen_limit or time.monotonic() > began + 90:
            break
        worst = max(range(len(tried)), key=lambda i: measurements[i] / predictions[i])
        measurements[worst] = min(measurements[worst], measure(tried[worst]))
    unlinked = [blind[name] for name in names]
    wrong = order.spearman(unlinked, measurements), order.above_best(unlinked, measurements)
    for name, prediction, measurement, without in zip(names, predictions, measurements, unlinked):
        print(f"{name}: {prediction:.0f} ms predicted, {measurement:.0f} ms measured, {without:.0f} ms without links")
    print(f"rank correlation {right[0]:.3f}, chosen {right[1]:.1%} above the best; without links {wrong[0]:.3f} and {wrong[1]:.1%}")
    assert right[0] >= LIMIT and right[1] <= chosen_limit, right
    assert wrong[0] < LIMIT and wrong[1] > chosen_limit, wrong
    assert all(way["shards"] * way["replicas"] * way["pipeline_ranks"] == 4 for way in tried)
    # No step is shorter than its sleeps: a transfer or a layer that is left out would show.
    assert all(m > 0.97 * p for p, m in zip(predictions, measurements)), (predictions, measurements)

    def changed(flag, value):
        words = list(map(str, order.measuring_words(tried[0], SETTING, files, 2)))
        words[words.index(flag) + 1] = value
        return words

    refusals = [
        (changed("--gpus", "1"), r"--nodes 1 of --gpus 1 have no room for 4 ranks. Remedy: more machines"),
        (changed("--layers", "1,1"), r"--layers has 2 layers on 2 stages; the profile has 4, and the schedule \d+ stages. Rem"),
        (changed("--profile", f"{folder}/ways.json"), r"has no 'model'. Remedy: a file that chevron-plan model wrote"),
    ]
    for words, said in refusals:
        done = called("bench-order", *words)
        assert done.returncode == 2 and re.search(said, done.stderr), (words, done.returncode, done.stderr)
