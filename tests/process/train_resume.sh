# A run that was killed goes on from its last checkpoint and ends as if nothing had happened: the same losses and norms to the last
# bit. A checkpoint that cannot be resumed is refused with exit code 7.
# timeout: 240
# waits: a run goes on until it is killed
. "$(dirname "$0")/shared/folder.sh"
. "$here/shared/killed.sh"
common="--layers 4 --width 32 --heads 2 --context 16 --microbatch-size 2 --microbatches 4 --replicas 1 --seed 7 --sample 0 --timeline none --trace none"
numbers() { sed 's/,"lr".*//' "$1"; }
fail() { echo "$1"; cat output 2>/dev/null; exit 1; }

timeout 150 "$train" $common --ranks 2 --steps 40 --metrics whole.jsonl > output 2>&1 || fail "the uninterrupted run failed"

# Killed some time after its second checkpoint, in the middle of whatever it was doing. Where this script does not get its turn the run
# may come to its end first: then another one.
for again in 1 2 3 4 5 6; do
  rm -rf saved
  "$train" $common --ranks 2 --backend gloo --steps 40 --metrics killed.jsonl --checkpoint saved --save-every 4 > output 2>&1 &
  job=$!
  while kill -0 $job 2>/dev/null && ! test -e saved/step-00000008/manifest.json; do sleep 0.02; done
  kill_all $job
  test -e saved/step-00000008/manifest.json || fail "no checkpoint appeared"
  test -e saved/step-00000040/manifest.json || break
  test $again -lt 6 || fail "it ends before it can be killed, each time"
done

# The file of the killed run stays, without the steps that are done again, nor a line of which only a part was written.
cp killed.jsonl resumed.jsonl
printf '{"step":41,"loss_met' >> resumed.jsonl
timeout 150 "$train" $common --ranks 2 --backend gloo --steps 40 --metrics resumed.jsonl --checkpoint saved --resume > output 2>&1 ||
  fail "the resumed run failed"
grep -q 'resumed  *at step' output || fail "it does not say where it went on"
numbers resumed.jsonl > resumed
numbers whole.jsonl | cmp -s - resumed || { numbers whole.jsonl | diff - resumed; fail "the resumed run is another"; }
first=$(sed -n 's/.*resumed  *at step \([0-9]*\),.*/\1/p' output)
test "$first" -ge 9 && test "$first" -le 40 || fail "it went on at step $first"

# Threads, four stages instead of two, another schedule: the same weights and the same data.
rm -r saved
timeout 150 "$train" $common --ranks 2 --steps 4 --checkpoint saved > output 2>&1 || fail "saving at the end failed"
timeout 150 "$train" $common --ranks 2 --schedule ZBVZeroBubble --steps 6 --metrics other.jsonl --checkpoint saved --resume > output 2>&1 ||
  fail "another layout cannot go on"
test "$(wc -l < other.jsonl)" -eq 2 || fail "not two more steps"

# Another number of replicas adds gradients in another order: the same run within rounding, which docs/reference/chevron-train.md tells.
replicas="--layers 4 --width 32 --heads 2 --context 16 --microbatch-size 2 --seed 7 --timeline none --trace none --ranks 2 --steps 6"
timeout 150 "$train" $replicas --replicas 2 --microbatches 2 --metrics two.jsonl --checkpoint two --save-every 2 > output 2>&1 ||
  fail "two replicas: the uninterrupted run failed"
rm -r two/step-00000006 two/step-00000004
timeout 150 "$train" $replicas --replicas 1 --microbatches 4 --metrics one.jsonl --checkpoint two --resume > output 2>&1 ||
  fail "one replica cannot go on from two"
grep -q 'resumed *at step 3' output || fail "one replica did not go on at step 3"
for metrics in two one; do
  tail -n 4 $metrics.jsonl | sed 's/.*global_avg_loss": *\([0-9.]*\).*grad_norm": *\([0-9.]*\).*/\1 \2/' > $metrics.numbers
done
paste -d ' ' two.numbers one.numbers | awk '
  function off(a, b) { return a > b ? (a - b) / a : (b - a) / a }
  { if (off($1, $3) > 4e-6 || off($2, $4) > 4e-6) wrong = 1 }
  END { exit wrong || NR != 4 }' || { paste two.numbers one.numbers; fail "one replica goes on as another run than two"; }

# Masters of bfloat16 parameters are in the checkpoint: a run with shares of them goes on from whole ones, and a run that
# keeps none does not.
half="--layers 4 --width 32 --heads 2 --context 16 --microbatch-size 2 --seed 7 --timeline none --trace none --ranks 2 --dtype bfloat16"
timeout 150 "$train" $half --master-parameters --replicas 1 --microbatches 4 --steps 12 --metrics whole.jsonl > output 2>&1 ||
  fail "masters: the uninterrupted run failed"
timeout 150 "$train" $half --master-parameters --replicas 1 --microbatches 4 --steps 12 --save-every 5 --checkpoint masters > output 2>&1 ||
  fail "masters: saving failed"
rm -r masters/step-00000012 masters/step-00000010
timeout 150 "$train" $half --master-parameters --replicas 1 --microbatches 4 --shard --steps 12 --metrics from_masters.jsonl --checkpoint masters --resume \
  > output 2>&1 || fail "masters: the resumed run failed"
numbers whole.jsonl | tail -n 7 > expected
numbers from_masters.jsonl | cmp -s - expected || { numbers from_masters.jsonl | diff - expected; fail "masters: the resumed run is another"; }
status=0
timeout 150 "$train" $half --replicas 1 --microbatches 4 --steps 14 --checkpoint masters --resume > output 2>&1 || status=$?
test "$status" -eq 7 || fail "masters that a run without them would lose: exit code $status, not 7"
grep -q "holds a float32 master of .*, which has no master in this job" output || fail "it does not say that masters would be lost"

# Steps count from 0 in the manifest, as a program that uses the library counts them: the next step is the number of batches trained on.
rm -rf counted
timeout 150 "$train" $common --ranks 2 --steps 4 --metrics counted.jsonl --checkpoint counted > output 2>&1 || fail "saving 4 steps failed"
grep -q '"next_step": 4,' counted/step-00000004/manifest.json || fail "after 4 steps the next is not step 4, counted from 0"
cp -r counted longer
timeout 150 "$train" $common --ranks 2 --steps 6 --learning-rate 0.001 --metrics counted.jsonl --checkpoint counted --resume > output 2>&1 ||
  fail "a longer run cannot go on"
for words in '--steps is 6, and was 4: it goes on as another run' '--learning-rate is 0.001, and was 0.003' \
  'the learning rate of step 5 is 0.000[0-9]*, and would have been 0.0003\( \|$\)'; do
  tr -s ' \n' '  ' < output | grep -q -e "$words" || fail "does not say '$words'"
done
if grep -q -e '--clip-grad-norm is' output; then fail "it tells a flag that is the same"; fi

# A checkpoint of a program that counted from 1, without words for its flags, goes on with the same batches.
find_python
"$python" - longer <<'PYTHON'
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1])
old = (folder / "step-00000004").rename(folder / "step-00000005")
about = json.loads((old / "manifest.json").read_text())
del about["fingerprint"]
about.pop("learning_rate", None)
about["next_step"] = 5
about["words"] = {word: value for word, value in about["words"].items() if not word.startswith("--")}
text = json.dumps(about, indent=2)[:-2].encode()
whole, mask = 14695981039346656037, 2**64 - 1
for begin in range(0, len(text) + 1, 8):
    mixed = (whole ^ int.from_bytes(text[begin:begin + 8], "little")) * 0x9e3779b97f4a7c15 & mask
    whole = mixed ^ mixed >> 29
mixed = (whole ^ len(text)) * 0x9e3779b97f4a7c15 & mask
(old / "manifest.json").write_bytes(text + b',\n  "fingerprint": "%016x"\n}\n' % (mixed ^ mixed >> 29))
PYTHON
head -n 4 counted.jsonl > older.jsonl
timeout 150 "$train" $common --ranks 2 --steps 6 --learning-rate 0.001 --metrics older.jsonl --checkpoint longer --resume > output 2>&1 ||
  fail "a checkpoint that counts from 1 cannot go on"
grep -q 'resumed  *at step 5,' output || fail "it does not go on at the fifth step"
numbers counted.jsonl > expected
numbers older.jsonl | cmp -s - expected || { numbers older.jsonl | diff - expected; fail "it goes on with other batches"; }

# refuses <words> <flags…>
refuses() {
  words=$1
  shift
  status=0
  timeout 150 "$train" $common --ranks 2 "$@" > output 2>&1 || status=$?
  test "$status" -eq 7 || fail "exit code $status, not 7: $*"
  grep -q "$words" output || fail "does not say '$words': $*"
}
timeout 150 "$train" $common --ranks 2 --steps 1 --checkpoint nothing --resume > output 2>&1 || fail "nothing to resume, and it does not begin anew"
grep -q "resumed *nothing: nothing holds no checkpoint yet, so training begins anew" output || fail "it does not say that it begins anew"
refuses "nothing is left to train" --checkpoint saved --resume --steps 3
# Whatever makes it another run.
seq -f "line %.0f of another text" 4000 > text.txt
refuses "saved by a run with seed 7, this one has 8" --checkpoint saved --resume --steps 9 --seed 8
refuses "with layers 4, this one has 6" --checkpoint saved --resume --steps 9 --layers 6
refuses "with width 32, this one has 64" --checkpoint saved --resume --steps 9 --width 64
refuses "with heads 2, this one has 4" --checkpoint saved --resume --steps 9 --heads 4
refuses "with context 16, this one has 8" --checkpoint saved --resume --steps 9 --context 8
refuses "with samples a step 8, this one has 6" --checkpoint saved --resume --steps 9 --microbatches 3
refuses "with dtype float32, this one has autocast" --checkpoint saved --resume --steps 9 --dtype autocast
refuses "with data .* bytes to learn from, fingerprint .*, this one has" --checkpoint saved --resume --steps 9 --data text.txt
grep -q "Remedy: the same data" output || fail "no remedy"
# One bit of the manifest: the step.
last=$(ls saved | tail -n 1)
cp "saved/$last/manifest.json" kept
sed 's/"next_step": 6/"next_step": 5/' kept > "saved/$last/manifest.json"
if cmp -s kept "saved/$last/manifest.json"; then fail "the manifest has another form"; fi
refuses "$last/manifest.json: was damaged, or changed by hand" --checkpoint saved --resume --steps 9
cp kept "saved/$last/manifest.json"
refuses "is of an earlier run" --checkpoint saved --steps 9
refuses "cannot be made" --checkpoint /proc/none --steps 2
if grep -q 'step:' output; then fail "it trained before it found out"; fi
