# The scripts of examples/jobs start ranks that find each other, through each launcher that is there: over Gloo, on this machine
# alone, they train as threads of one process do. Without shellcheck, torchrun or mpirun their part is left out, and said so.
# timeout: 500
. "$(dirname "$0")/shared/folder.sh"
. "$here/../support/free_port.sh"
export PATH="${CHEVRON_SOURCE:?}/.venv/bin:$PATH" OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
ln -s "${CHEVRON_BUILD:?}" build
jobs="$CHEVRON_SOURCE/examples/jobs"
failed=0

small="--steps 2 --microbatches 4 --layers 4 --width 32 --heads 2 --context 16 --dtype float32 --timeline none --trace none"
losses() { grep -o 'step: *[0-9]* *loss: *[0-9.]*' "$1" || true; }
build/bin/chevron-train --ranks 2 --replicas 1 $small >threads
[ "$(losses threads | wc -l)" -eq 2 ]

# same <output> <launcher's name>: the losses of these ranks equal those of threads.
same() {
  if [ "$(losses "$1")" != "$(losses threads)" ] || ! grep -q "Gloo, started by $2" "$1"; then
    echo "$2: not the losses of threads, or another launcher:"
    cat "$1"
    failed=1
  fi
}

if command -v shellcheck >/dev/null; then
  shellcheck "$jobs"/*.sh || failed=1
else
  echo "no shellcheck: left out"
fi

if command -v torchrun >/dev/null; then
  GPUS=2 timeout 150 "$jobs/torchrun.sh" --backend gloo $small >one.out 2>one.err || cat one.err
  same one.out torchrun
  # Two machines of one rank each, both of them this one; the flags make the two replicas a pipeline.
  export GPUS=1 NODES=2 HEAD=127.0.0.1 PORT="$(free_port)"
  NODE=1 timeout 150 "$jobs/torchrun.sh" --backend gloo --ranks 2 --replicas 1 $small >second.out 2>second.err &
  NODE=0 timeout 150 "$jobs/torchrun.sh" --backend gloo --ranks 2 --replicas 1 $small >first.out 2>first.err || cat first.err
  wait $! || cat second.err
  unset GPUS NODES HEAD PORT
  same first.out torchrun
else
  echo "no torchrun: left out"
fi

if command -v mpirun >/dev/null; then
  PORT="$(free_port)" timeout 150 "$jobs/mpirun.sh" localhost:2 --backend gloo $small >mpi.out 2>mpi.err || cat mpi.err
  same mpi.out "Open MPI"
else
  echo "no mpirun: left out"
fi
code=0
"$jobs/mpirun.sh" node-a >refused 2>&1 || code=$?
[ $code -eq 2 ] && grep -q "Remedy: node-a:8" refused || failed=1

# In place of srun: skips its flags, and starts two tasks with Slurm's variables for two nodes.
mkdir stand-in
cat >stand-in/srun <<'END'
#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
export SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST="localhost,node[2-3]" SLURM_LOCALID=0
SLURM_PROCID=1 "$@" &
SLURM_PROCID=0 "$@" && wait $!
END
chmod +x stand-in/srun
# Slurm's port is 20000 plus the job's number modulo 20000.
PATH="$folder/stand-in:$PATH" SLURM_NNODES=1 SLURM_JOB_ID=$(($(free_port) - 20000)) timeout 150 "$jobs/slurm.sh" --backend gloo --ranks 2 $small >slurm.out 2>slurm.err || cat slurm.err
same slurm.out Slurm
exit $failed
