# timeout: 600
"""chevron-finetune --dry-run beside runs: for ten models on 1 to 4 ranks, trained as a whole or by adapters (--lora-rank), with whole
sequences and with slices, the predicted bytes of each rank, states and activations, are within 1 % of those measured by a run's --profile,
which counts the storages of tensors. The judge plays the schedule's CSV with the measured bytes, of each slice where sequences have slices,
and shares no formula with the prediction. Then --memory and wrong inputs, by their words.

    python3 tests/process/finetune_bytes.py            # each model on two numbers of ranks, with adapters on one, and with slices on one
    python3 tests/process/finetune_bytes.py --table    # on all four, and the tables of docs/reference/model-costs.md
"""
import array
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "shared"))
from small_decoder import write_model

build = os.environ.get("CHEVRON_BUILD", "build")
program, planner = (os.path.join(build, "bin", name) for name in ("chevron-finetune", "chevron-plan"))
wrong = []
vocabulary, context = 320, 64
common = dict(vocab_size=vocabulary, hidden_size=64, intermediate_size=160, num_hidden_layers=6, max_position_embeddings=128, rms_norm_eps=1e-6,
              num_attention_heads=4, num_key_value_heads=4, torch_dtype="float32", hidden_act="silu", tie_word_embeddings=False)
models = {
    "Llama": dict(common, model_type="llama"),
    "Llama, grouped": dict(common, model_type="llama", num_key_value_heads=2, intermediate_size=224),
    "Llama, biases, one key head": dict(common, model_type="llama", num_key_value_heads=1, attention_bias=True, mlp_bias=True),
    "Llama, tied": dict(common, model_type="llama", tie_word_embeddings=True, vocab_size=640),
    "Mistral": dict(common, model_type="mistral", num_key_value_heads=2, hidden_size=96, num_attention_heads=6),
    "Mistral, a window": dict(common, model_type="mistral", num_key_value_heads=2, sliding_window=96, num_hidden_layers=7),
    "Qwen2": dict(common, model_type="qwen2", num_key_value_heads=2),
    "Qwen2, tied": dict(common, model_type="qwen2", tie_word_embeddings=True, num_attention_heads=8, num_key_value_heads=2),
    "Qwen3": dict(common, model_type="qwen3", head_dim=24, num_key_value_heads=2),
    "Qwen3, tied": dict(common, model_type="qwen3", head_dim=16, tie_word_embeddings=True, intermediate_size=192),
}
# Schedules and flags take turns, so that each meets several models and numbers of ranks.
schedules = ["1F1B", "ZB-H1", "GPipe", "ZBVZeroBubble", "Interleaved1F1B", "V-Half", "1F1B"]
settings = [[], ["--dtype", "bfloat16"], ["--dtype", "bfloat16", "--master-parameters"], ["--recompute"], ["--replicas", 2, "--shard"],
            ["--shards", 2], ["--shards", 2, "--sequence-parallel"], ["--post-validation"], ["--dtype", "autocast"],
            ["--dtype", "bfloat16", "--recompute"], ["--dtype", "autocast", "--recompute"]]
# Rank and targets of adapters, and flags beside them. Of each group of projections some are without adapter, so that what their products
# take is not stored.
adapters = [(4, "attention"), (16, "all"), (4, "q_proj,v_proj"), (16, "down_proj"), (4, "o_proj,k_proj"), (16, "up_proj,q_proj"), (4, "gate_proj")]
beside_adapters = [[], ["--dtype", "autocast"], ["--dtype", "bfloat16"], ["--recompute"], ["--shards", 2, "--sequence-parallel"],
                   ["--dtype", "bfloat16", "--master-parameters"], ["--replicas", 2, "--shard"],
                   ["--dtype", "autocast", "--shards", 2, "--sequence-parallel"], ["--post-validation"], ["--dtype", "autocast", "--recompute"],
                   ["--shards", 2]]
# Schedules of slices; flags beside them; slices and the shares of attention by which they are cut.
sliced_schedules = ["Seq1F1B", "SeqZB-H1", "GPipe", "SeqInterleaved1F1B", "SeqZB-H1"]
beside_slices = [[], ["--dtype", "bfloat16"], ["--recompute"], ["--shards", 2], ["--dtype", "autocast"], ["--post-validation"],
                 ["--dtype", "bfloat16", "--recompute"], ["--replicas", 2, "--shard"], ["--dtype", "autocast", "--recompute"],
                 ["--dtype", "bfloat16", "--master-parameters"], ["--shards", 2, "--recompute"]]
cuts = [(2, []), (4, ["--attention", 0.5]), (2, ["--attention", 1]), (4, []), (3, ["--attention", 0])]


def expect(holds, what):
    if not holds:
        wrong.append(what)
        print("FAILED: " + what, flush=True)
    return holds


def call(binary, *words):
    done = subprocess.run([binary, *map(str, words)], capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.returncode, done.stdout, done.stderr


def cells(row):
    """Actions of a rank, in order: stage, letter, slice."""
    for cell in row.strip().split(","):
        for stage, letter, part in re.findall(r"(\d+)([FBIWR])\d+(?:\.(\d+))?", cell):
            yield int(stage), letter, int(part or 0)


def held(rows, measured, recompute):
    """Bytes of activations at the fullest moment of each rank, by the bytes of stages, or of their slices, that a run measured."""
    out = []
    for row in rows:
        now = most = 0
        for stage, letter, part in cells(row):
            of = measured["slices"][part] if "slices" in measured else measured
            kept = of.get("kept_bytes") or [0] * measured["stages"]
            full, after = of["activation_bytes"][stage], of["input_bytes"][stage] if recompute else of["activation_bytes"][stage]
            if letter == "F":
                now += after
                most = max(most, now)
            elif letter in "BI":
                most = max(most, now + full - after)
                now += (kept[stage] if letter == "I" else 0) - after
                most = max(most, now)
            elif letter == "W":
                now -= kept[stage]
        assert now == 0, (row, now)
        out.append(most)
    return out


def far(predicted, measured, share=0.01):
    return abs(predicted - measured) > share * measured


def compare(folder, name, number, ranks, rows, adapted=None, cut=None):
    """Adds a row for each rank: of the whole model or, with the rank and the targets of adapters, of those; with a number of slices, and
    flags that cut them."""
    schedule = schedules[(number + ranks) % len(schedules)]
    flags = settings[(6 * number + 3 * ranks) % len(settings)]
    if adapted:
        flags = beside_adapters[(3 * number + 4 * ranks) % len(beside_adapters)]
    if cut:
        schedule = sliced_schedules[(number + 2 * ranks) % len(sliced_schedules)]
        flags = beside_slices[(4 * number + 3 * ranks + (5 if adapted else 0)) % len(beside_slices)]
    if "--shards" in flags and models[name]["num_key_value_heads"] % 2 != 0:
        flags = []
    if adapted:
        flags = ["--lora-rank", adapted[0], "--lora-targets", adapted[1], *flags]
    if cut:
        flags = ["--slices", cut[0], *cut[1], *flags]
    if ranks == 1 and schedule in ("ZBVZeroBubble", "V-Half", "Interleaved1F1B", "SeqInterleaved1F1B"):
        schedule = "SeqZB-H1" if cut else "ZB-H1"
    micro_batches = 2 * ranks + 2 - (2 * ranks + 2) % ranks
    job = ["--ranks", ranks, "--schedule", schedule, "--microbatches", micro_batches, "--context", context, "--microbatch-size", 2, *flags]
    label = f"{name}, {schedule} on {ranks}, {' '.join(map(str, flags)) or 'float32'}"
    bare = folder / "bare" / name
    code, told, error = call(program, "--model", bare, "--dry-run", "json", *job)
    if not expect(code == 0, f"{label}: --dry-run ended with {code}: {error[-400:]}"):
        return
    predicted = json.loads(told)
    profile = folder / "profile.json"
    profile.unlink(missing_ok=True)
    steps = 13 if "--post-validation" in flags else 2  # its copies begin after ten steady steps
    # Between threads, shards hold the tensor of their last sum until the next one.
    shards = ["--backend", "gloo"] if "--shards" in flags else []
    code, told, error = call(program, "--model", folder / name, "--data", folder / "tokens.bin", "--out", folder / ("adapted" if adapted else "out"), "--steps",
                             steps, "--profile", profile,
                             "--metrics", "none", "--learning-rate", 1e-4, "--clip-grad-norm", 1000, *shards, *job)
    if not expect(code == 0, f"{label}: training ended with {code}: {error[-600:]}"):
        return
    measured = json.loads(profile.read_text())
    code, lists, error = call(planner, "lower", schedule, "--ranks", ranks, "--microbatches", micro_batches, "--format", "csv",
                              *(["--slices", cut[0]] if cut else []))
    assert code == 0, error
    activations = held(lists.splitlines(), measured, "--recompute" in flags)
    for rank, mine in enumerate(predicted["ranks"]):
        states = sum(measured["static_bytes"][stage] for stage in mine["stages"])
        guess = mine["parameters"] + mine["gradients"] + mine["state"]
        for what, one, other in (("states", guess, states), ("activations", mine["activations"], activations[rank])):
            expect(not far(one, other), f"{label}, rank {rank}: {what}: predicted {one}, measured {other}: {100 * (one / other - 1):.2f} %")
        rows.append((name, schedule, ranks, rank, " ".join(map(str, flags)), guess, states, mine["activations"], activations[rank]))
        if "--table" in sys.argv:
            print(*rows[-1], sep="; ", flush=True)
        # A part that is predicted too low must not hide behind one that is too high.
        for key in "state_bytes", "activation_bytes", "kept_bytes", "input_bytes":
            for stage in mine["stages"]:
                known = measured.get(key)
                if known:
                    expect(not far(predicted[key][stage], known[stage], 0 if key == "state_bytes" else 0.01),
                           f"{label}, stage {stage}: {key}: predicted {predicted[key][stage]}, measured {known[stage]}")
        for part, (guessed, known) in enumerate(zip(predicted.get("slices", []), measured.get("slices", []), strict=True)):
            for key, list_of_stages in known.items():
                for stage in mine["stages"]:
                    expect(not far(guessed[key][stage], list_of_stages[stage]),
                           f"{label}, slice {part}, stage {stage}: {key}: predicted {guessed[key][stage]}, measured {list_of_stages[stage]}")
        # The gradients of keys and values that later slices take are float32, of one microbatch.
        if cut and not adapted:
            keys = models[name]["num_key_value_heads"] * models[name].get("head_dim", models[name]["hidden_size"] // models[name]["num_attention_heads"])
            layers = sum(predicted["layers"][stage] for stage in mine["stages"])
            wanted = layers * 2 * predicted["slice_ends"][-2] * 2 * keys // predicted["shards"] * 4
            expect(mine["carried_gradients"] == wanted, f"{label}, rank {rank}: carried gradients {mine['carried_gradients']}, not {wanted}")


def refusals(folder):
    model = folder / "bare" / "Llama"
    job = ["--model", model, "--context", 64, "--ranks", 2]
    for flags, words in (
            (["--dry-run", "--memory", "1MiB"], r"rank \d needs [\d.]+ MiB .* and --memory is 1 MiB\. Remedy: "),
            (["--dry-run", "--lora-rank", 4, "--memory", "300KiB"], r"rank \d needs [\d.]+ MiB .* and --memory is 300 KiB\. Remedy: "),
            (["--dry-run", "xml"], "--dry-run: .*xml.*Remedy:"),
            (["--memory", "much", "--dry-run"], "--memory: .*much.*Remedy:"),
            (["--memory", "0", "--dry-run"], "--memory 0 is not a number of bytes from 1 to .* Remedy:"),
            (["--out", folder / "out"], "--data is required. Remedy: chevron-finetune --help"),
            (["--data", folder / "tokens.bin"], "--out is required. Remedy: chevron-finetune --help"),
            (["--data", folder / "tokens.bin", "--out", folder / "out", "--memory", "1MiB"], "and --memory is 1 MiB. Remedy: "),
            (["--data", folder / "tokens.bin", "--out", folder / "out", "--steps", 1, "--profile", "p.json"], "--profile measures the steps after the first"),
            (["--dry-run", "--ranks", 9], "cuts the model into 9 stages"),
            (["--dry-run", "--schedule", "Seq1F1B", "--context", 4, "--slices", 8], r"--context 4 has too few tokens for 8 slices\. Remedy: "),
    ):
        code, told, error = call(program, *job, *flags)
        expect(code == 2 and re.search(words, error), f"{flags}: ended with {code}: {error[-400:]}")
    # A remedy of the message suffices.
    code, told, error = call(program, *job, "--dry-run", "json")
    needed = max(rank["sum"] for rank in json.loads(told)["ranks"])
    code, told, error = call(program, *job, "--dry-run", "--memory", needed)
    expect(code == 0 and "Rank " in told, f"--memory as needed: {code}, {error}")
    code, told, error = call(program, *job, "--dry-run", "--memory", needed - 1)
    remedy = re.search(r"Remedy: (--[^(]*) \(", error)
    if expect(code == 2 and remedy, f"--memory below: {code}, {error}"):
        code, told, error = call(program, *job, "--dry-run", "--memory", needed - 1, *remedy.group(1).split())
        expect(code == 0, f"the remedy {remedy.group(1)} does not suffice: {error}")


def main(folder):
    draw = random.Random(5)
    (folder / "tokens.bin").write_bytes(array.array("H", (draw.randrange(vocabulary) for _ in range(64 * context + 1))).tobytes())
    (folder / "bare").mkdir()
    for name, config in models.items():
        write_model(folder / name, config)
        (folder / "bare" / name).mkdir()
        (folder / "bare" / name / "config.json").write_text(json.dumps(config))
    table = "--table" in sys.argv
    rows = []
    for number, name in enumerate(models):
        for ranks in (1, 2, 3, 4) if table else (1 + number % 2, 3 + number // 2 % 2):
            compare(folder, name, number, ranks, rows)
    expect(len(rows) >= (80 if table else 40), f"only {len(rows)} ranks were compared")
    of_adapters = []
    for number, name in enumerate(models):
        for ranks in (1, 2, 3, 4) if table else (1 + (number + 1) % 4,):
            compare(folder, name, number, ranks, of_adapters, adapters[(number + ranks) % len(adapters)])
    expect(len(of_adapters) >= (80 if table else 20), f"only {len(of_adapters)} ranks with adapters were compared")
    of_slices, of_both = [], []
    for number, name in enumerate(models):
        for ranks in (1, 2, 3, 4) if table else (1 + (number + 2) % 4,):
            compare(folder, name, number, ranks, of_slices, cut=cuts[(number + 3 * ranks) % len(cuts)])
        for ranks in (1, 2, 3, 4) if table else (2,) if number % 3 == 0 else ():
            compare(folder, name, number, ranks, of_both, adapters[(number + ranks) % len(adapters)], cuts[(number + ranks) % len(cuts)])
    expect(len(of_slices) >= (80 if table else 20), f"only {len(of_slices)} ranks with slices were compared")
    # The comparison notices other sizes.
    ours, other = (dict(models["Qwen3"], num_hidden_layers=layers) for layers in (6, 7))
    (folder / "bare" / "other").mkdir()
    (folder / "bare" / "other" / "config.json").write_text(json.dumps(other))
    sums = [json.loads(call(program, "--model", folder / "bare" / one, "--dry-run", "json", "--context", 64, "--ranks", 1)[1])["ranks"][0]
            for one in ("Qwen3", "other")]
    expect(all(far(sums[1][key], sums[0][key]) for key in ("parameters", "activations")), "another layer changes nothing")
    # It notices another rank of adapters, and other projections.
    few, more, elsewhere = (json.loads(call(program, "--model", folder / "bare" / "Qwen3", "--dry-run", "json", "--context", 64, "--ranks", 2,
                                            "--lora-rank", *flags)[1])["ranks"][1] for flags in ([4], [8], [4, "--lora-targets", "up_proj"]))
    for what, one in (("another rank", more), ("other targets", elsewhere)):
        expect(all(one[key] != few[key] for key in ("gradients", "state", "activations")), f"{what} of adapters changes nothing: {few}, {one}")
    # 70 billion parameters, from config.json alone.
    (folder / "bare" / "large").mkdir()
    (folder / "bare" / "large" / "config.json").write_text(json.dumps(dict(
        model_type="llama", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=8192, tie_word_embeddings=False)))
    begin = time.monotonic()
    code, told, error = call(program, "--model", folder / "bare" / "large", "--dry-run", "json", "--context", 8192, "--ranks", 16, "--shards", 8,
                             "--schedule", "Interleaved1F1B", "--microbatches", 64, "--dtype", "bfloat16", "--master-parameters")
    expect(code == 0 and sum(rank["parameters"] for rank in json.loads(told)["ranks"]) * 8 > 2 * 70.5e9, f"70B: {code}, {error}")
    expect(time.monotonic() - begin < 60, "70B: --dry-run took long")
    refusals(folder)
    if not table:
        return
    for heading, compared in (("model", rows), ("model, with adapters", of_adapters), ("model, in slices", of_slices),
                              ("model, with adapters, in slices", of_both)):
        print(f"| {heading} | ranks compared | states | activations |\n|---|---|---|---|")
        for name in models:
            own = [row for row in compared if row[0] == name]
            off = [[(row[at] / row[at + 1] - 1) * 100 for row in own if row[at + 1] > 0] for at in (5, 7)]
            print(f"| {name} | {len(own)} | " + " | ".join(f"{min(one):+.2f} to {max(one):+.2f} %".replace("-0.00", "+0.00") for one in off) + " |")


with tempfile.TemporaryDirectory() as folder:
    main(pathlib.Path(folder))
sys.exit(1 if wrong else 0)
