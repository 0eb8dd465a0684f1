# chevron-plan explain on flight logs of failed runs (tests/flight_logs), on changed logs, and on files that are no flight logs.
# chevron-torture wrote the logs; tests/flight_logs/README.md names the commands.
# timeout: 180
seconds=60
. "$(dirname "$0")/shared/expect_plan.sh"
flight_logs="${CHEVRON_SOURCE:?}/tests/flight_logs"

# README.md of the logs names each scenario, with the rank that failed and its action.
expect 0 '^Everyone waited for 2F1 of rank 2, in step 2\.$' explain "$flight_logs/hang-gloo"
expect 0 '^Rank 2 had come to 2F1 and waited for no rank; 2.1 s later' explain "$flight_logs/hang-gloo"
expect 0 '^Rank 0 waited for 1I0 of rank 1, which waited for 2I0 of rank 2\.$' explain "$flight_logs/hang-gloo"
expect 0 '^   3     2  3F1  2 of 12  waited 1.9 s for 2F1 of rank 2$' explain "$flight_logs/hang-gloo"
expect 0 '^The reported failure in step 2, exit code 4: rank 2 did not answer within 1500 ms' explain "$flight_logs/hang-gloo"
expect 0 '^Everyone waited for 1B0 of rank 1, in step 2\.$' explain "$flight_logs/kill-gloo"
expect 0 '^Rank 1 left no flight log: it was killed or lost' explain "$flight_logs/kill-gloo"
expect 0 'exit code 3: rank 1 was lost (killed by signal 9)\.$' explain "$flight_logs/kill-gloo"
expect 0 '^Everyone waited for 0F2 of rank 0, in step 2\.$' explain "$flight_logs/stop-gloo"
expect 0 '^Rank 3 failed in 4I1, in step 2' explain "$flight_logs/throw-gloo"
expect 0 '^The reported failure in step 2, exit code 1: rank 3, step 2, 4I1: stage 4 threw: a fault was asked for\.$' explain "$flight_logs/throw-gloo"
expect 0 '^Rank 3 failed in 3I1, in step 2' explain "$flight_logs/throw-threads"
expect 0 '^Everyone waited for 2F1 of rank 2, in step 2\.$' explain "$flight_logs/hang-threads"
expect 0 '^Everyone waited for 1SEND_B0 of rank 1, in step 2\.$' explain "$flight_logs/send-threads"
expect 0 '^Everyone waited for 6F0 of rank 1, in step 2\.$' explain "$flight_logs/pairs-gloo"
expect 0 '^Everyone waited for OPTIMIZER_STEP of rank 1, in step 2\.$' explain "$flight_logs/optimizer-gloo"
expect 0 '^Everyone waited for rank 2, in step 2: it did not come to "save_checkpoint"\.$' explain "$flight_logs/saving-gloo"
expect 0 '^Everyone waited for 1F2 of rank 5, in step 2\.$' explain "$flight_logs/replicas-gloo"
expect 0 'waited [0-9.]* ms for "sum of gradients", where rank 5 was missing$' explain "$flight_logs/replicas-gloo"
expect 0 '^Everyone waited for rank 2: it did not come to "the other ranks to join"\.$' explain "$flight_logs/joining-gloo"
# Ranks that end by the failure of one tell it alike.
for one in "$flight_logs"/*-*; do
  "$plan" explain "$one" > output
  ! grep 'different failures\|look at both\|Waits lead to' output || { echo "in $one"; failed=1; }
done

# Pictures: each action once, one of them awaited.
for one in hang-gloo kill-gloo throw-gloo pairs-gloo replicas-gloo saving-gloo; do
  "$plan" explain "$flight_logs/$one" -o "$one.svg" || failed=1
  actions=$(grep -c 'class="compute"' "$one.svg")
  planned=$(sed -n '/"plan"/,/\]/p' "$flight_logs/$one/rank-0.json" | grep -o '[0-9][FBIW][0-9]' | wc -l)
  test "$actions" -eq "$planned" || { echo "$one.svg has $actions actions, its plan $planned"; failed=1; }
  awaited=$(grep -c 'class="awaited"' "$one.svg" || true)
  test "$awaited" -eq "$([ "$one" = saving-gloo ] && echo 0 || echo 1)" || { echo "$one.svg has $awaited awaited actions"; failed=1; }
done
grep -q '>rank 5<' replicas-gloo.svg && ! grep -q '>rank 1<' replicas-gloo.svg || { echo "not the replica of rank 5"; failed=1; }
grep -q 'font-weight="600" fill="#c0182b">stayed at 2F1' hang-gloo.svg || { echo "rank 2 is not marked in hang-gloo.svg"; failed=1; }

# changed <name of a flight log> <sed script for rank-2.json>: a copy in `changed`.
changed() {
  rm -rf changed
  cp -r "$flight_logs/$1" changed
  sed "$2" "$flight_logs/$1/rank-2.json" > changed/rank-2.json
  ! cmp -s "$flight_logs/$1/rank-2.json" changed/rank-2.json || { echo "nothing was changed by $2"; failed=1; }
}
# Another flight log, another answer.
changed hang-gloo 's/"waiting": null/"waiting": {"peer": 3, "step": 2, "action": "2RECV_B0", "text": "", "until": 1}/'
expect 0 '^Rank 2 and rank 3 waited for each other\.$' explain changed
changed hang-gloo 's/\[2, "2F1", \([0-9]*\), [0-9]*, null\]/[2, "2F1", \1, 99999999999999, null]/'
expect 0 '^Rank 2 had begun to compute 2F1' explain changed
changed hang-gloo 's/"2F1", \([0-9]*\), \([0-9]*\), null/"2I0", \1, \2, null/'
expect 0 '^Everyone waited for 2I0 of rank 2' explain changed
changed hang-gloo 's/"rank": 2, "step": 2,/"rank": 1, "step": 2,/'
expect 0 '^The ranks report different failures: ranks 0, 1 and 3: .*; rank 2: ' explain changed
changed kill-gloo 's/"peer": 1,/"peer": 3,/'
expect 0 '^Rank 2 and rank 3 waited for each other\.$' explain changed
changed hang-gloo 's/"wall_clock_ahead": [0-9]*/"wall_clock_ahead": 1000/'
expect 0 '^Changed/rank-2.json is .* s older than the newest: it is of a failure before, and was left aside\.$' explain changed
expect 0 '^Rank 2 left no flight log' explain changed
rm changed/rank-2.json changed/rank-1.json
expect 0 'left no flight log' explain changed
expect 0 '^Rank 0 waited for 1I0 of rank 1' explain changed/rank-0.json

# Files that are no flight logs, or are of several jobs.
expect 2 "no flight log given: name the folder that CHEVRON_FLIGHT_LOGS named" explain
expect 2 "'nowhere' cannot be read (No such file or directory): name files that a run with CHEVRON_FLIGHT_LOGS wrote" explain nowhere
mkdir empty
expect 2 "'empty' holds no rank-\*.json: name the folder" explain empty
expect 2 "'/dev/zero' is not a file" explain /dev/zero
head -c 1048577 /dev/zero > large.json
expect 2 "'large.json' is larger than 1 MiB" explain large.json
: > none.json
expect 2 "'none.json' is no flight log: it is empty" explain none.json
head -c 1000 "$flight_logs/hang-gloo/rank-0.json" > cut.json
expect 2 "'cut.json' is no flight log: it is no JSON, or was cut off" explain cut.json
echo '{"rank": 1}' > other.json
expect 2 "'other.json' is no flight log: 'chevron_ring' is missing" explain other.json
head -c 500000 /dev/zero | tr '\0' '[' > deep.json
expect 2 "'deep.json' is no flight log: it is no JSON" explain deep.json
# wrong <pattern of the message> <sed script>
wrong() {
  changed hang-gloo "$2"
  expect 2 "'changed/rank-2.json' $1" explain changed
}
wrong "is no flight log: it has format 2, and 1 is read here" 's/"chevron_ring": 1/"chevron_ring": 2/'
wrong "is no flight log: 'rank' is 4, not a whole number from 0 to 3" '0,/"rank": 2/s//"rank": 4/'
wrong "is no flight log: 'rank' is \"2\", not a whole number" '0,/"rank": 2/s//"rank": "2"/'
wrong "is no flight log: 'pipeline_ranks' is 0, not a whole number" 's/"pipeline_ranks": 4/"pipeline_ranks": 0/'
wrong "is no flight log: 'peer' is 18446744073709551615, not" 's/"waiting": null/"waiting": {"peer": 18446744073709551615}/'
wrong "is no flight log: '2Q1' in 'actions' is no action" 's/"2F1"/"2Q1"/'
wrong "is no flight log: 'failure' is missing" 's/"failure"/"failures"/'
wrong "is no flight log: 'plan' has not a row for each pipeline rank" 's/^    "0F0.*$//'
wrong "is no flight log: 'written' is 1e+99, not a whole number" 's/"written": [0-9]*/"written": 1e99/'
changed hang-gloo 's/"schedule": "ZB-H1"/"schedule": "GPipe"/'
expect 2 "are of different jobs (of .*, and of .*): name files of one" explain changed
expect 2 "'changed/rank-1.json' and 'changed/rank-1.json' are both of rank 1" explain changed/rank-1.json changed/rank-1.json
sed 's/0F0,0F1/0F1,0F1/' "$flight_logs/hang-gloo/rank-0.json" > rank-0.json
expect 2 "'rank-0.json' holds an unlawful plan (.*): name files" explain rank-0.json
expect 2 "no flight log holds the plan, which a picture needs" explain "$flight_logs/joining-gloo" -o none.svg
expect 2 "-o 'why.html': .html says no format this command has: choose one of text, svg" explain "$flight_logs/hang-gloo" -o why.html
# Bytes that are no text, and commands for a terminal, are not passed on.
printf 's/did not answer/\\\\u001b[31m\377 not/' > script
sed -f script "$flight_logs/hang-gloo/rank-0.json" > rank-0.json
"$plan" explain rank-0.json > output
grep -q 'rank 2  \[31m? not within' output && ! grep -q "$(printf '\033')" output || { echo "not made plain:"; cat output; failed=1; }
exit $failed
