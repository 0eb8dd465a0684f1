#!/bin/sh
# Two nodes of eight GPUs under Slurm: eight pipeline ranks on each node, and a replica of that pipeline on each.
#
#     sbatch examples/jobs/slurm.sh                   # from the folder of the sources, after ./dev build
#     sbatch --nodes=4 examples/jobs/slurm.sh --steps 1000
#
# Five minutes before its time is over Slurm sends a signal: with --checkpoint DIR the run saves and ends, and --resume goes on.
#
# Messages of a pipeline stay inside a node, gradient sums cross the network. One pipeline over all nodes instead:
# --ranks 16 --replicas 1 as flags of this script.
#
#SBATCH --job-name=chevron-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
#SBATCH --signal=USR1@300
#SBATCH --output=chevron-%j.log
set -eu
nodes=${SLURM_NNODES:-2}
# srun says which rank a process is and where the first node is; no MASTER_ADDR is needed. When a rank fails, the others
# say why and end; those that cannot are ended after 30 s.
exec srun --wait=30 --cpu-bind=cores \
  build/bin/chevron-train --backend nccl --ranks 8 --replicas "$nodes" --microbatches 32 \
  --layers 32 --width 2048 --heads 16 --context 1024 --dtype bfloat16 "$@"
