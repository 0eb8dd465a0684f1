# as_srun.sh TASKS JOB COMMAND…: starts COMMAND in TASKS processes with the variables that srun gives each of a step's tasks, all on this
# machine, whose name in the node list is that of one of two. Ends with the first exit code that is not 0.
tasks=$1
job=$2
shift 2
export SLURM_JOB_ID="$job" SLURM_STEP_ID=0 SLURM_NTASKS="$tasks" SLURM_STEP_NUM_TASKS="$tasks" SLURM_NNODES=2 SLURM_NODEID=0 \
  SLURM_STEP_NODELIST='127.0.0.[1-2]' SLURM_JOB_NODELIST='127.0.0.[1-2]' SLURM_TASKS_PER_NODE="$tasks"
exec sh "$(dirname "$0")/as_ranks.sh" "$tasks" "SLURM_PROCID SLURM_LOCALID" "$@"
