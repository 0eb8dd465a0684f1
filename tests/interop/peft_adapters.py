# timeout: 300
"""Adapters of chevron-finetune (--lora-rank) beside Hugging Face's peft, which wraps transformers' models of random weights.

From the same adapters, a plain loop over `get_peft_model` has the losses of chevron-finetune within 1e-5 over 20 AdamW steps, and ends with
the same adapters. peft reads the folder of --out, by its own configuration: its adapters, its logits and those of the model that it merges
are the logits that chevron-finetune writes, with adapters and of the merged folder. A folder that peft saves has our names, shapes and
settings.
"""
import json
import pathlib
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import random_models
from finetune_runs import expect, finetune, losses_of, wrong
from random_models import context, decay, opened, plain_losses, random_model, samples, steps, tokens_to_learn, tolerance

import torch
import transformers
from safetensors.torch import load_file

try:
    import peft
except ImportError as problem:
    print(f"skipped: no peft to compare with ({problem})")
    sys.exit(77)

rate = 1e-2
common = dict(random_models.common, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2)
attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Of each model: its configuration, flags of adapters and their meaning for peft, flags of the job.
cases = {
    "llama": (transformers.LlamaConfig(**common), ["--lora-rank", 4], dict(r=4, lora_alpha=8, target_modules=attention),
              ["--ranks", 2, "--schedule", "ZBVZeroBubble", "--recompute"]),
    "tied": (transformers.Qwen2Config(**common, tie_word_embeddings=True), ["--lora-rank", 3, "--lora-alpha", 12, "--lora-targets", "all"],
             dict(r=3, lora_alpha=12, target_modules=[*attention, "gate_proj", "up_proj", "down_proj"]),
             ["--ranks", 2, "--schedule", "SeqZB-H1", "--slices", 2]),
    "normed": (transformers.Qwen3Config(**common, head_dim=12), ["--lora-rank", 2, "--lora-alpha", 3, "--lora-targets", "v_proj,down_proj"],
               dict(r=2, lora_alpha=3, target_modules=["v_proj", "down_proj"]), ["--ranks", 2, "--shards", 2, "--schedule", "1F1B"]),
}


def wrapped(folder, wanted):
    return peft.get_peft_model(opened(folder), peft.LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **wanted))


def apart(a, b):
    """The largest difference of two lists of tensors by name."""
    expect(a.keys() == b.keys(), f"tensors {sorted(a)}, and {sorted(b)}")
    return max((a[name].float() - b[name].float()).abs().max().item() for name in a.keys() & b.keys())


def adapters_of(model):
    return {name: value.detach().clone() for name, value in peft.get_peft_model_state_dict(model).items()}


def compare(folder, kind, config, flags, wanted, cut):
    model = random_model(config, len(kind))
    base, data, out, saves = (folder / (kind + ending) for ending in ("", ".bin", "-out", "-saves"))
    model.save_pretrained(base)
    tokens = tokens_to_learn()
    tokens.numpy().astype("<u2").tofile(data)
    shared = ["--data", data, "--context", context, "--microbatch-size", 2, "--microbatches", 4, "--replicas", 1, *cut]
    job = ["--model", base, *shared, *flags]

    # The adapters with which runs begin: a step with a rate that changes nothing.
    finetune(*job, "--out", folder / (kind + "-begin"), "--steps", 1, "--learning-rate", 1e-30)
    begin = load_file(folder / (kind + "-begin") / "adapter_model.safetensors")
    begin = {name: torch.zeros_like(value) if ".lora_B." in name else value for name, value in begin.items()}
    theirs = wrapped(base, wanted)
    told = peft.set_peft_model_state_dict(theirs, begin)
    expect(not told.unexpected_keys and adapters_of(theirs).keys() == begin.keys(), f"{kind}: peft has other adapters: {told}")
    expect(apart(adapters_of(theirs), begin) == 0, f"{kind}: peft took other adapters")
    plain = plain_losses(theirs, (p for p in theirs.parameters() if p.requires_grad), tokens, rate)
    expect(plain[-1] < plain[0] - 0.1, f"{kind}: nothing is learned: {plain}")

    metrics = folder / (kind + ".jsonl")
    long = ["--steps", steps, "--learning-rate", rate, "--weight-decay", decay, "--checkpoint", saves]
    finetune(*job, *long, "--out", out, "--metrics", metrics)
    ours = losses_of(metrics)
    worst = max(abs(a - b) / b for a, b in zip(ours, plain, strict=True))
    saved = load_file(out / "adapter_model.safetensors")
    adapters = apart(saved, adapters_of(theirs))
    expect(worst < tolerance, f"{kind}: losses {ours}, those of peft's model {plain}")
    expect(adapters < 1e-3, f"{kind}: adapters differ by {adapters}")

    # The logits of the trained model: chevron-finetune goes on from its last checkpoint, has no step left, and writes them.
    logits = folder / (kind + ".logits")
    finetune(*job, *long, "--out", out, "--resume", "--logits", logits)
    x, written = tokens[:-1].view(samples, context), load_file(logits)["logits"]
    read = peft.PeftModel.from_pretrained(opened(base), out)
    by_name = peft.AutoPeftModelForCausalLM.from_pretrained(out)
    merged = folder / (kind + "-merged")
    with torch.no_grad():
        for what, one in (("PeftModel", read), ("AutoPeftModelForCausalLM", by_name)):
            expect(apart(adapters_of(one), saved) == 0, f"{kind}: {what} read other adapters")
            differ = (one(x).logits - written).abs().max().item()
            expect(differ < tolerance, f"{kind}: logits of {what} differ from chevron-finetune's by {differ}")
        unlike = (opened(base)(x).logits - written).abs().max().item()
        expect(unlike > 0.01, f"{kind}: the logits are those without adapters")
        by_name.merge_and_unload().save_pretrained(merged)
        # The merged folder, as chevron-finetune evaluates it.
        finetune("--model", merged, *shared, "--out", folder / (kind + "-whole"), "--steps", 1, "--learning-rate", 1e-30, "--logits", logits)
        of_merged = (load_file(logits)["logits"] - written).abs().max().item()
        expect(of_merged < 1e-4, f"{kind}: logits of the merged model differ by {of_merged}")

    # The same folder as peft saves it.
    theirs.save_pretrained(folder / (kind + "-theirs"))
    ours_of, theirs_of = (json.loads((where / "adapter_config.json").read_text()) for where in (out, folder / (kind + "-theirs")))
    shapes = [{name: (tuple(value.shape), value.dtype) for name, value in load_file(where / "adapter_model.safetensors").items()}
              for where in (out, folder / (kind + "-theirs"))]
    expect(shapes[0] == shapes[1], f"{kind}: tensors {shapes[0]}, of peft {shapes[1]}")
    for key, value in ours_of.items():
        other = theirs_of.get(key)
        same = sorted(value) == sorted(other) if key == "target_modules" else value == other
        expect(same or key == "base_model_name_or_path", f"{kind}: {key} of adapter_config.json is {value}, of peft {other}")
    print(f"{kind}: loss {ours[0]:.4f} -> {ours[-1]:.4f}, at most {worst:.1e} from those of peft's model; adapters {adapters:.1e}, "
          f"logits of the merged model {of_merged:.1e}", flush=True)


def main(folder):
    for kind, case in cases.items():
        compare(folder, kind, *case)


with tempfile.TemporaryDirectory() as place:
    main(pathlib.Path(place))
print(f"{len(wrong)} failed" if wrong else f"as peft {peft.__version__}")
sys.exit(1 if wrong else 0)
