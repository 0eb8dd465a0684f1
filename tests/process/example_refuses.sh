# What goes wrong in a small program ends as it does in chevron-train: a line with the remedy and an exit code, not an abort.
# timeout: 60
# beside: one program after another, none of them timed
set -eu
code=0
said=$(RANK=7 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29511 timeout 50 "${CHEVRON_BUILD:?}/bin/processes" 2>&1) || code=$?
echo "exit code $code: $said"
[ $code -eq 2 ] && echo "$said" | grep -q '^RANK=7 is not below WORLD_SIZE=2. Remedy: '
