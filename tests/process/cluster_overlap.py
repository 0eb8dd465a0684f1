# timeout: 120
"""chevron-plan cluster with steps that overlap by post-validation: the time of each way is the largest mean of a cycle in the
max-plus matrix of a step, by Karp's algorithm, with the orders of `show` played here from each rank and wire alone, and sums,
optimizer, copies and gathers from the guide; its parts; its bytes; bounds are below all ways and leave the answer as it is;
without the flag nothing changes; tied weights make ranks wait; the printed command; wrong choices by their words."""

import json
import math
import os
import pathlib
import re
import subprocess
import tempfile

PLAN = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve() / "bin" / "chevron-plan"
# Bytes of a millisecond: a slow device, since `model` writes a tenth of a microsecond as its last digit.
MEMORY, KB = 1e3, 1.0
LAYERS, WIDTH, TOKENS = 6, 256, 512
SIZE = ["--layers", LAYERS, "--width", WIDTH, "--heads", 8, "--key-heads", 4, "--inner", 384, "--vocabulary", 2000, "--tokens", TOKENS,
        "--tflops", 0.00005, "--bandwidth", "1MB/s"]
MODELS = {  # flags; bytes of a parameter, of its optimizer's state, of its copies
    "masters": (["--masters"], 2, 12, 12),
    "tied": (["--masters", "--tied"], 2, 12, 12),
    "single": (["--dtype", "fp32"], 4, 8, 12),
}
CLUSTERS = {  # nodes, GPUs, rate and latency inside, between, sequences of a step
    "one": (1, 4, 30, 2000, 0, 0, 8),
    "apart": (4, 1, 0, 0, 3, 4000, 8),
}
NEVER = -math.inf


def run(*arguments, code=0):
    done = subprocess.run([PLAN, *map(str, arguments)], capture_output=True, text=True, timeout=100)
    assert done.returncode == code, (arguments, done.returncode, done.stdout[-500:], done.stderr)
    return done.stdout if code == 0 else done.stderr


def flags(name, most="1GiB"):
    nodes, gpus, inside, late_inside, between, late_between, sequences = CLUSTERS[name]
    out = ["--nodes", nodes, "--gpus", gpus, "--batch-tokens", sequences * TOKENS, "--memory", most, "--slices", 1, "--shards", 1]
    out += ["--link-inside", f"{inside}KB/s", "--latency-inside", late_inside] if gpus > 1 else []
    return out + (["--link-between", f"{between}KB/s", "--latency-between", late_between] if nodes > 1 else [])


def cluster(model, name, *more, most="1GiB"):
    return json.loads(run("cluster", f"{model}.json", *flags(name, most), *more, "--format", "json"))


known = {}


def orders_of(w):
    """By rank, its actions: tuples of one, or of a pair's two, (kind, stage, microbatch)."""
    key = w["schedule"], w["chunks"], w["pipeline_ranks"], w["micro_batches"]
    if key not in known:
        chunks = ["--chunks", w["chunks"]] if "Interleaved" in w["schedule"] else []
        text = run("show", w["schedule"], "--ranks", w["pipeline_ranks"], "--microbatches", w["micro_batches"], *chunks, "--format", "csv")
        rows = [re.sub(r"\(([^)]*)\)OVERLAP_F_B", lambda m: m[1].replace(",", ";"), row) for row in text.strip().split("\n")]
        action = lambda cell: (re.search("[FBIW]", cell)[0], *map(int, re.split("[FBIW]", cell)))
        known[key] = [[tuple(map(action, cell.split(";"))) for cell in row.split(",") if cell] for row in rows]
    return known[key]


def pieces_of(w, model):
    """F, I, W and parameters of each stage."""
    key = model, w["samples"]
    if key not in known:
        told = lambda of: json.loads(run("model", *SIZE, *MODELS[of][0], "--samples", w["samples"], "--format", "json"))
        # `gradient_bytes` are without tied weights, which both stages store.
        known[key] = told(model) | {"gradient_bytes": told("masters" if model == "tied" else model)["gradient_bytes"]}
    told, out, next_piece = known[key], [], 1
    for stage, count in enumerate(w["layers"]):
        mine = [0] * (stage == 0) + [*range(next_piece, next_piece + count)] + [LAYERS + 1] * (stage + 1 == len(w["layers"]))
        next_piece += count
        of = lambda name, mine=mine: sum(told[name][i] for i in mine)
        out.append((of("forward"), of("backward_input"), of("backward_weight"), of("gradient_bytes") / 4))
    return out


def network(w, name):
    """Rate and latency of a message between two ranks, and those of rings over replicas."""
    nodes, gpus, inside, late_inside, between, late_between, _ = CLUSTERS[name]
    P, R = w["pipeline_ranks"], w["replicas"]
    same = lambda a, b: all((r * P + a) // gpus == (r * P + b) // gpus for r in range(R))
    link = lambda a, b: (inside * KB, late_inside) if same(a, b) else (between * KB, late_between)
    return link, (inside * KB, late_inside) if nodes == 1 else (between * KB, late_between)


class Step:
    """A step of a way, from the times at which its ranks and wires are free to those of the next step."""

    def __init__(self, w, model, name, sums=True, optimizer=True):
        self.orders, self.w = orders_of(w), w
        self.stages = pieces_of(w, model)
        self.link, (rate, late) = network(w, name)
        R, item, state, copied = w["replicas"], *MODELS[model][1:]
        owners = R if w["sharded_optimizer"] else 1
        self.rank_of = {stage: rank for rank, order in enumerate(self.orders) for pair in order for _, stage, _ in pair}
        passes = 1 if w["sharded_optimizer"] else 2
        ring = lambda bytes_each: [s[3] * bytes_each * (R - 1) / R / rate + late * (R - 1) for s in self.stages]
        self.ring = [passes * one * sums for one in ring(4)]
        self.gather = [one * sums * w["sharded_optimizer"] for one in ring(item)]
        self.optimizer = [s[3] * (4 + 2 * state + 2 * item + 2 * copied) / MEMORY / owners * optimizer for s in self.stages]
        self.copies = [math.ceil(round(s[3]) * copied / owners) for s in self.stages]
        self.tied = model == "tied"
        self.message = w["samples"] * TOKENS * WIDTH * item
        wires = {(self.rank_of[s], self.rank_of[s + 1]) for s in range(len(self.stages) - 1)}
        self.wires = sorted(one for a, b in wires if a != b for one in ((a, b), (b, a)))
        self.wires = sorted(set(self.wires))
        self.size = w["pipeline_ranks"] + len(self.wires)

    def time_of(self, kind, stage):
        F, I, W = self.stages[stage][:3]
        again = F * self.w["recompute"]
        if stage == 0 and kind in "IW":  # no input gradient: I computes nothing, and W the rest
            return 0 if kind == "I" else again + I + W
        return {"F": F, "B": again + I + W, "I": again + I, "W": W}[kind]

    def work(self, rank):
        """All that a rank does in a step, but for gathers."""
        mine = [stage for stage, of in self.rank_of.items() if of == rank]
        return sum(self.time_of(*one[:2]) for pair in self.orders[rank] for one in pair) + sum(self.optimizer[s] for s in mine)

    def play(self, before):
        P, last_stage = self.w["pipeline_ranks"], len(self.stages) - 1
        free, wire = list(before[:P]), dict(zip(self.wires, before[P:]))
        whole = {}
        for rank in range(P):
            gathered = free[rank]
            for stage in sorted(s for s, of in self.rank_of.items() if of == rank):
                whole[stage] = gathered = gathered + self.gather[stage]
        there, ends, at, moved = {}, [{} for _ in range(P)], [0] * P, True
        while moved:
            moved = False
            for rank in range(P):
                while at[rank] < len(self.orders[rank]):
                    pair = self.orders[rank][at[rank]]
                    needs = [("F", s - 1, m) for kind, s, m in pair if kind == "F" and s > 0]
                    needs += [("B", s + 1, m) for kind, s, m in pair if kind in "BI" and s < last_stage]
                    if any(one not in there for one in needs):
                        break
                    begin = max([free[rank], *(there[one] for one in needs), *(whole[s] for _, s, _ in pair)])
                    free[rank] = end = begin + sum(self.time_of(kind, s) for kind, s, _ in pair)
                    for kind, s, m in pair:
                        ends[rank][s] = end
                        to = s + 1 if kind == "F" else s - 1
                        if kind == "W" or not 0 <= to <= last_stage:
                            continue
                        other, arrives = self.rank_of[to], end
                        if other != rank:
                            rate, late = self.link(rank, other)
                            wire[rank, other] = max(end, wire[rank, other]) + self.message / rate
                            arrives = wire[rank, other] + late
                        there["F" if kind == "F" else "B", s, m] = arrives
                    at[rank] += 1
                    moved = True
        assert at == list(map(len, self.orders)), self.w
        # Sums behind the last action of their stage and one another; then the optimizer of the rank.
        for rank in range(P):
            summed = NEVER
            for stage in sorted(ends[rank], key=lambda s: (ends[rank][s], s)):
                summed = max(summed, ends[rank][stage]) + self.ring[stage]
            free[rank] = max(free[rank], summed)
        if self.tied:
            first, last = self.rank_of[0], self.rank_of[last_stage]
            free[first] = free[last] = max(free[first], free[last])
        for stage, rank in self.rank_of.items():
            free[rank] += self.optimizer[stage]
        return free + [wire[one] for one in self.wires]

    def period(self):
        """The largest mean weight of a cycle of the step's matrix (Karp, 1978)."""
        n = self.size
        columns = [self.play([0 if i == j else NEVER for i in range(n)]) for j in range(n)]
        walks = [[0.0] * n]
        for _ in range(n):
            walks.append([max(columns[j][i] + walks[-1][j] for j in range(n)) for i in range(n)])
        means = [min((walks[n][v] - walks[k][v]) / (n - k) for k in range(n) if walks[k][v] > NEVER) for v in range(n) if walks[n][v] > NEVER]
        return max(means)


def name_of(w):
    keys = "pipeline_ranks", "replicas", "samples", "schedule", "chunks", "recompute", "sharded_optimizer"
    return (*(w[key] for key in keys), w.get("post_validation", False))


def close(a, b, within=1e-7):
    return abs(a - b) <= within * max(abs(a), abs(b))


def main():
    overlapped = {}
    timed = waits = sharded = pairs = jumps = recomputed = won = several = 0
    for model, (more, *_) in MODELS.items():
        run("model", *SIZE, *more, "-o", f"{model}.json")
    for model in MODELS:
        for name in CLUSTERS:
            where = model, name
            assert run("cluster", f"{model}.json", *flags(name)) == run("cluster", f"{model}.json", *flags(name), "--post-validation", "no"), where
            whole = {choice: cluster(*where, "--post-validation", choice, "--exhaustive", "--threads", 1) for choice in ("no", "yes", "both")}
            judged = {choice: {name_of(w): w for w in told["judged"]} for choice, told in whole.items()}
            assert judged["both"] == judged["no"] | judged["yes"] and whole["both"]["ways"] == len(judged["both"]), where
            assert not any(n[-1] or n[3] == "ZB-H2" for n in judged["no"]) and all(n[-1] and n[0] > 1 for n in judged["yes"]), where
            overlapped[where] = judged["yes"]
            for choice in ("yes", "both"):
                few = cluster(*where, "--post-validation", choice)
                assert few["best"] == whole[choice]["best"] and few["longer"] == whole[choice]["longer"], (where, choice)
                # Little memory: bytes of copies count in the bounds, too.
                tight = f"{sorted(w['bytes'] for w in whole[choice]['judged'])[len(judged[choice]) // 3] // 1024}KiB"
                few, all_ways = (cluster(*where, "--post-validation", choice, *more, most=tight) for more in ([], ["--exhaustive"]))
                assert few["best"] == all_ways["best"] and few["best"], (where, choice, tight)
            for w in judged["yes"].values():
                assert whole["yes"]["bound"] <= w["lower_bound"] * (1 + 1e-6) and w["lower_bound"] <= w["time"], w
                step = Step(w, *where)
                time = step.period()
                assert close(w["time"], time), (where, w, time)
                timed += 1
                sharded += w["sharded_optimizer"]
                recomputed += w["recompute"]
                several += w["chunks"] > 1
                waits += time > max(map(step.work, range(w["pipeline_ranks"]))) * 1.001
                # The same layers without overlap.
                other = judged["no"].get((*name_of(w)[:-1], False))
                if other and other["layers"] == w["layers"]:
                    of_rank = [sum(c for s, c in enumerate(step.copies) if step.rank_of[s] == r) for r in range(w["pipeline_ranks"])]
                    added = w["bytes"] - other["bytes"]
                    assert min(of_rank) - 64 <= added <= max(of_rank) + 64, (where, w, other, of_rank)
                    jumps += all(abs(added - one) > 64 for one in of_rank)
                    pairs += 1
                    copying = 2 * max(of_rank) / MEMORY
                    assert w["time"] <= (other["time"] + copying) * (1 + 1e-9), (where, w, other)
            for w in whole["yes"]["best"]:
                pipeline, stepped = Step(w, *where, sums=False, optimizer=False).period(), Step(w, *where, sums=False).period()
                assert close(w["pipeline"], pipeline) and abs(w["optimizer"] - (stepped - pipeline)) < 1e-7 * stepped, (where, w, pipeline, stepped)
                assert close(w["pipeline"] + w["optimizer"] + w["sums"], w["time"]), w
                idle = Step(w, *where, optimizer=False)
                busy = sum(map(idle.work, range(w["pipeline_ranks"])))
                assert abs(1 - busy / w["pipeline_ranks"] / pipeline - w["bubble"]) < 1e-7, (where, w)
                won += 1
            if model != "single":
                for told in (whole["both"]["best"], cluster(*where, "--post-validation", "both", "--ranks", 4)["best"]):
                    assert all((" --post-validation " in w["command"] + " ") == w.get("post_validation", False) for w in told), told
    counts = timed, waits, sharded, recomputed, several, pairs, won
    assert timed > 300 and waits > 100 and sharded > 100 and recomputed > 100 and several > 100 and pairs > 100 and won > 50, counts
    assert jumps < pairs / 10, (jumps, pairs)

    # A tied weight makes steps no shorter, and longer where the first rank and the last wait for each other.
    longer = 0
    for name in CLUSTERS:
        for key, w in overlapped["tied", name].items():
            apart = overlapped["masters", name][key]
            if apart["layers"] == w["layers"]:
                assert w["time"] >= apart["time"] * (1 - 1e-9), (w, apart)
                longer += w["time"] > apart["time"] * 1.001
    assert longer > 8, longer
    # Where F, I and W are nearly equal no rank waits, and the bound is the time: a bound with waits of a rank in it would be longer.
    even = ["--layers", 8, "--width", 256, "--heads", 8, "--key-heads", 4, "--inner", 384, "--vocabulary", 8, "--tokens", 16, "--masters",
            "--tflops", 0.00005, "--bandwidth", "1GB/s"]
    run("model", *even, "-o", "even.json")
    for schedule in ("ZB-H2", "ZBVZeroBubble"):
        [w] = json.loads(run("cluster", "even.json", "--nodes", 1, "--gpus", 4, "--batch-tokens", 16 * 16, "--memory", "1GiB", "--slices", 1,
                             "--link-inside", "30MB/s", "--ranks", 4, "--shards", 1, "--schedule", schedule, "--samples", 1, "--recompute",
                             "none", "--post-validation", "yes", "--format", "json"))["best"]
        assert w["lower_bound"] <= w["time"] <= w["lower_bound"] * 1.0002, w

    last = ["--ranks", 4, "--schedule", "ZB-H2", "--samples", 1, "--recompute", "none"]
    [overlap, waiting] = (cluster("masters", "one", *last, "--post-validation", choice)["best"][0] for choice in ("yes", "no"))
    assert overlap["pipeline"] < waiting["pipeline"], (overlap, waiting)

    said = run("cluster", "masters.json", *flags("one"), "--ranks", 4, "--post-validation", "both", "-o", "map.svg", "--timeline", "first.svg",
               "--slurm", "job.sh")
    assert "  post-validated  bubble" in said and "post-validated: ranks begin the next step before they know the norm" in said, said
    assert ", post-validated:" in pathlib.Path("map.svg").read_text()
    assert "post-validated" not in run("cluster", "masters.json", *flags("one"), "--ranks", 4)
    [first] = cluster("masters", "one", *last, "--shard", "nothing", "--post-validation", "yes")["best"]
    run("cluster", "masters.json", *flags("one"), *last, "--shard", "nothing", "--post-validation", "yes", "--slurm", "job.sh", "--timeline", "first.svg")
    assert " --schedule ZB-H2 " in first["command"] and " --post-validation " in pathlib.Path("job.sh").read_text(), first
    for words, more in (
        ("--post-validation 'maybe' is not known: choose one of no, yes, both", ["--post-validation", "maybe"]),
        ("has --ranks 1 --shards 1 --slices 1 --post-validation yes: ", ["--ranks", 1, "--post-validation", "yes"]),
        ("one rank has the schedule 1F1B and no --post-validation yes", ["--ranks", 1, "--post-validation", "yes"]),
    ):
        told = run("cluster", "masters.json", *flags("one"), *more, code=2)
        assert words in told and told.count("\n") == 1, (words, told)


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    main()
