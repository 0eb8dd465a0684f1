# timeout: 400
"""chevron-finetune beside transformers: models of random weights, written by save_pretrained, in five configurations
(drawn ones: transformers_configs.py).

Logits of the loaded model are those of transformers. Losses of 20 AdamW steps are those of a plain loop over the whole model in
torch, under five schedules, with ranks as threads and over Gloo, also over 2 and 4 shards. What comes out is a folder that transformers opens, with the
tensors that are in it; where nothing was learned, with the tensors that went in. A resumed run is the uninterrupted one, bit for bit,
under another schedule. tokenise.py writes what the folder's tokenizer says.
"""
import json
import os
import pathlib
import struct
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from finetune_runs import expect, finetune, losses_of, program, wrong
from random_models import common, context, decay, plain_losses, random_model, samples, steps, tokens_to_learn

import numpy
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

source = pathlib.Path(os.environ.get("CHEVRON_SOURCE", "."))
rate = 3e-3
stretched = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 8}
configurations = {
    "llama": transformers.LlamaConfig(**common, num_attention_heads=4, attention_bias=True, mlp_bias=True),
    "tied": transformers.LlamaConfig(**common, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True, head_dim=10),
    "grouped": transformers.Qwen2Config(**common, num_attention_heads=4, num_key_value_heads=2, pad_token_id=3),  # a row that is not trained
    "normed": transformers.Qwen3Config(**common, num_attention_heads=4, num_key_value_heads=2, head_dim=12, attention_bias=True),
    "stretched": transformers.LlamaConfig(**common, num_attention_heads=4, num_key_value_heads=1, rope_parameters=stretched),
}
schedules = ["1F1B", "GPipe", "Interleaved1F1B", "ZB-H1", "ZBVZeroBubble"]


def write_tokens(folder, wide):
    """The same tokens in nanoGPT's convention, or in Megatron's with 32 bits and three documents."""
    tokens = tokens_to_learn()
    file = folder / "tokens.bin"
    if not wide:
        tokens.numpy().astype("<u2").tofile(file)
        return tokens, file
    tokens.numpy().astype("<i4").tofile(file)
    lengths = [40, 0, len(tokens) - 40]
    places = [0, 160, 160]
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 4)
    index += struct.pack("<3i", *lengths) + struct.pack("<3q", *places) + struct.pack("<4q", 0, 1, 2, 3)
    file.with_suffix(".idx").write_bytes(index)
    return tokens, file


def opens_equal(out, kind):
    """transformers opens the folder, and its model has the folder's tensors."""
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    saved = {}
    for file in out.glob("*.safetensors"):
        saved.update(load_file(file))
    state = model.state_dict()
    missing = set(state) - set(saved) - ({"lm_head.weight"} if kind == "tied" else set())
    expect(not missing and not set(saved) - set(state), f"{kind}: names in {out.name} differ: {missing} {set(saved) - set(state)}")
    expect(all(torch.equal(state[name], value) for name, value in saved.items()), f"{kind}: transformers reads other tensors than were saved")
    return model, saved


def main(folder):
    models_in, tokens_in, plain, trained = {}, {}, {}, {}
    for number, (kind, config) in enumerate(configurations.items()):
        model = random_model(config, number)
        models_in[kind] = folder / kind
        model.save_pretrained(models_in[kind], max_shard_size="60KB" if kind == "grouped" else "5GB")
        tokens_in[kind] = write_tokens(models_in[kind], wide=kind == "grouped")
        x = tokens_in[kind][0][:-1].view(samples, context)
        with torch.no_grad():
            logits = model(x).logits
        out, file = folder / f"{kind}-same", folder / f"{kind}.logits"
        # A learning rate with which no number changes.
        shared = ["--model", models_in[kind], "--data", tokens_in[kind][1], "--context", context, "--microbatch-size", 2, "--microbatches", 4]
        finetune(*shared, "--out", out, "--logits", file, "--ranks", 1 if kind == "llama" else 2, "--steps", 1, "--learning-rate", 1e-30)
        ours = load_file(file)
        expect(torch.equal(ours["tokens"], x), f"{kind}: other tokens than the file's")
        difference = (ours["logits"] - logits).abs().max().item()
        print(f"{kind}: logits of {logits.abs().max():.2f} at most differ by {difference:.1e}", flush=True)
        expect(difference < 1e-5, f"{kind}: logits differ by {difference}")
        _, saved = opens_equal(out, kind)
        state = model.state_dict()
        expect(all(torch.equal(state[name], value) for name, value in saved.items()), f"{kind}: what was loaded and saved is other than before")
        if kind != "stretched":
            plain[kind] = plain_losses(model, model.parameters(), tokens_in[kind][0], rate)
            trained[kind] = model
            expect(plain[kind][-1] < plain[kind][0] - 0.2, f"{kind}: nothing is learned: {plain[kind]}")

    runs = [("llama", "1F1B", "threads", 1), ("normed", "ZBVZeroBubble", "threads", 1)]
    runs += [("grouped", schedule, "threads", 1) for schedule in schedules] + [("tied", schedule, "gloo", 1) for schedule in schedules]
    runs += [("llama", "1F1B", "threads", 4), ("normed", "ZB-H1", "threads", 2), ("grouped", "ZBVZeroBubble", "gloo", 2)]
    for kind, schedule, backend, shards in runs:
        name = f"{kind}-{schedule}-{backend}" + (f"-{shards}-shards" if shards > 1 else "")
        metrics, out = folder / f"{name}.jsonl", folder / name
        replicas = 2 if schedule == "ZB-H1" and backend == "threads" else 1
        finetune("--model", models_in[kind], "--data", tokens_in[kind][1], "--out", out, "--metrics", metrics, "--context", context,
                 "--microbatch-size", 2 // replicas, "--microbatches", 4, "--ranks", 1 if kind == "llama" else 2, "--replicas", replicas, "--shards", shards,
                 "--schedule", schedule, "--backend", backend, "--steps", steps, "--learning-rate", rate, "--weight-decay", decay)
        ours = losses_of(metrics)
        worst = max(abs(a - b) / b for a, b in zip(ours, plain[kind]))
        print(f"{name}: loss {ours[0]:.4f} -> {ours[-1]:.4f}, at most {worst:.1e} from the plain loop's", flush=True)
        expect(len(ours) == steps and worst < 1e-4, f"{name}: losses {ours}, the plain loop's are {plain[kind]}")
        model, _ = opens_equal(out, kind)
        x = tokens_in[kind][0][:-1].view(samples, context)
        with torch.no_grad():
            difference = (model(x).logits - trained[kind](x).logits).abs().max().item()
        expect(difference < 2e-2, f"{name}: the saved model's logits differ by {difference} from the plain loop's")

    # Resumed under another schedule: the same losses, and the same files, in every byte.
    whole, later = folder / "tied-1F1B-gloo", folder / "resumed"
    flags = ["--model", models_in["tied"], "--data", tokens_in["tied"][1], "--out", later, "--metrics", folder / "resumed.jsonl", "--context",
             context, "--microbatch-size", 2, "--microbatches", 4, "--ranks", 2, "--steps", steps, "--learning-rate", rate, "--checkpoint", folder / "saved"]
    finetune(*flags, "--save-every", 7)
    for name in ("step-00000014", "step-00000020"):
        (folder / "saved" / name).rename(folder / name)
    for file in later.glob("*.safetensors"):
        file.unlink()
    said = finetune(*flags, "--resume", "--schedule", "ZBVZeroBubble")
    expect("at step 8" in said, "it does not say where it goes on:\n" + said)
    expect(losses_of(folder / "resumed.jsonl") == losses_of(folder / "tied-1F1B-gloo.jsonl"), "the resumed run has other losses")
    resumed, uninterrupted = opens_equal(later, "tied")[1], opens_equal(whole, "tied")[1]
    expect(all(torch.equal(resumed[name], value) for name, value in uninterrupted.items()), "the resumed run ends with other weights")
    # Ended after the last checkpoint and before the folder was written: the same command writes it.
    for file in later.glob("*.safetensors"):
        file.unlink()
    said = finetune(*flags, "--resume", "--schedule", "ZBVZeroBubble")
    expect("trained     nothing: the checkpoint is at the end of step" in said, "it does not say that all was done:\n" + said)
    expect(losses_of(folder / "resumed.jsonl") == losses_of(folder / "tied-1F1B-gloo.jsonl"), "metrics of a run that was over changed")
    again = opens_equal(later, "tied")[1]
    expect(all(torch.equal(again[name], value) for name, value in uninterrupted.items()), "what is written later has other weights")

    # Text to tokens, and the tokenizer into the folder that comes out.
    words = "the quick brown fox jumps over a lazy dog".split()
    plain_tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words + ["<end>", "?"])}, unk_token="?"))
    plain_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=plain_tokenizer, eos_token="<end>").save_pretrained(models_in["tied"])
    (folder / "a.txt").write_text("the lazy fox " * 50)
    (folder / "b.txt").write_text("a quick dog " * 50)
    (folder / "other.bin").write_text("of another run")
    (folder / "text.bin").symlink_to("other.bin")
    subprocess.run([sys.executable, source / "examples/chevron-finetune/tokenise.py", models_in["tied"], folder / "text.bin", folder / "a.txt",
                    folder / "b.txt"], check=True, capture_output=True)
    expect(numpy.fromfile(folder / "text.bin", "<u2").tolist() == [0, 7, 3] * 50 + [9] + [6, 1, 8] * 50 + [9], "tokenise.py writes other tokens")
    expect((folder / "other.bin").read_text() == "of another run", "tokenise.py writes through a link")
    # A vocabulary that 16 bits cannot name: wider numbers, with an index, which training reads; without it they are refused.
    wide = folder / "wide"
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=70_000, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                                           num_attention_heads=1, max_position_embeddings=16)).save_pretrained(wide)
    many = Tokenizer(models.WordLevel({**{f"w{i}": i for i in range(69_999)}, "<end>": 69_999}, unk_token="w0"))
    many.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=many, eos_token="<end>").save_pretrained(wide)
    (folder / "c.txt").write_text("w69998 w7 " * 20)
    (folder / "d.txt").write_text("w65536 " * 5)
    subprocess.run([sys.executable, source / "examples/chevron-finetune/tokenise.py", wide, folder / "wide.bin", folder / "c.txt",
                    folder / "d.txt"], check=True, capture_output=True)
    flags = ["--model", wide, "--data", folder / "wide.bin", "--out", folder / "wide-out", "--context", 6, "--ranks", 1, "--steps", 1]
    file = folder / "wide.logits"
    finetune(*flags, "--logits", file)
    expect(load_file(file)["tokens"].flatten().tolist() == [69_998, 7] * 12, "wide tokens are read otherwise than tokenise.py was given them")
    (folder / "wide.idx").unlink()
    expect("16-bit numbers, too few for a vocabulary of 70000" in finetune(*flags, code=2), "numbers of 32 bits are taken for ones of 16")
    said = finetune("--model", models_in["tied"], "--data", folder / "text.bin", "--validation", folder / "text.bin", "--out", folder / "half",
                    "--out-dtype", "bfloat16", "--context", 12, "--ranks", 3, "--steps", 5, "--learning-rate", 1e-2)
    expect("validation" in said, said)
    model, _ = opens_equal(folder / "half", "tied")
    expect(model.dtype == torch.bfloat16, f"saved as bfloat16, opened as {model.dtype}")
    expect(transformers.AutoTokenizer.from_pretrained(folder / "half")("lazy dog")["input_ids"] == [7, 8], "the tokenizer did not come along")

    # Models and data that cannot be trained are refused before training begins.
    def refused(code, words, change=None, **other):
        flags = {"model": models_in["llama"], "data": tokens_in["llama"][1], "out": folder / "none", "context": context, "ranks": 2, **other}
        if change is not None:
            flags["model"] = folder / "broken"
            flags["model"].mkdir(exist_ok=True)
            text = (models_in["llama"] / "config.json").read_text()
            (flags["model"] / "config.json").write_text(change(text) if callable(change) else json.dumps({**json.loads(text), **change}))
        said = finetune(*[word for name, value in flags.items() for word in (f"--{name}", value)], code=code)
        expect(all(word in said for word in words), f"refused with other words than {words}:\n{said}")

    refused(2, ["`model_type` is \"gpt2\"", "Remedy"], {"model_type": "gpt2"})
    refused(2, ["`hidden_size` is -4"], {"hidden_size": -4})
    refused(2, ["`hidden_act` is \"gelu\""], {"hidden_act": "gelu"})
    refused(2, ["no JSON of this kind"], lambda text: text[:100])
    refused(2, ["config.json cannot be read"], model=folder / "nowhere")
    refused(7, ["broken: holds neither model.safetensors nor"], {})
    refused(2, ["8 pieces", "fewer --ranks"], ranks=9)
    refused(2, ["--context 65 is more than the model's positions, 64"], context=65)
    refused(2, ["a step takes 80. Remedy"], microbatches=80)
    refused(2, ["is the --model"], out=models_in["llama"])
    # A disk without room for the weights is told before anything is trained.
    small = folder / "small"
    small.mkdir()
    apart = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs -o size=32k none "$0" && exec "$@"', small]
    if subprocess.run([*apart, "true"], check=False, capture_output=True).returncode == 0:
        done = subprocess.run([*apart, program, "--model", models_in["llama"], "--data", tokens_in["llama"][1], "--out", small / "out",
                               "--context", str(context), "--ranks", "1"], capture_output=True, text=True, check=False, timeout=120)
        expect(done.returncode == 2 and "its disk has 32 KiB left. Remedy: make room" in done.stderr, f"no room for --out:\n{done.stderr}")
    else:
        print("a full disk is left out: no file system can be mounted here", flush=True)
    refused(2, ["cannot be mapped"], data=folder / "none.bin")
    numpy.full(400, 97, "<u2").tofile(folder / "large.bin")
    refused(2, ["large.bin: token", "is 97, and the vocabulary has 97"], data=folder / "large.bin")
    other = folder / "other"
    other.mkdir()
    (other / "config.json").write_text((models_in["tied"] / "config.json").read_text())
    os.link(models_in["llama"] / "model.safetensors", other / "model.safetensors")
    refused(7, ["tensors do not fit the model", "42 tensors are not the model's"], model=other)


with tempfile.TemporaryDirectory() as place:
    main(pathlib.Path(place))
print(f"{len(wrong)} failed" if wrong else "as transformers does")
sys.exit(1 if wrong else 0)
