# timeout: 300
"""Adapters of chevron-finetune (--lora-rank) beside transformers: models of random weights, and LoRA modules that are written here.

Losses of 20 AdamW steps are those of a plain loop over transformers' model with the same adapters, under several schedules,
replicas, shards, slices, recomputation and cuts with a stage that has no adapter; so are the adapters that --out receives, which
have peft's names and shapes, and the logits of the merged model. Adapters begin alike however a model is cut. States exist of adapters alone.
Resumed runs are the uninterrupted one, bit for bit.
"""
import hashlib
import json
import math
import pathlib
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from finetune_runs import expect, finetune, losses_of, wrong
from random_models import common, context, decay, opened, plain_losses, random_model, samples, steps, tokens_to_learn, tolerance

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

rate = 1e-2
configurations = {
    "llama": transformers.LlamaConfig(**common, num_attention_heads=4, num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "tied": transformers.Qwen2Config(**common, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True, pad_token_id=3),
    "normed": transformers.Qwen3Config(**common, num_attention_heads=4, num_key_value_heads=2, head_dim=12),
}
attention, maps = ["q_proj", "k_proj", "v_proj", "o_proj"], ["gate_proj", "up_proj", "down_proj"]
# Of each model: flags, and what they mean.
settings = {
    "llama": (["--lora-rank", 4], 4, 8, attention),
    "tied": (["--lora-rank", 3, "--lora-alpha", 7.5, "--lora-targets", "all"], 3, 7.5, attention + maps),
    "normed": (["--lora-rank", 2, "--lora-alpha", 2, "--lora-targets", "v_proj,down_proj,q_proj"], 2, 2, ["q_proj", "v_proj", "down_proj"]),
}


class Adapted(torch.nn.Module):
    """W x + alpha / r B A x, of Hu et al.'s section 4.1."""

    def __init__(self, base, a, b, factor):
        super().__init__()
        self.base, self.factor = base, factor
        self.lora_A, self.lora_B = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T * self.factor


def name_in_peft(layer, projection, matrix):
    block = "self_attn" if projection in attention else "mlp"
    return f"base_model.model.model.layers.{layer}.{block}.{projection}.lora_{matrix}.weight"


def places(model, projections):
    for layer, each in enumerate(model.model.layers):
        for projection in projections:
            yield layer, projection, each.self_attn if projection in attention else each.mlp


def plain_run(folder, begin, tokens, rank, alpha, projections):
    """Losses of the plain loop, its adapters by their names, and its model."""
    model = opened(folder)
    model.requires_grad_(False)
    trained = {}
    for layer, projection, block in places(model, projections):
        a, b = (begin[name_in_peft(layer, projection, matrix)] for matrix in "AB")
        one = Adapted(getattr(block, projection), a, torch.zeros_like(b), alpha / rank)
        setattr(block, projection, one)
        trained[name_in_peft(layer, projection, "A")], trained[name_in_peft(layer, projection, "B")] = one.lora_A, one.lora_B
    losses = plain_losses(model, trained.values(), tokens, rate)
    return losses, {name: value.detach() for name, value in trained.items()}, model


def merged(folder, out):
    """transformers' model with the adapters of a folder added to its weights, by the folder's own configuration."""
    model = opened(folder)
    config, saved = json.loads((out / "adapter_config.json").read_text()), load_file(out / "adapter_model.safetensors")
    with torch.no_grad():
        for layer, projection, block in places(model, config["target_modules"]):
            a, b = (saved[name_in_peft(layer, projection, matrix)] for matrix in "AB")
            getattr(block, projection).weight += config["lora_alpha"] / config["r"] * b @ a
    return model


def check_folder(name, model, out, rank, alpha, projections):
    config, saved = json.loads((out / "adapter_config.json").read_text()), load_file(out / "adapter_model.safetensors")
    shapes = {}
    for layer, projection, block in places(model, projections):
        rows, columns = getattr(block, projection).weight.shape
        shapes[name_in_peft(layer, projection, "A")], shapes[name_in_peft(layer, projection, "B")] = (rank, columns), (rows, rank)
    expect({key: tuple(value.shape) for key, value in saved.items()} == shapes, f"{name}: tensors {sorted(saved)}, peft's are {sorted(shapes)}")
    expect(all(value.dtype == torch.float32 for value in saved.values()), f"{name}: saved in another dtype than float32")
    with safe_open(out / "adapter_model.safetensors", "pt") as file:
        expect(file.metadata() == {"format": "pt"}, f"{name}: metadata {file.metadata()}")
    wanted = dict(peft_type="LORA", task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, target_modules=projections, bias="none", lora_dropout=0.0)
    expect({key: config.get(key) for key in wanted} == wanted, f"{name}: adapter_config.json is {config}")
    expect(isinstance(config["lora_alpha"], int) == (alpha == int(alpha)), f"{name}: lora_alpha is {config['lora_alpha']}")
    names = {file.name for file in out.iterdir()}
    expect(names == {"adapter_config.json", "adapter_model.safetensors", "tokenizer_config.json"}, f"{name}: --out holds {sorted(names)}")
    return saved


def fingerprint(folder):
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def begin_of(folder, kind, model, tokens, shared):
    """The adapters before training, which are drawn alike for any cut, and their folder; the first logits are the model's."""
    flags, rank, alpha, projections = settings[kind]
    x = tokens[:-1].view(samples, context)
    first = None
    cuts = [["--ranks", 1], ["--ranks", 3, "--schedule", "Interleaved1F1B"]] if kind == "normed" else [["--ranks", 2]]
    if kind == "tied":
        cuts = [["--ranks", 1], ["--ranks", 3]]  # one table, and two copies of it
    if kind == "llama":
        cuts += [["--ranks", 2, "--shards", 2], ["--ranks", 1, "--replicas", 2, "--microbatch-size", 1]]
    for number, cut in enumerate(cuts):
        out, logits = folder / f"{kind}-begin-{number}", folder / f"{kind}-{number}.logits"
        # A learning rate with which A does not change, and B differs from zero by less than a float of its size notices.
        finetune(*shared, *flags, *cut, "--out", out, "--logits", logits, "--steps", 1, "--learning-rate", 1e-30)
        saved = check_folder(f"{kind} {cut}", model, out, rank, alpha, projections)
        if "--replicas" not in cut:
            with torch.no_grad():
                difference = (load_file(logits)["logits"] - model(x).logits).abs().max().item()
            expect(difference < tolerance, f"{kind} {cut}: with B of zeros the logits differ from the model's by {difference}")
        for name, value in saved.items():
            if ".lora_B." in name:
                expect(value.abs().max() < 1e-20, f"{kind} {cut}: {name} does not begin at zero")
                continue
            most = 1 / math.sqrt(value.shape[1])
            expect(value.abs().max() <= most and abs(value.mean()) < most / 2, f"{kind}: {name} is not drawn from U(-{most:.3f}, {most:.3f})")
        drawn = [value for name, value in saved.items() if ".lora_A." in name]
        every = torch.cat([(value * math.sqrt(value.shape[1])).flatten() for value in drawn])
        expect(every.max() > 0.98 and every.min() < -0.98 and abs(every.mean()) < 0.05 and abs(every.var() - 1 / 3) < 0.03,
               f"{kind}: A over its bound has mean {every.mean():.3f}, variance {every.var():.3f}, ends {every.min():.3f} and {every.max():.3f}")
        expect(len({tuple(value.flatten().tolist()[:4]) for value in drawn}) == len(drawn), f"{kind}: two adapters begin with the same numbers")
        first = first or saved
        expect(all(torch.equal(first[name], value) for name, value in saved.items() if ".lora_A." in name), f"{kind} {cut}: adapters begin otherwise")
    other = folder / f"{kind}-seed"
    if kind == "llama":
        finetune(*shared, *flags, "--out", other, "--steps", 1, "--learning-rate", 1e-30, "--seed", 2)
        others = load_file(other / "adapter_model.safetensors")
        expect(not any(torch.equal(first[name], value) for name, value in others.items() if ".lora_A." in name), "another seed draws the same adapters")
    return first


def main(folder):
    models_in, shared, plain, originals, tokens_of = {}, {}, {}, {}, {}
    for number, (kind, config) in enumerate(configurations.items()):
        model = random_model(config, number)
        models_in[kind] = folder / kind
        model.save_pretrained(models_in[kind])
        (models_in[kind] / "tokenizer_config.json").write_text("{}")
        originals[kind] = fingerprint(models_in[kind])
        tokens = tokens_to_learn()
        data = folder / f"{kind}.bin"
        tokens.numpy().astype("<u2").tofile(data)
        tokens_of[kind] = tokens
        shared[kind] = ["--model", models_in[kind], "--data", data, "--context", context, "--microbatch-size", 2, "--microbatches", 4,
                        "--replicas", 1]
        begin = begin_of(folder, kind, model, tokens, shared[kind])
        plain[kind] = plain_run(models_in[kind], begin, tokens, *settings[kind][1:])
        expect(plain[kind][0][-1] < plain[kind][0][0] - 0.2, f"{kind}: nothing is learned: {plain[kind][0]}")

    long = ["--steps", steps, "--learning-rate", rate, "--weight-decay", decay]
    runs = [
        ("llama", ["--ranks", 2]), ("llama", ["--ranks", 2, "--schedule", "ZBVZeroBubble", "--recompute"]),
        ("llama", ["--ranks", 2, "--schedule", "ZB-H1", "--replicas", 2, "--microbatch-size", 1, "--shard"]),
        # Stages of the embedding and of the head alone.
        ("llama", ["--ranks", 8, "--microbatches", 8, "--microbatch-size", 1, "--schedule", "ZB-H1"]),
        ("llama", ["--ranks", 2, "--shards", 2, "--sequence-parallel"]),
        ("tied", ["--ranks", 2, "--schedule", "ZB-H1", "--shards", 2]),
        ("tied", ["--ranks", 2, "--schedule", "ZBVZeroBubble", "--backend", "gloo", "--post-validation"]),
        ("normed", ["--ranks", 2, "--schedule", "SeqZB-H1", "--slices", 2]),
    ]
    whole = None
    for number, (kind, cut) in enumerate(runs):
        name, out, metrics = f"{kind} {' '.join(map(str, cut))}", folder / f"run-{number}", folder / f"run-{number}.jsonl"
        flags, rank, alpha, projections = settings[kind]
        said = finetune(*shared[kind], *flags, *cut, *long, "--out", out, "--metrics", metrics)
        count = sum(value.numel() for value in plain[kind][1].values())
        expect(f"rank {rank}, alpha {alpha:g}, on q_proj" in said and f"{count:,} parameters" in " ".join(said.split()), f"{name}: said\n{said[:800]}")
        ours, (losses, adapters, model) = losses_of(metrics), plain[kind]
        worst = max(abs(a - b) / b for a, b in zip(ours, losses))
        saved = check_folder(name, transformers.AutoModelForCausalLM.from_pretrained(models_in[kind]), out, rank, alpha, projections)
        apart = max((saved[key] - value).abs().max().item() for key, value in adapters.items())
        x = tokens_of[kind][:-1].view(samples, context)
        with torch.no_grad():
            logits = (merged(models_in[kind], out)(x).logits - model(x).logits).abs().max().item()
        print(f"{name}: loss {ours[0]:.4f} -> {ours[-1]:.4f}, at most {worst:.1e} from the plain loop's; adapters {apart:.1e}, logits {logits:.1e}", flush=True)
        expect(len(ours) == steps and worst < tolerance, f"{name}: losses {ours}, the plain loop's are {losses}")
        expect(apart < 1e-3 and logits < 1e-3, f"{name}: adapters differ by {apart}, the merged model's logits by {logits}")
        whole = whole or (ours, saved)
    expect(all(fingerprint(models_in[kind]) == originals[kind] for kind in models_in), "a model's folder was changed")

    # Gradients and states exist of adapters alone: 4 bytes a parameter, and 12 more for each of an adapter.
    profile = folder / "profile.json"
    finetune(*shared["llama"], *settings["llama"][0], "--ranks", 2, "--steps", 2, "--out", folder / "profiled", "--profile", profile)
    measured = json.loads(profile.read_text())
    count = sum(value.numel() for value in plain["llama"][1].values())
    frozen = sum(p.numel() for p in transformers.AutoModelForCausalLM.from_pretrained(models_in["llama"]).parameters())
    expect(sum(measured["state_bytes"]) == 8 * count, f"states of {measured['state_bytes']} bytes, and adapters have {count} parameters")
    expect(sum(measured["static_bytes"]) == 4 * frozen + 16 * count, f"{measured['static_bytes']} bytes of {frozen} frozen and {count} trained parameters")

    # Resumed under another schedule: the same losses and adapters in every bit, from checkpoints without the model.
    later, saves, metrics = folder / "resumed", folder / "saved", folder / "resumed.jsonl"
    flags = [*shared["llama"], *settings["llama"][0], "--ranks", 2, *long, "--out", later, "--metrics", metrics, "--checkpoint", saves]
    finetune(*flags, "--save-every", 7)
    for name in ("step-00000014", "step-00000020"):
        (saves / name).rename(folder / name)
    stored = {name for file in (saves / "step-00000007").glob("model-*.safetensors") for name in load_file(file)}
    expect(stored and all(".lora_" in name for name in stored), f"checkpoints hold {sorted(stored)[:4]}")
    (later / "adapter_model.safetensors").unlink()
    said = finetune(*flags, "--resume", "--schedule", "ZBVZeroBubble")
    expect("at step 8" in said, "it does not say where it goes on:\n" + said)
    expect(losses_of(metrics) == whole[0], "the resumed run has other losses")
    resumed = load_file(later / "adapter_model.safetensors")
    expect(all(torch.equal(resumed[name], value) for name, value in whole[1].items()), "the resumed run ends with other adapters")

    # In half precision, with masters.
    said = finetune(*shared["llama"], *settings["llama"][0], "--ranks", 2, "--steps", 3, "--dtype", "bfloat16", "--master-parameters", "--out", folder / "half")
    check_folder("bfloat16", transformers.AutoModelForCausalLM.from_pretrained(models_in["llama"]), folder / "half", 4, 8, attention)

    def refused(code, words, *more, lora=True, out="none"):
        said = " ".join(finetune(*shared["llama"], *(settings["llama"][0] if lora else []), "--steps", 20, "--out", folder / out, *more, code=code).split())
        expect(all(word in said for word in words), f"refused with other words than {words}:\n{said}")

    again = ["--checkpoint", saves, "--resume", "--learning-rate", rate]
    refused(7, ["rank 4, alpha 9"], *again, "--lora-alpha", 9)
    refused(7, ["the model lacks", "lora_A.weight"], *again, lora=False)
    other = folder / "other-base"
    other.mkdir()
    model = transformers.AutoModelForCausalLM.from_pretrained(models_in["llama"])
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    model.save_pretrained(other)
    refused(7, ["frozen parameters with other values", "model.norm.weight"], *again, "--model", other)
    refused(2, ["needs", "and --memory is 100 KiB. Remedy: "], "--memory", "100KiB")
    refused(2, ["--lora-alpha is about adapters", "Remedy: --lora-rank 8"], "--lora-alpha", 3, lora=False)
    refused(2, ["--lora-targets", "lm_head is none of attention, all, q_proj"], "--lora-targets", "q_proj,lm_head")
    refused(2, ["--lora-rank", "-1 is not a whole number from 0"], "--lora-rank", -1)
    refused(2, ["holds config.json of a model, and is to receive adapters. Remedy: another folder"], out="other-base")
    refused(2, ["holds adapter_config.json of adapters, and is to receive a model. Remedy: another folder"], lora=False, out="resumed")


with tempfile.TemporaryDirectory() as place:
    main(pathlib.Path(place))
print(f"{len(wrong)} failed" if wrong else "as LoRA over transformers' model")
sys.exit(1 if wrong else 0)
