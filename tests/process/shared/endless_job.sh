# Sourced first, in place of folder.sh: a job that still runs when the script ends is killed.
. "$(dirname "$0")/shared/folder.sh"
job=
trap 'test -z "$job" || kill -9 "$job" 2>/dev/null || true; rm -rf "$folder"' EXIT

# three_steps: returns when the process $job has written three lines of metrics.jsonl; its output is in `output` and `errors`.
three_steps() {
  waited=0
  until [ -s metrics.jsonl ] && [ "$(wc -l < metrics.jsonl)" -ge 3 ]; do
    kill -0 $job 2> /dev/null || { echo "no three steps"; cat output errors; exit 1; }
    sleep 0.1
    waited=$((waited + 1))
    test $waited -lt 1000 || { echo "no three steps in 100 s"; cat output errors; exit 1; }
  done
}

# start_endless_job [FLAG...]: four ranks over Gloo that train a small GPT and never stop, in the background, with these flags of
# chevron-train besides; comes back after three steps. Sets `job`, the launcher, and `children`, the ranks in the order of their birth.
# Output goes to the files `output` and `errors` in the current folder.
start_endless_job() {
  rm -f metrics.jsonl
  "${CHEVRON_BUILD:?}/bin/chevron-train" --backend gloo --steps 1000000 --width 32 --heads 2 --context 16 --timeline none --trace none \
      --metrics metrics.jsonl "$@" > output 2> errors &
  job=$!
  three_steps
  children=$(ps -o pid= --ppid "$job" | sort -n)
  test "$(echo "$children" | wc -l)" -eq 4 || { echo "not four ranks: $children"; exit 1; }
}

# kill_rank RANK: kill -9 of that one; waits for the job and sets `code`, how it ended.
kill_rank() {
  kill -9 "$(echo "$children" | sed -n "$(($1 + 1))p")"
  code=0
  wait "$job" || code=$?
  job=
}
