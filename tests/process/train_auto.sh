# chevron-train --schedule auto measures, plans and says so, and its losses and norms are those of a fixed schedule to the last bit:
# on threads, over Gloo, with post-validation, and when it goes on from a checkpoint with the layers cut otherwise.
# timeout: 400
. "$(dirname "$0")/shared/folder.sh"
write_text
small="--layers 6 --width 32 --heads 2 --context 16 --microbatch-size 2 --microbatches 6 --replicas 1 --seed 7 --sample 0 --data text.txt
  --timeline none --trace none --metrics metrics.jsonl"

# run <name> <flags…>: losses and norms go to <name>, the output to <name>.out
run() {
  name=$1
  shift
  if ! timeout 150 "$train" $small "$@" > "$name.out" 2>&1; then
    cat "$name.out"
    echo "failed: chevron-train $*"
    exit 1
  fi
  sed 's/,"lr".*//' metrics.jsonl > "$name"
}
same() {
  if ! cmp -s "$1" "$2"; then
    echo "$3 does not compute what a fixed schedule computes:"
    diff "$1" "$2"
    exit 1
  fi
}
# says <name> <regex>: printed, with lines that are broken put together
says() {
  tr '\n' ' ' < "$1.out" | tr -s ' ' | grep -Eq "$2" || { cat "$1.out"; echo "$1 does not say: $2"; exit 1; }
}
time='[0-9.]+ (µs|ms|s)'

run fixed --schedule ZBVZeroBubble --ranks 2 --steps 26
test "$(wc -l < fixed)" -eq 26
run auto --schedule auto --ranks 2 --steps 26 --profile p.json
same fixed auto "--schedule auto"
says auto 'schedule auto, beginning with [A-Za-z-]+, 4 stages: embedding, layers 0-1 '
says auto 'planned after step 11, from the medians of 10 steps: the schedule in use takes '"$time, predicted $time;"
says auto "no order of these stages takes less than $time"
if grep -q 'one found in' auto.out; then
  says auto "It is used from step 12 on, and relies on the measured times of stages and messages"
  says auto "planned after step 22: the new schedule takes $time, predicted $time; the one before took $time"
else
  says auto "it stays, since the best of a search of $time would take $time"
fi
grep -q '"layers": \[2,1,2,1\]' p.json || { cat p.json; exit 1; }

run gloo --schedule auto --ranks 2 --steps 26 --backend gloo --memory-limit 4
same fixed gloo "--schedule auto over Gloo"
run linear --schedule auto --placement linear --ranks 2 --steps 26 --post-validation
same fixed linear "--schedule auto with post-validation"
says linear 'schedule auto, beginning with ZB-H[12], 2 stages'

# Other layers on the stages: the same model, also when it goes on from a checkpoint.
run cut --schedule auto --ranks 2 --steps 26 --layers 1,2,3,0
same fixed cut "--layers 1,2,3,0"
says cut '4 stages: embedding, layer 0 \| layers 1-2 \| layers 3-5 \| head '
run passing --schedule auto --ranks 2 --steps 26 --layers 3,0,3,0
same fixed passing "--layers 3,0,3,0"
says passing '4 stages: embedding, layers 0-2 \| passes on \| layers 3-5 \| head '
run half --schedule auto --ranks 2 --steps 26 --checkpoint saved --save-every 13 --keep-checkpoints 2
rm -r saved/step-00000026
run half --schedule auto --ranks 2 --steps 26 --checkpoint saved --resume --layers 0,3,2,1
same fixed half "--resume --layers 0,3,2,1"
says half 'resumed at step 14'
says half 'planned after step 24, from the medians of 10 steps'

failed=0
refuses() {
  words=$1
  shift
  code=0
  timeout 30 "$train" $small "$@" > output 2>&1 || code=$?
  if [ $code -ne 2 ] || ! grep -q -e "$words" output; then
    echo "chevron-train $*: exit code $code, or not with \`$words\`:"
    cat output
    failed=1
  fi
}
refuses "--memory-limit is about a schedule that is made while training. Remedy: --schedule auto" --memory-limit 2
refuses "--placement vee does not exist with --chunks 1" --schedule auto --placement vee --chunks 1
refuses "--memory-limit 0.5 is below the smallest possible" --schedule auto --memory-limit 0.5
refuses "--layers gives the layers of 3 stages, and the schedule has 4" --schedule auto --layers 2,2,2
refuses "--layers 2,,2 is not usable" --layers 2,,2
exit $failed
