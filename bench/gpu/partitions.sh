#!/bin/sh
# partitions.sh N COMMAND...: runs the command while MPS, CUDA's Multi-Process Service, gives each of its processes at most one Nth of the
# GPU's multiprocessors and runs the processes beside each other. Without MPS the GPU runs one process at a time. Exits with 77 where
# the service is not installed, and with the command's exit code where it is.
set -u
parts=$1
shift
PATH=$PATH:/usr/local/nvidia/bin:/usr/local/cuda/bin
control=$(command -v nvidia-cuda-mps-control) || {
  echo "no nvidia-cuda-mps-control in $PATH"
  exit 77
}
folder=$(mktemp -d)
export CUDA_MPS_PIPE_DIRECTORY="$folder" CUDA_MPS_LOG_DIRECTORY="$folder"
stop() {
  echo quit | timeout 20 "$control" >/dev/null 2>&1
  tail -n 5 "$folder"/*.log 2>/dev/null
  rm -rf "$folder"
}
trap stop EXIT
"$control" -d || exit 1
CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=$((100 / parts)) "$@"
