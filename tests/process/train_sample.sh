# The text that chevron-train writes at the end: as many bytes as --sample says, the same on threads and in processes, with replicas,
# shards and slices; none with 0; and without the flag no more than 3 s of it.
# timeout: 300
. "$(dirname "$0")/shared/folder.sh"
export OMP_NUM_THREADS=1
write_text
small="--ranks 2 --layers 2 --width 32 --heads 2 --context 16 --microbatch-size 2 --steps 30 --timeline none --trace none --data text.txt"
fail() { echo "$1"; cat output; exit 1; }

# sample <name> <flags…>: the text, with the line that it goes on from, goes to <name>.
sample() {
  name=$1
  shift
  timeout 150 "$train" "$@" > output 2>&1 || fail "failed: chevron-train $*"
  sed '1,/goes on from a line it never saw/d' output > "$name"
}
# The prompt has as many bytes as the context, and a new line ends the text.
for flags in "--replicas 3 --shards 2" "--replicas 2 --shards 2 --sequence-parallel" "--replicas 2 --schedule Seq1F1B --slices 2"; do
  sample longer $small $flags --sample 60
  sample shorter $small $flags --sample 40 --backend gloo
  test "$(wc -c < longer)" -ge $((16 + 60 + 1)) || fail "$flags: not 60 bytes"
  # A character that the end cuts is shown as another.
  head -c $((16 + 36)) longer > wanted
  head -c $((16 + 36)) shorter | cmp - wanted || { cat longer shorter; fail "$flags: not the same text"; }
  test "$(wc -m < shorter)" -le $((16 + 40 + 1)) || fail "$flags: more than 40 characters"
done
sample none $small --replicas 1 --sample 0
if grep -q "goes on from" output; then fail "--sample 0 writes a text"; fi
grep -q "on text it never saw" output || fail "--sample 0: no held-out loss"

# A byte takes a tenth of a second or more, and 320 take half a minute.
sample slow --ranks 1 --replicas 1 --microbatches 1 --layers 4 --width 512 --heads 8 --context 512 --microbatch-size 1 --steps 1 \
  --timeline none --trace none --data text.txt
written=$(sed -n 's/^(\([0-9]*\) bytes\{0,1\} in 3 s; --sample 320 waits for more)$/\1/p' slow)
test -n "$written" || fail "nothing says that time was over"
test "$written" -ge 1 && test "$written" -lt 320 || fail "$written bytes"
