# Two jobs with one --checkpoint folder: the second is refused before its first step, with the process of the first, which goes on
# undisturbed. Once the first has ended, a job can resume from the folder, and cannot begin anew in it.
# timeout: 240
# waits: a job stands while another is refused
. "$(dirname "$0")/shared/folder.sh"
. "$here/shared/killed.sh"
job=
trap 'test -z "$job" || kill_all $job; rm -rf "$folder"' EXIT
write_text
seq -f "line %.0f of another text, no better" 4000 > other.txt
common="--ranks 2 --replicas 1 --layers 2 --width 32 --heads 2 --context 16 --microbatch-size 2 --sample 0 --timeline none --trace none"
fail() { echo "$1"; cat output 2> /dev/null; ls -Ra saved; exit 1; }
# refused <words>
refused() {
  status=0
  timeout 150 "$train" $common --data other.txt --checkpoint saved --steps 5 > output 2>&1 || status=$?
  test "$status" -eq 7 || fail "exit code $status, not 7"
  grep -q "$1" output || fail "it does not say '$1'"
  if grep -q 'step:' output; then fail "it trained before it found out"; fi
}

# On threads, so that the process which saves is the one started here.
"$train" $common --data text.txt --steps 100000 --checkpoint saved --save-every 5 --keep-checkpoints 2 > first 2>&1 &
job=$!
until ls saved/step-*/manifest.json > /dev/null 2>&1; do
  kill -0 $job 2> /dev/null || { cat first; fail "the first job ended"; }
  sleep 0.05
done
refused "another job saves its checkpoints into this folder: process $job on $(hostname)"
kill -0 $job 2> /dev/null || { cat first; fail "the first job did not outlive the second"; }
kill_all $job
job=
refused "is of an earlier run or of another job"

last=$(ls -d saved/step-*/manifest.json | tail -n 1 | sed 's,.*step-0*\([0-9]*\)/.*,\1,')
timeout 150 "$train" $common --data text.txt --steps $((last + 1)) --checkpoint saved --resume > output 2>&1 || fail "it does not go on"
