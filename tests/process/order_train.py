# timeout: 170
"""Ways to train a GPT on the cores of one machine: chevron-plan predicts their steps from stored profiles, and the order of the
predictions is that of the measured steps, the way with the least prediction among the shortest. Planners that ignore that ranks
share cores, or that small microbatches take longer for a sample, rank the same ways wrongly. A schedule that is played on as many
cores as ranks takes as long as chevron-plan says, on one core as long as its work.

shared/order_train.json has profiles and steps of a machine whose cores other programs used, too: rounds of one way differ by a half.
On figures of ./dev bench order-train in bench/results the limits are those of a quiet machine."""
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ["CHEVRON_BUILD"]) / "bin"
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))
from suite import order, training_ways  # noqa: E402
from suite.shared_cores import actions_of, played  # noqa: E402


def plan(*words):
    done = subprocess.run([BUILD / "chevron-plan", *map(str, words)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, (words, done.stderr)
    return done.stdout


# By hand: of three ranks on two cores the third waits for a core until the first ends, and goes on after its own first action.
three = actions_of("0F0,0B0\n")
assert three == [[[(0, "F", 0)], [(0, "B", 0)]]]
costs = {(0, "F"): 2, (0, "B"): 3}
assert [played(three, costs, 0, 0, cores, replicas=3) for cores in (1, 2, 3)] == [15, 10, 5]
# Two stages on one core: 0F0 0F1 without a wait, then 1F0 1B0 1F1 1B1, whose first gradient finds no free core.
two = actions_of("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
costs = {(0, "F"): 1, (0, "B"): 2, (1, "F"): 10, (1, "B"): 20}
assert played(two, costs, 0, 0, 1) == 66 and played(two, costs, 0, 0, 2) == 1 + 60 + 2
# A message of 5 that arrives 7 later passes the boundary twice; the second one follows the first on its wire.
assert played(two, costs, 5, 7, 2) == 1 + 12 + 60 + 12 + 2
assert actions_of("(1F2;0B3)OVERLAP_F_B,\n") == [[[(1, "F", 2), (0, "B", 3)]]]
try:
    played(actions_of("0B0,0F0\n1F0,1B0\n"), costs, 0, 0, 2)
    raise AssertionError("a deadlock has a time")
except ValueError as why:
    assert "waits for ever. Remedy: a schedule that chevron-plan check accepts" in str(why), why

# The median of several profiles, time by time; what was not measured stays so.
one = {"forward": [3, 5], "backward": [None, 8], "backward_input": [], "backward_weight": [], "communication": [1]}
one |= {"pipeline": 50, "step": 60}
middle = training_ways.median_of([one, {**one, "forward": [4, 2], "backward": [None, 9], "pipeline": 40, "step": 56}, one])
assert middle["forward"] == [3, 5] and middle["backward"] == [None, 8] and (middle["pipeline"], middle["step"]) == (50, 60), middle
line = '{"time_metrics/end_to_end(s)": %s, "time_metrics/data_loading(s)": 0.25}'
assert training_ways.milliseconds([line % time for time in (1, 1.75, 3.25, 1.5)], 1) == 1500

# Ways at even distances in the logarithm of their times, behind the shortest.
times = [8, 1, 64, 2, 7, 32, 1.5, 16, 9, 4]
assert training_ways.spread_in_time(times, times, 6, best=2) == [1, 1.5, 2, 7, 16, 64], "2, 6.3, 20.2 and 64 are even distances"


def compared(stored, limit):
    """A planner's predictions, in the order of the ways, beside what was measured."""
    setting, values = stored["setting"], stored["values"]
    names = [training_ways.way_name(way) for way in setting["tried"]]
    assert sorted(names) == sorted(values) and len(set(names)) == len(names) >= 30, "ways and figures differ"
    measured = [statistics.median(values[name]["measured"]) for name in names]

    def judged(planner, cores):
        planner.setting = {**setting, "cores": cores}
        predictions = [planner.time_of(way) for way in setting["tried"]]
        return predictions, order.spearman(predictions, measured), order.above_best(predictions, measured)

    def right_order(judgement):
        correlation, above_best = judgement
        return correlation >= limit and above_best <= 0.05

    with tempfile.TemporaryDirectory() as folder:
        planner = training_ways.Planner(plan, setting, setting["profiles"], folder)
        predictions, *right = judged(planner, setting["cores"])
        print(f"{len(names)} ways: rank correlation {right[0]:.3f}, chosen {right[1]:.1%} above the best")
        for name, prediction in zip(names, predictions):
            assert abs(values[name]["predicted"][0] / prediction - 1) < 0.01, (name, prediction, values[name])
        assert right_order(right), right

        # Laws of the played schedule. Profiles have five digits, hence the tolerance.
        for way in setting["tried"]:
            if way["shards"] > 1:
                continue
            own, work, shared = (planner.on_cores(way, cores) for cores in (training_ways.ranks_of(way), 1, 2))
            told = planner.told(way)["pipeline"]
            assert abs(own / told - 1) < 1e-4, (training_ways.way_name(way), own, told)
            assert max(own, work / 2) * (1 - 1e-9) <= shared <= work * (1 + 1e-9), (training_ways.way_name(way), own, work, shared)

        # Mutants: a core for each rank; the costs of a sample in large microbatches for all sizes.
        _, *cores = judged(planner, 4)
        largest, kinds = setting["samples_of"][-1], ("forward", "backward", "backward_input", "backward_weight")
        even = dict(setting["profiles"])
        for samples in setting["samples_of"]:
            for backward in ("whole", "split"):
                of, share = setting["profiles"][f"{backward} {largest}"], samples / largest
                scaled = {key: [time and time * share for time in of[key]] for key in kinds}
                even[f"{backward} {samples}"] = {**of, **scaled}
        _, *sizes = judged(training_ways.Planner(plan, setting, even, folder), setting["cores"])
        print(f"a core for each rank: {cores[0]:.3f}, {cores[1]:.1%}; equal samples: {sizes[0]:.3f}, {sizes[1]:.1%}")
        assert not right_order(cores), cores
        assert not right_order(sizes), sizes


compared(json.loads((ROOT / "tests" / "process" / "shared" / "order_train.json").read_text()), 0.85)
measured_here = ROOT / "bench" / "results" / "order-train.json"
if measured_here.is_file():
    compared(json.loads(measured_here.read_text()), 0.9)
