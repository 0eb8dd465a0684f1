# chevron-train --profile writes a file that chevron-plan reads: the planner predicts the trainer's prediction, and prints the measured
# time beside it. An unusable profile is refused, with the key at fault.
# timeout: 300
. "$(dirname "$0")/shared/folder.sh"
find_python
write_text
small="--layers 4 --width 32 --heads 2 --context 16 --microbatch-size 2 --microbatches 6 --steps 12 --sample 0 --timeline none --trace none --data text.txt"

for flags in "1F1B --ranks 2 --replicas 1" "ZBVZeroBubble --ranks 2 --replicas 1 --backend gloo" "ZB-H1 --ranks 2 --replicas 2" \
    "DualPipeV --ranks 2 --replicas 1"; do
  schedule=${flags%% *}
  timeout 150 "$train" $small --schedule $flags --profile $schedule.json > output 2>&1 || { cat output; exit 1; }
  grep -q "profile *$schedule.json: times of stages and messages" output || { cat output; exit 1; }
  "$plan" show "$schedule" --ranks 2 --microbatches 6 --profile "$schedule.json" --format json > shown.json
  "$plan" show "$schedule" --ranks 2 --microbatches 6 --profile "$schedule.json" > shown
  grep -Eq '^makespan +[0-9.]+ ms' shown || { cat shown; exit 1; }
  grep -Eq '^profile: makespan measured [0-9.]+ ms, the median of 11 steps(| and 2 replicas); the prediction is [0-9.]+ % (above|below)$' shown || {
    cat shown
    exit 1
  }
  "$plan" compare --ranks 2 --microbatches 6 --profile "$schedule.json" > compared
  grep -q "^profile: $schedule measured" compared || { cat compared; exit 1; }
  "$python" - "$schedule" <<'PYTHON'
import json, re, sys
name = sys.argv[1]
profile, shown = json.load(open(name + ".json")), json.load(open("shown.json"))
stages = profile["stages"]
assert stages == shown["stages"] and profile["steps"] == 11 and profile["unit"] == "ms", profile
split = "1F1B" not in name
for s in range(stages):
    assert profile["forward"][s] > 0, profile
    assert (profile["backward_input"][s] is not None) == split or name == "DualPipeV", profile
    assert abs(shown["costs"]["forward"][s] - profile["forward"][s]) < 1e-9, (profile, shown["costs"])
if split:
    # Stage 0 has no input gradient to compute, so its W is its whole backward.
    assert profile["backward_input"][0] < 0.3 * profile["backward_input"][1], profile
    assert profile["backward_weight"][0] > 1.5 * profile["backward_input"][0], profile
assert len(profile["communication"]) == stages - 1
assert 0 < profile["pipeline"] <= profile["step"], profile
# In a V the turn stands on one rank: no message, no time.
if "V" in name:
    assert profile["communication"][1] is None and profile["communication"][0] > 0, profile
# The trainer's prediction equals the planner's.
seconds = {"µs": 1e-3, "ms": 1, "s": 1e3}
told = re.search(r"pipeline, first F to last B or W +([0-9.]+) (µs|ms|s) +([0-9.]+) (µs|ms|s)", open("output").read())
predicted, measured = float(told[1]) * seconds[told[2]], float(told[3]) * seconds[told[4]]
assert abs(predicted - shown["makespan"]) < 0.06 * predicted, (told[0], shown["makespan"])
assert abs(measured - profile["pipeline"]) < 0.06 * measured, (told[0], profile)
PYTHON
done

# The bytes are those of the model, which is written a second time, for PyTorch, whose autograd lists the tensors that it saves.
if "$python" -c 'import torch' 2> /dev/null; then "$python" - <<'PYTHON'
import json
import torch
from torch.nn import functional as f

layers, width, heads, context, samples, vocabulary = 4, 32, 2, 16, 2, 256
ones = lambda *sizes: torch.ones(*sizes, requires_grad=True)

class block:
    def __init__(self):
        self.norms = [ones(width) for _ in range(4)]
        self.qkv, self.project = ones(3 * width, width), ones(width, width)
        self.widen, self.narrow = [ones(4 * width, width), ones(4 * width)], [ones(width, 4 * width), ones(width)]
        self.parameters = [*self.norms, self.qkv, self.project, *self.widen, *self.narrow]
    def __call__(self, x):
        parts = f.linear(f.layer_norm(x, (width,), *self.norms[:2]), self.qkv)
        parts = parts.view(samples, context, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
        seen = f.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + f.linear(seen.transpose(1, 2).reshape(samples, context, width), self.project)
        return x + f.linear(f.gelu(f.linear(f.layer_norm(x, (width,), *self.norms[2:]), *self.widen)), *self.narrow)

class embedding:
    def __init__(self):
        self.parameters = [ones(vocabulary, width), ones(context, width)]
    def __call__(self, x):
        return f.embedding(x, self.parameters[0]) + f.embedding(torch.arange(context), self.parameters[1])

targets = torch.zeros(samples, context, dtype=torch.long)
class head:
    def __init__(self):
        self.parameters = [ones(width), ones(width), ones(vocabulary, width)]
    def __call__(self, x):
        logits = f.linear(f.layer_norm(x, (width,), *self.parameters[:2]), self.parameters[2])
        return f.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

whole = [embedding(), *(block() for _ in range(layers)), head()]
def of_stage(number, stages):
    each = layers // stages
    own = whole[1 + number * each:1 + (number + 1) * each]
    own = ([whole[0]] if number == 0 else []) + own + ([whole[-1]] if number + 1 == stages else [])
    given = torch.ones(samples, context, dtype=torch.long) if number == 0 else ones(samples, context, width)
    saved = {}
    def note(t):
        saved[t.untyped_storage().data_ptr()] = (t.untyped_storage().nbytes(), t)
        return t
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        x = given
        for part in own:
            x = part(x)
    parameters = [p for part in own for p in part.parameters]
    for other in parameters + [targets]:
        saved.pop(other.untyped_storage().data_ptr(), None)
    values, moments = sum(p.numel() * 4 for p in parameters), 2
    return values * (2 + moments), sum(size for size, _ in saved.values()), given.untyped_storage().nbytes()

for name in "1F1B", "ZBVZeroBubble", "ZB-H1", "DualPipeV":
    told = json.load(open(name + ".json"))
    known = [of_stage(s, told["stages"]) for s in range(told["stages"])]
    for key, wanted in zip(["static_bytes", "activation_bytes", "input_bytes"], zip(*known)):
        assert told[key] == list(wanted), (name, key, told[key], wanted)
    assert ("kept_bytes" in told) == (name != "1F1B"), told
    moments = [static // 2 for static, _, _ in known]
    assert told["state_bytes"] == moments and told["shard"] == 1, (name, told["state_bytes"], moments)
    assert told["gradient_bytes"] == [bytes // 2 for bytes in moments], (name, told["gradient_bytes"], moments)
    for kept, (_, activation, _) in zip(told.get("kept_bytes", []), known):
        assert 0.5 * activation < kept < 1.5 * activation, (name, kept, activation)
PYTHON
fi
# The bytes of a sharded optimizer's state, also over another number of replicas.
timeout 150 "$train" $small --schedule 1F1B --ranks 2 --replicas 2 --shard --profile shares.json > output 2>&1 || { cat output; exit 1; }
for file in shares 1F1B; do
  "$plan" fit --ranks 2 --microbatches 6 --profile $file.json --shard 1 --memory 2MiB --trials 100 --format json > $file.fit
done
"$python" - <<'PYTHON'
import json
whole, share = json.load(open("1F1B.json")), json.load(open("shares.json"))
assert share["shard"] == 2 and share["activation_bytes"] == whole["activation_bytes"], share
for key, least, most in ("state_bytes", 0.5, 0.6), ("static_bytes", 0.75, 0.8):
    for some, all in zip(share[key], whole[key]):
        assert least * all <= some <= most * all, (key, some, all)
fixed = [{p["schedule"]: p["static_bytes"] for p in json.load(open(name + ".fit"))["schedules"]}["1F1B"] for name in ("shares", "1F1B")]
assert fixed[1] <= fixed[0] <= 1.1 * fixed[1], fixed
PYTHON
"$plan" fit --ranks 2 --microbatches 6 --profile ZBVZeroBubble.json --memory 2MiB --trials 200 > fits
grep -q '^The fastest found that fits: .* ms, ' fits || { cat fits; exit 1; }
code=0
"$plan" fit --ranks 2 --microbatches 6 --profile ZBVZeroBubble.json --memory 200KiB --trials 200 > fits 2>&1 || code=$?
[ $code -eq 6 ] && grep -q 'Nothing fits in 200 KiB' fits || { cat fits; exit 1; }

# Costs of stages can be added up, not cut; a backward that ran whole says nothing of its halves.
"$plan" show ZB-H1 --ranks 2 --microbatches 6 --profile ZBVZeroBubble.json > /dev/null
"$plan" search --ranks 2 --microbatches 4 --trials 50 --profile ZB-H1.json > /dev/null
failed=0
refuses() {
  words=$1
  shift
  code=0
  "$plan" "$@" > output 2>&1 || code=$?
  if [ $code -ne 2 ] || ! grep -q -e "$words" output || [ "$(wc -l < output)" -ne 1 ]; then
    echo "chevron-plan $*: exit code $code, or not one line with \`$words\`:"
    cat output
    failed=1
  fi
}
refuses "it has 2 stages, which do not add up to this schedule's 4: take a profile with 4 stages" show ZBVZeroBubble --ranks 2 --profile ZB-H1.json
refuses "'backward_input' of stage 0 is null: .* take a profile of a schedule with I and W" show ZB-H1 --ranks 2 --profile 1F1B.json
refuses "--forward does not go with --profile 'ZB-H1.json'" show ZB-H1 --ranks 2 --profile ZB-H1.json --forward 2
refuses "'nowhere.json' cannot be read (No such file or directory)" compare --profile nowhere.json
refuses "'./' is not a file" show 1F1B --profile ./
sed 's/"backward_weight"/"backwards_weight"/' ZB-H1.json > wrong.json
refuses "--profile 'wrong.json': 'backward_weight' is missing" show ZB-H1 --ranks 2 --profile wrong.json
sed 's/"steps": 11/"steps": "11"/' ZB-H1.json > wrong.json
refuses "'steps' is \"11\", not a whole number" compare --ranks 2 --profile wrong.json
"$plan" compare --ranks 2 --microbatches 6 --profile 1F1B.json > compared
grep -q "^  ZB-H1 .*'backward_input' of stage 0 is null" compared || { cat compared; failed=1; }
grep -q "^  ZBVZeroBubble .*do not add up" compared || { cat compared; failed=1; }
# A message may be asked to take longer than it did.
"$plan" show ZB-H1 --ranks 2 --microbatches 6 --profile ZB-H1.json --communication 1000 --format json | grep -q '"communication": \[1000\]' || failed=1

code=0
timeout 30 "$train" $small --steps 1 --profile p.json > output 2>&1 || code=$?
[ $code -eq 2 ] && grep -q "Remedy: --steps 10 or more" output || { cat output; failed=1; }
exit $failed
