# chevron-plan cluster: no way is shorter than the bound, all fit, and times are those of show with the same layers and links; sums over
# replicas and the optimizer by hand; more memory and faster links make nothing slower; wrong inputs by their words.
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

# The pipeline's time, by show; the rest by hand. Machines of one GPU: all messages take the slow links.
apart = 0
for name in "ways.json", "ways-3.json", "fast.json", "apart.json":
    rate = {"fast.json": 200e6, "apart.json": 2e6}.get(name, 20e6)  # bytes a millisecond
    for w in read(name)["best"]:
        if w["shards"] > 1 or w["recompute"]:
            continue
        model = run("model", *os.environ["SIZE"].split(), "--samples", w["samples"], "--format", "json")
        json.dump(model, open("one.json", "w"))
        if w["pipeline_ranks"] > 1:
            shown = run("show", w["schedule"], "--ranks", w["pipeline_ranks"], "--microbatches", w["micro_batches"], "--profile", "one.json",
                        "--layers", ",".join(map(str, w["layers"])), "--bandwidth", f"{rate / 1e6:g}GB/s", "--message-bytes",
                        1024 * 1024 * 2 * w["samples"], "--format", "json", *(["--chunks", w["chunks"]] if w["schedule"] == "Interleaved1F1B" else []))
            assert abs(shown["makespan"] / w["pipeline"] - 1) < 2e-3, (w, shown["makespan"])
        else:
            R, parameters = w["replicas"], sum(model["gradient_bytes"]) / 4
            work = sum(model["forward"] + model["backward_input"] + model["backward_weight"]) * w["micro_batches"]
            sums = parameters * 4 * (R - 1) / R / rate * (1 if w["sharded_optimizer"] else 2)
            gathers = parameters * 2 * (R - 1) / R / rate if w["sharded_optimizer"] else 0
            steps = parameters * (4 + 2 * 12 + 2 * 2) / 1e9 / (R if w["sharded_optimizer"] else 1)
            assert abs(w["time"] / (work + sums + gathers + steps) - 1) < 2e-3, (w, work, sums, gathers, steps)
        checked += 1
        apart += name == "apart.json" and w["pipeline_ranks"] > 1
assert checked >= 5 and apart >= 2, (checked, apart)
PYTHON

expect 2 "--batch-tokens is not given: give the tokens of a step" cluster profile.json --memory 8GiB --link-inside 1GB/s
expect 2 "--batch-tokens 1000 is no multiple of the 1024 tokens of a sequence: give 1024" cluster profile.json --memory 8GiB --link-inside 1GB/s --batch-tokens 1000
expect 2 "--link-between is not given" cluster profile.json --nodes 2 --memory 8GiB --link-inside 1GB/s --batch-tokens 64k
expect 2 "--memory is not given: give the memory of a GPU" cluster profile.json --link-inside 1GB/s --batch-tokens 64k
expect 6 "Nothing of [0-9]* ways fits in 100 MiB. The least that is needed is .* Remedy: more GPUs" cluster profile.json $machine --memory 100MiB
sed 's/^  "model".*$/  "shard": 1/' profile.json | sed 's/^  "shard": 1,$//' > bare.json
expect 2 "has no 'model', from which the costs on shards" cluster bare.json $machine --memory 8GiB
sed 's/"heads":8/"heads":"many"/' profile.json > wrong.json
expect 2 "'model', key 'heads' is \"many\", no whole number from 1 on. Remedy: write the file anew" cluster wrong.json $machine --memory 8GiB
exit $failed
