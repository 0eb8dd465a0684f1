#!/bin/sh
# Open MPI's mpirun, on the hosts given, with so many GPUs each: a process for each GPU. MPI only starts them; they talk over
# NCCL.
#
#     examples/jobs/mpirun.sh localhost:2 --steps 1000
#     examples/jobs/mpirun.sh node-a:8,node-b:8 --ranks 16 --replicas 1
#
# The first host is where the ranks meet; PORT: at which port. Without --ranks each host is a pipeline, all of them its replicas.
set -eu
hosts=${1:?hosts and GPUs, as node-a:8,node-b:8}
shift
first=${hosts%%,*}
gpus=${first##*:}
case $gpus in
  '' | *[!0-9]*)
    echo "$first has no number of GPUs. Remedy: $first:8" >&2
    exit 2
    ;;
esac
replicas=$(echo "$hosts" | tr ',' '\n' | grep -c .)
address=${first%:*}
[ "$address" != localhost ] || address=127.0.0.1
export MASTER_ADDR="$address" MASTER_PORT="${PORT:-29500}"
# Left to itself, Open MPI binds each process to one core.
exec mpirun --host "$hosts" -np $((gpus * replicas)) --bind-to none -x MASTER_ADDR -x MASTER_PORT \
  build/bin/chevron-train --backend nccl --ranks "$gpus" --replicas "$replicas" "$@"
