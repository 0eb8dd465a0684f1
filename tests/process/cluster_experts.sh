# chevron-plan cluster for models with experts: times and bytes of ways that divide experts over ranks, recomputed from the
# formulas of docs/reference/model-costs.md and docs/guides/cluster-plan.md, pipelines by show; network cards that GPUs share, the
# ranks that send at one time counted one by one; which ranks may divide experts;
# the ten best are those of a search without bounds; mixtures in Hugging Face folders; what is said of programs without experts.
# timeout: 120
seconds=60
. "$(dirname "$0")/shared/expect_plan.sh"

# Inner width, key heads and heads differ, so that a formula with the wrong one is noticed.
size='--layers 4 --width 256 --heads 8 --key-heads 4 --inner 384 --vocabulary 2000 --experts 12 --experts-per-token 3'
expect 0 . model $size --tokens 256 --tflops 50 --bandwidth 1TB/s --masters -o profile.json
each=0
ways() {
  each=$((each + 1))
  expect 0 "E ranks over which each layer's experts are divided" cluster profile.json "$@"
  expect 0 . cluster profile.json "$@" --format json; cp output few-$each.json
  expect 0 . cluster profile.json "$@" --format json --exhaustive --threads 1; cp output all-$each.json
}
ways --gpus 8 --link-inside 20GB/s --latency-inside 20us --batch-tokens 16k --memory 400MiB
slow='--link-between 4GB/s --latency-inside 5us --latency-between 30us'
ways --nodes 2 --gpus 4 --link-inside 50GB/s $slow --batch-tokens 16k --memory 1GiB
ways --nodes 6 --gpus 1 --link-between 40GB/s --batch-tokens 12k --memory 130MiB
ways --nodes 3 --gpus 4 --link-inside 400GB/s --link-between 50GB/s --batch-tokens 12k --memory 1GiB
ways --nodes 2 --gpus 8 --link-inside 50GB/s --link-between 4GB/s --latency-between 10us --nics 2 --batch-tokens 16k --memory 1GiB
ways --nodes 4 --gpus 2 --link-inside 50GB/s --link-between 5GB/s --nics 3 --batch-tokens 16k --memory 1GiB

CHEVRON_PLAN=$plan python3 - <<'PYTHON' || failed=1
import json, os, subprocess

h, heads, keys, f, V, s, experts, met, layers, e = 256, 8, 4, 384, 2000, 256, 12, 3, 4, 2
d = h // heads
q, k = h, keys * d
flops, memory = 50e9, 1e9  # of a millisecond
GB = 1e6                   # bytes of a millisecond
profile = json.load(open("profile.json"))

class cluster:
    def __init__(self, nodes, gpus, inside, between, latency_inside, latency_between, cards=None):
        self.nodes, self.gpus, self.cards = nodes, gpus, cards
        self.rate, self.latency = {True: inside, False: between}, {True: latency_inside, False: latency_between}

    def inside(self, a, b):
        return a // self.gpus == b // self.gpus

    def rate_of(self, pairs):
        """The slowest link of these pairs of sender and receiver, which send at one time."""
        leaving = [a for a, b in pairs if not self.inside(a, b)]
        if not leaving:
            return self.rate[True]
        most = max(sum(a // self.gpus == node for a in set(leaving)) for node in range(self.nodes))
        share = min(max(1, self.cards / self.gpus), self.cards / most) if self.cards else 1
        return self.rate[False] * share

clusters = [cluster(1, 8, 20 * GB, 20 * GB, 0.02, 0), cluster(2, 4, 50 * GB, 4 * GB, 0.005, 0.03),
            cluster(6, 1, 40 * GB, 40 * GB, 0, 0), cluster(3, 4, 400 * GB, 50 * GB, 0, 0),
            cluster(2, 8, 50 * GB, 4 * GB, 0, 0.01, 2), cluster(4, 2, 50 * GB, 5 * GB, 0, 0, 3)]
at = lambda w, r, p, t: (r * w["pipeline_ranks"] + p) * w["shards"] + t

def pieces(on, w):
    """Of each piece: F, I, W, all parameters, experts' parameters, bytes from F to B, and of F's time that of the all-to-all."""
    P, T, R, E = (w[x] for x in ("pipeline_ranks", "shards", "replicas", "expert_ranks"))
    n = w["samples"] * s
    part = n / T
    divided = E > 1
    here, width, tokens = (experts / E, f, part) if divided else (experts, f / T, n)
    rows = tokens * met
    ring = 2 * (T - 1) * (n * h * e / T / on.rate[True] + on.latency[True])
    # The slowest rank's all-to-all: what it sends to each other member, one after another.
    slowest = 0
    if divided:
        X = E // T
        groups = [[[at(w, r, p, t) for r in range(first, first + X) for t in range(T)] for first in range(0, R, X)]
                  for p in range(P)]
        shared = min(on.rate_of([(a, b) for group in of_rank for a in group for b in group]) for of_rank in groups)
        for group in sum(groups, []):
            for a in group:
                link = lambda b: rows * h * e / E / (on.rate[True] if on.inside(a, b) else shared) + on.latency[on.inside(a, b)]
                slowest = max(slowest, sum(link(b) for b in group if a != b))
    time = lambda products, moved: products / flops + moved / memory
    norm, bring = 28 * part * h, e + 8
    maps = 3 * h * width
    products = 2 * (n * h * (2 * q + 2 * k) / T + rows * maps + tokens * h * experts)
    scores = 4 * n * q / T * (s + 1) / 2
    moved = 2 * norm + 6 * e * part * h + 11 * e * n * (q + k) / T + 5 * e * rows * width + e * h * (4 * rows + tokens)
    parameters = h * (2 * q + 2 * k) / T + here * maps + h * experts + 2 * h
    sums = (1 if divided else 2) * ring + 2 * slowest
    stored_norm = lambda numbers, rows: 8 * numbers + 4 * rows
    each_key = k if keys <= T else q  # the heads of all queries see one key head where it lies
    stored = (2 * stored_norm(part * h, part) + e * h * ((n - part) + (tokens - part)) + e * n * 2 * (q + each_key) / T + 4 * n * heads / T
              + 4 * s * d * e + 4 * e * rows * width + 4 * tokens * experts + 2 * e * rows * h + 12 * rows)
    layer = (time(products + scores, moved) + sums, time(products + 2.5 * scores, 2 * moved) + sums,
             time(products, parameters * bring), parameters, here * maps, stored, 2 * slowest)
    words = V / T
    embedding = (time(0, 2 * e * n * h) + ring / 2, 0, time(0, 2 * e * n * h + words * h * bring) + ring / 2, words * h, 0, 8 * n + n * (T > 1), 0)
    product = 2 * n * h * words
    head = (time(product, norm + (e + 12) * n * words) + ring / 2, time(product, 2 * norm + (12 + e) * n * words) + ring / 2,
            time(product, (words + 1) * h * bring), (words + 1) * h, 0,
            stored_norm(part * h, part) + 4 * n * words + e * (n - part) * h + (4 * n * words + 13 * n) * (T > 1), 0)
    return [embedding] + layers * [layer] + [head]

def pipeline_ends(on, w, of):
    """By rank, the end of each stage's last action."""
    M, P = w["micro_batches"], w["pipeline_ranks"]
    again = 1 if w["recompute"] else 0
    if P == 1:
        return [{0: M * sum(F * (1 + again) + I + W for F, I, W, *_ in of)}]
    made = dict(profile)
    made.pop("model")
    made["forward"] = [one[0] for one in of]
    made["backward_input"] = [one[1] + again * one[0] for one in of]
    made["backward_weight"] = [one[2] for one in of]
    # The first stage has no input gradient: its W is the whole backward.
    made["backward_weight"][0] += made["backward_input"][0]
    made["backward_input"][0] = 0
    made["backward"] = [a + b for a, b in zip(made["backward_input"], made["backward_weight"])]
    json.dump(made, open("one.json", "w"))
    pairs = lambda p, to: [(at(w, r, p, t), at(w, r, to, t)) for r in range(w["replicas"]) for t in range(w["shards"])]
    rate = min(on.rate_of(pairs(p, to)) for p, to in ((0, 1), (1, 0)))
    inside = all(on.inside(*pair) for pair in pairs(0, 1))
    options = ["--ranks", P, "--microbatches", M, "--profile", "one.json", "--layers", ",".join(map(str, w["layers"])),
               "--bandwidth", f"{rate / GB:.12g}GB/s", "--latency", on.latency[inside], "--message-bytes",
               w["samples"] * s * h * e // w["shards"], "--format", "trace"]
    if w["schedule"] == "Interleaved1F1B":
        options += ["--chunks", w["chunks"]]
    done = subprocess.run([os.environ["CHEVRON_PLAN"], "show", w["schedule"], *map(str, options)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    last = [{} for _ in range(P)]
    for one in json.loads(done.stdout)["traceEvents"]:
        if one["ph"] == "X":
            stage = one["args"]["stage"]
            last[one["pid"]][stage] = max(last[one["pid"]].get(stage, 0), (one["ts"] + one["dur"]) / 1e3)
    return last

def step(on, w, of, ends):
    R, X = w["replicas"], max(w["expert_ranks"] // w["shards"], 1)
    copies, sharded = R // X, w["sharded_optimizer"]
    late = on.latency[on.nodes == 1]
    members = [(r, p, t) for r in range(R) for p in range(w["pipeline_ranks"]) for t in range(w["shards"])]
    rates = {stride: on.rate_of([(at(w, r, p, t), at(w, (r + stride) % R, p, t)) for r, p, t in members]) for stride in {1, X}}
    first = lambda stage: 1 + sum(w["layers"][:stage])
    summed = behind = 0  # no rank steps before all have the norm of the whole gradient
    for rank in ends:
        wire = rest = 0
        for stage in sorted(rank, key=rank.get):
            held = list(range(first(stage) - (stage == 0), first(stage + 1) + (stage + 1 == len(w["layers"]))))
            mine = sum(of[i][4] for i in held)
            all_of = sum(of[i][3] for i in held)
            ring = lambda count, N, stride=1: count * 4 * (N - 1) / N / rates[stride] + late * (N - 1)
            sums = ring(all_of - mine, R) + ring(mine, copies, X) if X > 1 else ring(all_of, R)
            wire = max(wire, rank[stage]) + sums * (1 if sharded else 2)
            rest += all_of * (4 + 24 + 4) / memory / (R if sharded else 1)
            if sharded:
                rest += ring(all_of / 2, R)
        summed, behind = max(summed, wire), max(behind, rest)
    return summed + behind

key = lambda w: tuple(str(w[x]) for x in ("pipeline_ranks", "shards", "replicas", "micro_batches", "samples", "expert_ranks", "slices",
                                          "schedule", "chunks", "recompute", "sharded_optimizer"))
timed = several = apart = shown = cards = bound_met = 0
for number, on in enumerate(clusters, 1):
    whole, few = (json.load(open(f"{name}-{number}.json")) for name in ("all", "few"))
    assert whole["best"] == few["best"] and whole["ways"] == few["ways"] and whole["longer"] == few["longer"], number
    judged = {key(w): w for w in whole["judged"]}
    assert len(judged) == len(whole["judged"]), number
    divisions = set()
    for w in whole["judged"]:
        P, T, R, E = (w[x] for x in ("pipeline_ranks", "shards", "replicas", "expert_ranks"))
        divisions.add((P, T, R, E))
        assert E == 1 or (E % T == 0 and R % (E // T) == 0 and experts % E == 0), w
        assert not (E > T and w["sharded_optimizer"]), w
        assert whole["bound"] * (1 - 1e-6) <= w["lower_bound"] <= w["time"], w
        of = pieces(on, w)
        if P == 1:
            time = step(on, w, of, pipeline_ends(on, w, of))
            assert abs(w["time"] / time - 1) < 1e-9, (number, w, time)
            share = w["replicas"] if w["sharded_optimizer"] else 1
            takes = sum(one[3] * (2 + 4 + 12 / share) + one[5] for one in of)
            assert abs(w["bytes"] / takes - 1) < 1e-6, (number, w, takes)
            timed += 1
            bound_met += w["lower_bound"] > w["time"] * (1 - 1e-6)
            several += E > 1 and T > 1 and E > T
    # All divisions are there for which the model has enough layers.
    devices = on.nodes * on.gpus
    sequences = (12 if number in (3, 4) else 16) * 1024 // s
    wanted = {(P, T, devices // (P * T), E) for T in (1, 2, 4) if on.gpus % T == 0 for P in range(1, layers + 3)
              if devices % (P * T) == 0 and sequences % (devices // (P * T)) == 0
              for E in range(1, 13) if E == 1 or (E % T == 0 and devices // (P * T) % (E // T) == 0 and experts % E == 0)}
    assert divisions == wanted, (number, divisions ^ wanted)
    # Pipelines by show, where all links are alike.
    alike = on.rate[True] == on.rate[False] and not on.cards
    piped = [w for w in whole["judged"] if w["slices"] == 1 and (w["pipeline_ranks"] == 2 or (alike and w["pipeline_ranks"] > 1))]
    for w in [w for w in piped if w["samples"] < 4][::max(1, len(piped) // 20)]:
        of = pieces(on, w)
        time = step(on, w, of, pipeline_ends(on, w, of))
        assert abs(w["time"] / time - 1) < 2e-4, (number, w, time)
        shown += 1
        cards += on.cards is not None
    for w in whole["best"]:
        assert w["command"] is None, w
        if w["expert_ranks"] > 1 and w["pipeline_ranks"] * w["chunks"] == 1:
            routing = sum(one[6] for one in pieces(on, w)) * (3 if w["recompute"] else 2) * w["micro_batches"]
            assert abs(w["expert_routing"] / routing - 1) < 1e-9, (w, routing)
            apart += 1
counts = timed, bound_met, several, shown, cards, apart
assert timed > 100 and bound_met > 20 and several > 10 and shown > 60 and cards > 20 and apart > 2, counts
PYTHON

# One card for each GPU: rates are those while all send.
machine='--nodes 2 --gpus 4 --link-inside 50GB/s --link-between 4GB/s --batch-tokens 16k --memory 1GiB'
expect 0 . cluster profile.json $machine --nics 4 --format json; cp output own.json
expect 0 . cluster profile.json $machine --format json
cmp output own.json || failed=1

# What a program of chevron-finetune cannot run is said.
machine='--gpus 8 --link-inside 20GB/s --batch-tokens 16k --memory 1GiB'
expect 0 '^Not run by chevron-finetune: it has no experts\. Stages of a program' cluster profile.json $machine
expect 2 "'job.sh': the script starts chevron-finetune, which does not train the profile's model: it has no experts. Remedy: leave out" \
  cluster profile.json $machine --slurm job.sh
expect 0 . cluster profile.json $machine -o map.svg
grep -q '<title>P[0-9]* T[0-9]* R[0-9]* M[0-9]* E[0-9]*' map.svg || { echo "no way of the map divides experts"; failed=1; }

expect 2 "--nics 4 has no effect on one machine. Remedy: leave it out, or give --nodes" cluster profile.json $machine --nics 4

# Published sizes of mixtures: arXiv 2401.04088 (47 billion), arXiv 2505.09388 (30.5 billion), arXiv 2508.10925 (20.9 billion).
mkdir mixtral qwen oss
echo '{"model_type": "mixtral"}' > mixtral/config.json
echo '{"model_type": "qwen3_moe", "num_hidden_layers": 48, "head_dim": 128, "num_experts": 128}' > qwen/config.json
echo '{"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32}' > oss/config.json
expect 0 '^46702792704 parameters: .* inner width 14336 in 8 experts, 2 for a token' model mixtral --gpu h100
expect 0 '^30532122624 parameters: 48 layers of width 2048, 32 heads of 128, 4 of keys, inner width 768 in 128 experts, 8 for' \
  model qwen --gpu h100
expect 0 '^20914757184 parameters: 24 layers of width 2880, 64 heads of 64' model oss --gpu h100
wrong() {
  echo "$1" > mixtral/config.json
  expect 2 "$2" model mixtral --gpu h100
}
wrong '{"model_type": "qwen3_moe", "mlp_only_layers": [0]}' '`mlp_only_layers` is \[0\]. Remedy: a model with experts in every'
wrong '{"model_type": "qwen3_moe", "decoder_sparse_step": 2}' '`decoder_sparse_step` is 2. Remedy: a model with experts in every'
wrong '{"model_type": "mixtral", "num_experts_per_tok": 9}' '`num_experts_per_tok` is 9. Remedy: at most the number of experts, 8'
wrong '{"model_type": "gpt_oss", "layer_types": ["full_attention"]}' '`layer_types` is .* Remedy: a list of one word a layer, 36'
wrong '{"model_type": "mixtral", "num_key_value_heads": 5}' '`num_key_value_heads` is 5. Remedy: a divisor of num_attention_heads'
wrong '{"model_type": "deepseek_v3"}' '`model_type` is "deepseek_v3".*; with experts mixtral, qwen3_moe and gpt_oss; or give'
exit $failed
