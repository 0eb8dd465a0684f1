# Every schedule and every backend computes the same as the model in one piece: losses and gradient norms equal to the last bit. Each
# process starts LibTorch anew, so shapes are few here; run.trainer and run.processes_trainer have all of them.
# timeout: 600
. "$(dirname "$0")/shared/folder.sh"

# As the program lists them, so that a new one is tried too.
schedules=$("$train" --help | sed -n 's/.* or one of \(GPipe,[^;]*\).*/\1/p' | tr -d ,)
test "$(echo "$schedules" | wc -w)" -ge 5 || { echo "only these schedules are listed: $schedules"; exit 1; }

# run <name> <flags…>: steps, losses and norms go to <name>.
steps=4
run() {
  name=$1
  shift
  if ! timeout 150 "$train" --layers 6 --width 32 --heads 2 --context 16 --microbatch-size 2 --steps $steps --seed 7 --sample 0 \
      --timeline none --trace none --metrics metrics.jsonl "$@" > output 2>&1; then
    cat output
    echo "failed: chevron-train $*"
    exit 1
  fi
  sed 's/,"lr".*//' metrics.jsonl > "$name"
  test "$(wc -l < "$name")" -eq $steps || { echo "not $steps steps: $*"; exit 1; }
}
same() {
  if ! cmp -s "$1" "$2"; then
    echo "$3 does not compute what $4 computes:"
    diff "$1" "$2"
    exit 1
  fi
}

run whole --ranks 1 --replicas 1 --microbatches 5 --schedule 1F1B
run other --ranks 1 --replicas 1 --microbatches 5 --schedule 1F1B --seed 8
if cmp -s whole other; then echo "another seed gives the same losses"; exit 1; fi
# Breadth first goes backward through the microbatches from the last to the first: the same sums in another order.
run whole.LoopedBFS --ranks 1 --replicas 1 --microbatches 5 --schedule LoopedBFS
for schedule in $schedules; do
  reference=whole
  if [ "$schedule" = LoopedBFS ]; then reference=whole.LoopedBFS; fi
  run this --ranks 4 --replicas 1 --microbatches 5 --schedule "$schedule"
  same $reference this "$schedule on 4 ranks" "the model in one piece"
done

run replicated --ranks 1 --replicas 2 --microbatches 4 --schedule GPipe
run replicated.LoopedBFS --ranks 1 --replicas 2 --microbatches 4 --schedule LoopedBFS
# Placements and orders that the runs below leave out; run.processes_trainer has every schedule over Gloo.
for schedule in Interleaved1F1B LoopedBFS DualPipeV; do
  reference=replicated
  if [ "$schedule" = LoopedBFS ]; then reference=replicated.LoopedBFS; fi
  run this --ranks 2 --replicas 2 --microbatches 4 --schedule "$schedule" --backend gloo
  same $reference this "$schedule on 2 ranks x 2 replicas, gloo," "two replicas of the model in one piece"
done
for schedule in 1F1B ZBVZeroBubble; do
  run this --ranks 2 --replicas 2 --microbatches 4 --schedule "$schedule" --backend gloo --recompute
  same replicated this "$schedule, recomputed," "the same with all activations kept"
done
# Of pairs of a backend and an option the library's tests have all (docs/inside/contributing.md, "Which test owns which pair").
run this --ranks 2 --replicas 2 --microbatches 4 --schedule 1F1B --backend gloo --shard
same replicated this "1F1B with a sharded optimizer, gloo," "the same with whole ones"
run this --ranks 2 --replicas 2 --microbatches 4 --schedule ZBVZeroBubble --backend threads --shard gradients
same replicated this "ZBVZeroBubble with sharded gradients, threads," "the same with whole ones"
# A stage without a block, which has no parameters: its replicas have nothing to sum, to share or to gather.
run replicated.four --ranks 1 --replicas 2 --microbatches 4 --schedule 1F1B --layers 4
for flags in "threads" "gloo --shard" "threads --shard gradients" "gloo --shard --overlap-gather"; do
  run this --ranks 3 --replicas 2 --microbatches 4 --schedule 1F1B --layers 2,0,2 --backend $flags
  same replicated.four this "a rank without a block, $flags," "two replicas of the model in one piece"
done
# Float32 masters of bfloat16 parameters, whole and in shares.
half="--replicas 2 --microbatches 4 --dtype bfloat16"
run replicated.masters --ranks 1 $half --schedule GPipe --master-parameters
run rounded --ranks 1 $half --schedule GPipe
if cmp -s replicated.masters rounded; then echo "--master-parameters changes nothing"; exit 1; fi
run this --ranks 2 $half --schedule ZBVZeroBubble --backend threads --master-parameters
same replicated.masters this "ZBVZeroBubble with masters, threads," "two replicas of the model in one piece"
run this --ranks 2 $half --schedule ZB-H1 --backend gloo --master-parameters --shard gradients --post-validation
same replicated.masters this "ZB-H1 with masters in shares, gloo," "two replicas of the model in one piece"
# Slices: the same bits under every schedule of slices, and the results of whole sequences within rounding.
run whole.sliced --ranks 1 --replicas 1 --microbatches 5 --schedule Seq1F1B --slices 3
first_loss() { sed -n '1s/.*global_avg_loss": *\([0-9.]*\).*/\1/p' "$1"; }
awk -v a="$(first_loss whole)" -v b="$(first_loss whole.sliced)" 'BEGIN { exit !(a > 1 && a - b < 1e-4 && b - a < 1e-4) }' || {
  echo "slices give the loss $(first_loss whole.sliced), whole sequences $(first_loss whole)"
  exit 1
}
for schedule in Seq1F1B SeqZB-H1 SeqInterleaved1F1B GPipe; do
  run this --ranks 3 --replicas 1 --microbatches 5 --schedule $schedule --slices 3
  same whole.sliced this "$schedule in slices on 3 ranks" "the model in one piece, sliced alike"
done
run this --ranks 2 --replicas 1 --microbatches 5 --schedule SeqZB-H1 --slices 3 --backend gloo --recompute
same whole.sliced this "SeqZB-H1 in slices, gloo, recomputed," "the model in one piece, sliced alike"
run replicated.sliced --ranks 1 --replicas 2 --microbatches 4 --schedule Seq1F1B --slices 2
run this --ranks 2 --replicas 2 --microbatches 4 --schedule Seq1F1B --slices 2 --backend gloo --shard
same replicated.sliced this "Seq1F1B in slices with a sharded optimizer, gloo," "two replicas of the model in one piece"
# Ranks begin to rely on steps after ten that needed no correction.
steps=16
run waiting --ranks 2 --replicas 2 --microbatches 4 --schedule ZB-H2 --clip-grad-norm 0
for flags in "ZB-H2 --backend threads" "ZB-H2 --backend gloo --shard" "ZBVZeroBubble --backend threads --shard" \
  "ZBVZeroBubble --backend gloo"; do
  run this --ranks 2 --replicas 2 --microbatches 4 --clip-grad-norm 0 --post-validation --schedule $flags
  same waiting this "$flags with --post-validation" "ZB-H2 without"
done
steps=4
echo "equal: $(echo $schedules)"

# A schedule from a file is the schedule: this one as PyTorch could have written it.
"${CHEVRON_BUILD}/bin/chevron-plan" show ZBVZeroBubble --ranks 2 --microbatches 5 --format csv -o from_file.csv
run named --ranks 2 --replicas 1 --microbatches 5 --schedule ZBVZeroBubble
run file --replicas 1 --schedule from_file.csv
same named file "the schedule of a file" "the schedule of that name"
