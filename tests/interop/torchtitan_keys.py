# timeout: 180
"""docs/guides/torchtitan.md beside an installed torchtitan, 0.2 or 0.3: each key of its configuration has a row, in the version that the row
names, and each key of a row is torchtitan's; torchtitan reads the page's example, and divides layers as the page says. The example of
Chevron's has the sizes of torchtitan's. Skipped without torchtitan, after all that needs none."""
import ast
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

try:
    import tomllib
except ImportError:  # Python 3.10
    tomllib = None

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("CHEVRON_BUILD", ROOT / "build")).resolve() / "bin"
PAGE = (ROOT / "docs" / "guides" / "torchtitan.md").read_text()
FILES = dict(re.findall(r"^```\w+ file (\S+)\n(.*?)^```$", PAGE, re.M | re.S))
wrong = []


def expect(holds, words):
    if not holds:
        wrong.append(words)


def rows():
    """{key: versions} of the table, a section's all keys as `section.*`."""
    out = {}
    for line in PAGE[PAGE.index("| key | in |"):].splitlines()[2:]:
        if not line.startswith("|"):
            break
        keys, versions, flag, cpp = (cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|")))
        expect(flag and cpp and versions, f"an empty cell: {line}")
        for key in re.findall("`([^`]+)`", keys):
            expect(key not in out, f"{key} has two rows")
            out[key] = set(versions.split(", "))
    return out


def classes_in(file):
    return {c.name: c for c in ast.walk(ast.parse(file.read_text())) if isinstance(c, ast.ClassDef)}


def fields(cls):
    return {n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def config_of(owner):
    """Fields of the class Config inside a class."""
    return next((fields(c) for c in owner.body if isinstance(c, ast.ClassDef) and c.name == "Config"), set())


def keys_02(folder):
    """{section: keys} of torchtitan 0.2."""
    found = classes_in(folder / "config" / "job_config.py")
    return {n.target.id: fields(found[n.annotation.id]) for n in found["JobConfig"].body if isinstance(n, ast.AnnAssign)}


def keys_03(folder):
    """{section: keys} of torchtitan 0.3."""
    shared = classes_in(folder / "config" / "configs.py")
    out = {name: fields(shared[f"{name.capitalize()}Config"]) for name in ("training", "parallelism", "compile", "comm", "debug")}
    owners = {"profiler": "tools/profiler.py", "metrics": "components/metrics.py", "optimizer": "components/optimizer/optimizer.py",
              "lr_scheduler": "components/optimizer/lr_scheduler.py", "validator": "components/validate.py",
              "activation_checkpoint": "distributed/activation_checkpoint.py"}
    for section, file in owners.items():
        out[section] = set().union(*(config_of(c) for c in classes_in(folder / file).values()))
    out["checkpoint"] = set().union(*(config_of(c) for name in ("base", "dcp")
                                      for c in classes_in(folder / "components" / "checkpointer" / f"{name}.py").values()))
    return out


def compare_keys(version, theirs):
    table = rows()
    here = {f"{section}.{key}" for section, keys in theirs.items() for key in keys}
    expect(len(here) > 80 and "parallelism.pipeline_parallel_degree" in here, f"only these keys were found in torchtitan: {sorted(here)}")
    for key in sorted(here):
        row = table.get(key) or table.get(key.split(".")[0] + ".*")
        expect(row is not None, f"torchtitan {version} has {key}, which has no row")
        expect(row is None or version in row, f"torchtitan {version} has {key}, whose row says {row}")
    for key, versions in table.items():
        there = any(k.startswith(key[:-1]) for k in here) if key.endswith(".*") else key in here
        expect(there == (version in versions), f"the row of {key} says {sorted(versions)}; torchtitan {version} {'has' if there else 'lacks'} it")


def check_layers(folder):
    """torchtitan's own function, which imports nothing, beside the page's formula and example."""
    tree = ast.parse((folder / "distributed" / "pipeline_parallel.py").read_text())
    function, = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name.endswith("generate_llm_fqn_per_model_part")]
    scope = {}
    exec(compile(ast.Module([function], []), "torchtitan", "exec"), scope)
    compared = 0
    for layers in (4, 7, 32, 33):
        for stages in (2, 3, 4, 8):
            for first, last in ((1, 1), (0, 0), (2, 1)):
                each, more = divmod(layers + first + last, stages)
                if each < max(first, last, 1):
                    continue
                parts = scope[function.name](stages, layers, first, last)
                got = [sum(name.startswith("layers.") for name in part) for part in parts]
                wanted = [each + (s < more) - (first if s == 0 else 0) - (last if s == stages - 1 else 0) for s in range(stages)]
                expect(got == wanted, f"{layers} layers on {stages} stages, {first} and {last} less: {got}, by the page {wanted}")
                compared += 1
                if (layers, stages, first, last) == (32, 4, 1, 1):
                    expect(f"--layers {','.join(map(str, got))}\n" in PAGE, f"the page's numbers of layers are not {got}")
    expect(compared > 30, f"only {compared} divisions of layers")


READS = """
import dataclasses, json, sys
from torchtitan.config import ConfigManager
config = ConfigManager().parse_args(sys.argv[1:])
read = lambda section: {f.name: getattr(section, f.name) for f in dataclasses.fields(section)}
print("READ" + json.dumps({name: read(getattr(config, name)) for name in ("training", "parallelism", "checkpoint", "lr_scheduler")}, default=str))
"""


def check_read(version, folder):
    """torchtitan reads the page's example, with the TOML file's values in both versions."""
    wanted = tomllib.loads(FILES["llama3_8b.toml"])
    with tempfile.TemporaryDirectory() as name:
        file = pathlib.Path(name, "llama3_8b.toml")
        file.write_text(FILES["llama3_8b.toml"])
        words = ["--job.config_file", str(file)] if version == "0.2" else ["--module", "llama3", "--config", "llama3_8b", *FILES["flags.txt"].split()]
        done = subprocess.run([sys.executable, "-c", READS, *words], capture_output=True, text=True, timeout=150, check=False, cwd=name,
                              env=dict(os.environ, PYTHONPATH=os.pathsep.join([str(folder.parent), os.environ.get("PYTHONPATH", "")])))
    if "ImportError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        print(f"left out: torchtitan {version} does not import here: {done.stderr.splitlines()[-1]}")
        return
    said = re.search(r"^READ(.*)$", done.stdout, re.M)
    expect(said is not None, f"torchtitan {version} does not read the example: {done.stdout[-800:]}{done.stderr[-800:]}")
    if said:
        read = json.loads(said[1])
        for section in ("training", "parallelism", "checkpoint", "lr_scheduler"):
            for key, value in wanted[section].items():
                expect(read[section][key] == value, f"torchtitan {version} reads {section}.{key} as {read[section][key]}, not {value}")


def check_ours():
    """Sizes of the command are those of the TOML file; the program takes it."""
    job = tomllib.loads(FILES["llama3_8b.toml"])
    training, parallel, saved = job["training"], job["parallelism"], job["checkpoint"]
    words = FILES["chevron.sh"].replace("\\\n", " ").split()
    flags = {w: n for w, n in zip(words, words[1:]) if w.startswith("--") and not n.startswith("--")}
    size = parallel["pipeline_parallel_microbatch_size"]
    wanted = {"--ranks": parallel["pipeline_parallel_degree"], "--schedule": parallel["pipeline_parallel_schedule"], "--microbatch-size": size,
              "--microbatches": training["local_batch_size"] // size, "--replicas": parallel["data_parallel_replicate_degree"],
              "--shards": parallel["tensor_parallel_degree"], "--context": training["seq_len"], "--steps": training["steps"],
              "--learning-rate": "2e-5", "--checkpoint": saved["folder"], "--save-every": saved["interval"],
              "--keep-checkpoints": saved["keep_latest_k"], "--model": job["model"]["hf_assets_path"]}
    for flag, value in wanted.items():
        expect(flags.get(flag) == str(value), f"{flag} is {flags.get(flag)} in Chevron's command, {value} in torchtitan's file")
    world = wanted["--ranks"] * wanted["--replicas"] * wanted["--shards"]
    expect(flags["--nproc-per-node"] == str(world), f"{flags['--nproc-per-node']} processes, not {world}")
    expect(training["global_batch_size"] == training["local_batch_size"] * wanted["--replicas"], "the global batch")
    expect(job["lr_scheduler"] == {"warmup_steps": training["steps"] // 20, "decay_type": "cosine", "min_lr_factor": 0.1}, "the programs' rate")
    expect(("--recompute" in words) == (job["activation_checkpoint"]["mode"] == "full"), "recomputation")
    program = BIN / "chevron-finetune"
    if not program.exists():
        print("left out: chevron-finetune was not built")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = pathlib.Path(folder, flags["--model"])
        model.mkdir()
        (model / "config.json").write_text(json.dumps(dict(
            model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
            vocab_size=128256, max_position_embeddings=131072, rms_norm_eps=1e-5, rope_theta=500000.0)))
        done = subprocess.run([program, *words[words.index("chevron-finetune") + 1:], "--backend", "gloo", "--print-groups"], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    expect(done.returncode == 0 and f", of {world}\n" in done.stdout, f"chevron-finetune: {done.stdout}{done.stderr}")


def main():
    if tomllib is None:
        print("skipped: no tomllib in this Python")
        return 77
    rows()
    check_ours()
    # The package is found without being imported, and not this file's folder.
    sys.path[:] = [p for p in sys.path if pathlib.Path(p).resolve() != pathlib.Path(__file__).resolve().parent]
    spec = importlib.util.find_spec("torchtitan")
    if spec is not None:
        folder = pathlib.Path(spec.submodule_search_locations[0])
        version = "0.2" if (folder / "config" / "job_config.py").exists() else "0.3"
        compare_keys(version, (keys_02 if version == "0.2" else keys_03)(folder))
        check_layers(folder)
        check_read(version, folder)
    for words in wrong[:40]:
        print("FAILED: " + words)
    if wrong:
        return 1
    if spec is None:
        print("skipped: no torchtitan, to compare its keys with the table's")
        return 77
    return 0


if __name__ == "__main__":
    sys.exit(main())
