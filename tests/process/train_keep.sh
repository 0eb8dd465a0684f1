# --keep-checkpoints: the last checkpoints stay, and a run that is killed at any moment leaves a checkpoint to resume from.
# timeout: 300
# waits: a run goes on until it is killed
. "$(dirname "$0")/shared/folder.sh"
. "$here/shared/killed.sh"
write_text
common="--ranks 2 --replicas 1 --layers 2 --width 32 --heads 2 --context 16 --microbatch-size 2 --timeline none --trace none --sample 0 --data text.txt"
fail() { echo "$1"; cat output 2> /dev/null; ls -R saved; exit 1; }

mkdir saved
echo mine > saved/notes.txt
timeout 150 "$train" $common --steps 11 --checkpoint saved --save-every 2 --keep-checkpoints 2 > output 2>&1 || fail "it does not train"
test "$(ls saved | tr '\n' ' ')" = "notes.txt step-00000010 step-00000011 " || fail "not the last two checkpoints, and the notes"
timeout 150 "$train" $common --steps 4 --checkpoint all --save-every 1 > output 2>&1 || fail "it does not train"
test "$(ls all | wc -l)" -eq 4 || fail "without the flag all stay"

# Saving and removing in every step, killed somewhere in it.
rm -r saved
for round in 1 2 3 4 5 6; do
  "$train" $common --backend gloo --steps 100000 --checkpoint saved --save-every 1 --keep-checkpoints 1 $(test -e saved && echo --resume) \
      > output 2>&1 &
  job=$!
  before=$(ls -d saved/step-* 2> /dev/null | tail -n 1)
  for _ in $(seq 2000); do
    now=$(ls -d saved/step-*[0-9] 2> /dev/null | tail -n 1)
    test -z "$now" || test "$now" = "$before" || ! test -e "$now/manifest.json" || break
    kill -0 $job 2> /dev/null || fail "round $round: it ended by itself"
    sleep 0.05
  done
  sleep "0.0$((round * 13 % 10))"
  kill_all $job
  whole=$(ls saved/step-*/manifest.json 2> /dev/null | wc -l)
  test "$whole" -ge 1 || fail "round $round: no whole checkpoint is left"
  # One more may be there: the newest, before the one before it went.
  test "$whole" -le 2 || fail "round $round: $whole checkpoints are left"
done
last=$(ls -d saved/step-*/manifest.json | tail -n 1 | sed 's,.*step-0*\([0-9]*\)/.*,\1,')
timeout 150 "$train" $common --steps $((last + 1)) --checkpoint saved --resume --keep-checkpoints 1 > output 2>&1 || fail "it does not go on"
test "$(ls saved | grep -c manifest)" -eq 0 && test "$(ls saved/*/manifest.json | wc -l)" -eq 1 || fail "more than the last one is left"
if ls saved | grep -q removed; then fail "what a killed run did not finish removing is still there"; fi
