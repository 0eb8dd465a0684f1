# chevron-train goes on from a checkpoint over another number of shards: the losses are those of the run that was not interrupted, within
# rounding.
# timeout: 400
. "$(dirname "$0")/shared/folder.sh"

# run <flags…>: losses go to `losses`.
run() {
  if ! timeout 100 "$train" --layers 2 --width 48 --heads 4 --context 18 --microbatch-size 2 --steps 6 --replicas 1 --seed 7 --sample 0 \
      --timeline none --trace none --metrics metrics.jsonl "$@" > output 2>&1; then
    cat output
    echo "failed: chevron-train $*"
    exit 1
  fi
  sed 's/.*global_avg_loss": *\([0-9.]*\).*/\1/' metrics.jsonl > losses
}
run
mv losses whole
run --shards 2 --checkpoint saved --save-every 2
rm -rf saved/step-00000006
test -d saved/step-00000004 || { echo "no checkpoint of step 4's end in: $(ls saved)"; exit 1; }
for flags in "--shards 1" "--shards 4 --sequence-parallel" "--shards 2 --nproc 4"; do
  rm -rf copy
  cp -r saved copy
  run $flags --checkpoint copy --resume
  grep -q 'resumed *at step 5' output || { echo "$flags did not go on at step 5:"; grep resumed output; exit 1; }
  tail -n 2 losses > after
  tail -n 2 whole | paste -d ' ' - after | awk '
    function off(a, b) { return a > b ? (a - b) / a : (b - a) / a }
    { if (off($1, $2) > 1e-5) wrong = 1 }
    END { exit wrong || NR != 2 }' || {
    echo "$flags: losses after the checkpoint of two shards, beside those of a run in one piece:"
    tail -n 2 whole | paste -d ' ' after -
    exit 1
  }
done
