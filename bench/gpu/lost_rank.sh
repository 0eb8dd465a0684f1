#!/bin/sh
# lost_rank.sh BIN SIGNAL: two ranks without a launcher that would end the one when the other ends; rank 1 gets the signal. Rank 0 must end
# with exit code 3 (KILL) or 4 (STOP), within the deadline and 3 s. The end of both logs is printed.
set -u
bin=$1 signal=$2 deadline=15
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
export WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((29600 + $$ % 300))
# rank NUMBER [COMMAND...]: becomes that rank, started by the command.
rank() {
  export RANK=$1 LOCAL_RANK=$1
  shift
  exec "$@" "$bin/chevron-train" --backend nccl --share-gpus --ranks 2 --replicas 1 --steps 100000 --timeout $deadline --timeline none \
    --trace none --data include >"$out/rank$RANK.log" 2>&1
}
rank 0 timeout -k 1 90 &
zero=$!
rank 1 env &
one=$!
sleep 25
kill "-$signal" $one
began=$(date +%s)
wait $zero
code=$?
took=$(($(date +%s) - began))
kill -KILL $one 2>/dev/null
for each in 0 1; do
  echo "rank $each:"
  tail -n 20 "$out/rank$each.log"
done
echo "after SIG$signal rank 0 ended with $code after $took s (124: it hung)"
case $signal in KILL) expected=3 ;; *) expected=4 ;; esac
[ $code -eq $expected ] && [ $took -le $((deadline + 3)) ]
