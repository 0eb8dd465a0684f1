# A real Slurm, of this machine alone: srun's ranks train as --nproc does, to the last bit; a killed rank ends the step with its exit code;
# the batch script's example saves and goes on after its signals, as it promises: USR1 before the time limit, or scancel.
# timeout: 300
# waits: daemons start, and jobs wait for them
. "$(dirname "$0")/shared/endless_job.sh"
. "$here/../support/free_port.sh"
for program in slurmctld slurmd srun sbatch munged; do
  command -v $program > /dev/null || { echo "skipped: no $program here (Debian's slurm-wlm and munge have it)"; exit 77; }
done
test "$(id -u)" -eq 0 || { echo "skipped: Slurm's daemons are started by root"; exit 77; }
chmod 755 "$folder"
stop() {
  for daemon in slurmd slurmctld munged; do
    test -s $daemon.pid || continue
    pid=$(cat $daemon.pid)
    kill "$pid" 2> /dev/null || continue
    # It writes its state as it ends, into the folder that is removed next.
    waited=0
    while kill -0 "$pid" 2> /dev/null && test $waited -lt 100; do
      sleep 0.1
      waited=$((waited + 1))
    done
  done
  cd /
  rm -rf "$folder" || true
}
trap stop EXIT

# Munge wants its folders to be one user's alone.
mkdir -m 755 munge spool state
dd if=/dev/urandom of=munge/key bs=64 count=1 2> /dev/null
chmod 600 munge/key
munged --force --key-file="$PWD/munge/key" --socket="$PWD/munge/socket" --pid-file="$PWD/munged.pid" --log-file="$PWD/munge/log" \
    --seed-file="$PWD/munge/seed" || { cat munge/log; exit 1; }
export SLURM_CONF="$PWD/slurm.conf"
node=$(hostname -s)
cat > slurm.conf << END
ClusterName=chevron
SlurmctldHost=$node(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
AuthType=auth/munge
AuthInfo=socket=$PWD/munge/socket
CryptoType=crypto/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation=$PWD/state
SlurmdSpoolDir=$PWD/spool
SlurmctldPidFile=$PWD/slurmctld.pid
SlurmdPidFile=$PWD/slurmd.pid
SlurmctldLogFile=$PWD/slurmctld.log
SlurmdLogFile=$PWD/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
KillWait=60
MessageTimeout=30
NodeName=$node NodeAddr=127.0.0.1 CPUs=4 Boards=1 Sockets=4 CoresPerSocket=1 ThreadsPerCore=1 State=UNKNOWN
PartitionName=all Nodes=$node Default=YES MaxTime=INFINITE State=UP
SlurmdParameters=config_overrides
END
slurmctld && slurmd || { cat slurmctld.log slurmd.log; exit 1; }
waited=0
until sinfo -h -o %T 2> /dev/null | grep -q idle; do
  sleep 0.2
  waited=$((waited + 1))
  test $waited -lt 150 || { sinfo; cat slurmctld.log slurmd.log; exit 1; }
done

write_text
export OMP_NUM_THREADS=1
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT 2> /dev/null || true
small="--ranks 2 --replicas 1 --layers 2 --width 32 --heads 2 --context 16 --microbatch-size 2 --sample 0 --timeline none --trace none --data text.txt"
numbers() { sed 's/,"lr".*//' "$1"; }

timeout 150 "$train" $small --steps 6 --nproc 2 --metrics alone.jsonl > alone 2>&1 || { cat alone; exit 1; }
timeout 150 srun -n 2 "$train" $small --steps 6 --metrics slurm.jsonl > output 2> errors || { cat output errors; exit 1; }
grep -q 'a process each, Gloo, started by Slurm' output || { cat output; exit 1; }
numbers alone.jsonl > wanted
numbers slurm.jsonl | diff wanted - || { echo "under Slurm it computes something else"; exit 1; }

# start_endless [FLAG...]: a step of two ranks that never stop, in the background; comes back after three training steps.
start_endless() {
  rm -f metrics.jsonl
  srun --wait=30 -n 2 "$train" $small --steps 1000000 --metrics metrics.jsonl "$@" > output 2> errors &
  job=$!
  three_steps
}
# ended CODE: that is how the step ends, within a minute.
ended() {
  waited=0
  while kill -0 $job 2> /dev/null; do
    sleep 0.1
    waited=$((waited + 1))
    test $waited -lt 600 || { echo "still there after a minute"; cat output errors; exit 1; }
  done
  code=0
  wait $job || code=$?
  test $code -eq "$1" || { echo "exit code $code, not $1"; cat output errors; exit 1; }
}

# The signals of `#SBATCH --signal=USR1@300` and of scancel: all ranks save after the same step, and end well.
for signal in USR1 TERM; do
  start_endless --checkpoint "$signal"
  scancel --signal=$signal "$(squeue -h -o %A)"
  ended 0
  grep -q "signal" output errors || { echo "nobody says why it ended"; cat output errors; exit 1; }
  ls "$signal"/step-*/manifest.json || { echo "no checkpoint after $signal"; exit 1; }
done
# And another step goes on from there.
start_endless --checkpoint TERM --resume
scancel --signal=TERM "$(squeue -h -o %A)"
ended 0
test "$(ls -d TERM/step-* | wc -l)" -ge 2 || { echo "it began anew"; ls TERM; cat output; exit 1; }

# Rank 1 is killed: rank 0 has the time to say whom it lost, and Slurm ends with the worse of the two codes.
start_endless
kill -9 "$(ps -o pid= -C chevron-train | sort -n | tail -n 1)"
ended 137
grep "^rank 0.*rank 1 was lost" errors || grep "^rank 1.*rank 0 was lost" errors || { echo "nobody says who was lost"; cat errors; exit 1; }
