# chevron-plan fit on the command line: the schedules that fit into a rank's memory, the fastest of them, and the remedy if none fits.
# timeout: 180
seconds=60
. "$(dirname "$0")/shared/expect_plan.sh"

given='--ranks 4 --microbatches 12 --forward 20 --backward-input 26 --backward-weight 14 --communication 1 --trials 4000'
bytes='--static-bytes 10GiB --activation-bytes 4GiB --kept-bytes 3GiB --input-bytes 64MiB'

expect 0 '^4 ranks, 12 microbatches: what fits in 25 GiB\.$' fit $given $bytes --memory 25GiB
expect 0 '^The fastest found that fits: .*, [0-9.]* GiB on rank [0-3]\.' fit $given $bytes --memory 25GiB
expect 0 '^1F1B  *ranks\{0,1\}.* [0-9.]* GiB  *-$' fit $given $bytes --memory 25GiB
expect 0 '^ZB-H2  *-  *[0-9.]*  *[0-9.]* %  *[0-9]  *3[0-9.]* GiB  *-$\|^ZB-H2  *-  *[0-9.]*  *-  *[0-9]  *3[0-9.]* GiB  *-$' fit $given $bytes --memory 64GiB
expect 6 '^chevron-plan: Nothing fits in 9 GiB\. The least that is needed is .*: more ranks, so that each' fit $given $bytes --memory 9GiB
expect 6 'Remedy: smaller microbatches, or more ranks$' fit $given $bytes --memory 10.5GiB
expect 6 'Remedy: recomputation (--input-bytes), smaller microbatches' fit $given --static-bytes 10GiB --activation-bytes 4GiB --memory 11GiB
expect 0 '^Recomputation was not looked at: add --input-bytes' fit $given --static-bytes 10GiB --activation-bytes 4GiB --memory 25GiB

# The printed bytes and times, computed a second time from the schedules' CSV; and no point lies below the line.
expect 0 . fit $given $bytes --memory 25GiB --format json
cp output fit.json
for name in 1F1B ZB-H1 V-Min; do "$plan" show $name --ranks 4 --microbatches 12 --format csv -o $name.csv; done
python3 - <<'PYTHON' || failed=1
import json
GiB = 1 << 30
told = json.load(open("fit.json"))
points = {(p["schedule"], p["recomputed"]): p for p in told["schedules"]}
for name, chunks in ("1F1B", 1), ("ZB-H1", 1), ("V-Min", 2):
    activation, kept, static, whole_input = 4 * GiB // chunks, 3 * GiB // chunks, 10 * GiB, GiB // 16
    for recomputed in None, "all":
        first = activation if recomputed is None else whole_input
        most = 0
        for line in open(name + ".csv"):
            held = {}
            for cell in line.strip().split(","):
                kind = next(c for c in cell if c.isalpha())
                which = tuple(map(int, cell.split(kind)))
                if kind == "F":
                    held[which] = first
                if kind in "BI":
                    held[which] = activation
                most = max(most, static + sum(held.values()))
                if kind in "BI":
                    held[which] = kept if kind == "I" else 0
                if kind == "W":
                    held[which] = 0
        point = points[name, recomputed]
        assert point["bytes"] == most, (name, recomputed, most, point)
        assert point["fits"] == (most <= 25 * GiB), point
for p in told["schedules"]:
    # A line says nothing of ranks that recompute beside ranks that do not.
    if p["recomputed"] in (None, "all"):
        line = told["bound"] if p["recomputed"] is None else told["bound_recomputed"]
        known = [time for bytes, time in line if bytes <= p["bytes"]]
        assert known and p["time"] >= known[-1] * (1 - 1e-12), (p, known[-1:])
    assert not p["searched"] or p["fits"], p
for line in told["bound"], told["bound_recomputed"]:
    assert len(line) > 3 and line == sorted(line) and [t for _, t in line] == sorted((t for _, t in line), reverse=True), line
# Recomputation where it is needed costs less time than everywhere.
part = [p for (name, ranks), p in points.items() if name == "1F1B" and ranks not in (None, "all")]
assert part and part[0]["fits"] and part[0]["time"] < points["1F1B", "all"]["time"], part
PYTHON
# The printed command finds the searched schedule again, unchanged; and -o writes the same schedule.
expect 0 '^Its schedule: chevron-plan search --ranks 4 ' fit $given $bytes --memory 21GiB -o fastest.csv
length=$(sed -n 's/^The fastest found.* \([0-9.]*\), [0-9.]* GiB on rank.*/\1/p' output)
again=$(sed -n 's/^Its schedule: chevron-plan \(.*\) -o FILE.csv$/\1/p' output)
expect 0 "^[a-z]*  *$length " $again -o again.csv
cmp fastest.csv again.csv || failed=1
# No schedule that search finds with a limit in microbatches, and that fits, is shorter: chunks of the fullest stage count for all.
cat > uneven.json <<'JSON'
{"chevron_profile": 1, "unit": "ms", "schedule": "ZBVZeroBubble", "ranks": 4, "chunks": 2, "stages": 8, "micro_batches": 8, "replicas": 1,
 "steps": 3, "pipeline": 300, "step": 310, "hidden": null, "forward": [9, 9, 9, 9, 9, 9, 9, 12], "backward": [null, null, null, null, null, null, null, null],
 "backward_input": [9, 9, 9, 9, 9, 9, 9, 12], "backward_weight": [8, 8, 8, 8, 8, 8, 8, 11],
 "communication": [1, 1, 1, 1, 1, 1, 1], "static_bytes": [2000, 1000, 1000, 1000, 1000, 1000, 1000, 1000],
 "activation_bytes": [100, 100, 100, 100, 100, 100, 100, 150], "kept_bytes": [60, 60, 60, 60, 60, 60, 60, 90],
 "input_bytes": [5, 5, 5, 5, 5, 5, 5, 5]}
JSON
uneven='--ranks 4 --microbatches 12 --profile uneven.json --trials 2000'
expect 0 . fit $uneven --memory 3600 --format json
cp output uneven.fit
for limit in 1.5 2 2.5 3 3.5 4 4.5 5 6; do
  "$plan" search $uneven --placement vee --chunks 2 --memory-limit $limit --kept-for-weight 0.6 --format csv > vee-$limit.csv
  "$plan" show vee-$limit.csv --profile uneven.json --format json > vee-$limit.json
done
python3 - <<'PYTHON' || failed=1
import glob, json
told = json.load(open("uneven.fit"))["schedules"]
best = min(p["time"] for p in told if p["fits"])
activation, kept, static = [100] * 7 + [150], [60] * 7 + [90], [3000, 2000, 2000, 2000]
count = 0
for name in glob.glob("vee-*.csv"):
    most = 0
    for rank, line in enumerate(open(name)):
        held = static[rank]
        for cell in line.strip().split(","):
            kind = next(c for c in cell if c.isalpha())
            stage = int(cell.split(kind)[0])
            held += {"F": activation[stage], "I": 0, "W": -kept[stage], "B": -activation[stage]}[kind]
            most = max(most, held)
            held += kept[stage] - activation[stage] if kind == "I" else 0
    if most <= 3600:
        count += 1
        time = json.load(open(name.replace("csv", "json")))["makespan"]
        assert best <= time * (1 + 1e-12), (name, best, time)
assert count >= 2, count
PYTHON
expect 0 '^fastest.csv  *-  *' fit fastest.csv $bytes --memory 40GiB --forward 20 --trials 100
expect 2 "'1F1B' is no CSV file" fit 1F1B $bytes --memory 40GiB
expect 2 "fastest.csv, which has 4" fit fastest.csv $bytes --memory 40GiB --ranks 3
# Pictures.
for file in fit.svg fit.html; do
  expect 0 '^The fastest found that fits' fit $given $bytes --memory 25GiB -o $file
  grep -q 'a rank has 25 GiB' $file && grep -q 'prefers-color-scheme: dark' $file && grep -q '<polygon' $file || { echo "$file: not the picture"; failed=1; }
done
python3 -c 'import xml.dom.minidom as x; x.parse("fit.svg")' || failed=1
# A profile says all of it by itself, if bytes are written into it.
cat > profile.json <<'JSON'
{"chevron_profile": 1, "unit": "ms", "schedule": "ZBVZeroBubble", "ranks": 2, "chunks": 2, "stages": 4, "micro_batches": 8, "replicas": 1,
 "steps": 3, "pipeline": 20, "step": 21, "forward": [10, 10, 10, 20], "backward": [null, null, null, null], "backward_input": [0, 13, 13, 20],
 "backward_weight": [20, 7, 7, 12], "communication": [1, null, 1], "hidden": null, "static_bytes": [5000, 4000, 4000, 9000],
 "activation_bytes": [1000, 1000, 1000, 3000], "input_bytes": [10, 50, 50, 50]}
JSON
expect 0 '^The fastest found that fits: .* ms, ' fit --ranks 2 --microbatches 8 --memory 25KB --profile profile.json --trials 4000
sed 's/, "static_bytes".*/}/; /"activation_bytes"/d' profile.json > old.json
expect 2 "--profile 'old.json': 'activation_bytes' is missing: .* or add --activation-bytes" fit --ranks 2 --memory 25KB --profile old.json
expect 0 '^Recomputation was not looked at' fit --ranks 2 --memory 25KB --profile old.json --activation-bytes 1000 --static-bytes 5000 --trials 100 --microbatches 3

# The optimizer's state over replicas: worked out a second time.
sed 's/"input_bytes"/"state_bytes": [2500, 2000, 2000, 4501], "input_bytes"/' profile.json > state.json
for shard in 1 2 4; do
  expect 0 . fit --ranks 2 --microbatches 8 --memory 25KB --profile state.json --shard $shard --trials 100 --format json
  cp output profile-$shard.fit
  expect 0 . fit $given $bytes --state-bytes 5GiB --memory 64GiB --shard $shard --format json
  cp output flags-$shard.fit
done
python3 - <<'PYTHON' || failed=1
import json
def fixed(name):
    return {(p["schedule"], p["recomputed"]): p["static_bytes"] for p in json.load(open(name))["schedules"] if not p["searched"]}
GiB = 1 << 30
for shard in 1, 2, 4:
    for (schedule, recomputed), bytes in fixed(f"flags-{shard}.fit").items():
        whole = 5 * GiB + 5 * GiB // shard
        assert whole <= bytes < whole + 16, (shard, schedule, bytes)
    known = [5000, 4000, 4000, 9000], [2500, 2000, 2000, 4501]
    of_stage = [static - state + -(-state // shard) for static, state in zip(*known)]
    got = fixed(f"profile-{shard}.fit")["ZBVZeroBubble", None]
    assert got in (of_stage[0] + of_stage[3], of_stage[1] + of_stage[2]), (shard, got, of_stage)
PYTHON
# Gradients that are freed: one chunk's at a time where backwards follow one another, all where they run in turns.
expect 0 . fit $given $bytes --state-bytes 5GiB --gradient-bytes 2GiB --memory 64GiB --shard 4 --shard-gradients --format json
cp output freed.fit
for name in 1F1B LoopedBFS ZBVZeroBubble; do "$plan" show $name --ranks 4 --microbatches 12 --format csv -o $name.csv; done
python3 - <<'PYTHON' || failed=1
import json
GiB = 1 << 30
points = {(p["schedule"], p["recomputed"]): p for p in json.load(open("freed.fit"))["schedules"]}
whole = {(p["schedule"], p["recomputed"]): p for p in json.load(open("flags-4.fit"))["schedules"]}
saved = {}
for name, chunks in ("1F1B", 1), ("LoopedBFS", 2), ("ZBVZeroBubble", 2):
    static, activation, kept = 10 * GiB - 5 * GiB * 3 // 4, 4 * GiB // chunks, 3 * GiB // chunks
    gradient, share = 2 * GiB // chunks, 2 * GiB // chunks // 4
    most = 0
    for line in open(name + ".csv"):
        held, gradients, left = {}, {}, {}
        now = lambda: static - 2 * GiB + sum(held.values()) + sum(gradients.values())
        def free():
            global most
            for stage in [s for s, bytes in gradients.items() if bytes == gradient and left[s] == 0]:
                most = max(most, now() + share)
                gradients[stage] = share
        for cell in line.strip().split(","):
            kind = next(c for c in cell if c.isalpha())
            stage, m = map(int, cell.split(kind))
            if kind in "BIW" and stage not in gradients:
                free()
                gradients[stage], left[stage] = gradient, 12
            if kind == "F":
                held[stage, m] = activation
            most = max(most, now())
            if kind in "BI":
                held[stage, m] = kept if kind == "I" else 0
                most = max(most, now())
            if kind == "W":
                held[stage, m] = 0
            if kind in "BW":
                left[stage] -= 1
        free()
    assert points[name, None]["bytes"] == most, (name, most, points[name, None])
    saved[name] = whole[name, None]["bytes"] - most
# Where backwards of chunks run in turns, or with one chunk, nothing is saved while the most activations are held.
assert saved["LoopedBFS"] >= GiB and saved["1F1B"] <= 0 and saved["ZBVZeroBubble"] <= GiB, saved
PYTHON
expect 2 "--shard-gradients has no effect without --shard" fit $given $bytes --memory 25GiB --shard-gradients
expect 2 "--gradient-bytes 1GiB has no effect without --shard-gradients" fit $given $bytes --memory 25GiB --gradient-bytes 1GiB
expect 2 "--shard-gradients: how much of --static-bytes are gradients is not known: add --gradient-bytes" fit $given $bytes --state-bytes 5GiB --memory 25GiB --shard 2 --shard-gradients
expect 2 "--gradient-bytes 8 GiB is more than --static-bytes without the optimizer's state, 7.5 GiB" fit $given $bytes --state-bytes 5GiB --gradient-bytes 8GiB --memory 25GiB --shard 2 --shard-gradients
expect 2 "--profile 'state.json': 'gradient_bytes' is missing" fit --ranks 2 --memory 25KB --profile state.json --shard 2 --shard-gradients
expect 0 '^Its schedule: chevron-plan search .* --state-bytes 5GiB --shard 2 \|^The fastest found' fit $given $bytes --state-bytes 5GiB --shard 2 --memory 25GiB
expect 2 "--profile 'profile.json': 'state_bytes' is missing" fit --ranks 2 --memory 25KB --profile profile.json --shard 2
expect 2 "--shard 2: how much of --static-bytes is the optimizer's state is not known: add --state-bytes" fit $given $bytes --memory 25GiB --shard 2
expect 2 "--state-bytes 1GiB has no effect without --shard" fit $given $bytes --memory 25GiB --state-bytes 1GiB
expect 2 "--state-bytes 11 GiB is more than --static-bytes 10 GiB, of which it is a part" fit $given $bytes --memory 25GiB --state-bytes 11GiB --shard 2
expect 2 "--shard" fit $given $bytes --memory 25GiB --state-bytes 1GiB --shard 0
expect 2 "--state-bytes 1GiB does not stand alone: add --activation-bytes" fit --memory 25GiB --state-bytes 1GiB
expect 2 "--shard has no effect without --memory" search --ranks 2 --shard 2

# A profile with the bytes of slices: plans of as many slices hold each slice's own, others a share by tokens. Worked out a second time.
python3 - <<'PYTHON' || failed=1
import json, random
draw = random.Random(3)
stages = 8
slices = [{"activation_bytes": [draw.randrange(90, 400) for _ in range(stages)], "kept_bytes": [draw.randrange(50, 300) for _ in range(stages)],
           "input_bytes": [draw.randrange(3, 20) for _ in range(stages)]} for _ in range(3)]
whole = {key: [sum(one[key][s] for one in slices) for s in range(stages)] for key in slices[0]}
profile = {"chevron_profile": 1, "unit": "ms", "stages": stages, "forward": [3 + s for s in range(stages)], "backward": [None] * stages,
           "backward_input": [4 + s for s in range(stages)], "backward_weight": [2 + s for s in range(stages)], "communication": [1] * 7,
           "static_bytes": [1000 + 10 * s for s in range(stages)], **whole, "slices": slices}
json.dump(profile, open("sliced.json", "w"))
# Stages of two layers, with an embedding and a head.
for one in slices:
    layer, embedding, head = (draw.randrange(90, 400) for _ in range(3))
    one["activation_bytes"] = [2 * layer + (s == 0) * embedding + (s == 7) * head for s in range(stages)]
    one.pop("kept_bytes"), whole.pop("kept_bytes", None), profile.pop("kept_bytes", None)
whole["activation_bytes"] = [sum(one["activation_bytes"][s] for one in slices) for s in range(stages)]
profile["static_bytes"] = [1000] * stages
json.dump({**profile, **whole, "slices": slices, "layers": [2] * stages}, open("sliced-layers.json", "w"))
PYTHON
sliced='--ranks 4 --chunks 1 --microbatches 6 --memory 1MiB --trials 100'
for slices in 2 3; do
  for name in Seq1F1B SeqZB-H1; do
    "$plan" show $name --ranks 4 --microbatches 6 --slices $slices --format csv -o $name-$slices.csv
  done
done
expect 0 "^Bytes of 2 slices: shares of a microbatch's bytes, by tokens; the profile has the bytes of each of 3 slices\.$" fit $sliced --profile sliced.json --slices 2,3
expect 0 '^Bytes of 3 slices: of each slice, from the profile\.$' fit $sliced --profile sliced.json --slices 2,3
expect 0 . fit $sliced --profile sliced.json --slices 2,3 --format json -o united.fit
expect 0 . fit $sliced --profile sliced-layers.json --slices 3 --layers 3,6,4,3 --format json -o layers.fit
python3 - <<'PYTHON' || failed=1
import json
def most_bytes(name, slices, bytes_of, static, recomputed):
    most = 0
    for rank, line in enumerate(open(f"{name}-{slices}.csv")):
        held = static[rank]
        for cell in filter(None, line.strip().split(",")):
            kind = next(c for c in cell if c.isalpha())
            stage, unit = cell.split(kind)
            assert int(stage) == rank
            activation, kept, taken_in = bytes_of(rank, int(unit.split(".")[1]))
            left = taken_in if recomputed else activation
            held += {"F": left, "B": activation - left, "I": activation - left, "W": 0}[kind]
            most = max(most, held)
            held -= {"F": 0, "B": activation, "I": activation - kept, "W": kept}[kind]
        assert held == static[rank]
    return most
def compare(file, names, slices, bytes_of, static):
    points = {(p["schedule"], p["recomputed"]): p["bytes"] for p in json.load(open(file))["schedules"]}
    for name in names:
        for recomputed in None, "all":
            wanted = most_bytes(name, slices, bytes_of, static, recomputed)
            assert points[f"{name} k={slices}", recomputed] == wanted, (file, name, slices, recomputed, wanted, points)
told = json.load(open("sliced.json"))
static = [sum(told["static_bytes"][2 * s:2 * s + 2]) for s in range(4)]
def united(of, stage, share=1):
    pair = slice(2 * stage, 2 * stage + 2)
    return [int(share * n + 0.5) for n in (sum(of["activation_bytes"][pair]), sum(of["kept_bytes"][pair]), of["input_bytes"][2 * stage])]
compare("united.fit", ("Seq1F1B", "SeqZB-H1"), 3, lambda stage, slice: united(told["slices"][slice], stage), static)
compare("united.fit", ("Seq1F1B", "SeqZB-H1"), 2, lambda stage, slice: united(told, stage, 1 / 2), static)
told, cut = json.load(open("sliced-layers.json")), [3, 6, 4, 3]
def recut(stage, slice):
    of = told["slices"][slice]["activation_bytes"]
    bytes = cut[stage] * of[1] // 2 + (stage == 0) * (of[0] - of[1]) + (stage == 3) * (of[7] - of[1])
    return bytes, bytes, told["slices"][slice]["input_bytes"][sum(cut[:stage]) // 2]
compare("layers.fit", ["Seq1F1B"], 3, recut, [500 * layers for layers in cut])
PYTHON

expect 2 "--memory is not given: give the memory of a rank, such as --memory 80GiB" fit --activation-bytes 1GiB
expect 2 "--memory 'much' is not a size: give bytes up to 1PiB" fit --memory much
expect 2 "the memory of a microbatch is unknown: add --activation-bytes and --static-bytes" fit --memory 80GiB
expect 2 "--static-bytes is not given" fit --memory 80GiB --activation-bytes 1GiB
expect 2 "--kept-bytes 2 does not stand alone: add --activation-bytes" fit --memory 80GiB --kept-bytes 2
expect 2 "--input-bytes 2 GiB is more than --activation-bytes" fit --memory 80GiB --activation-bytes 1GiB --static-bytes 1GiB --input-bytes 2GiB
expect 2 "--forward '1,2' has 2 values, but the schedule has 4 stages" fit --memory 80GiB --activation-bytes 1GiB --static-bytes 1GiB --forward 1,2
exit $failed
