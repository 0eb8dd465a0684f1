# as_torchrun.sh TASKS PORT COMMAND…: starts COMMAND in TASKS processes with the variables that torchrun gives each of its
# ranks on one machine. Ends with the first exit code that is not 0.
tasks=$1
port=$2
shift 2
# One thread for each rank, as torchrun has it: ranks with a thread for each core take many times as long where other work runs.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export WORLD_SIZE="$tasks" LOCAL_WORLD_SIZE="$tasks" MASTER_ADDR=127.0.0.1 MASTER_PORT="$port" GROUP_RANK=0 \
  TORCHELASTIC_RUN_ID=none TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_USE_AGENT_STORE=False
exec sh "$(dirname "$0")/as_ranks.sh" "$tasks" "RANK LOCAL_RANK" "$@"
