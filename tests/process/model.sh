# chevron-plan model on the command line: published formulas for parameters, operations and activations over a grid of sizes; Hugging
# Face folders; calibration by a measured profile; wrong inputs by their words.
# timeout: 120
seconds=20
. "$(dirname "$0")/shared/expect_plan.sh"

rates='--tflops 1 --bandwidth 1GB/s'
cat > config.json <<'JSON'
{"model_type": "llama", "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
 "vocab_size": 32000, "max_position_embeddings": 4096}
JSON
mkdir qwen && cat > qwen/config.json <<'JSON'
{"model_type": "qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
 "num_key_value_heads": 2, "vocab_size": 100, "use_sliding_window": true, "sliding_window": 16, "max_window_layers": 3}
JSON
mkdir other && echo '{"model_type": "gpt2"}' > other/config.json

expect 0 '^13015864320 parameters: 40 layers of width 5120, 40 heads of 128, inner width 13824, vocabulary 32000\.$' model config.json --gpu h100
expect 0 '^Matrix products at 593.64 TFLOP/s (0.6 of the peak' model config.json --gpu h100
expect 0 '^each of layers 0-2  .*' model qwen $rates --tokens 64
expect 0 '^layer 3  .*' model qwen/config.json $rates --tokens 64
expect 2 "model_type. is \"gpt2\". Remedy: llama, mistral, qwen2 or qwen3.*; or give the model's sizes by --layers" model other $rates
expect 2 "no model is given: give the config.json of a Hugging Face folder, or at least --layers and --width" model $rates
expect 2 "the device is not given: give --gpu, such as --gpu h100, or both --tflops and --bandwidth" model config.json
expect 2 "--gpu 'h900' is not known: choose one of a100, b200, h100, h200" model config.json --gpu h900
expect 2 "--dtype 'int8' is not known: choose one of bf16, fp16, fp32" model config.json $rates --dtype int8
expect 2 "--heads 7 does not divide --width 64" model --layers 2 --width 64 --heads 7 $rates
expect 2 "--key-heads 3 does not divide the number of heads, 4" model --layers 2 --width 64 --heads 4 --key-heads 3 $rates
expect 2 "--experts and --experts-per-token belong together" model --layers 2 --width 64 --experts 4 $rates
expect 2 "--masters has no effect with --dtype fp32" model --layers 2 --width 64 --dtype fp32 --masters $rates
expect 2 "--attention 'ring' is not known: choose one of flash, full, selective" model --layers 2 --width 64 --attention ring $rates
expect 2 "--calibrate-model has no effect without --calibrate" model config.json $rates --calibrate-model config.json

CHEVRON_PLAN="$plan" python3 - <<'PYTHON' || failed=1
import itertools, json, os, subprocess

def model(*arguments):
    command = [os.environ["CHEVRON_PLAN"], "model", *map(str, arguments), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)

# Narayanan et al., SC'21: equations 2 and 3; Korthikanti et al.: equation 1, without dropout.
count = 0
for l, h, s, b, V in itertools.product((1, 3), (256, 1024), (128, 512), (1, 2), (1000, 32000)):
    a = h // 64
    size = ("--kind", "gpt", "--layers", l, "--width", h, "--heads", a, "--vocabulary", V, "--tokens", s, "--samples", b, "--attention", "full",
            "--kernels", "fused")
    fast = model(*size, "--tflops", 1e-3, "--bandwidth", "100000TB/s", "--optimizer", "sgd")
    parameters = sum(fast["static_bytes"]) / 8  # two bytes, four of the gradient's sum, two of the rounded gradient
    paper = 12 * l * h * h * (1 + 13 / (12 * h) + (V + s) / (12 * l * h)) + V * h + 2 * h  # the head is not tied here
    assert abs(parameters - paper) < 0.5, (l, h, parameters, paper)
    operations = sum(fast["forward"] + fast["backward_input"] + fast["backward_weight"]) * 1e6
    paper = 72 * b * s * l * h * h * (1 + s / (6 * h) + V / (12 * l * h))
    assert abs(operations / paper - 1) < 1e-3, (l, h, s, operations / paper)
    stored = s * b * h * (32 + 2 * a * s / h) + 2 * 8 * s * b
    assert fast["activation_bytes"][1] == stored, (h, s, fast["activation_bytes"][1], stored)
    # Work, and all that a microbatch stores, is linear in its sequences.
    double = model(*size[:-6], "--samples", 2 * b, *size[-4:], "--tflops", 1e-3, "--bandwidth", "100000TB/s", "--optimizer", "sgd")
    for key in "activation_bytes", "kept_bytes", "input_bytes":
        assert double[key] == [2 * n for n in fast[key]], key
    count += 1
assert count == 32

# What shares of work and memory options have.
size = ("--layers", 2, "--width", 256, "--tokens", 512, "--tflops", 1, "--bandwidth", "1TB/s")
plain, masters = model(*size), model(*size, "--masters")
ratio = masters["state_bytes"][1] / plain["state_bytes"][1]
assert ratio == 3, ratio
for better, worse in (("flash", "selective"), ("selective", "full")):
    stores = [model(*size, "--attention", kind)["activation_bytes"][1] for kind in (better, worse)]
    assert (stores[0] < stores[1]) == (worse == "full"), stores
window = model(*size, "--window", 64)
assert window["forward"][1] < plain["forward"][1] and window["activation_bytes"] == plain["activation_bytes"]
# Keys that queries meet, counted position by position: of the forward, what a window changes is scores alone.
for tokens, w in (512, 64), (512, 511), (300, 1), (300, 299):
    bare = ("--layers", 1, "--width", 256, "--tokens", tokens, "--tflops", 1e-4, "--bandwidth", "100000TB/s")
    saved = (model(*bare)["forward"][1] - model(*bare, "--window", w)["forward"][1]) * 1e5  # operations
    pairs = sum(i + 1 - min(i + 1, w) for i in range(tokens))
    assert abs(saved - 4 * 256 * pairs) < 50 + 1e-6 * 4 * 256 * pairs, (tokens, w, saved, 4 * 256 * pairs)
shared = model(*size, "--heads", 4, "--key-heads", 1, "--kernels", "transformers")
assert shared["activation_bytes"][1] < plain["activation_bytes"][1] and shared["static_bytes"][1] < plain["static_bytes"][1]
one, four = (model(*size, "--experts", n, "--experts-per-token", 1) for n in (1, 4))
assert abs(four["forward"][1] / one["forward"][1] - 1) < 0.01 and four["static_bytes"][1] > 2 * one["static_bytes"][1]
assert model(*size, "--experts", 4, "--experts-per-token", 2)["forward"][1] > 1.3 * four["forward"][1]
# Numbers are not rounded: on a device with twice the rates every time is half, to the last bit.
slow, fast = (model("--layers", 3, "--width", 192, "--tflops", 7 * rate, "--bandwidth", f"{rate}TB/s", "--link", f"{rate}GB/s") for rate in (1, 2))
for key in "forward", "backward_input", "backward_weight", "communication":
    assert slow[key] == [2 * time for time in fast[key]] and any(slow[key]), (key, slow[key], fast[key])
tied = model(*size, "--tied")
assert tied["static_bytes"] == plain["static_bytes"] and tied["gradient_bytes"][0] == 0 < plain["gradient_bytes"][0]

# A measured profile: three times the predicted F, half its I, its W; then the factors carry over to another model.
small = model("--layers", 4, "--width", 512, "--tflops", 1, "--bandwidth", "1TB/s")
json.dump(small, open("small.json", "w"))
measured = dict(small, model=None, forward=[3 * t for t in small["forward"]], backward_input=[t / 2 for t in small["backward_input"]])
json.dump(measured, open("measured.json", "w"))
large = ("--layers", 6, "--width", 1024, "--tflops", 1, "--bandwidth", "1TB/s")
before, after = model(*large), model(*large, "--calibrate", "measured.json", "--calibrate-model", "small.json")
for key, factor in ("forward", 3), ("backward_input", 0.5), ("backward_weight", 1):
    assert abs(after[key][1] / before[key][1] / factor - 1) < 1e-12, (key, after[key][1] / before[key][1])
PYTHON
expect 0 '^Calibrated by measured.json: F × 3, I × 0.5, W × 1\.$' model --layers 4 --width 512 --tflops 1 --bandwidth 1TB/s --calibrate measured.json
expect 2 "was measured with 4 layers, and the model has 6: describe the measured model" model --layers 6 --width 512 $rates --calibrate measured.json
exit $failed
