# A run that was killed goes on from its last checkpoint and ends as if nothing had happened: the same losses and norms to the last
# bit. What cannot be resumed is said, with exit code 7.
# timeout: 240
set -eu
. "$(dirname "$0")/shared/killed.sh"
train="${CHEVRON_BUILD:?}/bin/chevron-train"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
common="--layers 4 --width 32 --heads 2 --context 16 --microbatch-size 2 --microbatches 4 --replicas 1 --seed 7 --timeline none --trace none"
numbers() { sed 's/,"lr".*//' "$1"; }
fail() { echo "$1"; cat output 2>/dev/null; exit 1; }

timeout 150 "$train" $common --ranks 2 --steps 40 --metrics whole.jsonl > output 2>&1 || fail "the uninterrupted run failed"

# Killed some time after its second checkpoint, in the middle of whatever it was doing. Where this script does not get its turn the run
# may come to its end first: then another one.
for again in 1 2 3 4 5 6; do
  rm -rf saved
  "$train" $common --ranks 2 --backend gloo --steps 40 --metrics killed.jsonl --checkpoint saved --save-every 4 > output 2>&1 &
  job=$!
  while kill -0 $job 2>/dev/null && ! test -e saved/step-00000009/manifest.json; do sleep 0.02; done
  kill_all $job
  test -e saved/step-00000009/manifest.json || fail "no checkpoint appeared"
  test -e saved/step-00000041/manifest.json || break
  test $again -lt 6 || fail "it ends before it can be killed, each time"
done

timeout 150 "$train" $common --ranks 2 --backend gloo --steps 40 --metrics resumed.jsonl --checkpoint saved --resume > output 2>&1 ||
  fail "the resumed run failed"
grep -q 'resumed  *at step' output || fail "it does not say where it went on"
numbers resumed.jsonl > resumed
count=$(wc -l < resumed)
test "$count" -ge 1 && test "$count" -le 32 || fail "$count steps were left to do"
numbers whole.jsonl | tail -n "$count" | cmp -s - resumed || { numbers whole.jsonl | diff - resumed; fail "the resumed run is another"; }

# Threads, four stages instead of two, another schedule: the same weights and the same data.
rm -r saved
timeout 150 "$train" $common --ranks 2 --steps 4 --checkpoint saved > output 2>&1 || fail "saving at the end failed"
timeout 150 "$train" $common --ranks 2 --schedule ZBVZeroBubble --steps 6 --metrics other.jsonl --checkpoint saved --resume > output 2>&1 ||
  fail "another layout cannot go on"
test "$(wc -l < other.jsonl)" -eq 2 || fail "not two more steps"

# refuses <words> <flags…>
refuses() {
  words=$1
  shift
  status=0
  timeout 150 "$train" $common --ranks 2 "$@" > output 2>&1 || status=$?
  test "$status" -eq 7 || fail "exit code $status, not 7: $*"
  grep -q "$words" output || fail "does not say '$words': $*"
}
refuses "holds no whole checkpoint" --checkpoint nothing --resume --steps 9
refuses "nothing is left to train" --checkpoint saved --resume --steps 3
refuses "saved by a run with seed 7" --checkpoint saved --resume --steps 9 --seed 8
refuses "which the checkpoint does not hold" --checkpoint saved --resume --steps 9 --layers 6
refuses "is of an earlier run" --checkpoint saved --steps 9
refuses "cannot be made" --checkpoint /proc/none --steps 2
if grep -q 'step:' output; then fail "it trained before it found out"; fi
