# Under torchrun --max-restarts a job that starts from nothing gets over its first failures: --resume begins anew where nothing was saved
# yet, and goes on from the last checkpoint later. It ends as the run that was never interrupted, each step once in its metrics file.
# timeout: 300
. "$(dirname "$0")/shared/folder.sh"
. "$here/../support/free_port.sh"
torchrun="${CHEVRON_TORCHRUN:-${CHEVRON_SOURCE:?}/.venv/bin/torchrun}"
test -x "$torchrun" || { echo "no torchrun at $torchrun"; exit 77; }
export OMP_NUM_THREADS=1
write_text
common="--layers 4 --width 32 --heads 2 --context 16 --microbatch-size 2 --microbatches 4 --ranks 2 --replicas 1 --seed 7 --sample 0 --steps 400
  --timeline none --trace none --data text.txt"
numbers() { sed 's/,"lr".*//' "$1"; }
fail() { echo "$1"; cat output; exit 1; }
timeout 150 "$train" $common --metrics whole.jsonl > output 2>&1 || fail "the uninterrupted run failed"

timeout 250 "$torchrun" --master-port "$(free_port)" --nproc-per-node 2 --max-restarts 2 --no-python --monitor-interval 0.2 "$train" $common --metrics run.jsonl \
  --checkpoint saved --resume --save-every 150 > output 2>&1 &
job=$!
# A rank is killed, once before anything was saved and once after: each attempt has processes of its own.
killed=
for until in 20 220; do
  while kill -0 $job 2> /dev/null; do
    agent=$(ps -o pid= --ppid $job | tr -d ' ')
    rank=$(ps -o pid= --ppid "${agent:-0}" | tail -n 1 | tr -d ' ')
    if test -n "$rank" && test "$rank" != "$killed" && grep -q "{\"step\":$until," run.jsonl 2> /dev/null; then break; fi
    sleep 0.02
  done
  kill -9 "$rank" || fail "no rank to kill at step $until"
  killed=$rank
done
code=0
wait $job || code=$?
test $code -eq 0 || fail "torchrun ends with $code"
grep -q 'resumed *nothing: saved holds no checkpoint yet, so training begins anew' output || fail "it does not say that it begins anew"
grep -q 'resumed *at step 151, from saved' output || fail "it does not go on from its checkpoint"
numbers whole.jsonl > whole
numbers run.jsonl | cmp -s - whole || fail "it is another run"
