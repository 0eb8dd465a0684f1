# The memory of a rank's process follows the chunks that its schedule keeps in flight: GPipe > 1F1B > V-Min. (How
# exactly: bench-memory --resident. Here rank 0 of a V has the head, too.)
# timeout: 300
. "$(dirname "$0")/shared/folder.sh"
find_python
write_text
# Freed memory returns to the system at once.
export OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=32768 MALLOC_TRIM_THRESHOLD_=32768 MALLOC_ARENA_MAX=1

for schedule in GPipe 1F1B V-Min; do
  timeout 150 "$train" --backend gloo --schedule $schedule --ranks 4 --replicas 1 --microbatches 8 --layers 8 --width 128 --heads 2 --context 64 \
    --microbatch-size 8 --steps 1 --sample 0 --timeline none --trace none --data text.txt --metrics $schedule.jsonl > output 2>&1 || { cat output; exit 1; }
  "$plan" show $schedule --ranks 4 --microbatches 8 --format json > $schedule.json
done
timeout 150 "$train" --schedule 1F1B --ranks 4 --replicas 1 --microbatches 8 --layers 8 --width 128 --heads 2 --context 64 \
  --microbatch-size 8 --steps 2 --sample 0 --timeline none --trace none --data text.txt --profile profile.json > output 2>&1 || { cat output; exit 1; }
"$python" - <<'PYTHON'
import json
names = ["GPipe", "1F1B", "V-Min"]
mib, planned = {}, {}
for name in names:
    mib[name] = json.loads(open(name + ".jsonl").readlines()[-1])["memory/max_reserved(GiB)"] * 1024
    shown = json.load(open(name + ".json"))
    planned[name] = shown["peak_in_flight"][0] / shown["chunks"]
for name in names:
    print(f"{name:8} {planned[name]:4} microbatches of rank 0's share of the model, {mib[name]:6.1f} MiB of its process")
each = (mib["GPipe"] - mib["1F1B"]) / (planned["GPipe"] - planned["1F1B"])
assert each > 3, f"a microbatch in flight takes {each:.1f} MiB"
# The bytes that a run counts of its tensors are the growth of the ranks' processes.
counted = json.load(open("profile.json"))["activation_bytes"][0] / (1 << 20)
print(f"a microbatch of rank 0's share: {each:.2f} MiB of its process, {counted:.2f} MiB counted")
assert 0.85 < each / counted < 1.15, (each, counted)
wanted = each * (planned["1F1B"] - planned["V-Min"])
assert mib["1F1B"] - mib["V-Min"] > 0.3 * wanted, f"1F1B takes {mib['1F1B'] - mib['V-Min']:.1f} MiB more than V-Min, not about {wanted:.1f}"
PYTHON
