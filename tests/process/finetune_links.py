# timeout: 300
"""chevron-finetune --out into a folder that holds links to files of other models, as copies of the hub's snapshots do: each link is
replaced by a new file, and the other models' files keep their bytes, also where a link leads to the model's own files. What cannot be
written is refused before training.
"""
import array
import hashlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "shared"))
from small_decoder import configurations, context, vocabulary, write_model

program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-finetune")
NAMES = ("config.json", "tokenizer.json", "model.safetensors")
wrong = []


def expect(holds, what):
    if not holds:
        wrong.append(what)
        print("FAILED: " + what, flush=True)


def sums(folder):
    return {str(file.relative_to(folder)): hashlib.md5(file.read_bytes()).hexdigest() for file in sorted(folder.rglob("*")) if file.is_file()}


def main(folder):
    draw = random.Random(5)
    (folder / "tokens.bin").write_bytes(array.array("H", (draw.randrange(vocabulary) for _ in range(4 * context + 1))).tobytes())

    def model(name, kind):
        write_model(folder / name, configurations[kind])
        (folder / name / "tokenizer.json").write_text(json.dumps({"of": name}))
        return folder / name

    mine, other = model("mine", "grouped"), model("other", "normed")

    def finetune(out, *flags, of=mine):
        words = ["--model", of, "--data", folder / "tokens.bin", "--context", context, "--microbatches", 2, "--steps", 1, "--ranks", 1,
                 "--replicas", 1, "--schedule", "GPipe", "--out", out, *flags]
        done = subprocess.run([program, *map(str, words)], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        return done.returncode, done.stdout + done.stderr

    kinds = {
        "symbolic": lambda target, link: link.symlink_to(os.path.relpath(target, link.parent)),
        "hard": lambda target, link: link.hardlink_to(target),
        "symbolic, to the model's own": lambda target, link: link.symlink_to(os.path.relpath(mine / target.name, link.parent)),
        "hard, to the model's own": lambda target, link: link.hardlink_to(mine / target.name),
        "dangling": lambda target, link: link.symlink_to("nothing"),
    }
    for kind, link in kinds.items():
        out = folder / f"out {kind}"
        out.mkdir()
        for name in NAMES:
            link(other / name, out / name)
        (out / "model.safetensors.index.json").symlink_to("../other/config.json")
        before = sums(mine), sums(other)
        code, told = finetune(out, "--out-dtype", "bfloat16", "--metrics", out / "metrics")
        expect(code == 0, f"{kind}: ended with {code}: {told[-600:]}")
        expect((sums(mine), sums(other)) == before, f"{kind}: another file was changed")
        expect(sorted(file.name for file in out.iterdir()) == sorted((*NAMES, "metrics")), f"{kind}: {sorted(out.iterdir())}")
        expect(not any(file.is_symlink() or file.stat().st_nlink > 1 for file in out.iterdir()), f"{kind}: a link is left")
        config = json.loads((out / "config.json").read_text())
        expect(config["torch_dtype"] == "bfloat16" and config["model_type"] == "llama", f"{kind}: config.json is {config}")
        expect(json.loads((out / "tokenizer.json").read_text()) == {"of": "mine"}, f"{kind}: another tokenizer")

    # The model's weights lie in --out, which saving would remove.
    linked = folder / "linked"
    linked.mkdir()
    for name in NAMES:
        (linked / name).symlink_to(f"../mine/{name}")
    before = sums(mine)
    code, told = finetune(mine, of=linked)
    expect(code == 2 and "is a link. Remedy: another folder" in told and "step:" not in told, f"weights in --out: {code}, {told[-400:]}")
    for name, words in (("config.json", "config.json: Is a directory"), ("tokenizer.json", "tokenizer.json: Is a directory"),
                        ("model.safetensors", "model.safetensors there is a folder"),
                        ("model-00001-of-00002.safetensors", "model-00001-of-00002.safetensors there is a folder")):
        out = folder / f"no {name}"
        (out / name).mkdir(parents=True)
        code, told = finetune(out)
        expect(code == 2 and words in told and "step:" not in told, f"a folder as {name}: {code}, {told[-400:]}")
        expect(list(out.iterdir()) == [out / name], f"a folder as {name}: {list(out.iterdir())}")
    expect(sums(mine) == before, "a refused run has changed the model")


with tempfile.TemporaryDirectory() as folder:
    main(pathlib.Path(folder))
sys.exit(1 if wrong else 0)
