# timeout: 250
"""chevron-finetune over two shards: losses of five steps, logits and saved weights are those of one shard, within rounding; and so are
losses in slices, with and without shards. Models of random weights in three configurations: grouped heads with biases, norms of
queries and keys, tied tables with a padding row.
"""
import array
import json
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile

program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-finetune")
vocabulary, width, inner, context = 97, 32, 50, 16  # of odd pieces: 48 and 49 tokens, 25 numbers
common = dict(vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=4, max_position_embeddings=64,
              rms_norm_eps=1e-6, num_attention_heads=4, num_key_value_heads=2, torch_dtype="float32", hidden_act="silu")
configurations = {
    "grouped": dict(common, model_type="llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "normed": dict(common, model_type="qwen3", head_dim=12, attention_bias=False, tie_word_embeddings=False),
    "tied": dict(common, model_type="qwen2", tie_word_embeddings=True, pad_token_id=3),
}
wrong, printed = [], []


def expect(holds, what):
    if not holds:
        wrong.append(what)
        print("FAILED: " + what, flush=True)


def tensors_of(config):
    """Names and shapes, as Hugging Face has them."""
    head = config.get("head_dim", width // 4)
    out = {"model.embed_tokens.weight": [vocabulary, width], "model.norm.weight": [width]}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = [vocabulary, width]
    for layer in range(config["num_hidden_layers"]):
        def add(name, *shape):
            out[f"model.layers.{layer}.{name}"] = list(shape)
        for name, rows in (("q", 4 * head), ("k", 2 * head), ("v", 2 * head)):
            add(f"self_attn.{name}_proj.weight", rows, width)
            if config["model_type"] == "qwen2" or config.get("attention_bias"):
                add(f"self_attn.{name}_proj.bias", rows)
        add("self_attn.o_proj.weight", width, 4 * head)
        if config.get("attention_bias"):
            add("self_attn.o_proj.bias", width)
        for name, shape in (("gate", (inner, width)), ("up", (inner, width)), ("down", (width, inner))):
            add(f"mlp.{name}_proj.weight", *shape)
            if config.get("mlp_bias"):
                add(f"mlp.{name}_proj.bias", shape[0])
        if config["model_type"] == "qwen3":
            add("self_attn.q_norm.weight", head)
            add("self_attn.k_norm.weight", head)
        add("input_layernorm.weight", width)
        add("post_attention_layernorm.weight", width)
    return out


def write_model(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    draw = random.Random(3)
    header, data = {}, array.array("f")
    for name, shape in tensors_of(config).items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        begin = 4 * len(data)
        data.extend((1 if name.endswith("norm.weight") else 0) + draw.gauss(0, 0.15) for _ in range(count))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, 4 * len(data)]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data.tobytes())


def read_tensors(file):
    content = file.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:8 + length])
    out = {}
    for name, entry in header.items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = entry["data_offsets"]
            out[name] = entry["shape"], array.array("f", content[8 + length + begin:8 + length + end])
    return out


def close(a, b, within):
    return len(a) == len(b) and all(abs(x - y) <= within * (1 + abs(x)) for x, y in zip(a, b))


def finetune(*flags, code=0):
    done = subprocess.run([program, *map(str, flags)], capture_output=True, text=True, timeout=100, stdin=subprocess.DEVNULL)
    expect(done.returncode == code, f"chevron-finetune {' '.join(map(str, flags))} ended with {done.returncode}:\n{done.stdout[-800:]}{done.stderr[-800:]}")
    printed.append(done.stdout + done.stderr)
    return printed[-1]


def main(folder):
    draw = random.Random(5)
    (folder / "tokens.bin").write_bytes(array.array("H", (draw.randrange(vocabulary) for _ in range(4 * context + 1))).tobytes())
    for kind, config in configurations.items():
        model = folder / kind
        write_model(model, config)

        def run(name, *flags):
            out = folder / f"{kind}-{name}"
            finetune("--model", model, "--data", folder / "tokens.bin", "--validation", folder / "tokens.bin", "--context", context, "--microbatches", 4,
                     "--steps", 5, "--learning-rate", 3e-3, "--metrics", folder / "metrics", "--logits", folder / "logits", "--out", out, *flags)
            if wrong:
                sys.exit(1)
            losses = [json.loads(line)["loss_metrics/global_avg_loss"] for line in (folder / "metrics").read_text().splitlines()]
            saved = {}
            for file in out.glob("*.safetensors"):
                saved.update(read_tensors(file))
            return losses, read_tensors(folder / "logits"), saved

        losses, logits, saved = run("whole")
        expect(len(losses) == 5 and losses[4] < losses[0], f"{kind}: losses {losses}")
        expect(set(saved) - {"lm_head.weight"} == set(tensors_of(config)) - {"lm_head.weight"}, f"{kind}: saved {sorted(saved)[:5]} …")
        for flags in (["--shards", 2], ["--shards", 2, "--sequence-parallel", "--schedule", "ZB-H1", "--nproc", 4]):
            cut_losses, cut_logits, cut_saved = run("cut" + str(len(flags)), *flags)
            words = f"{kind} {' '.join(map(str, flags))}"
            expect(len(cut_losses) == 5 and all(abs(a - b) <= 1e-4 * a for a, b in zip(losses, cut_losses)), f"{words}: losses {cut_losses}, not {losses}")
            expect(logits["logits"][0] == cut_logits["logits"][0] and close(logits["logits"][1], cut_logits["logits"][1], 1e-4),
                   f"{words}: other logits")
            expect({name: shape for name, (shape, _) in saved.items()} == {name: shape for name, (shape, _) in cut_saved.items()}, f"{words}: other tensors are saved")
            far = [name for name, (_, values) in saved.items() if name in cut_saved and not close(values, cut_saved[name][1], 2e-3)]
            expect(not far, f"{words}: saved weights differ: {far[:4]}")
        slices = [["--slices", 4], ["--slices", "auto"], ["--slices", 4, "--shards", 2], ["--slices", "auto", "--shards", 2]]
        for flags in slices if kind == "grouped" else slices[2:3]:
            sliced_losses, _, _ = run("sliced" + "-".join(map(str, flags)), "--schedule", "Seq1F1B", *flags)
            expect(len(sliced_losses) == 5 and all(abs(a - b) <= 1e-5 * a for a, b in zip(losses, sliced_losses)),
                   f"{kind} {' '.join(map(str, flags))}: losses {sliced_losses}, not {losses}")
            expect("auto" not in flags or re.search("^slices +[248] ", printed[-1], re.MULTILINE), f"auto chose no slices:\n{printed[-1][:800]}")
    told = finetune("--model", folder / "grouped", "--data", folder / "tokens.bin", "--out", folder / "none", "--shards", 4, code=2)
    expect("--shards 4 cannot share the 2 heads of keys" in told and "Remedy: a number of shards that divides the heads: 1, 2" in told,
           f"four shards of two heads: {told}")


with tempfile.TemporaryDirectory() as name:
    main(pathlib.Path(name))
sys.exit(1 if wrong else 0)
