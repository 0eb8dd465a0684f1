# chevron-train --profile writes what chevron-plan reads: the planner predicts what the trainer predicted, and says beside it what was
# measured. A profile that cannot serve is refused, with the key at fault.
# timeout: 300
set -eu
train="${CHEVRON_BUILD:?}/bin/chevron-train"
plan="$CHEVRON_BUILD/bin/chevron-plan"
python=$(command -v "${CHEVRON_SOURCE:?}/.venv/bin/python" || command -v python3) || { echo "no Python to read the files with"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
seq -f "line %.0f of some text, as good as any" 4000 > text.txt
small="--layers 4 --width 32 --heads 2 --context 16 --microbatch-size 2 --microbatches 6 --steps 12 --timeline none --trace none --data text.txt"

for flags in "1F1B --ranks 2 --replicas 1" "ZBVZeroBubble --ranks 2 --replicas 1 --backend gloo" "ZB-H1 --ranks 2 --replicas 2" \
    "DualPipeV --ranks 2 --replicas 1"; do
  schedule=${flags%% *}
  timeout 150 "$train" $small --schedule $flags --profile $schedule.json > output 2>&1 || { cat output; exit 1; }
  grep -q "profile *$schedule.json: what each stage and message cost" output || { cat output; exit 1; }
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
# What the trainer predicted is what the planner predicts.
seconds = {"µs": 1e-3, "ms": 1, "s": 1e3}
told = re.search(r"pipeline, first F to last B or W +([0-9.]+) (µs|ms|s) +([0-9.]+) (µs|ms|s)", open("output").read())
predicted, measured = float(told[1]) * seconds[told[2]], float(told[3]) * seconds[told[4]]
assert abs(predicted - shown["makespan"]) < 0.06 * predicted, (told[0], shown["makespan"])
assert abs(measured - profile["pipeline"]) < 0.06 * measured, (told[0], profile)
PYTHON
done

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
refuses "'backward_input' of stage 0 is null, .* take a profile under one that does" show ZB-H1 --ranks 2 --profile 1F1B.json
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
