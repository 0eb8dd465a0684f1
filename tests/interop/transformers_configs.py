# timeout: 400
"""Drawn config.json files beside transformers: chevron-finetune either has transformers' logits, or refuses with the key and its value.

Each configuration is legal for its kind or nearly so: keys are missing, null, in the older spelling or in both, windows and frequencies of
all sorts. transformers opens the folder and says what the logits are (1e-5); what transformers cannot open must be refused here, too. The
folder that comes out holds the tensors that went in, in the dtype that config.json says. With arguments: how many to draw, the first
seed. Before the drawn ones come some that are drawn too rarely.
"""
import concurrent.futures
import json
import os
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile
import threading

os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
    import transformers
    from safetensors.torch import load_file, save_file
except ImportError as problem:
    print(f"skipped: no transformers to compare with ({problem})")
    sys.exit(77)

transformers.logging.set_verbosity(transformers.logging.CRITICAL)
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-finetune")
context, samples = 16, 2
MISSING = object()
in_turn = threading.Lock()  # transformers makes models under settings of the whole process
dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64, "half": torch.float16}


def put(config, **keys):
    config.update({key: value for key, value in keys.items() if value is not MISSING})


def frequencies(draw, config):
    """Rotary frequencies: nothing, the newer object, the older keys, or both."""
    def one():
        kind = draw.choice(["default", "default", "llama3", "llama3", "llama3", "linear"])
        made = {draw.choice(["rope_type", "rope_type", "type"]): kind}
        if kind == "default" and draw.random() < 0.3:
            made = {}
        if draw.random() < 0.7:
            made["rope_theta"] = draw.choice([500.0, 10000, 1e6, 20.0])
        if kind == "llama3":
            made |= {"factor": draw.choice([2.0, 8.0, 32]), "low_freq_factor": draw.choice([1.0, 1, 2.0]), "high_freq_factor": draw.choice([4.0, 8.0])}
            if draw.random() < 0.5:
                made["original_max_position_embeddings"] = draw.choice([4, 8, 16])
            if draw.random() < 0.1:
                made.pop(draw.choice(["factor", "low_freq_factor", "high_freq_factor"]))
        if kind == "linear":
            made["factor"] = 2.0
        return made
    place = draw.choice(["none", "new", "new", "old", "old", "both", "nulls"])
    put(config, rope_theta=draw.choice([MISSING, MISSING, 700.0, 10000]))
    put(config, original_max_position_embeddings=draw.choice([MISSING] * 5 + [8, 16]))
    put(config, partial_rotary_factor=draw.choice([MISSING] * 8 + [0.5, 1.0]))
    put(config, rope_parameters={"new": one, "both": one, "nulls": lambda: None}.get(place, lambda: MISSING)())
    put(config, rope_scaling={"old": one, "both": one, "nulls": lambda: None}.get(place, lambda: MISSING)())


def drawn(seed):
    """A configuration, and how its folder holds the head of a tied model."""
    draw = random.Random(seed)
    kind = draw.choice(["llama", "mistral", "qwen2", "qwen3"])
    heads = draw.choice([1, 2, 4])
    layers = draw.choice([1, 2, 3])
    config = {"model_type": kind, "architectures": ["SomeForCausalLM"], "vocab_size": draw.choice([97, 64]), "hidden_size": draw.choice([16, 24, 32]),
              "intermediate_size": draw.choice([8, 40]), "num_hidden_layers": layers, "num_attention_heads": heads, "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-2])}
    put(config, num_key_value_heads=draw.choice([heads, 1, max(1, heads // 2), None, MISSING]))
    put(config, head_dim=draw.choice([8, 10, MISSING, MISSING, None] if kind != "qwen3" else [8, 10, 16, MISSING]))
    put(config, max_position_embeddings=draw.choice([64, 128, 16, 8, MISSING]))
    put(config, hidden_act=draw.choice(["silu", "silu", "silu", "swish", MISSING]), tie_word_embeddings=draw.choice([True, False, MISSING]))
    put(config, attention_bias=draw.choice([True, False, MISSING]), mlp_bias=draw.choice([True, False, MISSING]))
    put(config, attention_dropout=draw.choice([0.0, 0, MISSING, MISSING, 0.1] if draw.random() < 0.3 else [0.0]))
    put(config, sliding_window=draw.choice([MISSING, MISSING, None, 8, 16, 4096]), use_sliding_window=draw.choice([MISSING, False, True]))
    put(config, max_window_layers=draw.choice([MISSING, 0, 1, layers, 28]))
    put(config, layer_types=draw.choice([MISSING] * 5 + [None, ["full_attention"] * layers, [draw.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]]))
    put(config, pad_token_id=draw.choice([MISSING, None, 0, 5, -1]), use_cache=draw.choice([MISSING, True, False]))
    put(config, **{draw.choice(["dtype", "torch_dtype"]): draw.choice(["float32", "float32", "bfloat16", "float16", "float64", "half", MISSING, None])})
    put(config, pretraining_tp=draw.choice([MISSING, 1, 2]), pruned_heads=draw.choice([MISSING, {}]), is_causal=draw.choice([MISSING] * 20 + [False]))
    frequencies(draw, config)
    if draw.random() < 0.3:  # a default of the class: the sizes that a small model can have
        config.pop(draw.choice(["vocab_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps", "hidden_act"]), None)
    return config, draw.choice(["as saved", "both", "head only"]), draw.choice([1, 1, 2, 3])


llama = {"model_type": "llama", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
         "max_position_embeddings": 64, "dtype": "float32"}
stretched = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
qwen2 = {**llama, "model_type": "qwen2", "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 8}
named = {
    "stretched from max_position_embeddings": ({**llama, "rope_parameters": stretched}, "as saved", 2),
    "stretched, older keys": ({**llama, "rope_theta": 500.0, "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}, "as saved", 1),
    "stretched, the original at the top": ({**llama, "rope_parameters": {**stretched, "original_max_position_embeddings": 32}, "original_max_position_embeddings": 16}, "as saved", 1),
    "both spellings": ({**llama, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_scaling": {**stretched, "original_max_position_embeddings": 16}}, "as saved", 1),
    "a window that no layer uses": ({**qwen2, "max_window_layers": 2}, "as saved", 1),
    "full layers only": ({**qwen2, "max_window_layers": 0, "layer_types": ["full_attention"] * 2}, "as saved", 1),
    "Qwen3 of default sizes": ({"model_type": "qwen3", "vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "attention_bias": True}, "as saved", 2),
    "tied, both names, one stage": ({**llama, "tie_word_embeddings": True}, "both", 1),
    "tied, the head's name only, one stage": ({**llama, "tie_word_embeddings": True}, "head only", 1),
    "tied, the head's name only, three stages": ({**llama, "tie_word_embeddings": True}, "head only", 3),
    "Mistral without its key of a window": ({**llama, "model_type": "mistral", "num_key_value_heads": 1, "max_position_embeddings": 8192}, "as saved", 1),
}


def write_folder(folder, config, head, seed):
    """Weights of a width of their own, so that logits are about 1; the head under the names that `head` says. Returns what went in."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    dtype = dtypes.get(config.get("dtype") or config.get("torch_dtype"), torch.float32)
    for p in model.parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3) + (1 if p.dim() == 1 else 0))
    tensors = {name: value.detach().to(dtype).clone() for name, value in model.state_dict().items()}
    if config.get("tie_word_embeddings") and head != "both":
        tensors.pop("lm_head.weight" if head == "as saved" else "model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors, model.config.vocab_size


def write_tokens(folder, vocabulary, seed):
    tokens = torch.randint(0, vocabulary, (samples * context + 1,), generator=torch.Generator().manual_seed(seed), dtype=torch.int32)
    tokens.numpy().astype("<i4").tofile(folder / "tokens.bin")
    (folder / "tokens.idx").write_bytes(b"MMIDIDX\x00\x00" + struct.pack("<QBQQiqqq", 1, 4, 1, 2, len(tokens), 0, 0, 1))
    return tokens[:-1].view(samples, context).long()


def finetune(folder, ranks):
    return subprocess.run([program, "--model", folder, "--data", folder / "tokens.bin", "--out", folder / "out", "--logits", folder / "logits", "--context", str(context),
                           "--microbatch-size", "1", "--microbatches", str(samples), "--ranks", str(ranks), "--steps", "1", "--learning-rate", "1e-30"],
                          capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL, check=False)


def names_key_and_value(said, config):
    """Whether a refusal names a key of the configuration, by its path, and the value that is there."""
    if found := re.search(r"is more than the model's positions, (\d+) \((\w+) of its config.json\)", said):
        default = {"sliding_window": 4096}
        return config.get(found[2], default.get(found[2])) == int(found[1])
    found = re.search(r"`([\w.]+)` is (.*?)\. Remedy: \S", said, re.S)
    if not found:
        return False
    value = config
    for part in found[1].split("."):
        value = value.get(part, MISSING) if isinstance(value, dict) else MISSING
    if value is MISSING:
        return found[2] == "missing"
    return found[2].endswith("…") or json.loads(found[2]) == value


def compared(folder, config, head, ranks, seed):
    """(outcome, what is wrong): outcomes are equal, refused, and refused as transformers does."""
    try:
        with in_turn, torch.no_grad():
            tensors, vocabulary = write_folder(folder, config, head, seed)
            tokens = write_tokens(folder, vocabulary, seed)
            wanted = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(tokens).logits
        if not wanted.isfinite().all():
            raise ValueError("logits that are not finite")
        problem = None
    except Exception as raised:  # whatever keeps transformers from opening it
        problem, wanted = raised, None
        write_tokens(folder, 97, seed)
    done = finetune(folder, ranks)
    said = done.stdout + done.stderr
    if done.returncode != 0:
        told = done.returncode == 2 and names_key_and_value(said, config)
        if problem is not None and done.returncode in (2, 7):
            return "refused as transformers does", None
        return "refused", None if told else f"ended with {done.returncode}, and no key and value:\n{said[-800:]}"
    if problem is not None:
        return "equal", f"taken, and transformers does not: {type(problem).__name__} {str(problem)[:300]}"
    ours = load_file(folder / "logits")
    difference = (ours["logits"] - wanted).abs().max().item() / max(1.0, wanted.abs().max().item())
    if not torch.equal(ours["tokens"], tokens) or not difference < 1e-5:
        return "equal", f"logits differ by {difference:.1e}"
    out = {}
    for file in (folder / "out").glob("*.safetensors"):
        out.update(load_file(file))
    if config.get("tie_word_embeddings"):
        tensors["model.embed_tokens.weight"] = tensors.get("model.embed_tokens.weight", tensors.get("lm_head.weight"))
        tensors.pop("lm_head.weight", None)
    if set(out) != set(tensors):
        return "equal", f"the folder out has other tensors: {sorted(set(out) ^ set(tensors))[:6]}"
    for name, value in out.items():
        before = tensors[name].float().to(value.dtype)
        if value.dtype != tensors[name].dtype or (value - before).abs().max() > 1e-20:
            return "equal", f"{name} comes out as another tensor, {value.dtype}"
    with in_turn:
        opened = transformers.AutoConfig.from_pretrained(folder / "out")
    if opened.dtype != value.dtype:
        return "equal", f"the folder out says {opened.dtype}, and its tensors are {value.dtype}"
    return "equal", None


def refusals(folder):
    """Folders that mean something else than their tensors say, and what chevron-finetune says of them."""
    folder.mkdir()
    write_tokens(folder, 97, 1)
    other = [({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "`quantization_config` is {"),
             ({"compression_config": {"quant_method": "compressed-tensors"}}, "`compression_config` is {"),
             ({"quantization": {"group_size": 64, "bits": 4}}, "`quantization` is {"),
             ({"per_layer_config": {"1": {"intermediate_size": 4}}}, "`per_layer_config` is {"), ({"pruned_heads": {"0": [1]}}, "`pruned_heads` is {"),
             ({"auto_map": {"AutoModelForCausalLM": "modeling_mine.Mine"}}, "`auto_map` is {"), ({"transformers_weights": "other.safetensors"}, "`transformers_weights` is "),
             ({"configuration_files": ["config.4.0.0.json"]}, "`configuration_files` is ["), ({"dtype": "int8"}, "`dtype` is \"int8\""),
             ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "`rope_parameters.full_attention` is {"),
             ({"rope_scaling": {**stretched, "high_freq_factor": 0.5}}, "`rope_scaling.high_freq_factor` is 0.5"),
             ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}}, "`rope_scaling.factor` is missing")]
    for change, words in other:
        (folder / "config.json").write_text(json.dumps({**llama, **change}))
        done = finetune(folder, 1)
        if done.returncode != 2 or words not in done.stderr:
            yield f"{change}: {done}"
    (folder / "config.json").write_text(json.dumps(llama))
    (folder / "adapter_config.json").write_text("{}")
    done = finetune(folder, 1)
    if done.returncode != 2 or "adapter_config.json says that the folder's tensors are not the whole model" not in done.stderr:
        yield f"an adapter: {done}"


count, first = (int(sys.argv[1]) if len(sys.argv) > 1 else 12), (int(sys.argv[2]) if len(sys.argv) > 2 else 1)
jobs = [*named.items(), *((f"seed {seed}", drawn(seed)) for seed in range(first, first + count))]
counts, wrong = {}, []
with tempfile.TemporaryDirectory() as place:
    def outcome(job):
        number, (name, (config, head, ranks)) = job
        folder = pathlib.Path(place) / str(number)
        found = compared(folder, config, head, ranks, number)
        subprocess.run(["rm", "-rf", folder], check=False)
        return name, config, head, ranks, *found

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for name, config, head, ranks, how, problem in pool.map(outcome, enumerate(jobs)):
            counts[how] = counts.get(how, 0) + 1
            if problem is None and name in named and how != "equal":
                problem = f"{how}, and it has transformers' logits"
            if problem is not None:
                wrong.append(name)
                print(f"FAILED: {name}, {ranks} ranks, head {head}: {problem}\n{json.dumps(config)}", flush=True)
    for problem in refusals(pathlib.Path(place) / "refused"):
        wrong.append("refusal")
        print("FAILED: " + problem, flush=True)
    # Without the key Mistral's window is 4096.
    folder = pathlib.Path(place) / "window"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(named["Mistral without its key of a window"][0]))
    said = subprocess.run([program, "--model", folder, "--data", folder / "none", "--out", folder / "out", "--context", "4200"], capture_output=True, text=True, check=False).stderr
    if "--context 4200 is more than the model's positions, 4096 (sliding_window of its config.json)" not in said:
        wrong.append("window")
        print("FAILED: a window of Mistral that is not named: " + said)

print(f"{len(jobs)} configurations: " + ", ".join(f"{number} {how}" for how, number in sorted(counts.items())) + f", {len(wrong)} wrong")
if counts.get("equal", 0) < len(jobs) / 4:
    print("FAILED: too few have logits at all")
    wrong.append("few")
sys.exit(1 if wrong else 0)
