# With the variables that srun sets: rank 0 is on the first host of the step's node list, the port comes from the job's number, and
# two tasks train as --nproc does, to the last bit. srun itself is not run.
# timeout: 300
. "$(dirname "$0")/shared/folder.sh"
export OMP_NUM_THREADS=1
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT 2> /dev/null || true
write_text
small="--ranks 2 --replicas 1 --layers 2 --width 32 --heads 2 --context 16 --microbatch-size 2 --steps 6 --sample 0 --timeline none --trace none --data text.txt"
numbers() { sed 's/,"lr".*//' "$1"; }

timeout 150 "$train" $small --nproc 2 --metrics alone.jsonl > alone 2>&1 || { cat alone; exit 1; }
# Slurm's port is 20000 plus the job's number modulo 20000.
. "$here/../support/free_port.sh"
timeout 150 sh "$here/shared/as_srun.sh" 2 $(($(free_port) - 20000)) "$train" $small --metrics slurm.jsonl || { cat task*; exit 1; }
grep -q 'a process each, Gloo, started by Slurm' task0.out || { cat task0.out; exit 1; }
test ! -s task1.out || { echo "rank 1 speaks too:"; cat task1.out; exit 1; }
numbers alone.jsonl > wanted
numbers slurm.jsonl | diff wanted - || { echo "under Slurm's variables it computes something else"; exit 1; }

# One task of a batch script has a rank and no step: it is no rank of a job. Three tasks for two ranks are refused by each.
SLURM_PROCID=0 SLURM_NTASKS=2 SLURM_JOB_ID=5 timeout 150 "$train" $small --steps 1 > output 2>&1 || { cat output; exit 1; }
grep -q 'threads of this process' output || { cat output; exit 1; }
code=0
timeout 150 sh "$here/shared/as_srun.sh" 3 $(($(free_port) - 20000)) "$train" $small || code=$?
test $code -eq 2 || { echo "exit code $code, not 2"; cat task*; exit 1; }
for rank in 0 1 2; do
  grep -q "need 2 processes, but Slurm has started 3" task$rank.err || { cat task$rank.err; exit 1; }
done
