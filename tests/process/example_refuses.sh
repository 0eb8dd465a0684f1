# A failure of a small program ends like one of chevron-train: a line with the remedy, and an exit code, not an abort.
# timeout: 120
seconds=50
. "$(dirname "$0")/shared/refused.sh"
bin="${CHEVRON_BUILD:?}/bin"

refused 2 '^RANK=7 is not below WORLD_SIZE=2. Remedy: ' \
  env RANK=7 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 "$bin/processes"

# A schedule that is chosen at run time and is not there, or not for that size.
refused 2 '^`NoSuchSchedule`: no schedule of the catalogue has that name.*Remedy: ' "$bin/plan_at_run_time" NoSuchSchedule 2 8
refused 2 '^`1F1B`: ranks must be at least 1, not 0. Remedy: ' "$bin/plan_at_run_time" 1F1B 0 8

# Ranks on GPUs, where there is no driver.
if [ -x "$bin/nccl_train" ] && [ ! -e /dev/nvidiactl ] && [ ! -e /dev/dxg ]; then
  refused 2 '^no GPU for local rank 1: there is no NVIDIA driver on this machine.*Remedy: ' "$bin/nccl_train"
fi
exit $failed
