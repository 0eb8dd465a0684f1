"""A small decoder of random weights as a Hugging Face folder, in three configurations: grouped heads with biases, norms of queries and
keys, tied tables with a padding row."""
import array
import json
import random
import struct

vocabulary, width, inner, context = 97, 32, 50, 16  # of odd pieces: 48 and 49 tokens, 25 numbers
common = dict(vocab_size=vocabulary, hidden_size=width, intermediate_size=inner, num_hidden_layers=4, max_position_embeddings=64,
              rms_norm_eps=1e-6, num_attention_heads=4, num_key_value_heads=2, torch_dtype="float32", hidden_act="silu")
configurations = {
    "grouped": dict(common, model_type="llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "normed": dict(common, model_type="qwen3", head_dim=12, attention_bias=False, tie_word_embeddings=False),
    "tied": dict(common, model_type="qwen2", tie_word_embeddings=True, pad_token_id=3),
}


def tensors_of(config):
    """Names and shapes, as Hugging Face has them."""
    vocabulary, width, inner = (config[key] for key in ("vocab_size", "hidden_size", "intermediate_size"))
    heads, key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head = config.get("head_dim", width // heads)
    out = {"model.embed_tokens.weight": [vocabulary, width], "model.norm.weight": [width]}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = [vocabulary, width]
    for layer in range(config["num_hidden_layers"]):
        def add(name, *shape):
            out[f"model.layers.{layer}.{name}"] = list(shape)
        for name, rows in (("q", heads * head), ("k", key_heads * head), ("v", key_heads * head)):
            add(f"self_attn.{name}_proj.weight", rows, width)
            if config["model_type"] == "qwen2" or config.get("attention_bias"):
                add(f"self_attn.{name}_proj.bias", rows)
        add("self_attn.o_proj.weight", width, heads * head)
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
