# timeout: 120
"""chevron-plan cluster with sequences in slices: times, bytes, cuts and idle shares of all its ways from the formulas of
docs/reference/model-costs.md and docs/guides/cluster-plan.md, with the orders of Seq1F1B and SeqZB-H1 written here and played
here, and that of SeqInterleaved1F1B played from its CSV; bounds are below all ways and leave the answer as it is; --slices 1
gives the ways of whole sequences; more slices make idle time shorter and bytes no more, but for carried keys and values; wrong
choices by their words."""

import json
import math
import os
import pathlib
import subprocess
import tempfile

BIN = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve() / "bin"
GB = 1e6  # bytes of a millisecond
# Inner width, key heads and heads differ, so that a formula with the wrong one is noticed.
h, heads, key_heads, f, V, s, layers, e = 256, 8, 4, 384, 2000, 512, 6, 2
d = h // heads
q, k = h, key_heads * d
flops, memory = 50e9, 1000 * GB  # of a millisecond
SIZE = ["--layers", layers, "--width", h, "--heads", heads, "--key-heads", key_heads, "--inner", f, "--vocabulary", V, "--tokens", s,
        "--tflops", 50, "--bandwidth", "1TB/s", "--masters"]
CLUSTERS = {  # nodes, GPUs, rates inside and between, latencies inside and between, tokens of a step, memory
    "one": (1, 4, 20, 20, 0.01, 0, 6, "220MiB"),
    "two": (2, 2, 50, 4, 0, 0.02, 8, "1GiB"),
    "long": (4, 1, 9, 9, 0, 0, 4, "180MiB"),
}


def run(*arguments, code=0):
    done = subprocess.run([BIN / "chevron-plan", *map(str, arguments)], capture_output=True, text=True, timeout=100)
    assert done.returncode == code, (arguments, done.returncode, done.stdout[-500:], done.stderr)
    return done.stdout if code == 0 else done.stderr


def flags(name, most=None):
    nodes, gpus, inside, between, late_inside, late_between, sequences, bytes_of_gpu = CLUSTERS[name]
    out = ["--nodes", nodes, "--gpus", gpus, "--batch-tokens", sequences * s, "--memory", most or bytes_of_gpu, "--latency-inside", late_inside]
    out += ["--link-inside", f"{inside}GB/s"] if gpus > 1 else []
    return out + (["--link-between", f"{between}GB/s", "--latency-between", late_between] if nodes > 1 else [])


def cluster(name, *more, most=None):
    return json.loads(run("cluster", "profile.json", *flags(name, most), *more, "--format", "json"))


def pieces(w, begin, end, link):
    """Of each piece, for the tokens from begin to end: F, I, W, parameters, bytes from F to B, bytes from I to W, keys and values that
    later slices take, and of the bytes from F to B those that whole sequences do not have."""
    T, samples = w["shards"], w["samples"]
    n, own = samples * (end - begin), end - begin
    rate, late = link
    ring = 2 * (T - 1) * (n * h * e / T / rate + late)
    pairs = samples * (end * (end + 1) - begin * (begin + 1)) / 2
    time = lambda products, moved: products / flops + moved / memory
    norm, summed = 28 * n * h, e + 8
    weights = h * (2 * q + 2 * k) / T + 3 * h * f / T
    products, scores = 2 * n * weights, 4 * q / T * pairs
    moved = 2 * norm + 6 * e * n * h + 11 * e * n * (q + k) / T + 5 * e * n * f / T
    parameters = weights + 2 * h
    stored_norm = lambda numbers, rows: 8 * numbers + 4 * rows
    each_key = k if key_heads <= T else q
    joined = e * (samples * end if begin > 0 else n) * 2 * each_key / T
    carried = e * n * 2 * k / T if end < s else 0
    beside = carried if begin > 0 or each_key > k else 0
    stored = 2 * stored_norm(n * h, n) + 2 * e * n * q / T + joined + beside + 4 * n * heads / T + 4 * own * d * e + 4 * e * n * f / T
    more = joined - e * n * 2 * each_key / T + beside
    kept = e * (3 * n * h + n * q / T + n * (q + 2 * k) / T + n * (3 * f / T + h)) + 4 * e * n * h
    layer = (time(products + scores, moved) + 2 * ring, time(products + 2.5 * scores, 2 * moved) + 2 * ring,
             time(products, parameters * summed), parameters, stored, kept, carried, more)
    words = V / T
    embedding = (time(0, 2 * e * n * h) + ring, 0, time(0, 2 * e * n * h + words * h * summed), words * h,
                 8 * n + n * (T > 1), 8 * n + n * (T > 1) + e * n * h, 0, 0)
    product = 2 * n * h * words
    head = (time(product, norm + (e + 12) * n * words), time(product, 2 * norm + (12 + e) * n * words) + ring,
            time(product, (words + 1) * h * summed), (words + 1) * h,
            stored_norm(n * h, n) + 4 * n * words + (4 * n * words + 13 * n) * (T > 1), e * n * (h + words) + 2 * e * n * h, 0, 0)
    return [embedding] + layers * [layer] + [head]


def cut(w, link):
    """The ends of slices that take equal time by the share of attention, and this share."""
    times = [sum(sum(piece[:3]) for piece in pieces(w, *of, link)[1:-1]) for of in ((0, s), (0, s // 2), (s // 2, s))]
    share = 2 * (times[2] - times[1]) / (2 * times[0] - times[1] - times[2])
    share = round(min(max(share, 0), 1) * 1e4) / 1e4
    ends = []
    for i in range(1, w["slices"]):
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if (1 - share) * middle + share * middle**2 < i / w["slices"] else (low, middle)
        ends.append(math.floor(low * s + 0.5))
    return share, ends + [s]


def backwards(M, count):
    return [m * count + i for m in range(M) for i in reversed(range(count))]


def order_of(w, rank):
    """The actions of a rank: kind, stage, unit."""
    P, M, count = w["pipeline_ranks"], w["micro_batches"], w["slices"]
    F, B = list(range(M * count)), backwards(M, count)
    ahead = min(P - 1 - rank + count - 1, len(F))
    out = [("F", rank, F.pop(0)) for _ in range(ahead)]
    if w["schedule"] == "Seq1F1B":
        while F or B:
            out += [("F", rank, F.pop(0))] if F else []
            out += [("B", rank, B.pop(0))] if B else []
        return out
    weights = []

    def halves():
        if B:
            weights.append(B[0])
            out.append(("I", rank, B.pop(0)))

    def forward():
        if F:
            out.append(("F", rank, F.pop(0)))

    for _ in range(rank):
        forward()
        halves()
    while F or B or weights:
        forward()
        halves()
        if weights:
            out.append(("W", rank, weights.pop(0)))
    return out


def orders_of(w):
    if w["schedule"] != "SeqInterleaved1F1B":
        return [order_of(w, rank) for rank in range(w["pipeline_ranks"])]
    text = run("show", w["schedule"], "--ranks", w["pipeline_ranks"], "--microbatches", w["micro_batches"], "--chunks", w["chunks"],
               "--slices", w["slices"], "--format", "csv")

    def action(cell):
        stage, what = cell.split("F") if "F" in cell else cell.split("B")
        m, i = what.split(".")
        return "F" if "F" in cell else "B", int(stage), int(m) * w["slices"] + int(i)

    return [[action(cell) for cell in row.split(",") if cell] for row in text.strip().split("\n")]


def play(w, orders, time_of, message, late):
    """The end of each action. Messages from one rank to another follow each other, in the order in which they are sent."""
    P, stages = w["pipeline_ranks"], w["pipeline_ranks"] * w["chunks"]
    free, next_of, there, wire, ends = [0.0] * P, [0] * P, {}, {}, {}
    moved = True
    while moved:
        moved = False
        for rank in range(P):
            while next_of[rank] < len(orders[rank]):
                kind, stage, unit = action = orders[rank][next_of[rank]]
                needs = [("F", stage - 1, unit)] if kind == "F" and stage > 0 else []
                needs += [("B", stage + 1, unit)] if kind in "BI" and stage + 1 < stages else []
                if any(one not in there for one in needs):
                    break
                begin = max([free[rank], *(there[one] for one in needs)])
                free[rank] = ends[action] = begin + time_of(*action)
                to = stage + 1 if kind == "F" else stage - 1
                if kind != "W" and 0 <= to < stages:
                    arrives = free[rank]
                    if to % P != rank:
                        leaves = max(free[rank], wire.get((rank, to % P), 0))
                        wire[rank, to % P] = leaves + message(unit % w["slices"], rank, to % P)
                        arrives = wire[rank, to % P] + late(rank, to % P)
                    there["F" if kind == "F" else "B", stage, unit] = arrives
                next_of[rank] += 1
                moved = True
    assert next_of == [len(one) for one in orders], w
    return ends


def step_of(w, name):
    """Times, bytes and idle share of a way from the formulas, and the bytes without what slices add."""
    nodes, gpus, inside, between, late_inside, late_between, *_ = CLUSTERS[name]
    rate, latency = {True: inside * GB, False: between * GB}, {True: late_inside, False: late_between}
    P, T, R, count, M = (w[x] for x in ("pipeline_ranks", "shards", "replicas", "slices", "micro_batches"))
    machine = lambda r, p: (r * P + p) * T // gpus
    same = lambda a, b: all(machine(r, a) == machine(r, b) for r in range(R))
    link = rate[True], latency[True]
    share, ends = cut(w, link)
    assert (w["attention"], w["slice_ends"]) == (share, ends), (w, share, ends)
    begins = [0, *ends[:-1]]
    of = [pieces(w, begin, end, link) for begin, end in zip(begins, ends)]
    first = lambda stage: 1 + sum(w["layers"][:stage])
    stages = len(w["layers"])
    held = [range(first(x) - (x == 0), first(x + 1) + (x + 1 == stages)) for x in range(stages)]
    again = 1 if w["recompute"] else 0

    def time_of(kind, stage, unit):
        F, I, W = (sum(of[unit % count][i][x] for i in held[stage]) for x in range(3))
        # On the first stage the input gradient of a first slice is needed by none, that of later slices by earlier keys and values.
        if stage == 0 and unit % count == 0 and kind in "IW":
            return 0 if kind == "I" else F * again + I + W
        return {"F": F, "B": F * again + I + W, "I": F * again + I, "W": W}[kind]

    orders = orders_of(w)
    message = lambda i, a, b: w["samples"] * (ends[i] - begins[i]) * h * e / rate[same(a, b)]
    played = play(w, orders, time_of, message, lambda a, b: latency[same(a, b)])
    pipeline = max(played.values())
    busy = sum(time_of(*action) for rank in orders for action in rank)
    # Sums over replicas, then the optimizer, which waits for all of them.
    all_in_one = nodes == 1
    wide, late = (rate[True], latency[True]) if all_in_one else (rate[False], latency[False])
    wide = rate[True] if R == 1 else wide
    summed = behind = 0
    for rank, order in enumerate(orders):
        last = {stage: max(end for (_, x, _), end in played.items() if x == stage) for stage in {stage for _, stage, _ in order}}
        wire = rest = 0
        for stage in sorted(last, key=last.get):
            parameters = sum(of[0][i][3] for i in held[stage])
            ring = parameters * 4 * (R - 1) / R / wide + late * (R - 1)
            wire = max(wire, last[stage]) + ring * (1 if w["sharded_optimizer"] else 2)
            rest += parameters * (4 + 24 + 4) / memory / (R if w["sharded_optimizer"] else 1)
            rest += parameters * 2 * (R - 1) / R / wide + late * (R - 1) if w["sharded_optimizer"] else 0
        summed, behind = max(summed, wire), max(behind, rest)
    fullest = without = 0
    for order in orders:
        mine = {stage for _, stage, _ in order}
        owners = R if w["sharded_optimizer"] else 1
        fixed = sum(of[0][i][3] * (2 + 4 + 12 / owners) for stage in mine for i in held[stage])
        gradients = sum(of[j][i][6] * 2 for stage in mine for i in held[stage] for j in range(count))  # of carried tensors, in float32
        most = less = now = bare = 0

        def size(stage, j, part):
            return sum(of[j][i][part] for i in held[stage])

        def kept_of(stage, j):
            """W of the first stage, which has no input gradient, needs all that F stored of its layers."""
            return sum(max(of[j][i][4:6]) if stage == 0 and 0 < i <= layers else of[j][i][5] for i in held[stage])

        for kind, stage, unit in order:
            j = unit % count
            entry = of[j][held[stage][0]]
            whole, more = size(stage, j, 4), size(stage, j, 7)
            samples_own = w["samples"] * (ends[j] - begins[j])
            entered = (8 if stage == 0 else h * e) * samples_own
            left = entered + size(stage, j, 6) if again else whole
            left_bare = entered if again else whole - more
            kept = kept_of(stage, j)
            if kind == "F":
                now, bare = now + left, bare + left_bare
            else:
                again_stored = kind != "W"
                most = max(most, now + again_stored * (whole - left))
                less = max(less, bare + again_stored * (whole - more - left_bare))
            if kind in "BI":
                now, bare = now - left, bare - left_bare
            if kind == "I":
                now, bare = now + kept, bare + kept
            if kind == "W":
                now, bare = now - kept, bare - kept
            most, less = max(most, now), max(less, bare)
        fullest, without = max(fullest, fixed + gradients + most), max(without, fixed + less)
    return summed + behind, pipeline, 1 - busy / P / pipeline, fullest, without


def name_of(w):
    return tuple(w[x] for x in ("pipeline_ranks", "shards", "replicas", "samples", "slices", "schedule", "chunks", "recompute", "sharded_optimizer"))


def main():
    run("model", *SIZE, "-o", "profile.json")
    timed = cut_unevenly = several = shards = won = smaller = 0
    for name in CLUSTERS:
        whole, few = cluster(name, "--exhaustive", "--threads", 1), cluster(name)
        assert whole["best"] == few["best"] and whole["ways"] == few["ways"] and whole["longer"] == few["longer"], name
        judged = {name_of(w): w for w in whole["judged"]}
        assert len(judged) == len(whole["judged"]), name
        for w in whole["judged"]:
            assert whole["bound"] <= w["lower_bound"] * (1 + 1e-6) and w["lower_bound"] <= w["time"], w
            if w["slices"] == 1:
                continue
            time, pipeline, idle, fullest, without = step_of(w, name)
            assert abs(w["time"] / time - 1) < 1e-9, (name, w, time)
            assert abs(w["bytes"] / fullest - 1) < 1e-6, (name, w, fullest)
            timed += 1
            shards += w["shards"] > 1
            several += w["chunks"] > 1
            cut_unevenly += w["slice_ends"][0] > s / w["slices"] + 1
            # But for carried keys and values, slices take no more than whole sequences of the same schedule and layers.
            like = {"Seq1F1B": "1F1B", "SeqZB-H1": "ZB-H1"}.get(w["schedule"])
            if like and w["shards"] == 1:
                other = judged[(*name_of(w)[:4], 1, like, *name_of(w)[6:])]
                if other["layers"] == w["layers"]:
                    assert without <= other["bytes"] * (1 + 1e-6), (w, without, other)
                    smaller += 1
        for w in whole["best"]:
            if w["slices"] == 1:
                assert "--slices" not in w["command"] and "slice_ends" not in w, w
                continue
            won += 1
            time, pipeline, idle, *_ = step_of(w, name)
            assert abs(w["pipeline"] / pipeline - 1) < 1e-9 and abs(w["bubble"] - idle) < 1e-9, (w, pipeline, idle)
            assert f"--slices {w['slices']} --attention {w['attention']:g} " in w["command"], w
            assert "--sequence-parallel" not in w["command"], w
        # Whole sequences alone: the same ways with the same numbers.
        alone = cluster(name, "--slices", 1, "--exhaustive")
        assert {name_of(w): w for w in alone["judged"]} == {n: w for n, w in judged.items() if w["slices"] == 1}, name
        four = cluster(name, "--slices", 4, "--exhaustive")
        assert {name_of(w): w for w in four["judged"]} == {n: w for n, w in judged.items() if w["slices"] == 4} and four["judged"], name
    counts = timed, cut_unevenly, several, shards, won, smaller
    assert timed > 150 and cut_unevenly > 50 and several > 30 and shards > 20 and won > 3 and smaller > 20, counts

    # Idle time falls from number to number of slices, under the same division and layers.
    for schedules, layers_of_stages in ((("1F1B", "Seq1F1B"), "3,3"), (("1F1B", "Seq1F1B"), "2,4"), (("1F1B", "Seq1F1B"), "2,1,2,1")):
        P = layers_of_stages.count(",") + 1
        idle = []
        for count in (1, 2, 4):
            [w] = cluster("long", "--ranks", P, "--samples", 1, "--slices", count, "--schedule", schedules[count > 1], "--layers", layers_of_stages,
                          "--recompute", "none", "--shard", "nothing", most="1GiB")["best"]
            idle.append(w["pipeline"] * w["bubble"])
        assert idle == sorted(set(idle), reverse=True), (schedules, idle)

    said = run("cluster", "profile.json", *flags("long"), "--slices", 4)
    assert "  samples  slices  schedule" in said and "each sequence in so many slices" in said, said
    assert "slices" not in run("cluster", "profile.json", *flags("long"), "--slices", 1)
    run("cluster", "profile.json", *flags("long"), "--slices", 4, "-o", "map.svg", "--timeline", "first.svg", "--slurm", "job.sh")
    assert " k4, 1 sample" in pathlib.Path("map.svg").read_text() and "--slices 4 --attention " in pathlib.Path("job.sh").read_text()
    refused = lambda words, *more: run("cluster", "profile.json", *flags("long"), *more, code=2)
    for words, more in (
        ("no way on 4 GPUs has --slices 2 --schedule 1F1B", ["--slices", 2, "--schedule", "1F1B"]),
        ("schedules of slices have 2 slices or more, the others 1; microbatches times slices are at most 4096. Remedy: leave out", ["--slices", 1, "--schedule", "Seq1F1B"]),
        ("no way on 4 GPUs has --ranks 1 --slices 2", ["--ranks", 1, "--slices", 2]),
        ("no way on 4 GPUs has --slices 1000", ["--slices", 1000]),
        ("--slices '0'", ["--slices", 0]),
    ):
        told = refused(words, *more)
        assert words in told and told.count("\n") == 1, (words, told)


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    main()
