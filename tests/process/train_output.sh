# The output of a run: metrics, timeline and trace that other programs can read, plain lines in a file, one line on a terminal.
# timeout: 300
. "$(dirname "$0")/shared/folder.sh"
find_python
small="--layers 2 --width 32 --heads 2 --context 16 --microbatch-size 2 --steps 6"

mkdir text
i=0
while [ $i -lt 30 ]; do
  seq -f "line %.0f of some text, as good as any" $i $((i + 60)) > text/part$i.txt
  i=$((i + 1))
done
head -c 3000 /dev/zero > text/picture.bin

for flags in "--schedule 1F1B" "--schedule ZBVZeroBubble --backend gloo"; do
  timeout 150 "$train" $small $flags --data text --metrics m.jsonl --timeline t.svg --trace t.json --report t.html > output 2> errors
  test ! -s errors || { echo "on stderr, which is no terminal:"; cat errors; exit 1; }
  for line in 'bubble .* if forward, input gradient and weight' '30 files, .* (1 that are not text left out)' \
      'step: 1  loss: *5\.[0-9]*  grad_norm: *[0-9.]*  memory: *[0-9.]*GiB([0-9.]*%)  tps: [0-9,]*  tflops: [0-9.]*  bubble: *[0-9.]*%' 'step: 6  loss' '^ *predicted *measured$' \
      'pipeline, first F to last B or W' 'peak in flight, rank 0, 2' 'timeline *t.svg' 'trace *t.json' 'report *t.html' 'goes on from'; do
    grep -q "$line" output || { echo "$flags: no line \`$line\` in:"; cat output; exit 1; }
  done
  if grep -q "$(printf '\033')" output; then echo "escape sequences in a file"; exit 1; fi
  "$plan" plot m.jsonl --y loss,grad_norm,learning_rate,throughput,end_to_end,bubble --x seconds -o loss.svg > table 2>&1 &&
    [ "$(grep -c '^m  *1-6  *6 ' table)" -eq 6 ] || { echo "chevron-plan plot cannot read the metrics:"; cat table; exit 1; }
  "$python" - "$flags" <<'PYTHON'
import json, math, sys
import xml.etree.ElementTree as xml

steps = [json.loads(line) for line in open("m.jsonl")]
assert [s["step"] for s in steps] == [1, 2, 3, 4, 5, 6], steps
for s in steps:
    # torchtitan's names and meanings: tokens are counted by rank, times in seconds, memory in GiB and per cent.
    assert set(s) == {"step", "loss_metrics/global_avg_loss", "grad_norm", "lr", "n_tokens_seen", "throughput(tps)", "tflops",
                      "time_metrics/end_to_end(s)", "time_metrics/data_loading(s)", "time_metrics/data_loading(%)",
                      "memory/max_reserved(GiB)", "memory/max_reserved(%)", "bubble"}, s
    seconds, loading = s["time_metrics/end_to_end(s)"], s["time_metrics/data_loading(s)"]
    assert all(math.isfinite(v) for v in s.values()) and 0 < loading < seconds and 0 <= s["bubble"] <= 1, s
    assert abs(s["time_metrics/data_loading(%)"] - 100 * loading / seconds) < 1e-6, s
    bytes_in_step, ranks, layers, width, context = 2 * 4 * 2 * 16, 4, 2, 32, 16
    assert abs(s["throughput(tps)"] * ranks * seconds - bytes_in_step) < 1e-6 * bytes_in_step, s
    assert s["n_tokens_seen"] == s["step"] * bytes_in_step, s
    multiplying = layers * (12 * width * width + 9 * width) + 2 * width + 256 * width
    flops = 6 * multiplying + 12 * layers * width * context
    assert abs(s["tflops"] * 1e12 / s["throughput(tps)"] - flops) < 1e-6 * flops, (s, flops)
    assert 0.02 < s["memory/max_reserved(GiB)"] < 4 and 0 < s["memory/max_reserved(%)"] < 100, s
loss = "loss_metrics/global_avg_loss"
assert abs(steps[0][loss] - math.log(256)) < 0.2, steps[0]
assert steps[-1][loss] < steps[0][loss], steps

root = xml.parse("t.svg").getroot()
assert root.tag.endswith("svg"), root.tag
words = " ".join(root.itertext())
for word in ("predicted", "measured", "rank 3"):
    assert word in words, (word, words[:400])

page = open("t.html").read()
model = json.loads(page.split('id="model">')[1].split("</script>")[0])
assert [p["title"].split(",")[0] for p in model["pictures"]] == ["predicted from measured costs", "measured"], model["pictures"]
assert [p["rows"] for p in model["pictures"]] == [2, 4] and all(all(boxes for _, boxes in p["lists"]) for p in model["pictures"])
assert [bool(p["path"]) for p in model["pictures"]] == [True, False] and model["pictures"][0]["bound"] > 0 and len(page) < 200000, len(page)

events = json.load(open("t.json"))["traceEvents"]
slices = [e for e in events if e["ph"] == "X"]
split = "ZBV" in sys.argv[1]
stages, micro_batches, replicas = (4 if split else 2), 4, 2
forwards = [e for e in slices if e["name"].startswith("PP:") and e["name"].lstrip("PP:0123456789").startswith("F")]
# Once in the prediction, which has one pipeline, and once for each replica in the measurement.
assert len(forwards) == stages * micro_batches * (1 + replicas), len(forwards)
assert all(e["dur"] >= 0 for e in slices)
starts = {e["id"]: e["ts"] for e in events if e["ph"] == "s"}
ends = {e["id"]: e["ts"] for e in events if e["ph"] == "f"}
assert starts.keys() == ends.keys() and len(starts) > 0, (len(starts), len(ends))
assert all(starts[i] <= ends[i] for i in starts), "a message arrives before it leaves"
PYTHON
done

# The number of slices that the prediction says: as many as are worth it.
chosen() {
  timeout 150 "$train" --layers 2 --width 32 --heads 2 --context 16 --microbatch-size 1 --steps 1 --replicas 1 --data text \
    --timeline none --trace none --schedule Seq1F1B --slices auto "$@" > auto
  tr -s ' \n' ' ' < auto | grep -q "$words" || { echo "Seq1F1B --slices auto $*: no \`$words\` in:"; cat auto; exit 1; }
}
words='microbatches in 8 slices of .* slices 8 of 1, 2, 4, 8: a step is predicted to take 17.5 % less than one in whole sequences; attention is 40'
chosen --microbatches 4 --attention 0.4
words=' 12 microbatches in 4 slices of .* slices 4 of 1, 2, 4, 8: .* less than one in whole sequences, and 8 slices would save no more than 1.0 %'
chosen --microbatches 12
words='slices 1 of 1, 2, 4, 8: 8 slices would save no more than 1.[0-9] % of a step; attention is'
chosen --microbatches 60

# The same seed writes the same text, where time does not cut it short.
timeout 150 "$train" $small --data text --timeline none --trace none --sample 320 > again
sed -n '/goes on from/,$p' again > sample_again
timeout 150 "$train" $small --data text --timeline none --trace none --sample 320 --schedule GPipe --backend gloo > other
sed -n '/goes on from/,$p' other > sample
test "$(wc -c < sample)" -gt 300
cmp sample sample_again || { echo "the sample differs between runs"; exit 1; }

# On a terminal: one line that is rewritten, and colours only where they are welcome.
if ! script -qec true /dev/null > none 2>&1 < /dev/null; then
  echo "what a run says on a terminal is left out: $(head -n 1 none); remedy: util-linux's script, and mount -t devpts devpts /dev/pts"
else
  TERM=xterm timeout 150 script -qec "$train $small --data text --timeline none --trace none" /dev/null > terminal < /dev/null
  if grep -q 'step: ' terminal; then echo "plain lines on a terminal"; exit 1; fi
  grep -q "step 6/6  loss" terminal || { echo "no progress line on a terminal"; exit 1; }
  grep -q "$(printf '\033\\[1m')" terminal || { echo "nothing bold on a terminal"; exit 1; }
  NO_COLOR=1 TERM=xterm timeout 150 script -qec "$train $small --data text --timeline none --trace none" /dev/null > terminal < /dev/null
  if grep -q "$(printf '\033\\[[0-9]*m')" terminal; then echo "colours in spite of NO_COLOR"; exit 1; fi
fi
