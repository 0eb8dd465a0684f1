# Files that a run writes are new files: a link in place of one is replaced, its target and other hard links keep their bytes, and a run
# that is killed leaves the old file. A file that cannot be written is refused before the first step.
# timeout: 240
# waits: a run goes on until it is killed
. "$(dirname "$0")/shared/folder.sh"
. "$here/shared/killed.sh"
common="--layers 2 --width 16 --heads 2 --context 16 --microbatch-size 2 --microbatches 2 --replicas 1 --ranks 2 --sample 0 --data text.txt"
files="--metrics metrics --trace trace --timeline timeline --report report --profile profile"
fail() { echo "$1"; cat output 2>/dev/null; exit 1; }
write_text
sum_of() { md5sum < "$1"; }

# unchanged <name of the files>: the other run's file is unchanged, and each file is a new one.
unchanged() {
  test "$(sum_of other)" = "$before" || fail "$1: the other file was changed"
  for file in metrics trace timeline report profile; do
    test -f $file && test ! -L $file && test $file -ot other.later || fail "$1: $file is no new file"
    if cmp -s $file other; then fail "$1: $file was not written"; fi
  done
}

for kind in symbolic hard; do
  rm -f metrics trace timeline report profile
  seq -f "line %.0f of another run" 1000 > other
  before=$(sum_of other)
  for file in metrics trace timeline report profile; do
    if [ $kind = symbolic ]; then ln -s "$folder/other" $file; else ln other $file; fi
  done
  timeout 150 "$train" $common $files --steps 2 > output 2>&1 || fail "$kind links: the run failed"
  sleep 0.01
  touch other.later
  unchanged "$kind links"
  test "$(wc -l < metrics)" -eq 2 || fail "$kind links: metrics has not two lines"
done
# A link to nothing.
rm metrics
ln -s nothing metrics
timeout 150 "$train" $common --metrics metrics --timeline none --trace none --steps 1 > output 2>&1 || fail "a dangling link: the run failed"
test ! -e nothing && test ! -L metrics && test "$(wc -l < metrics)" -eq 1 || fail "a dangling link is followed"

# A run that goes on copies the lines of earlier steps: the file that the link leads to stays as it is.
quiet="--timeline none --trace none"
timeout 150 "$train" $common $quiet --steps 2 --checkpoint saved --metrics whole > output 2>&1 || fail "saving failed"
cp whole kept
ln -sf whole metrics
timeout 150 "$train" $common $quiet --steps 4 --checkpoint saved --resume --metrics metrics > output 2>&1 || fail "the resumed run failed"
cmp -s whole kept || fail "metrics of a resumed run were written through a link"
test ! -L metrics && test "$(wc -l < metrics)" -eq 4 && head -n 2 metrics | cmp -s - kept || fail "a resumed run's metrics lack earlier steps"
# A checkpoint's folder that is a link to one of another run, and the lock of another folder.
cp -a saved others
rm -rf saved
mkdir saved
for each in others/step-* others/.chevron-lock; do ln -s "../$each" saved/; done
before=$(cd others && find . -type f | sort | xargs md5sum)
timeout 150 "$train" $common $quiet --steps 6 --checkpoint saved --resume > output 2>&1 || fail "linked checkpoints: the run failed"
test "$(cd others && find . -type f | sort | xargs md5sum)" = "$before" || fail "another run's checkpoints were changed"
test -d saved/step-00000006 && test ! -L saved/.chevron-lock || fail "the run saved elsewhere"

# refuses <words> <flags…>: before the first step.
refuses() {
  words=$1
  shift
  status=0
  timeout 60 "$train" $common --steps 1000000 "$@" > output 2>&1 || status=$?
  test $status -eq 2 || fail "exit code $status, not 2: $*"
  grep -q -- "$words" output || fail "does not say '$words': $*"
  if grep -q 'step: ' output; then fail "refused after a step: $*"; fi
}
mkdir folder
ln -s folder to_folder
for flag in --metrics --trace --timeline --report --profile; do
  refuses "$flag folder cannot be written: Is a directory" $flag folder
  refuses "$flag to_folder cannot be written: Is a directory" $flag to_folder
  refuses "$flag nowhere/file cannot be written: No such file or directory" $flag nowhere/file
done
test "$(ls | grep -c partial)" -eq 0 || fail "a probe is left"

# Killed in the middle: pictures are those of the run before, and metrics are whole lines of this one.
sum=$(cat trace timeline report profile | md5sum)
"$train" $common $files --steps 1000000 > output 2>&1 &
job=$!
while kill -0 $job 2>/dev/null && ! { test "$(wc -l < metrics)" -ge 5 && grep -q '"step":5,' metrics; }; do sleep 0.02; done
kill_all $job
test "$(cat trace timeline report profile | md5sum)" = "$sum" || fail "a killed run has changed pictures"
test "$(ls | grep -c partial)" -eq 0 || fail "a killed run has left parts"

# A stream is written in place.
timeout 150 "$train" $common --trace none --timeline /dev/stdout --steps 1 > output 2>errors || fail "/dev/stdout: the run failed"
grep -q "</svg>" output || fail "nothing came through /dev/stdout"
test -L /dev/stdout || fail "/dev/stdout is no link any more"
