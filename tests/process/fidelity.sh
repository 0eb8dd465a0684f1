# timeout: 260
# serial: it compares times
# Every schedule, on threads and over Gloo: the measured step is at most 1.15 times the makespan predicted from the measured costs;
# zero bubble with optimizer post-validation at most 1.15 times what a step adds when steps overlap. Stages sleep, so four ranks
# fit two cores. A busy machine gets a second and a third try.
set -u
for try in 1 2 3; do
  if "$CHEVRON_BUILD/bin/bench-sleep" --optimizer synchronous --limit 1.15 --steps 5 --milliseconds 20 &&
    "$CHEVRON_BUILD/bin/bench-sleep" --optimizer post-validated --schedule ZB-H2 --limit 1.15 --steps 6 --milliseconds 20 &&
    "$CHEVRON_BUILD/bin/bench-sleep" --optimizer post-validated --schedule ZBVZeroBubble --limit 1.15 --steps 6 --milliseconds 20; then
    exit 0
  fi
  echo "try $try: above the limit"
done
exit 1
