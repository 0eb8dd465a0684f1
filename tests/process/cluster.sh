# chevron-plan cluster: no way is shorter than the bound, all fit, and times are those of show with the same layers and links; sums over
# replicas and the optimizer by hand; more memory and faster links make nothing slower; the ten best are those of a search without
# bounds, each way's bound is at most its time, and the map has all ways of its part of the plane; the batch script starts the
# printed command; wrong inputs by their words.
# timeout: 120
seconds=60
. "$(dirname "$0")/shared/expect_plan.sh"

size='--layers 8 --width 1024 --heads 8 --vocabulary 8000 --tokens 1024 --tflops 100 --bandwidth 1TB/s --masters'
expect 0 . model $size -o profile.json
machine='--gpus 4 --link-inside 20GB/s --batch-tokens 64k'
expect 0 '^No way takes less than [0-9.]* ms' cluster profile.json $machine --memory 8GiB
expect 0 '^Train: torchrun --nnodes 1 --nproc-per-node 4 .* --context 1024 ' cluster profile.json $machine --memory 8GiB
expect 0 . cluster profile.json $machine --memory 8GiB -o ways.json
for more in "--memory 6GiB" "--memory 3GiB" "--memory 80GiB"; do
  expect 0 . cluster profile.json $machine $more --format json
  cp output "ways-$(echo "$more" | tr -dc 0-9).json"
done
expect 0 . cluster profile.json --gpus 4 --link-inside 200GB/s --batch-tokens 64k --memory 8GiB --format json; cp output fast.json
expect 0 . cluster profile.json --nodes 2 --gpus 2 --link-inside 20GB/s --link-between 1GB/s --batch-tokens 64k --memory 8GiB --format json; cp output two.json
expect 0 . cluster profile.json --nodes 2 --gpus 1 --link-inside 20GB/s --link-between 2GB/s --batch-tokens 64k --memory 8GiB --format json; cp output apart.json
expect 0 . cluster profile.json $machine --memory 8GiB --latency-inside 200us --format json; cp output late.json
expect 0 . cluster profile.json $machine --memory 8GiB --latency-inside 200us --exhaustive --format json; cp output late-all.json
expect 0 . cluster profile.json $machine --memory 8GiB --exhaustive --format json; cp output ways-all.json

CHEVRON_PLAN=$plan SIZE=$size python3 - <<'PYTHON' || failed=1
import json, os, subprocess

def run(*arguments):
    done = subprocess.run([os.environ["CHEVRON_PLAN"], *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

read = lambda name: json.load(open(name))
ways = read("ways.json")
checked = 0
for name in "ways.json", "ways-6.json", "ways-3.json", "ways-80.json", "fast.json", "two.json":
    told = read(name)
    times = [w["time"] for w in told["best"]]
    assert 0 < len(times) <= 10 and times == sorted(times), (name, times)
    memory = {"ways-6.json": 6, "ways-3.json": 3, "ways-80.json": 80}.get(name, 8) << 30
    for w in told["best"]:
        assert told["bound"] <= w["time"] and w["bytes"] <= memory, (name, w)
        assert w["pipeline_ranks"] * w["shards"] * w["replicas"] == 4, w
        assert w["replicas"] * w["samples"] * w["micro_batches"] == 64 and sum(w["layers"]) == 8, w
        assert len(w["layers"]) == w["pipeline_ranks"] * w["chunks"] and 0 < w["mfu"] < 1, w
assert read("ways-80.json")["best"][0]["time"] <= ways["best"][0]["time"] <= read("ways-6.json")["best"][0]["time"]
assert read("ways-6.json")["best"][0]["time"] <= read("ways-3.json")["best"][0]["time"]
assert read("fast.json")["best"][0]["time"] < ways["best"][0]["time"] <= read("two.json")["best"][0]["time"]

# The pipeline, by show; sums, optimizer and gathers behind it by hand. Machines of one GPU: all messages take the slow links.
apart = several = 0
for name in "ways.json", "ways-3.json", "fast.json", "apart.json", "late.json":
    latency = 0.2 if name == "late.json" else 0
    rate = {"fast.json": 200e6, "apart.json": 2e6}.get(name, 20e6)  # bytes a millisecond
    for w in read(name)["best"]:
        if w["shards"] > 1 or w["recompute"] or w["slices"] > 1:  # of slices: cluster_slices.py
            continue
        model = run("model", *os.environ["SIZE"].split(), "--samples", w["samples"], "--format", "json")
        json.dump(model, open("one.json", "w"))
        # By rank, the end of each stage's last action.
        ends = [{0: sum(model["forward"] + model["backward_input"] + model["backward_weight"]) * w["micro_batches"]}]
        if w["pipeline_ranks"] > 1:
            traced = run("show", w["schedule"], "--ranks", w["pipeline_ranks"], "--microbatches", w["micro_batches"], "--profile", "one.json",
                         "--layers", ",".join(map(str, w["layers"])), "--bandwidth", f"{rate / 1e6:g}GB/s", "--latency", latency, "--message-bytes",
                         1024 * 1024 * 2 * w["samples"], "--format", "trace", *(["--chunks", w["chunks"]] if w["schedule"] == "Interleaved1F1B" else []))
            last = {}
            for one in traced["traceEvents"]:
                if one["ph"] == "X":
                    at = one["pid"], one["args"]["stage"]
                    last[at] = max(last.get(at, 0), (one["ts"] + one["dur"]) / 1e3)
            assert abs(max(last.values()) / w["pipeline"] - 1) < 2e-3, (w, max(last.values()))
            several += w["chunks"] > 1 and w["replicas"] > 1
            ends = [{s: end for (r, s), end in last.items() if r == rank} for rank in range(w["pipeline_ranks"])]
        pieces = [b / 4 for b in model["gradient_bytes"]]
        first = lambda s: 1 + sum(w["layers"][:s])
        held = lambda s: sum(pieces[first(s):first(s + 1)]) + (pieces[0] if s == 0 else 0) + (pieces[-1] if s + 1 == len(w["layers"]) else 0)
        part = (w["replicas"] - 1) / w["replicas"]
        # No rank steps before all ranks have summed.
        summed = behind = 0
        for stages in ends:
            wire, parameters = 0, sum(map(held, stages))
            for stage in sorted(stages, key=stages.get):
                ring = held(stage) * 4 * part / rate + latency * (w["replicas"] - 1)
                wire = max(wire, stages[stage]) + ring * (1 if w["sharded_optimizer"] else 2)
            gathers = parameters * 2 * part / rate + latency * (w["replicas"] - 1) * len(stages) if w["sharded_optimizer"] else 0
            steps = parameters * (4 + 2 * 12 + 2 * 2) / 1e9 / (w["replicas"] if w["sharded_optimizer"] else 1)
            summed, behind = max(summed, wire), max(behind, gathers + steps)
        time = summed + behind
        assert abs(w["time"] / time - 1) < 2e-4, (name, w, time)
        checked += 1
        apart += name == "apart.json" and w["pipeline_ranks"] > 1
# Without a pipeline, latencies are those of rings: over shards 17 sums in F and in the backward (16 in layers, half a one in embedding
# and in head), over replicas one.
key = lambda w: (w["pipeline_ranks"], w["shards"], w["samples"], w["recompute"], w["sharded_optimizer"])
plain = {key(w): w for w in read("ways-all.json")["judged"] if w["pipeline_ranks"] == 1}
for w in read("late-all.json")["judged"]:
    assert w["lower_bound"] <= w["time"], w
    if w["pipeline_ranks"] == 1:
        sums = w["micro_batches"] * 17 * (3 if w["recompute"] else 2) * 2 * (w["shards"] - 1)
        more = w["time"] - plain[key(w)]["time"]
        assert abs(more / (0.2 * (sums + 2 * (w["replicas"] - 1))) - 1) < 1e-6, (w, more, sums)
assert len(plain) > 8, len(plain)
assert checked >= 5 and apart >= 2 and several >= 2, (checked, apart, several)
PYTHON

# Bounds leave the answer as it is: three models, with much and little memory, fast and slow links, uneven layers.
expect 0 . model --layers 12 --width 512 --heads 8 --vocabulary 32000 --tokens 512 --tflops 50 --bandwidth 1TB/s --masters -o wide.json
expect 0 . model --layers 6 --width 512 --heads 4 --vocabulary 1000 --tokens 2048 --tflops 100 --bandwidth 2TB/s --attention full -o long.json
compared=0
each() {
  compared=$((compared + 1))
  expect 0 . cluster "$@" --exhaustive --threads 1 --format json
  cp output all-$compared.json
  expect 0 . cluster "$@" --format json
  cp output few-$compared.json
  expect 0 . cluster "$@" --threads 1 -o map-$compared.svg
}
each profile.json $machine --memory 8GiB
each profile.json $machine --memory 2500MiB
each profile.json --nodes 2 --gpus 4 --link-inside 100GB/s --link-between 2GB/s --batch-tokens 128k --memory 3GiB
each wide.json --nodes 2 --gpus 2 --link-inside 50GB/s --link-between 5GB/s --batch-tokens 16k --memory 4GiB
each wide.json --gpus 8 --link-inside 10GB/s --batch-tokens 32k --memory 1GiB
each long.json --nodes 4 --gpus 1 --link-between 10GB/s --batch-tokens 64k --memory 2GiB
COMPARED=$compared python3 - <<'PYTHON' || failed=1
import json, os, re, xml.dom.minidom

key = lambda w: tuple(w[k] for k in ("pipeline_ranks", "shards", "replicas", "micro_batches", "slices", "samples", "schedule", "chunks", "recompute", "sharded_optimizer"))
exact, pruned = 0, 0
for i in range(1, int(os.environ["COMPARED"]) + 1):
    whole, few = (json.load(open(f"{name}-{i}.json")) for name in ("all", "few"))
    assert [key(w) for w in whole["best"]] == [key(w) for w in few["best"]], (i, whole["best"], few["best"])
    assert whole["best"] == few["best"] and whole["ways"] == few["ways"] and whole["longer"] == few["longer"], i
    judged = {key(w): w for w in whole["judged"]}
    assert len(judged) == len(whole["judged"]) > 20, (i, len(judged))
    for w in judged.values():
        assert w["lower_bound"] <= w["time"] and whole["bound"] <= w["lower_bound"] * (1 + 1e-6), (i, w)
        exact += w["pipeline_ranks"] == 1 and w["lower_bound"] > w["time"] * (1 - 1e-6)
    for w in few["judged"]:
        assert judged[key(w)] == w and w["lower_bound"] <= few["best"][-1]["time"], (i, w)
    pruned += len(judged) > len(few["judged"])
    # The map: one mark for each way of its part of the plane, with its numbers.
    svg = open(f"map-{i}.svg").read()
    xml.dom.minidom.parseString(svg)
    memory = int(re.search(r"a GPU has", svg) is not None)
    assert memory and "prefers-color-scheme: dark" in svg and 'class="front"' in svg, i
    marks = re.findall(r"<title>P(\d+) T(\d+) R(\d+) M(\d+)(?: k(\d+))?, (\d+) samples?, ([^:]*): ([0-9.]+) ms, ", svg)
    given = {1: 8 << 30, 2: 2500 << 20, 3: 3 << 30, 4: 4 << 30, 5: 1 << 30, 6: 2 << 30}[i]
    inside = [w for w in judged.values() if w["time"] <= 1.3 * whole["best"][0]["time"] and w["bytes"] <= 1.3 * given]
    words = lambda w: (w["schedule"] + (f", {w['chunks']} chunks" if w["chunks"] > 2 else "") + (", recomputed" if w["recompute"] else "")
                       + (", sharded" if w["sharded_optimizer"] else ""))
    wanted = sorted((*(str(w[k]) for k in ("pipeline_ranks", "shards", "replicas", "micro_batches")), str(w["slices"]) if w["slices"] > 1 else "",
                     str(w["samples"]), words(w)) for w in inside)
    assert sorted(m[:7] for m in marks) == wanted, (i, len(marks), len(wanted))
assert exact >= 10 and pruned >= 4, (exact, pruned)
PYTHON

# The batch script runs the command of the first way, with the job's own folders and further flags; the timeline ends with its step.
expect 0 '^Train: torchrun' cluster profile.json $machine --memory 8GiB --slurm job.sh --timeline first.svg
grep '^Train: ' output > train
sh -n job.sh || failed=1
grep -q '^#SBATCH --nodes=1$' job.sh && grep -q '^#SBATCH --ntasks-per-node=4$' job.sh && grep -q '^#SBATCH --signal=USR1@300$' job.sh || { cat job.sh; failed=1; }
mkdir stand_in
printf '#!/bin/sh\nfor one; do printf "%%s\\n" "$one"; done\nexit 7\n' > stand_in/srun
chmod 755 stand_in/srun
code=0
PATH="$PWD/stand_in:$PATH" MODEL='a model' DATA=tokens CHECKPOINT=saved OUT=tuned sh job.sh --steps 9 > started || code=$?
[ $code -eq 7 ] || { echo "the script's exit code is $code, not srun's 7"; failed=1; }
python3 - <<'PYTHON' || failed=1
words = open("train").read().split("--no-python ")[1].split()
started = open("started").read().split("\n")[:-1]
own = started.index("chevron-finetune")
assert started[:own] == ["--wait=30", "--cpu-bind=cores"], started
wanted = [{"FOLDER": "a model", "TOKENS": "tokens", "TRAINED": "tuned"}.get(w, w) for w in words]
at = wanted.index("tokens") + 1
assert started[own:] == wanted[:at] + ["--checkpoint", "saved", "--resume"] + wanted[at:] + ["--steps", "9"], (started, wanted)
PYTHON
code=0
MODEL=m DATA=d sh job.sh 2> errors || code=$?
[ $code -ne 0 ] && grep -q 'CHECKPOINT: is not set. Remedy' errors || { cat errors; failed=1; }
python3 -c 'import xml.dom.minidom as x; x.parse("first.svg")' && grep -q optimizer first.svg || failed=1
expect 0 . cluster profile.json $machine --memory 8GiB --timeline first.html -o map.html
grep -q 'a GPU has 8 GiB' map.html && grep -q '<html' first.html || failed=1
expect 2 "--timeline 'first.png': the file's ending says no format. Remedy" cluster profile.json $machine --memory 8GiB --timeline first.png
expect 2 "--slurm 'none/job.sh' cannot be written" cluster profile.json $machine --memory 8GiB --slurm none/job.sh
expect 2 "--latency-inside" cluster profile.json $machine --memory 8GiB --latency-inside soon
expect 2 "--threads" cluster profile.json $machine --memory 8GiB --threads none

# Of a large model's ways on 64 and on 2,048 GPUs few are judged: the time of a search is that of these ways.
expect 0 . model --layers 80 --width 8192 --heads 64 --key-heads 8 --tokens 4096 --gpu h100 --masters -o large.json
large='--gpus 8 --memory 80GiB --link-inside 450GB/s --link-between 50GB/s --batch-tokens 4M'
expect 0 '^No way takes less' cluster large.json --nodes 8 $large -o few.json
expect 0 '^No way takes less' cluster large.json --nodes 256 $large -o many.json
python3 - <<'PYTHON' || failed=1
import json
for name, least, most in ("few", 2000, 150), ("many", 2000, 500):
    told = json.load(open(name + ".json"))
    assert told["ways"] > least and len(told["best"]) == 10 and len(told["judged"]) < most, (name, told["ways"], len(told["judged"]))
PYTHON

expect 2 "--batch-tokens is not given: give the tokens of a step" cluster profile.json --memory 8GiB --link-inside 1GB/s
expect 2 "--batch-tokens 1000 is no multiple of the 1024 tokens of a sequence: give 1024" cluster profile.json --memory 8GiB --link-inside 1GB/s --batch-tokens 1000
expect 2 "--link-between is not given" cluster profile.json --nodes 2 --memory 8GiB --link-inside 1GB/s --batch-tokens 64k
expect 2 "--memory is not given: give the memory of a GPU" cluster profile.json --link-inside 1GB/s --batch-tokens 64k
expect 6 "Nothing of [0-9]* ways fits in 100 MiB. The least that is needed is .* Remedy: more GPUs" cluster profile.json $machine --memory 100MiB
for size in 40MiB 100MiB; do
  expect 6 "The least that is needed is" cluster wide.json --nodes 2 --gpus 4 --link-inside 20GB/s --link-between 9GB/s --batch-tokens 64k --memory $size
  cp errors few
  expect 6 "The least that is needed is" cluster wide.json --nodes 2 --gpus 4 --link-inside 20GB/s --link-between 9GB/s --batch-tokens 64k --memory $size --exhaustive
  cmp errors few || { cat errors few; failed=1; }
done
sed 's/^  "model".*$/  "shard": 1/' profile.json | sed 's/^  "shard": 1,$//' > bare.json
expect 2 "has no 'model', from which the costs on shards" cluster bare.json $machine --memory 8GiB
sed 's/"heads":8/"heads":"many"/' profile.json > wrong.json
expect 2 "'model', key 'heads' is \"many\", no whole number from 1 on. Remedy: write the file anew" cluster wrong.json $machine --memory 8GiB
exit $failed
