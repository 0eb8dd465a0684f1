# A mixture of experts in each block: under every schedule and backend chevron-train has the results of the un-pipelined model,
# prints the balance and writes it to the metrics; a checkpoint of another number of experts is refused.
# timeout: 400
. "$(dirname "$0")/shared/folder.sh"
export OMP_NUM_THREADS=1  # sums of index_add depend on the threads that share them
small="--layers 4 --width 32 --heads 2 --context 16 --microbatch-size 2 --microbatches 4 --seed 7 --sample 0 --timeline none --trace none"

# run <name> <flags…>: losses and norms go to <name>, balances to <name>.balance
run() {
  name=$1
  shift
  if ! timeout 150 "$train" $small --steps 4 --metrics metrics.jsonl "$@" > "$name.out" 2>&1; then
    cat "$name.out"
    echo "failed: chevron-train $*"
    exit 1
  fi
  sed 's/"loss_metrics.balance":[^,]*,//; s/,"lr".*//' metrics.jsonl > "$name"
  sed -n 's/.*"loss_metrics.balance":\([^,]*\),.*/\1/p' metrics.jsonl > "$name.balance"
  test "$(wc -l < "$name.balance")" -eq 4 || { echo "no balance in each of 4 steps: $*"; exit 1; }
  grep -q '^step: 1 .* balance: ' "$name.out" || { cat "$name.out"; echo "no balance is printed: $*"; exit 1; }
}
same() { cmp -s "$1" "$2" || { echo "$2 does not compute what $1 computes:"; diff "$1" "$2"; exit 1; }; }

run whole --experts 3 --ranks 1 --replicas 1 --schedule 1F1B
run zbv --experts 3 --ranks 2 --replicas 1 --schedule ZBVZeroBubble
run gloo --experts 3 --ranks 2 --replicas 1 --schedule ZBVZeroBubble --backend gloo --recompute
run dual --experts 3 --ranks 2 --replicas 1 --schedule DualPipeV --post-validation
for one in zbv gloo dual; do same whole $one; done
# Where the model is cut alike, the reported balance is the same to the last bit, too.
same zbv.balance gloo.balance
same zbv.balance dual.balance
run replicas --experts 3 --ranks 2 --replicas 2 --schedule ZB-H1
# Four blocks, in each of which a balance of 1 is even.
awk '{ if ($1 < 3.9 || $1 > 8) exit 1 }' whole.balance || { cat whole.balance; exit 1; }
if cmp -s whole replicas; then echo "two replicas have the samples of one"; exit 1; fi

run saved --experts 3 --ranks 2 --replicas 1 --schedule 1F1B --checkpoint saved.d --save-every 2
if timeout 100 "$train" $small --steps 6 --experts 2 --ranks 2 --replicas 1 --checkpoint saved.d --resume > refused 2>&1; then
  echo "a checkpoint of 3 experts goes on with 2"
  exit 1
fi
grep -q "experts" refused || { cat refused; exit 1; }
