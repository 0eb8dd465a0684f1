# A shard of chevron-train is killed with CHEVRON_FLIGHT_LOGS set: chevron-plan explain names its rank, and draws its pipeline.
# timeout: 100
. "$(dirname "$0")/shared/endless_job.sh"

export CHEVRON_FLIGHT_LOGS=flight_logs
start_endless_job --replicas 1 --shards 2
kill_rank 3
test $code -eq 3 || { echo "exit code $code, not 3"; cat errors; exit 1; }
"$plan" explain flight_logs > why
for words in '^1F1B, 2 ranks, 4 microbatches, 2 shards' '^Rank 3 left no flight log: it was killed or lost' 'exit code 3: rank 3 '; do
  grep -q "$words" why || { echo "no \`$words\` in:"; cat why; exit 1; }
done
# Pipeline ranks 0 and 1 of shard 1.
"$plan" explain flight_logs -o why.svg
for words in '>rank 1<' '>rank 3<' '>left no flight log: it was killed or lost<'; do
  grep -q "$words" why.svg || { echo "no \`$words\` in the picture"; grep -o '>rank [0-9]*<' why.svg; exit 1; }
done
if grep -q '>rank [02]<' why.svg; then echo "ranks of another shard in the picture"; exit 1; fi
