# as_ranks.sh TASKS NAMES COMMAND…: starts COMMAND in TASKS processes; the variables NAMES (with blanks between) of each are its number,
# from 0. Writes taskN.out and taskN.err. Ends with the first exit code that is not 0.
tasks=$1
names=$2
shift 2
started=""
rank=0
while [ $rank -lt "$tasks" ]; do
  for name in $names; do export "$name=$rank"; done
  "$@" > "task$rank.out" 2> "task$rank.err" &
  started="$started $!"
  rank=$((rank + 1))
done
first=0
for process in $started; do
  code=0
  wait "$process" || code=$?
  test $first -ne 0 || first=$code
done
exit $first
