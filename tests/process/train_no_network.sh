# The loopback interface goes down under a job, and one rank is stopped: the ranks share memory and end by their deadline, and the
# launcher, which hears no store any more, kills the stopped one and ends, too.
# timeout: 120
# waits: what cannot be reached is waited for
set -eu
if [ "${CHEVRON_OWN_NETWORK:-}" != yes ]; then
  for way in "unshare -n" "unshare -rn"; do
    if $way sh -c 'ip link set lo up && ip link set lo down' > /dev/null 2>&1; then CHEVRON_OWN_NETWORK=yes exec $way sh "$0"; fi
  done
  echo "skipped: no network namespace can be made here, or there is no ip"
  exit 77
fi
. "$(dirname "$0")/shared/endless_job.sh"
. "$here/shared/killed.sh"
job=
trap 'test -z "$job" || kill_all $job; rm -rf "$folder"' EXIT
ip link set lo up
start_endless_job --timeout 3
ip link set lo down
kill -STOP "$(echo "$children" | sed -n 3p)"
waited=0
while kill -0 $job 2> /dev/null && [ $waited -lt 600 ]; do
  sleep 0.1
  waited=$((waited + 1))
done
test $waited -lt 600 || { echo "the launcher is still there after a minute"; cat errors; exit 1; }
code=0
wait $job || code=$?
job=
cat errors
test $code -eq 4 || { echo "exit code $code, not 4"; exit 1; }
grep -q "within 3000 ms; this rank was waiting for" errors || { echo "no rank says what it waited for"; exit 1; }
for rank in $children; do
  ! kill -0 $rank 2> /dev/null || { echo "process $rank is still there"; exit 1; }
done
