# Ranks that a launcher started with other flags, or on machines with other files: each ends with exit code 5 before the first step, and
# one of them names the difference. A port of another program is no store; ranks wait for a store no longer than --timeout.
# timeout: 300
# waits: ranks wait for each other
. "$(dirname "$0")/shared/folder.sh"
. "$here/../support/free_port.sh"
export OMP_NUM_THREADS=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1
write_text
seq -f "line %.0f of another text" 4000 > other.txt
small="--ranks 2 --replicas 1 --layers 2 --width 32 --heads 2 --context 16 --microbatch-size 2 --steps 3 --timeline none --trace none --data text.txt"
failed=0

# differ <pattern of one rank's message> <flags of rank 1…>: the other rank prints a short line, whichever comes first
differ() {
  words=$1
  shift
  MASTER_PORT=$(free_port)
  export MASTER_PORT
  RANK=1 timeout 150 "$train" $small "$@" > one.out 2> one.err &
  one=$!
  code0=0
  RANK=0 timeout 150 "$train" $small > zero.out 2> zero.err || code0=$?
  code1=0
  wait $one || code1=$?
  if [ $code0 -ne 5 ] || [ $code1 -ne 5 ] || [ "$(cat zero.err one.err | grep -c -e "$words")" -ne 1 ] ||
      [ "$(cat zero.err one.err | grep -c "^rank [01].*; rank [01]'s message says more$")" -ne 1 ] || grep -q step: zero.out; then
    echo "rank 1 with $*: exit codes $code0 and $code1, not 5, or no \`$words\`, or it trained:"
    cat zero.err one.err
    failed=1
  fi
}
differ 'rank 1 has `--seed: 2` where rank 0 has `--seed: 1`' --seed 2
differ 'rank 1 has `--steps: 4` where rank 0 has `--steps: 3`' --steps 4
differ 'rank 1 has `--width: 64` where rank 0 has `--width: 32`' --width 64
differ 'rank 1 has `--sample: 5` where rank 0 has `--sample: at most 320' --sample 5
differ 'rank 1 has `--data: .* bytes to learn from' --data other.txt
differ 'rank 1 has `schedule: GPipe` where rank 0 has `schedule: 1F1B`' --schedule GPipe

# A server that takes connections and says nothing.
python=$(command -v python3 || command -v "${CHEVRON_SOURCE:?}/.venv/bin/python") || exit $failed
"$python" -c '
import socket, time
taken = socket.create_server(("127.0.0.1", 0))
print(taken.getsockname()[1], flush=True)
time.sleep(200)' > port &
server=$!
trap 'kill $server 2> /dev/null; rm -rf "$folder"' EXIT
until [ -s port ]; do sleep 0.1; done
MASTER_PORT=$(cat port)
code=0
RANK=1 timeout 150 "$train" $small --timeout 2 > output 2> errors || code=$?
if [ $code -ne 4 ] || ! grep -q "no store at 127.0.0.1:$MASTER_PORT .*Remedy: is rank 0 up" errors || [ "$(wc -l < errors)" -ne 1 ]; then
  echo "a port without a store: exit code $code, not 4, or not one line:"
  cat errors
  failed=1
fi
code=0
RANK=0 timeout 150 "$train" $small > output 2> errors || code=$?
if [ $code -ne 5 ] || ! grep -q "cannot listen on 127.0.0.1:$MASTER_PORT: Address already in use. Remedy: another job has this port" errors; then
  echo "a port that is taken: exit code $code, not 5, or:"
  cat errors
  failed=1
fi
exit $failed
