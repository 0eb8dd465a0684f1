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

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "shared"))
from small_decoder import configurations, context, tensors_of, vocabulary, write_model

program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-finetune")
wrong, printed = [], []


def expect(holds, what):
    if not holds:
        wrong.append(what)
        print("FAILED: " + what, flush=True)


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
