# Two machines, as far as one can pretend: network and process namespaces of their own with a wire between them, so no memory is shared and
# every message crosses the wire. They train as one machine does, listen at the wire's address alone, and when the wire is cut each
# ends in time and names a rank beyond it.
# timeout: 300
# waits: the wire is cut, and silence is waited for
. "$(dirname "$0")/shared/folder.sh"
torchrun="${CHEVRON_TORCHRUN:-${CHEVRON_SOURCE:?}/.venv/bin/torchrun}"
for tool in ip ss unshare; do
  command -v $tool > /dev/null || { echo "no $tool here (Debian's iproute2 and util-linux have it)"; exit 77; }
done
a=chevron-a-$$ b=chevron-b-$$
clean() {
  ip netns pids $a 2> /dev/null | xargs -r kill -9 2> /dev/null || true
  ip netns pids $b 2> /dev/null | xargs -r kill -9 2> /dev/null || true
  ip netns del $a 2> /dev/null || true
  ip netns del $b 2> /dev/null || true
  rm -rf "$folder"
}
trap clean EXIT
ip netns add $a 2> /dev/null && ip netns add $b && ip link add chv0 netns $a type veth peer name chv1 netns $b 2> /dev/null ||
  { echo "network namespaces cannot be made here"; exit 77; }
ip -n $a addr add 10.77.0.1/24 dev chv0
ip -n $b addr add 10.77.0.2/24 dev chv1
for each in $a $b; do ip -n $each link set lo up; done
ip -n $a link set chv0 up
ip -n $b link set chv1 up
ip netns exec $a unshare --pid --fork --mount-proc true 2> /dev/null || { echo "process namespaces cannot be made here"; exit 77; }
export OMP_NUM_THREADS=1
write_text
common="--layers 4 --width 32 --heads 2 --context 16 --microbatch-size 2 --microbatches 4 --ranks 2 --replicas 1 --seed 7
  --sample 0 --timeline none --trace none --data text.txt --backend gloo"
numbers() { sed 's/,"lr".*//' "$1"; }
fail() { echo "$1"; cat output.* 2> /dev/null || true; exit 1; }
# on <machine> <command…>: there, with processes of its own.
on() {
  machine=$1
  shift
  ip netns exec "$machine" unshare --pid --fork --kill-child --mount-proc "$@"
}
# ranks <flags…>: both start; codes and output go to files.
ranks() {
  for rank in 0 1; do
    if [ $rank = 0 ]; then machine=$a; else machine=$b; fi
    ( code=0
      on $machine env RANK=$rank WORLD_SIZE=2 MASTER_ADDR=10.77.0.1 MASTER_PORT=29500 timeout 120 "$train" $common "$@" > output.$rank 2>&1 || code=$?
      echo $code > code.$rank ) &
  done
}

timeout 150 "$train" $common --steps 8 --metrics whole.jsonl > output.0 2>&1 || fail "one machine alone fails"
numbers whole.jsonl > whole

ranks --steps 8 --metrics two.jsonl
wait
test "$(cat code.0) $(cat code.1)" = "0 0" || fail "exit codes $(cat code.0) and $(cat code.1)"
numbers two.jsonl | cmp -s - whole || fail "two machines compute something else"

if test -x "$torchrun"; then
  for node in 0 1; do
    if [ $node = 0 ]; then machine=$a; else machine=$b; fi
    ( code=0
      on $machine timeout 120 "$torchrun" --nnodes 2 --node-rank $node --master-addr 10.77.0.1 --master-port 29501 --nproc-per-node 1 --no-python \
        "$train" $common --steps 8 --metrics torchrun.jsonl > output.$node 2>&1 || code=$?
      echo $code > code.$node ) &
  done
  wait
  test "$(cat code.0) $(cat code.1)" = "0 0" || fail "under torchrun: exit codes $(cat code.0) and $(cat code.1)"
  numbers torchrun.jsonl | cmp -s - whole || fail "under torchrun two machines compute something else"
fi

# The ports on which ranks listen, and the ends of both machines' ranks when the wire is cut.
ranks --steps 1000000 --metrics cut.jsonl --timeout 5
for look in $(seq 600); do test -s cut.jsonl && break; sleep 0.05; done
test -s cut.jsonl || fail "it does not train"
for each in $a $b; do
  listening=$(ip netns exec $each ss -H -l -t -n | awk '{ print $4 }' | grep -v '^10\.77\.0\.[12]:' || true)
  test -z "$listening" || fail "it listens at $listening, too"
done
ip -n $a link set chv0 down
began=$(date +%s)
wait
spent=$(($(date +%s) - began))
test $spent -le 30 || fail "it took $spent s to end after the wire was cut"
for rank in 0 1; do
  test "$(cat code.$rank)" = 4 || fail "the wire is cut: rank $rank ends with $(cat code.$rank), not 4"
  grep -q "rank $((1 - rank)) did not answer within 5000 ms" output.$rank || fail "the wire is cut: rank $rank does not say whom it lost"
done
echo "two machines, by hand and under torchrun: the same bits; the wire cut: both ended after $spent s"
