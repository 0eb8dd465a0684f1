# Small limits on open files, on memory and on /dev/shm: a run that does not fit is refused at the start; no run ends by a signal or hangs.
# timeout: 200
. "$(dirname "$0")/shared/folder.sh"
export OMP_NUM_THREADS=1
write_text
small="--layers 4 --width 32 --heads 2 --context 16 --microbatch-size 2 --microbatches 4 --ranks 2 --replicas 1 --steps 3
  --timeline none --trace none --data text.txt --timeout 15"
fail() { echo "$1"; cat output; exit 1; }
# with <limit> <flags…>: the exit code of a run under this limit.
with() {
  limit=$1
  shift
  code=0
  ( eval "$limit"; exec timeout 90 "$train" $small "$@" ) > output 2>&1 || code=$?
}

# A soft limit is raised; a hard one that is too low is told.
with "ulimit -S -n 12" --backend gloo
test $code -eq 0 || fail "a soft limit of 12 open files, Gloo: exit code $code"
with "ulimit -n 12" --backend gloo
test $code -eq 2 || fail "12 open files, Gloo: exit code $code, not 2"
grep -q "may have 12 files open, and a rank among 2 needs [0-9]*. Remedy: ulimit -n" output || fail "12 open files: it does not say what it needs"
with "ulimit -n 12" --backend threads
test $code -eq 0 || fail "12 open files, threads: exit code $code"
# Least that passes the check is enough.
least=$(with "ulimit -n 12" --backend gloo; sed -n 's/.*needs \([0-9]*\)\. Remedy.*/\1/p' output)
with "ulimit -n $least" --backend gloo
test $code -eq 0 || fail "$least open files, Gloo: exit code $code"

# Too little memory for the model, not for LibTorch.
for backend in threads gloo; do
  with "ulimit -v 1500000" --backend $backend --width 4096 --heads 16 --context 256
  test $code -eq 1 || fail "too little memory, $backend: exit code $code, not 1"
  grep -qi "memory" output || fail "too little memory, $backend: it does not say so"
done

# Files that may not grow: metrics stop, training goes on.
with "ulimit -f 1" --backend threads --steps 40 --metrics metrics.jsonl
test $code -eq 0 || fail "a metrics file that may not grow: exit code $code"
echo "limits: open files, memory, sizes of files"
