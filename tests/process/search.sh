# chevron-plan search on the command line: its result is a schedule like any other; without a result it prints the reason.
# timeout: 180
seconds=60
. "$(dirname "$0")/shared/expect_plan.sh"

# Where a published schedule is the best there is, that is said; where it is not, a shorter one is found.
expect 0 '^linear  *27  *optimal  *27  *27  ZB-H1$' search --memory-limit 4
expect 0 '^linear  *33  *optimal  *33  *33  1F1B$' search --memory-limit 4 --full-backward
expect 0 '^vee  *51  *optimal  *51  *51  ZBVZeroBubble$' search --chunks 2 --memory-limit 4
expect 0 '^loop .* InterleavedZeroBubble$' search --chunks 2 --memory-limit 4
expect 0 'none fits' search --placement wave --chunks 4 --memory-limit 1 --trials 100
expect 0 '^span  *24 ' search --objective span
# The zero-bubble paper's ZB-2p, 1.5B parameters, 8 ranks, 24 microbatches: 2 x 8 microbatches' activations, of which a W needs 0.366.
costs='--forward 18.522 --backward-input 18.086 --backward-weight 9.337 --communication 0.601'
expect 0 '^linear  *1152.6  *optimal  *1152.6  *1236.63  ZB-H2$' \
  search --ranks 8 --microbatches 24 $costs --memory-limit 16 --kept-for-weight 0.36641 --objective span

# A slow link is absorbed where memory has room for the slack that it needs; a narrow one is the bound.
expect 0 '^linear  *215  *optimal  *215  *215  1F1B+1@3-4$' \
  search --ranks 8 --microbatches 64 --link 3-4=1 --memory-limit 9 --full-backward
expect 0 '^linear  *200  *optimal  *200  *200  ZB-H1+1@3-4$' search --ranks 8 --microbatches 64 --link 3-4=1 --memory-limit 9
expect 0 '^linear  *81.5  *optimal  *81.5 ' search --ranks 2 --microbatches 16 --message-bytes 9 --bandwidth 2 --trials 500
expect 0 '^loop  *' search --placement loop --chunks 2 --link 3-0=2 --trials 500

# Microbatches of unequal length: planned for them, in the order in which they were given or in one that is found.
long='--ranks 4 --lengths 4096,512,512,640,256,2048,512,1024 --attention 0.2'
expect 0 '^Microbatches have 4096,512,512,640,256,2048,512,1024 tokens; the costs are those of the mean, of which 0.2 goes with' \
  search $long --memory-limit 4 --trials 2000
given=$(awk '$1 == "linear" { print $2 }' output)
expect 0 '% shorter than in that order ('"$given"')' search $long --memory-limit 4 --trials 2000 --order -o ordered.csv
length=$(awk '$1 == "linear" { print $2 }' output)
order=$(sed -n 's/^Microbatches go in as \([0-9,]*\), counted.*/\1/p' output)
awk -v a="$length" -v b="$given" 'BEGIN { exit !(a < 0.85 * b) }' || { echo "an order that is hardly shorter: $length, $given"; failed=1; }
# In that order the lengths make the file's schedule as long as was said.
lengths=$(echo "$order" | awk -v given=4096,512,512,640,256,2048,512,1024 \
  '{ split(given, l, ","); n = split($0, o, ","); for (i = 1; i <= n; ++i) printf "%s%s", (i > 1 ? "," : ""), l[o[i] + 1] }')
expect 0 "^makespan $length " show ordered.csv --lengths "$lengths" --attention 0.2
expect 0 '"order": \['"$order"'\], "as_given": ' search $long --memory-limit 4 --trials 2000 --order --format json
expect 0 '"transfer_factors": \[0.5, 1, 1.5, 1\]' show 1F1B --ranks 2 --microbatches 4 --lengths 1,2,3,2 --format json
# By hand: 0F1 ends at 4, its message of 1.5 is there at 5.5, 1F1 and 1B1 take 3 and 6, the way back 1.5, 0B1 6.
expect 0 '^makespan 22 ' show 1F1B --ranks 2 --microbatches 2 --lengths 1,3 --measured-length 1 --communication 0.5
expect 2 "--lengths '1,2,3' has 3 values, but the schedule has 8 microbatches: give one for all, or 8" search --lengths 1,2,3
expect 2 "--lengths '0' is not usable: a microbatch has tokens; give numbers above 0" search --lengths 0
expect 2 "--attention '2' is not a share" search --lengths 3 --attention 2
expect 2 "--attention has no effect without --lengths or --slices: add one of these flags" compare --attention .2
expect 2 "--measured-length has no effect without --lengths" show 1F1B --measured-length 7
expect 2 "--order has nothing to choose where microbatches are alike: give --lengths" search --order
expect 2 "--order does not go with --jitter: leave one of them out" search --lengths 3 --order --jitter 5%

# Other commands take the schedule that was found; the same command finds the same schedule.
uneven='--forward 10,10,10,10,10,10,10,16 --backward-input 11 --backward-weight 9 --communication 0.5'
what="search --placement vee --microbatches 12 --memory-limit 4 --trials 2000 $uneven"
expect 0 '^vee  *[0-9.]*  *[+o].*ZBVZeroBubble$' $what -o found.csv
length=$(awk '$1 == "vee" { print $2 }' output)
expect 0 '^ok: found.csv, 4 ranks' check found.csv --memory-limit 4
expect 0 "^makespan $length " show found.csv $uneven
expect 0 '^0F0,0SEND_F0,' lower found.csv --format csv-comms
"$plan" $what --format csv | diff found.csv - || failed=1
expect 0 '"optimal": ' $what --format json
python3 -m json.tool output > indented || { echo "not JSON"; failed=1; }
for format in svg html trace; do expect 0 . $what --format $format; done

# Layers and order together, from a profile: the head's stage is left with fewer layers, and the flag for that is printed.
cat > profile.json <<'JSON'
{"chevron_profile": 1, "unit": "ms", "schedule": "ZB-H1", "ranks": 4, "chunks": 1, "stages": 4, "micro_batches": 8, "replicas": 1,
 "steps": 10, "pipeline": 200, "step": 210, "forward": [6, 6, 6, 10], "backward": [null, null, null, null],
 "backward_input": [0.01, 7.5, 7.5, 12.5], "backward_weight": [12, 4.5, 4.5, 7.5], "communication": [0.25, 0.25, 0.25],
 "hidden": null, "layers": [3, 3, 3, 3]}
JSON
parted="search --memory-limit 4 --trials 200 --profile profile.json --partition"
# 12 layers of 6 ms and a head of 12: no rank can have less than 22.5 ms, so none has more than 4 layers, and the head's at most 2.
expect 0 '^linear  *[0-4],[1-4],[1-4],[0-2]  *[0-9.]*  *[0-9.]* %  *1[0-2] (12)  *12  *' $parted -o parted.csv
layers=$(sed -n 's/^Train with them: chevron-train --schedule parted.csv --layers //p' output)
expect 0 '^ok: parted.csv, 4 ranks' check parted.csv
python3 - "$layers" <<'PYTHON' || failed=1
import sys
layers = [int(n) for n in sys.argv[1].split(",")]
assert sum(layers) == 12, layers
for line in open("parted.csv"):
    held = 0
    for cell in line.strip().split(","):
        kind = next(c for c in cell if c.isalpha())
        held += {"F": 1, "I": 0, "W": -1, "B": -1}[kind] * layers[int(cell.split(kind)[0])]
        assert held <= 12, (line, held)
PYTHON
expect 0 "\"placement\": \"linear\", \"layers\": \[$layers\], \"even\": " $parted --format json
python3 -m json.tool output > indented || { echo "not JSON"; failed=1; }
# Other stages than the profile's.
expect 0 '^vee  *[0-4],[1-4],[1-4],[1-4],[1-4],[1-4],[1-4],[0-4] ' $parted --chunks 2 --placement vee
expect 2 "--partition needs the costs of layers: give --profile FILE.json" search --partition
expect 2 "12 layers cannot be cut into 16 stages" $parted --chunks 4
sed 's/, "layers".*/}/' profile.json > unsaid.json
expect 2 "'layers', the number of layers of each stage, is missing" search --profile unsaid.json --partition
# The limit counts layers, so no cut takes more memory than even layers may; links count as without --partition.
expect 0 '^4 ranks, 1 chunk on each, 8 microbatches, at most 4 microbatches of even layers in flight on a rank\.$' $parted
expect 0 '^linear  *[0-9,]*  *[0-9.]* .* \([0-9]\|1[0-2]\) ([0-9]*)  ' $parted
plain=$(awk '$1 == "linear" { print $2; exit }' output)
expect 0 '^linear  *[0-9,]*  *[0-9.]* .* \([0-9]\|1[0-2]\) ([0-9]*)  ' $parted --latency 2 --link 1-2=5
slow=$(awk '$1 == "linear" { print $2; exit }' output)
awk -v slow="$slow" -v plain="$plain" 'BEGIN { exit !(slow > plain + 4) }' || { echo "slow links cost nothing: $slow, $plain"; failed=1; }
expect 2 "--partition does not go with --lengths" $parted --lengths 3
# A limit in bytes of a rank's whole share: the schedules that keep it, in the unit of `fit`.
inside='--microbatches 12 --static-bytes 10GiB --activation-bytes 4GiB --kept-bytes 3GiB --trials 500'
expect 0 ', at most 26 GiB on a rank\.$' search $inside --memory 26GiB
expect 0 '^linear  *[0-9.]*  *optimal  .* ZB-H1$' search $inside --memory 26GiB
expect 0 ', at most 14.5 GiB on a rank, all recomputed\.$' search $inside --input-bytes 64MiB --memory 14.5GiB --recompute
expect 6 "--memory 13GiB: no order was found that fits into a rank's memory; stages: 4; give more, or more --ranks" search $inside --memory 13GiB
expect 2 "--static-bytes has no effect without --memory: give the memory of a rank" search --static-bytes 1GiB
expect 2 "--memory does not go with --memory-limit: leave one of them out" search $inside --memory 26GiB --memory-limit 4
expect 2 "--recompute: the bytes of a stage's input are unknown: add --input-bytes" search $inside --memory 26GiB --recompute
# With times that vary: by the 90th percentile, never above the catalogue's, the same again, and as `compare` says it.
shaky="search --placement vee --chunks 2 --microbatches 12 --memory-limit 4 --trials 20000 --forward 10 --backward-input 13 --backward-weight 7 --communication 1 --jitter 5%"
expect 0 '^vee .* -[0-9.]* ± [0-9.]*$\|^vee .* the same$' $shaky -o shaky.csv
expect 0 '"p90_above_published": ' $shaky --format json
python3 - "$plan" <<'PYTHON' || failed=1
import json, subprocess, sys
told = json.load(open("output"))["placements"][0]
words = [sys.argv[1], "compare", "shaky.csv", "--forward", "20", "--backward-input", "26", "--backward-weight", "14", "--communication", "1",
         "--jitter", "0.05", "--format", "json"]
shown = {one["schedule"]: one for one in json.loads(subprocess.run(words, capture_output=True, check=True).stdout)}
for key in ("median", "p90", "spread"):
    assert abs(shown["shaky.csv"][key] - told[key]) < 1e-9 * told[key], (key, shown["shaky.csv"], told)
published = shown[told["published_under_jitter"]]
assert abs(published["p90"] - told["p90_published"]) < 1e-9 * published["p90"], (published, told)
assert told["p90"] <= told["p90_published"] and told["p90"] <= min(one["p90"] for one in shown.values() if one.get("peak_share", 9) <= 4), told
PYTHON
"$plan" $shaky --format csv | diff shaky.csv - || failed=1
expect 0 '^Rank 1 takes 1.5 times as long\. Each computation varies' search --jitter 5% --slow-rank 1=1.5 --trials 100
expect 0 '^Rank 1 takes 1.5 times as long\.$' search --slow-rank 1=1.5 --trials 100
expect 0 '^Each computation varies by 5.0 % (log-normal)\. 50 draws; the slowest of 4 replicas counts\.$' compare --jitter 5% --replicas 4 --draws 50
expect 0 ',median,p90,spread,p90_above_first' compare --jitter 5% --format csv
expect 2 "--jitter 'much' is not usable: give a standard deviation from 0% to 100%" compare --jitter much
expect 2 "--replicas 4 changes nothing where times are as planned: add --jitter 5%" compare --replicas 4
expect 2 "--slow-rank '2' names no factor: write 3=1.3" search --slow-rank 2
expect 2 "--slow-rank 9=2: rank '9' is not usable: give a whole number from 0 to 3" compare --slow-rank 9=2
expect 2 "--slow-rank 2=x: factor 'x' is no factor" search --slow-rank 2=x
expect 2 "--slow-replica 2 with one replica slows everything: add --replicas 2" compare --slow-replica 2

# A time limit, and signals. A search that is ended prints the best schedule so far; a line of progress appears on a terminal only.
CHEVRON_PLAN="$plan" python3 - <<'PYTHON' || failed=1
import fcntl, json, os, pty, signal, struct, subprocess, termios, time

plan = os.environ["CHEVRON_PLAN"]
costs = "--forward 10 --backward-input 13 --backward-weight 7 --communication 1".split()
vee = ["search", "--placement", "vee", "--chunks", "2", "--ranks", "8", "--microbatches", "32", "--memory-limit", "6", *costs]
long = [*vee, "--trials", "100000000"]  # minutes
published = 2246


def ask(words, **more):
    return subprocess.run([plan, *words], capture_output=True, text=True, timeout=60, **more)


def found(text):
    return json.loads(text)["placements"][0]


for seconds in ("0.001", "1"):
    began = time.monotonic()
    done = ask([*vee, "--seconds", seconds, "--format", "json"])
    took = time.monotonic() - began
    assert done.returncode == 0 and done.stderr == "", (seconds, done)
    assert found(done.stdout)["length"] <= published == found(done.stdout)["published_length"], done.stdout
    assert took < 20, took
    assert took > 0.9 or seconds != "1" or found(done.stdout)["optimal"], took
# Two placements share the time; with a number of trials and a time, the first limit ends the search.
done = ask(["search", "--chunks", "2", "--microbatches", "12", "--memory-limit", "2.5", *costs, "--seconds", "1", "--format", "json"])
assert [one["placement"] for one in json.loads(done.stdout)["placements"]] in (["vee", "loop"], ["loop", "vee"]), done
few = [*vee, "--trials", "2000", "--format", "json"]
assert ask([*few, "--seconds", "50"]).stdout == ask(few).stdout
began = time.monotonic()
assert ask([*long, "--seconds", "1"]).returncode == 0 and time.monotonic() - began < 20
# With times that vary, and with layers.
done = ask([*vee, "--jitter", "5%", "--draws", "40", "--seconds", "1", "--format", "json"])
told = found(done.stdout)
assert done.returncode == 0 and told["p90"] <= told["p90_published"], done
done = ask(["search", "--memory-limit", "4", "--profile", "profile.json", "--partition", "--seconds", "0.5", "--format", "json"])
assert done.returncode == 0 and found(done.stdout)["length"] <= found(done.stdout)["even"], done


def default_signals():  # CTest may have been started with SIGINT ignored
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(words, **where):
    return subprocess.Popen([plan, *words], stdout=subprocess.PIPE, text=True, preexec_fn=default_signals, **where)


def caught(process):
    """Waits until it has its own handler of SIGINT."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        mask = next(line for line in open(f"/proc/{process.pid}/status") if line.startswith("SigCgt"))
        if int(mask.split()[1], 16) >> (signal.SIGINT - 1) & 1:
            return
        time.sleep(0.01)
    raise AssertionError("no handler")


for number, wait, words in ((signal.SIGINT, 0, long), (signal.SIGTERM, 1, long), (signal.SIGINT, 1, [*long, "--jitter", "5%"])):
    process = start([*words, "-o", "ended.csv"], stderr=subprocess.PIPE)
    caught(process)
    time.sleep(wait)
    process.send_signal(number)
    out, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number, (process.returncode, errors)
    assert errors.startswith("chevron-plan: interrupted after ") and errors.endswith(" s; this is the best found so far\n"), errors
    assert errors.count("\n") == 1 and "vee" in out, (out, errors)
    checked = ask(["check", "ended.csv", "--memory-limit", "6"])
    assert checked.returncode == 0, checked
    length = json.loads(ask(["show", "ended.csv", *costs, "--format", "json"]).stdout)["makespan"]
    assert length <= published or "--jitter" in words, length
    os.remove("ended.csv")
# The second signal ends the process at once: a stopped process cannot act on the first one.
process = start(long, stderr=subprocess.PIPE)
caught(process)
process.send_signal(signal.SIGSTOP)
process.send_signal(signal.SIGINT)
process.send_signal(signal.SIGCONT)
process.send_signal(signal.SIGTERM)
process.communicate(timeout=30)
assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGINT, 128 + signal.SIGTERM), process.returncode
# A signal that the parent ignores, as nohup does, stays ignored.
process = subprocess.Popen([plan, *vee, "--seconds", "1"], stdout=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))
time.sleep(0.3)
process.send_signal(signal.SIGINT)
assert process.communicate(timeout=30) and process.returncode == 0, process.returncode

# On a terminal: lines that are written over and wiped at the end.
tight = ["4" if word == "6" else word for word in vee]  # far from the bound
for width, words in ((80, [*tight, "--seconds", "1.5"]), (30, long)):
    try:
        ours, theirs = pty.openpty()
    except OSError as problem:
        print(f"what a search says on a terminal is left out: no pseudo-terminal ({problem}); remedy: mount -t devpts devpts /dev/pts")
        break
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    process = start(words, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    seen = b""
    ends = time.monotonic() + (3 if words is long else 60)
    try:
        while piece := os.read(ours, 65536):
            seen += piece
            if time.monotonic() > ends:
                process.send_signal(signal.SIGINT)
                ends += 60
    except OSError:  # its last line was read
        pass
    process.communicate()
    os.close(ours)
    first, *lines = seen.decode().split("\r\x1b[K")
    assert first == "" and len(lines) >= 3, seen
    assert lines[0].startswith("vee") and all(len(line) < width for line in lines[:-1]), seen
    if words is long:
        assert lines[-1].startswith("chevron-plan: interrupted after "), seen
    else:
        assert lines[-1] == "" and any(" % above the bound, 1." in line and line.rstrip().endswith(" of 1.5 s") for line in lines), seen
PYTHON

expect 2 "--seconds '0' is not usable: give a number of seconds above 0, such as 10 or 0.5" search --seconds 0
expect 2 "--seconds 'soon' is not usable" search --seconds soon
expect 2 "--seconds '-1' is not usable" search --seconds=-1
expect 2 "--seconds 'inf' is not usable" search --seconds inf
expect 2 "--memory-limit 0.5 is below the smallest possible, 1: a microbatch" search --chunks 2 --memory-limit 0.5
expect 2 "--memory-limit 0.2 is less than one chunk, which is 1/2 of .*: give at least 0.5" search --chunks 2 --memory-limit 0.2
expect 2 "--memory-limit 'much' is not usable: give a number of microbatches above 0" search --memory-limit much
expect 2 "--placement 'round' is not known: choose one of linear, loop, vee, wave" search --placement round
expect 2 "--placement vee does not exist with --chunks 3" search --placement vee --chunks 3
expect 2 "--placement wave does not exist with --chunks 3" search --placement wave --chunks 3
expect 2 "--placement linear does not exist with --chunks 2: linear has 1" search --placement linear --chunks 2
expect 2 "--objective 'time' is not known: choose one of makespan, span" search --objective time
expect 2 "--kept-for-weight '0' is not usable" search --kept-for-weight 0
expect 2 "--trials '0' is not usable: give a whole number from 1" search --trials 0
expect 2 "--forward '1,2' has 2 values, but the schedule has 8 stages" search --chunks 2 --forward 1,2
expect 2 "makes 65536 stages, more than 1024" search --ranks 1024 --chunks 64
exit $failed
