#!/bin/sh
# torchrun, on one machine or on several: a process for each GPU.
#
#     examples/jobs/torchrun.sh                                    # all GPUs of this machine
#     NODES=2 NODE=0 HEAD=node-a examples/jobs/torchrun.sh         # on node-a
#     NODES=2 NODE=1 HEAD=node-a examples/jobs/torchrun.sh         # on the other one
#
# Flags are handed on to chevron-train. GPUS: processes on each machine; PORT: of the meeting point on HEAD.
set -eu
if [ -z "${GPUS:-}" ]; then
  GPUS=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU') || {
    echo "nvidia-smi lists no GPU. Remedy: GPUS=<processes on each machine>" >&2
    exit 2
  }
fi
NODES=${NODES:-1}
meeting="--standalone --local-addr 127.0.0.1"
if [ "$NODES" -gt 1 ]; then
  : "${NODE:?which machine this is, from 0}" "${HEAD:?name or address of machine 0}"
  meeting="--nnodes $NODES --node-rank $NODE --master-addr $HEAD --master-port ${PORT:-29500}"
fi
# shellcheck disable=SC2086 # words without spaces, to be split
exec torchrun $meeting --nproc-per-node "$GPUS" --no-python \
  build/bin/chevron-train --backend nccl --ranks "$GPUS" --replicas "$NODES" "$@"
