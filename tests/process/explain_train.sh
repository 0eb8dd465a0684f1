# A rank of chevron-train is killed with CHEVRON_FLIGHT_LOGS set: the others leave their flight logs, and chevron-plan explain names the rank. Where
# flight logs cannot be written, the run ends as it does without.
# timeout: 300
. "$(dirname "$0")/shared/endless_job.sh"

# kill_one <rank> <value of CHEVRON_FLIGHT_LOGS>
kill_one() {
  export CHEVRON_FLIGHT_LOGS="$2"
  start_endless_job
  kill_rank "$1"
  test $code -eq 3 || { echo "CHEVRON_FLIGHT_LOGS=$2: exit code $code, not 3"; cat errors; exit 1; }
}

kill_one 1 flight_logs
ls flight_logs
for rank in 0 2 3; do test -s flight_logs/rank-$rank.json || { echo "no flight log of rank $rank"; cat errors; exit 1; }; done
test ! -e flight_logs/rank-1.json || { echo "a flight log of the rank that was killed"; exit 1; }
test "$(ls flight_logs | wc -l)" -eq 3 || { echo "more than three flight logs"; exit 1; }
"$plan" explain flight_logs > why
cat why
for words in '^[A-Z].*ank 1.*, in step [0-9]*' '^Rank 1 left no flight log: it was killed or lost' 'exit code 3: rank 1 was lost'; do
  grep -q "$words" why || { echo "no \`$words\` in it"; exit 1; }
done
"$plan" explain flight_logs -o why.svg
grep -q '>left no flight log: it was killed or lost<' why.svg || { echo "rank 1 is not marked in why.svg"; exit 1; }

# Paths at which no folder can be made, or no file be written.
kill_one 3 /dev/null/flight_logs
kill_one 3 /proc

# Slices: actions are named by microbatch and slice.
export CHEVRON_FLIGHT_LOGS="$PWD/sliced"
start_endless_job --replicas 1 --ranks 4 --schedule Seq1F1B --slices 2
kill_rank 2
test $code -eq 3 || { echo "exit code $code, not 3"; cat errors; exit 1; }
"$plan" explain sliced > why
cat why
grep -q '^Seq1F1B, 4 ranks, 4 microbatches, 2 slices' why || { echo "no slices in it"; exit 1; }
grep -q '"0F3\.1"' sliced/rank-0.json || { echo "no slice's forward in rank 0's log"; exit 1; }

# Ranks that are threads and find one failure each by themselves: the flight logs hold the first, and no rank disagrees.
code=0
CHEVRON_FLIGHT_LOGS="$PWD/threads" timeout 100 "${CHEVRON_BUILD:?}/bin/chevron-train" --ranks 2 --replicas 1 --layers 2 --width 16 --heads 2 \
    --context 16 --steps 40 --learning-rate 1e9 --clip-grad-norm 0 --timeline none --trace none > output 2> errors || code=$?
test $code -eq 6 || { echo "exit code $code, not 6"; cat errors; exit 1; }
for rank in 0 1; do test -s threads/rank-$rank.json || { echo "no flight log of rank $rank"; exit 1; }; done
"$plan" explain threads > why
if grep -q "different failures" why || ! grep -q "exit code 6: .*is not finite" why; then
  echo "a failure that all ranks found is told as several:"
  cat why
  exit 1
fi
