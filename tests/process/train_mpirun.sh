# Under Open MPI's mpirun, which only starts processes and tells each its rank: it trains as --nproc does, to the last bit, and
# names the missing variables if the address of rank 0 is unknown.
# timeout: 300
# waits: processes start and end one after the other
. "$(dirname "$0")/shared/endless_job.sh"
command -v mpirun > /dev/null || { echo "no mpirun here (Debian's openmpi-bin has one)"; exit 77; }
mpirun --version 2>&1 | grep -q 'Open MPI' || { echo "this mpirun is not Open MPI's"; exit 77; }
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
write_text
small="--ranks 2 --replicas 1 --layers 2 --width 32 --heads 2 --context 16 --microbatch-size 2 --steps 6 --sample 0 --timeline none --trace none --data text.txt"
numbers() { sed 's/,"lr".*//' "$1"; }

timeout 150 "$train" $small --nproc 2 --metrics alone.jsonl > alone 2>&1 || { cat alone; exit 1; }
. "$here/../support/free_port.sh"
timeout 150 mpirun --oversubscribe --bind-to none -np 2 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT="$(free_port)" \
  "$train" $small --metrics mpirun.jsonl > output 2> errors || { cat output errors; exit 1; }
grep -q 'a process each, Gloo, started by Open MPI' output || { cat output; exit 1; }
test "$(wc -l < mpirun.jsonl)" -eq 6 || { echo "not six steps, or two ranks that speak:"; cat mpirun.jsonl; exit 1; }
numbers alone.jsonl > wanted
numbers mpirun.jsonl | diff wanted - || { echo "under mpirun it computes something else"; exit 1; }

# refuses <code> <words> <processes> <flags…>
refuses() {
  expected=$1
  words=$2
  processes=$3
  shift 3
  code=0
  timeout 150 mpirun --oversubscribe --bind-to none -np "$processes" "$@" > output 2>&1 || code=$?
  test $code -eq "$expected" && grep -q "$words" output || { echo "exit code $code, or no \`$words\` in:"; cat output; exit 1; }
}
refuses 2 "MASTER_ADDR is missing, while Open MPI says 2 ranks" 2 "$train" $small
refuses 2 "need 2 processes, but Open MPI has started 3" 3 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT="$(free_port)" "$train" $small

# endless FOLDER FLAG…: two ranks that save and never stop, with these flags of mpirun; comes back after three steps.
endless() {
  saved=$1
  shift
  rm -f metrics.jsonl
  mpirun --oversubscribe --bind-to none -np 2 -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT="$(free_port)" "$@" \
    "$train" $small --steps 1000000 --checkpoint "$saved" --metrics metrics.jsonl > output 2> errors &
  job=$!
  three_steps
}
# mpirun hands SIGUSR1 on at once. Of SIGTERM it tells the ranks so many seconds later, and kills them after as many more.
for way in "USR1" "TERM --mca odls_base_sigkill_timeout 4"; do
  signal=${way%% *}
  endless "$signal" ${way#"$signal"}
  kill -"$signal" $job
  code=0
  wait $job || code=$?
  echo "mpirun ends with $code after $signal"
  ls "$signal"/step-*/manifest.json || { echo "nothing is saved after $signal"; cat output errors; exit 1; }
  grep -q "was sent signal" output errors || { echo "it does not say why it stopped"; cat output; exit 1; }
done
