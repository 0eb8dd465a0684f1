# SIGTERM, SIGINT, SIGUSR1 and a time limit end a run that keeps checkpoints after the step under way: it saves, exits with 0, and goes
# on later as if nothing had happened. A second signal ends it at once, and so does the first where there is no checkpoint.
# timeout: 400
# waits: runs go on until they are told to stop
. "$(dirname "$0")/shared/folder.sh"
export OMP_NUM_THREADS=1
. "$here/../support/free_port.sh"
write_text
common="--layers 4 --width 32 --heads 2 --context 16 --microbatch-size 2 --microbatches 4 --ranks 2 --replicas 1 --seed 7 --steps 300
  --schedule ZB-H2 --sample 0 --timeline none --trace none --data text.txt"
numbers() { sed 's/,"lr".*//' "$1"; }
fail() { echo "$1"; cat output output.* 2> /dev/null || true; exit 1; }
timeout 150 "$train" $common --metrics whole.jsonl > output 2>&1 || fail "the uninterrupted run failed"
numbers whole.jsonl > whole

# begin <flags…>: starts a job, and comes back when it has trained a few steps.
begin() {
  rm -rf saved run.jsonl
  timeout 150 "$train" $common --metrics run.jsonl "$@" > output 2>&1 &
  timed=$!
  while kill -0 $timed 2> /dev/null && ! test -s run.jsonl; do sleep 0.02; done
  job=$(ps -o pid= --ppid $timed | tr -d ' ')
}
# ended <code> <name>: the job's own exit code.
ended() {
  code=0
  wait $timed || code=$?
  test $code -eq "$1" || fail "$2: exit code $code, not $1"
}
# goes_on <name> <rank> <flags…>: a stopped run says why, has saved its last step, and goes on as the same run: the first to its end,
# all others for some steps, at least one.
longer=
goes_on() {
  name=$1
  tr -s ' \n' '  ' < output | grep -q "stopped after step [0-9]* of 300, since $2; saved in saved: --resume goes on" ||
    fail "$name: it does not say why it stopped"
  shift 2
  steps=$(wc -l < run.jsonl)
  test "$steps" -lt 300 || fail "$name: it trained to its end"
  test -e "saved/step-$(printf %08d "$steps")/manifest.json" || fail "$name: $steps steps, but saved: $(ls saved)"
  timeout 150 "$train" $common --metrics run.jsonl --checkpoint saved --resume $longer "$@" > output 2>&1 || fail "$name: it cannot go on"
  if test -z "$longer"; then test "$(wc -l < run.jsonl)" -eq 300 || fail "$name: it does not go on to its end"; fi
  test "$(wc -l < run.jsonl)" -gt "$steps" || fail "$name: it makes no further step"
  numbers run.jsonl > resumed
  head -n "$(wc -l < resumed)" whole | cmp -s - resumed || fail "$name: it goes on as another run"
  longer="--stop-after 0.5s"
}

# The whole job: a process of threads, or a launcher that tells its ranks.
for way in "threads TERM" "gloo INT" "gloo USR1"; do
  backend=${way% *} signal=${way#* }
  begin --backend "$backend" --checkpoint saved
  kill -"$signal" "$job"
  ended 0 "$way"
  goes_on "$way" "rank [01] was sent signal [0-9]* ([A-Za-z0-9 ]*)" --backend "$backend"
done

# One rank alone; twice, as launchers and terminals do.
begin --backend gloo --checkpoint saved
rank=$(ps -o pid= --ppid "$job" | tail -n 1)
kill -TERM $rank
kill -TERM $rank 2> /dev/null || true
ended 0 "one rank alone"
goes_on "one rank alone" "rank 1 was sent signal 15 (Terminated)" --backend gloo

# With post-validation ranks hear of it a step later.
begin --backend gloo --checkpoint saved --post-validation --clip-grad-norm 0
kill -TERM "$job"
ended 0 "post-validation"
tr -s ' \n' '  ' < output | grep -q "since rank [01] was sent signal 15 (Terminated); saved in saved" || fail "post-validation: it does not say why"
test -e "saved/step-$(printf %08d "$(wc -l < run.jsonl)")/manifest.json" || fail "post-validation: not the last step is saved"

# Time.
begin --checkpoint saved --stop-after 0.01m
ended 0 "a time limit"
goes_on "a time limit" "rank [01] came to its time limit"

# begin_ranks: starts them as a launcher does that tells each its place, and comes back when they have trained a few steps.
begin_ranks() {
  rm -rf saved run.jsonl
  port=$(free_port)
  ranks=
  for rank in 0 1; do
    RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port "$train" $common --checkpoint saved --metrics run.jsonl > output.$rank 2>&1 &
    ranks="$ranks $!"
  done
  while kill -0 $ranks 2> /dev/null && ! test -s run.jsonl; do sleep 0.02; done
}
begin_ranks
kill -TERM $ranks
for rank in $ranks; do wait "$rank" || fail "a rank of the environment: exit code $?"; done
cp output.0 output
goes_on "ranks of the environment" "rank [01] was sent signal 15 (Terminated)"

# A second signal, some seconds later, is meant: here the step cannot end.
begin_ranks
kill -STOP ${ranks##* }
kill -TERM ${ranks% *}
sleep 2.5
kill -TERM ${ranks% *} || fail "it ended without the rank that is stopped"
code=0
wait ${ranks% *} || code=$?
test $code -eq 143 || fail "a second signal: exit code $code, not 143"
kill -KILL ${ranks##* }
rm -f output.0 output.1

# Nothing could be saved.
begin
kill -TERM "$job"
ended 143 "without a checkpoint"
echo "stopped, saved and gone on with: threads, a launcher, one rank, post-validation, a time limit, ranks of the environment"
