# Unusable flags are refused before any rank starts: exit code 2, one line that names the flag and the remedy.
# timeout: 300
seconds=30
. "$(dirname "$0")/shared/refused.sh"

# refuses <code> <pattern of the message> <flags…>
refuses() {
  of_code=$1
  of_words=$2
  shift 2
  refused "$of_code" "$of_words" "$train" --timeline none --trace none "$@"
}

printf 'a short text\n' > short.txt
head -c 4000 /dev/zero > zeros.bin
mkdir empty
refuses 2 "ends in .csv, auto, or one of GPipe, 1F1B" --schedule Foo
refuses 2 "nowhere.csv cannot be read: No such file" --schedule nowhere.csv
printf '0F0,0B0\n1F0,1B0,1Q0\n' > junk.csv
refuses 2 "junk.csv: line 2, column 9" --schedule junk.csv
printf '0F0,0B0\n1F0,1B0\n' > one.csv
refuses 2 "--ranks 4 differs from the schedule's file, which has 2" --schedule one.csv --ranks 4
refuses 2 "--chunks cannot be chosen" --schedule one.csv --chunks 2
refuses 2 "ForwardOnly runs forwards alone: it evaluates and cannot train. Remedy: one of GPipe" --schedule ForwardOnly
refuses 2 "--ranks: 0 is not a whole number from 1" --ranks 0
refuses 2 "--microbatches: 2.5 is not a whole number" --microbatches 2.5
refuses 2 "--slices: 0 is not a whole number from 1" --schedule Seq1F1B --slices 0
refuses 2 "--slices auto has nothing to choose from: --schedule 1F1B takes whole sequences .*Remedy: --schedule Seq1F1B" --slices auto
refuses 2 "--slices auto cannot choose: --schedule one.csv has 1 slice of each sequence. Remedy: leave" --schedule one.csv --slices auto
refuses 2 "--slices does not go with --schedule auto" --schedule auto --slices auto
refuses 2 "--steps: x is not a whole number" --steps x
refuses 2 "--steps: 1e1 is not a whole number from 1 to 1000000000" --steps 1e1
refuses 2 "--timeout: nan is not a number above 0, at most 1e9" --timeout nan
refuses 2 "--schedule /dev/zero is not a file" --schedule /dev/zero
refuses 2 "--schedule ./ is not a file" --schedule ./
refuses 2 "--learning-rate: -1 is not a number above 0" --learning-rate=-1
refuses 2 "--bogus was not expected: there is no such flag. Remedy: chevron-train --help" --bogus
refuses 2 "--lr was not expected: there is no such flag; did you mean --learning-rate? Remedy" --lr 1e-3
refuses 2 "--batch-size was not expected: there is no such flag; did you mean --microbatch-size?" --batch-size=8
refuses 2 "Remedy: a width that is a multiple" --heads 5
refuses 2 "Remedy: --nproc 4" --nproc 3
refuses 2 "Remedy: --backend gloo" --backend threads --nproc 4
refuses 2 "Remedy: --layers 2 or more" --layers 1 --ranks 4
refuses 2 "P=2, M=4, V=2: law shape" --chunks 2
refuses 2 "law shape" --schedule ZBVZeroBubble --chunks 3
refuses 2 "--master-parameters is about bfloat16 parameters, and --dtype autocast has float32 ones. Remedy: --dtype bfloat16" --master-parameters --dtype autocast
refuses 2 "--data nowhere does not exist" --data nowhere
mkfifo pipe
refuses 2 "--data pipe cannot be read" --data pipe
refuses 2 "--schedule ./pipe is not a file" --schedule ./pipe
refuses 2 "holds no text" --data zeros.bin
refuses 2 "holds nothing" --data empty
refuses 2 "is too short: 13 bytes" --data short.txt
refuses 2 "--metrics nowhere/m.jsonl cannot be written" --metrics nowhere/m.jsonl
refuses 2 "--timeline nowhere/t.svg cannot be written" --timeline nowhere/t.svg
# A launcher's variables must fit, too.
export RANK=0 WORLD_SIZE=3 MASTER_ADDR=127.0.0.1 MASTER_PORT=29871
refuses 2 "need 4 processes, but environment has started 3" --steps 1
refuses 2 "Remedy: --backend gloo" --backend threads
refuses 2 "Remedy: leave --nproc away" --nproc 4
unset MASTER_ADDR
refuses 2 "MASTER_ADDR is missing" --steps 1
unset RANK WORLD_SIZE MASTER_PORT
export SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4
refuses 2 "SLURM_STEP_NODELIST is missing, while Slurm says 4 ranks" --steps 1
unset SLURM_PROCID SLURM_STEP_NUM_TASKS

# A loss that is no number any more: exit code 6, and no step after it.
code=0
timeout 150 "$train" --timeline none --trace none --width 32 --heads 2 --context 16 --steps 200 --learning-rate 1e9 --clip-grad-norm 0 \
    --metrics metrics.jsonl > output 2> errors || code=$?
if [ $code -ne 6 ] || ! grep -q -e "is not finite; no parameter was changed" -e "is infinite or NaN before step" errors || grep -q null metrics.jsonl; then
  echo "a loss that is not finite: exit code $code, not 6, or no word about it:"
  cat errors
  failed=1
fi
# A remedy names flags, and no option of C++; a version is told.
if ! grep -q "Remedy: a lower --learning-rate, or a smaller --clip-grad-norm$" errors || grep -q "::" errors; then
  echo "a remedy that is no flag:"
  cat errors
  failed=1
fi
for program in train finetune; do
  "$CHEVRON_BUILD/bin/chevron-$program" --version > version || failed=1
  grep -q "^chevron-$program [0-9][0-9.]*$" version || { echo "no version of chevron-$program:"; cat version; failed=1; }
done
exit $failed
