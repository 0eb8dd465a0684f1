# A profile by layers in fit, compare, show and search: each schedule's stages get the layers that suit it, within memory. 40 layers
# of width 5120 on 8 ranks of 80 GiB: times and bytes are computed a second time from the schedule's file and the layers' figures.
# timeout: 180
seconds=60
. "$(dirname "$0")/shared/expect_plan.sh"

# Costs as a user would add them up: a head of half a layer, an embedding without input gradient in the first.
python3 - <<'PYTHON'
import json
def list_of(first, inner, last): return [first] + [inner] * 38 + [last]
layers = dict(chevron_profile=1, unit="ms", stages=40, forward=list_of(6.92, 6.92, 10.32), backward=list_of(6.2, 13.4, 20.2),
    backward_input=list_of(0, 7.2, 10.6), backward_weight=list_of(6.2, 6.2, 9.6), communication=[0.14] * 39, layers=[1] * 40,
    static_bytes=list_of(8655120000, 5706000000, 8655120000), activation_bytes=list_of(720000000, 720000000, 1140000000),
    kept_bytes=list_of(860000000, 860000000, 1280000000), input_bytes=list_of(32768, 41943040, 41943040))
json.dump(layers, open("p40.json", "w"))
# Without embedding and head the rank of a vee's first and last stage would have room for the layers of even stages.
json.dump(dict(layers, communication=[None] * 39), open("unlinked.json", "w"))
json.dump(dict(layers, static_bytes=list_of(30 << 30, 1 << 30, 30 << 30)), open("heavy.json", "w"))
PYTHON
given='--ranks 8 --microbatches 64 --profile p40.json'

# The answer for one chunk on each rank, to which an even division of other schedules led, and the one for two.
expect 0 '^linear  *7398\.38  *' search $given --chunks 1 --memory 80GiB
expect 0 '^vee  *66[0-9.]*  ' search $given --chunks 2 --placement vee --memory 80GiB -o v.csv
layers=$(sed -n 's/.*--layers \([0-9,]*\)$/\1/p' output)
for command in show compare; do expect 0 . $command v.csv --profile p40.json --layers "$layers" --format json; cp output $command.json; done
expect 0 '^layers of the stages: 0*[0-9,]*$' show v.csv --profile p40.json
expect 0 '^layers: divided for each schedule; of .* [0-9,]*$' compare $given
expect 0 '^The fastest found that fits: searched, vee, 66[0-9.]* ms' fit $given --memory 80GiB --trials 1000 -o fit.json
cp fit.json all.json
expect 0 "^Layers of its stages: [0-9,]*\.$" fit $given --memory 80GiB --trials 1
expect 0 '^vee  *[0-9.]* .*[0-9] %$\|^vee .*cuts searched$' search --ranks 4 --chunks 2 --microbatches 8 --placement vee --profile heavy.json --memory 90GiB --trials 100

LAYERS=$layers python3 - <<'PYTHON' || failed=1
import json, os
p = json.load(open("p40.json"))
cut = list(map(int, os.environ["LAYERS"].split(",")))
rows = [[(next(c for c in cell if c.isalpha()), *map(int, cell.replace(next(c for c in cell if c.isalpha()), " ").split()))
         for cell in line.strip().split(",")] for line in open("v.csv")]
assert len(cut) == 16 and sum(cut) == 40
begin = [sum(cut[:s]) for s in range(17)]
together = lambda key, s: sum(p[key][begin[s]:begin[s + 1]])
forward = [together("forward", s) for s in range(16)]
whole = [together("backward_input", s) + together("backward_weight", s) for s in range(16)]
input_ = [0 if s == 0 else together("backward_input", s) for s in range(16)]
cost = lambda kind, s: {"F": forward[s], "I": input_[s], "W": whole[s] - input_[s], "B": whole[s]}[kind]
# The schedule, played.
done, at, clock = {}, [0] * 8, [0.0] * 8
home = {s: r for r, row in enumerate(rows) for _, s, _ in row}
while any(at[r] < len(rows[r]) for r in range(8)):
    moved = False
    for r in range(8):
        while at[r] < len(rows[r]):
            kind, s, m = rows[r][at[r]]
            needs = [("F", s - 1, m)] if kind == "F" and s > 0 else [("G", s + 1, m)] if kind in "IB" and s < 15 else []
            if any(n not in done for n in needs):
                break
            ready = [done[n] + (0.14 if home[n[1]] != r else 0) for n in needs]
            clock[r] = max([clock[r], *ready]) + cost(kind, s)
            done["G" if kind in "IB" else kind, s, m] = clock[r]
            at[r] += 1
            moved = True
    assert moved
shown, = [e for e in json.load(open("compare.json")) if e["schedule"] == "v.csv"]
for told in json.load(open("show.json"))["makespan"], shown["makespan"]:
    assert abs(told - max(clock)) < 1e-6, (told, max(clock))
assert max(clock) <= 6712 < 7398
# Bytes, action by action.
most = []
for r, row in enumerate(rows):
    static, held, peak = sum(together("static_bytes", s) for s in range(16) if home[s] == r), {}, 0
    for kind, s, m in row:
        if kind == "F":
            held[s, m] = together("activation_bytes", s)
        peak = max(peak, static + sum(held.values()))
        if kind == "I":
            held[s, m] = together("kept_bytes", s)
            peak = max(peak, static + sum(held.values()))
        if kind in "WB":
            held[s, m] = 0
    most.append(peak)
assert max(most) <= 80 << 30, most
open("bytes", "w").write(str(max(most)))

# No schedule is shorter with even layers, if it fits with them; and none is left out.
points = json.load(open("all.json"))
assert all(len(q["layers"]) in (8, 16) and sum(q["layers"]) == 40 for q in points["schedules"])
assert {q["schedule"] for q in points["schedules"]} >= {"1F1B", "ZBVZeroBubble", "DualPipeV", "Interleaved1F1B", "GPipe", "searched, vee"}
for q in points["schedules"]:
    for bytes, time in points["bound"]:
        assert q["bytes"] >= bytes and q["time"] >= time or q["recomputed"], q
PYTHON
[ -e bytes ] && expect 0 "\"schedule\": \"v.csv\", \"recomputed\": null, .* \"bytes\": $(cat bytes)," fit v.csv --profile p40.json --layers "$layers" --memory 80GiB --trials 1 --format json
even=3,2,3,2,3,2,3,2,3,2,3,2,3,2,3,2
expect 0 . compare $given --chunks 2 --layers $even --format json; cp output even.json
expect 0 . compare $given --chunks 2 --format json
python3 - <<'PYTHON' || failed=1
import json
read = lambda name: {e["schedule"]: e["makespan"] for e in json.load(open(name)) if "makespan" in e and e["chunks"] == 2}
even, free = read("even.json"), read("output")
assert len(even) >= 7 and all(free[name] <= even[name] * (1 + 1e-9) for name in even), (even, free)
assert sum(free[name] < even[name] * 0.98 for name in even) >= 2, (even, free)
PYTHON

# With less memory than the shortest layers of a schedule take, the schedule gets others, with which it fits.
heavy="--ranks 4 --microbatches 8 --profile heavy.json --trials 1 --format json"
expect 0 . fit $heavy --memory 400GiB; cp output wide.json
python3 - > tight <<'PYTHON' || failed=1
import json
point, = [p for p in json.load(open("wide.json"))["schedules"] if (p["schedule"], p["recomputed"]) == ("1F1B", None)]
print(point["bytes"] - (2 << 30))
PYTHON
expect 0 . fit $heavy --memory "$(cat tight)"
python3 - <<'PYTHON' || failed=1
import json
wide, tight = ([p for p in json.load(open(name))["schedules"] if (p["schedule"], p["recomputed"]) == ("1F1B", None)][0]
               for name in ("wide.json", "output"))
assert tight["fits"] and tight["layers"] != wide["layers"] and tight["time"] >= wide["time"], (wide, tight)
PYTHON

# From a configuration to a schedule in three calls.
cat > config.json <<'JSON'
{"model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
 "vocab_size": 32000, "max_position_embeddings": 4096}
JSON
expect 0 . model config.json --gpu h100 --masters --link 50GB/s -o profile.json
expect 0 '^The fastest found that fits: ' fit --ranks 8 --microbatches 16 --memory 80GiB --profile profile.json --trials 1000
eval "set -- $(sed -n 's/^Its schedule: chevron-plan //; s/ -o FILE.csv$/ -o mine.csv/p' output)"
[ $# -gt 0 ] && expect 0 . "$@"
expect 0 '^ok: ' check mine.csv

expect 2 "--layers needs the costs of layers: give --profile" show 1F1B --layers 1,1,1,1
expect 2 "--layers '3,2' are 5 layers, and the profile has 40: give one number for each stage" fit $given --memory 80GiB --layers 3,2
expect 2 "it has 8 stages, and --layers 2 numbers" show 1F1B $given --layers 20,20
expect 2 "--layers does not go with --partition, which looks for them" search $given --partition --layers 20,20
expect 2 "whose layers are divided, does not go with --jitter: give --layers" search $given --jitter 5%
expect 6 "--memory 30GiB: no order was found that fits" search $given --chunks 2 --placement vee --memory 30GiB
expect 2 "'communication' is null for every boundary: give --communication, in milliseconds, or --bandwidth" search --ranks 4 --profile unlinked.json
exit $failed
