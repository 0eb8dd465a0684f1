# timeout: 180
"""chevron-plan model beside transformers and PyTorch: the parameters of small models of each kind exactly, and within 1 % the bytes that
autograd stores from the forward to the backward, of a layer and of the rest, for dtypes, kinds of attention, grouped and shared heads,
windows and tied heads. Autograd's hooks on saved tensors count, each storage once. A model of GPT's kind is one of PyTorch's modules.
"""
import json
import os
import subprocess
import sys
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
    import transformers
    from torch import nn
except ImportError as problem:
    print(f"skipped: no transformers to compare with ({problem})")
    sys.exit(77)

transformers.logging.set_verbosity(transformers.logging.CRITICAL)
torch.set_num_threads(1)
torch.manual_seed(1)
program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")
tokens, samples, failed, compared = 64, 2, 0, 0


def stored(module, call):
    """Bytes of the storages that a call leaves for its backward, without parameters and buffers."""
    known = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *module.buffers())}
    seen, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            seen[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = call()
    del result
    return sum(seen.values())


def predicted(*arguments):
    done = subprocess.run([program, "model", *map(str, arguments), "--tokens", str(tokens), "--samples", str(samples), "--tflops", "1",
                           "--bandwidth", "1GB/s", "--format", "json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def compare(name, wanted, got, tolerance=0.01):
    global failed, compared
    compared += 1
    if abs(got - wanted) > tolerance * wanted:
        failed = 1
        print(f"FAILED: {name}: predicted {got}, measured {wanted}: {100 * (got / wanted - 1):.2f} %")


def parameters_of(profile):
    """Each parameter takes 2 or 4 bytes, its gradient 4, rounded to bfloat16 2 more, AdamW's state twice its bytes."""
    return sum(profile["static_bytes"])


def of_layers(measure, count=2):
    """The bytes of a layer, and of embedding and head, from models with one layer and with more."""
    one, more = measure(1), measure(count)
    layer = (more - one) / (count - 1)
    return layer, one - layer


kinds = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "llama, shared keys and biases": (transformers.LlamaConfig, transformers.LlamaForCausalLM,
                                      {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True}),
    "llama, tied": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {"tie_word_embeddings": True}),
    "mistral, a window": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": 16, "num_key_value_heads": 2}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {"num_key_value_heads": 2}),
    "qwen3, wide heads": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"num_key_value_heads": 2, "head_dim": 24}),
}
sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 320, "intermediate_size": 160,
         "max_position_embeddings": 128}
dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
folder = tempfile.mkdtemp()
rotary = 0
for name, (config_class, model_class, more) in kinds.items():
    for dtype, as_torch in dtypes.items():
        for attention, implementation in ("flash", "sdpa"), ("full", "eager"):
            if "window" in name and attention == "flash":
                continue  # PyTorch's own attention then takes a mask, and its mathematical form
            options = {**sizes, **more}

            def made(layers):
                config = config_class(**options, num_hidden_layers=layers, attn_implementation=implementation)
                model = model_class(config).to(as_torch)
                return config, model

            def measure(layers):
                _, model = made(layers)
                ids = torch.randint(options["vocab_size"], (samples, tokens))
                return stored(model, lambda: model(input_ids=ids, labels=ids, use_cache=False))

            config, model = made(2)
            config.save_pretrained(folder)
            profile = predicted(os.path.join(folder, "config.json"), "--dtype", dtype, "--attention", attention, "--kernels", "transformers")
            count = sum(p.numel() for p in model.parameters())
            each = 16 if dtype == "fp32" else 2 + 4 + 2 + 4  # the gradient's sum in float32, rounded for the optimizer
            tied = options["vocab_size"] * options["hidden_size"] if options.get("tie_word_embeddings") else 0  # on both stages
            compare(f"{name}, {dtype}: static bytes", each * (count + tied), parameters_of(profile), 0)
            layer, rest = of_layers(measure)
            label = f"{name}, {dtype}, {attention}"
            compare(label + ": a layer", layer, profile["activation_bytes"][1])
            # transformers makes cosines and sines once for all layers.
            width = options.get("head_dim", options["hidden_size"] // options["num_attention_heads"])
            rotary = 2 * tokens * width * (4 if dtype == "fp32" else 2)
            mask = 0
            compare(label + ": embedding and head", rest - rotary - mask, profile["activation_bytes"][0] + profile["activation_bytes"][-1], 0.02)


class Layer(nn.Module):
    """A layer of GPT-2 without dropout."""

    def __init__(self, width, heads, whole):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.wide, self.narrow, self.heads, self.whole = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), heads, whole

    def forward(self, x):
        y = self.first(x)
        q, k, v = (m(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for m in (self.query, self.key, self.value))
        if self.whole:
            scores = (q @ k.transpose(-1, -2)).softmax(-1)
            seen = scores @ v
        else:
            seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.narrow(nn.functional.gelu(self.wide(self.second(x))))


for attention in "flash", "full":
    def measure(layers):
        model = nn.Sequential(*(Layer(64, 4, attention == "full") for _ in range(layers)))
        x = torch.randn(samples, tokens, 64, requires_grad=True)
        return stored(model, lambda: model(x))

    layer, _ = of_layers(measure)
    profile = predicted("--kind", "gpt", "--layers", 2, "--width", 64, "--heads", 4, "--vocabulary", 320, "--dtype", "fp32", "--attention",
                        attention, "--kernels", "transformers")
    compare(f"gpt, {attention}: a layer", layer, profile["activation_bytes"][1], 0.02)
    count = sum(p.numel() for p in Layer(64, 4, False).parameters())
    compare(f"gpt, {attention}: static bytes of a layer", 16 * count, profile["static_bytes"][1], 0)

# Experts: transformers' models have as many parameters, in folders and by flags.
mixtures = {
    "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM, {"num_local_experts": 4}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, {"num_experts": 4, "moe_intermediate_size": 48}),
    "qwen3_moe with biases": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM,
                              {"num_experts": 6, "moe_intermediate_size": 32, "attention_bias": True, "head_dim": 24}),
    "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM, {"num_local_experts": 4, "head_dim": 24}),
    "gpt_oss, tied": (transformers.GptOssConfig, transformers.GptOssForCausalLM, {"num_local_experts": 3, "tie_word_embeddings": True}),
}
for name, (config_class, model_class, more) in mixtures.items():
    config = config_class(**{**sizes, "num_key_value_heads": 2, **more}, num_hidden_layers=2, num_experts_per_tok=2)
    config.save_pretrained(folder)
    count = sum(p.numel() for p in model_class(config).parameters())
    tied = sizes["vocab_size"] * sizes["hidden_size"] if config.tie_word_embeddings else 0
    compare(f"{name}: static bytes", 16 * (count + tied), parameters_of(predicted(os.path.join(folder, "config.json"), "--dtype", "fp32")), 0)
    if name == "mixtral":
        profile = predicted("--layers", 2, "--width", 64, "--heads", 4, "--key-heads", 2, "--inner", 160, "--vocabulary", 320, "--experts", 4,
                            "--experts-per-token", 2, "--dtype", "fp32")
        compare("mixtral by flags: static bytes", 16 * count, parameters_of(profile), 0)
print(f"{compared} comparisons")
sys.exit(failed or compared < 60)
