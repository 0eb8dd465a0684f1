# chevron-train over shards has the results of one shard, within rounding, on threads and in processes, cut sequences and replicas
# included; `--shards 1` is the program without the flag, bit for bit. Ranks with torchrun's variables have the results of ranks
# of --nproc. Numbers that do not fit are refused.
# timeout: 350
seconds=100
. "$(dirname "$0")/shared/refused.sh"

steps=5
# run <name> <flags…>: losses and norms go to <name>, the output to <name>.out.
run() {
  name=$1
  shift
  if ! timeout $seconds "$train" --layers 4 --width 48 --heads 4 --context 18 --microbatch-size 2 --steps $steps --seed 7 --sample 0 \
      --timeline none --trace none --metrics metrics.jsonl "$@" > "$name.out" 2>&1; then
    cat "$name.out"
    echo "failed: chevron-train $*"
    exit 1
  fi
  sed 's/.*global_avg_loss": *\([0-9.]*\).*grad_norm": *\([0-9.]*\).*/\1 \2/' metrics.jsonl > "$name"
  test "$(grep -c '^[0-9.]* [0-9.]*$' "$name")" -eq $steps || { echo "not $steps steps: $*"; cat metrics.jsonl; exit 1; }
}
# near <of one shard> <of several> <flags…>: each loss and norm within 1e-5 of it.
near() {
  paste -d ' ' "$1" "$2" | awk '
    function off(a, b) { return a > b ? (a - b) / a : (b - a) / a }
    { if (off($1, $3) > 1e-5 || off($2, $4) > 1e-5) wrong = 1 }
    END { exit wrong || NR != '$steps' }' && return
  echo "$3 is not what one shard computes (loss and norm, then of shards):"
  paste -d ' ' "$1" "$2"
  failed=1
}

run whole --replicas 1
run asked --replicas 1 --shards 1
cmp whole asked || { echo "--shards 1 changes bits"; failed=1; }
run other --replicas 1 --seed 8
if paste -d ' ' whole other | awk '{ exit !($1 == $3) }'; then echo "another seed gives the same losses"; failed=1; fi
# Each schedule on threads and in processes, with whole sequences and with cut ones.
for flags in "1F1B" "ZB-H1 --nproc 4" "ZB-H1 --sequence-parallel" "1F1B --sequence-parallel --nproc 4 --recompute"; do
  run cut --replicas 1 --shards 2 --schedule $flags
  near whole cut "--shards 2 --schedule $flags"
done
grep -q '2 pipeline ranks × 1 replica × 2 shards, a process each' cut.out || { echo "shards are not in the header:"; head -5 cut.out; failed=1; }
# Pieces that differ in size: 18 bytes of context over 4 shards.
run cut --replicas 1 --shards 4 --sequence-parallel
near whole cut "--shards 4 --sequence-parallel"

run replicas --replicas 2
run cut --replicas 2 --shards 2 --profile profile.json
near replicas cut "--replicas 2 --shards 2"
grep -q 'peak in flight, rank 0, 4 ' cut.out && grep -q '  rank 2, 6 ' cut.out || {
  echo "the table does not name the first shards of pipeline ranks 0 and 1:"
  grep -A2 'peak in flight' cut.out
  failed=1
}
grep -q '"replicas": 2' profile.json || { echo "the profile counts shards as replicas:"; head -c 300 profile.json; failed=1; }
run cut --replicas 2 --shards 2 --sequence-parallel --shard --nproc 8
near replicas cut "--replicas 2 --shards 2 --sequence-parallel --shard --nproc 8"
run cut --replicas 2 --shards 2 --schedule auto --chunks 1
near replicas cut "--replicas 2 --shards 2 --schedule auto"

run experts --replicas 1 --experts 3
for flags in "" --sequence-parallel; do
  run cut --replicas 1 --experts 3 --shards 2 $flags
  near experts cut "--experts 3 --shards 2 $flags"
done
run sliced --replicas 1 --schedule Seq1F1B --slices 3
run cut --replicas 1 --schedule Seq1F1B --slices 3 --shards 2
near sliced cut "--slices 3 --shards 2"

"$train" --print-groups --ranks 2 --replicas 2 --shards 2 > groups
cat > expected <<'END'
global rank = (replica × 2 + pipeline rank) × 2 + shard, of 8
pipelines {0, 2} {1, 3} {4, 6} {5, 7}
replicas  {0, 4} {1, 5} {2, 6} {3, 7}
shards    {0, 1} {2, 3} {4, 5} {6, 7}
END
cmp groups expected || { cat groups; failed=1; }

# Shards that something else has started: a stage of its own, then two pipeline ranks whose sequences are cut.
. "$here/../support/free_port.sh"
small="--layers 4 --width 48 --heads 4 --context 18 --microbatch-size 2 --steps $steps --seed 7 --sample 0 --timeline none --trace none"
for flags in "--ranks 1 --replicas 1 --shards 2" "--ranks 2 --replicas 1 --shards 2 --sequence-parallel"; do
  processes=2
  if [ "${flags#--ranks 2}" != "$flags" ]; then processes=4; fi
  timeout $seconds "$train" $small $flags --nproc $processes --metrics alone.jsonl > alone 2>&1 || { cat alone; exit 1; }
  timeout $seconds sh "$here/shared/as_torchrun.sh" $processes "$(free_port)" "$train" $small $flags \
    --metrics launched.jsonl || { cat task*; exit 1; }
  grep -q "$processes processes\|2 shards, a process each, Gloo, started by torchrun" task0.out || { cat task0.out; failed=1; }
  test ! -s task1.out || { echo "$flags, under torchrun's variables: rank 1 speaks too:"; cat task1.out; failed=1; }
  for metrics in alone launched; do sed 's/,"lr".*//' $metrics.jsonl > $metrics.numbers; done
  test "$(wc -l < launched.numbers)" -eq $steps && cmp alone.numbers launched.numbers || {
    echo "$flags, under torchrun's variables: not what --nproc $processes computes"
    diff alone.numbers launched.numbers
    failed=1
  }
  # Groups are told by one rank, and once.
  timeout $seconds sh "$here/shared/as_torchrun.sh" $processes "$(free_port)" "$train" \
    --print-groups $flags || { cat task*; exit 1; }
  "$train" --print-groups $flags > groups
  cat task*.out | cmp - groups && grep -q "^shards    {0, 1}" groups || { cat groups task*; failed=1; }
done

refuses() { refused 2 "$@"; }
refuses "shards 3 cannot share --heads 4. Remedy: a number of shards that divides the heads: 1, 2, 4" "$train" --shards 3
refuses "shards: 0 is not a whole number from 1 to 256" "$train" --shards 0
refuses "sequence-parallel cuts sequences over shards, and --shards is 1" "$train" --sequence-parallel
refuses "sequence-parallel does not go with --slices" "$train" --shards 2 --sequence-parallel --slices 2 --schedule Seq1F1B
refuses "cannot cut --context 2 over --shards 4" "$train" --shards 4 --sequence-parallel --context 2
refuses "nproc 4 is not --ranks 2 × --replicas 2 × --shards 2. Remedy: --nproc 8" "$train" --shards 2 --nproc 4
refuses "ranks 2 × --replicas 1 × --shards 2 need 4 processes, but environment has started 2" env WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 \
  LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=29999 "$train" --replicas 1 --shards 2
exit $failed
