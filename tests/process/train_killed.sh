# kill -9 of one rank: all others end with exit code 3, none stays, and, within two seconds, each names the rank that was lost. The
# two seconds hold on a machine that lets all processes run: up to five tries for each rank.
# timeout: 300
# serial: it measures how fast others notice
. "$(dirname "$0")/shared/endless_job.sh"

# kill_one <rank>: complaints, which a busy machine may cause, go to `complaints`; any other fault ends the test.
kill_one() {
  victim=$1
  start_endless_job
  begin=$(date +%s%N)
  kill_rank "$victim"
  spent=$((($(date +%s%N) - begin) / 1000000))
  echo "rank $victim killed: exit code $code after $spent ms"
  test $code -eq 3 || { echo "exit code $code, not 3"; cat errors; exit 1; }
  for child in $children; do
    ! kill -0 "$child" 2>/dev/null || { echo "process $child is still there"; exit 1; }
  done
  : > complaints
  test $spent -lt 2000 || echo "$spent ms are more than two seconds" >> complaints
  # The three others each say whom they lost, and one of them how.
  test "$(grep -c "^rank [0-3][,:].*rank $victim was lost (" errors)" -eq 1 || echo "not one message that says how" >> complaints
  for rank in 0 1 2 3; do
    test $rank -ne $victim || continue
    grep -q "^rank $rank.*rank $victim \(was lost\|is gone\)" errors || echo "rank $rank does not name rank $victim" >> complaints
  done
}
for rank_killed in 0 1 2 3; do
  for try in 1 2 3 4 5; do
    kill_one $rank_killed
    test -s complaints || break
    echo "try $try:"
    cat complaints errors
  done
  test ! -s complaints || exit 1
done
