# timeout: 260
# serial: it compares times
# Every schedule, on threads and over Gloo: the measured step is at most 1.15 times the makespan predicted from the measured costs.
# Stages sleep, so four ranks fit two cores. A busy machine gets a second and a third try.
set -u
for try in 1 2 3; do
  if "$CHEVRON_BUILD/bin/bench-sleep" --limit 1.15 --steps 5 --milliseconds 20; then
    exit 0
  fi
  echo "try $try: above the limit"
done
exit 1
