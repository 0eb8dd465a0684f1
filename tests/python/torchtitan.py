# timeout: 600
"""torchtitan's trainer under Chevron: losses, gradient norms, losses of its Validator and parameters of its debug model have the bits of
torchtitan's own schedules, also of a run that goes on from a checkpoint, of Chevron's or of torchtitan's schedule."""
import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile

here = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(here))
os.environ.update(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
from support.ranks import SOURCE, check, finish, run  # noqa: E402

import torch  # noqa: E402

import chevron_pipelining.torchtitan as titan  # noqa: E402

sys.path[:] = [folder for folder in sys.path if pathlib.Path(folder).resolve() != here]  # torchtitan is the package, not this file
titan.on_cpu()
try:
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    try:
        from torchtitan.trainer import Trainer  # 0.3
    except ImportError:
        from torchtitan.train import Trainer  # 0.2
except ImportError as problem:
    print(f"skipped: no torchtitan that runs with torch {torch.__version__} ({problem})")
    sys.exit(77)

RANKS, MICROBATCHES, LENGTH, STEPS = 4, 8, 64, 2
# torchtitan's schedule, and those of Chevron's for its placement
CASES = [("1F1B", [None]), ("Interleaved1F1B", [None, "order.csv"]), ("ZBVZeroBubble", [None, "V-Half"])]
RESUMED = ["1F1B", "ZBVZeroBubble"]
numbers = itertools.count()


def assets(folder):
    """A tokenizer of 256 bytes, and a data set of this repository's pages."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters + ["<s>", "</s>"])}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (folder / "text").mkdir()
    with open(folder / "text" / "train.jsonl", "w") as file:
        for page in sorted((SOURCE / "docs").rglob("*.md"))[:8]:
            file.write(json.dumps({"text": page.read_text()}) + "\n")


def order():
    """A CSV of PyTorch's runtime that loops over two stages of a rank, all forwards first."""
    rows = [[f"{stage}{kind}{m}" for kind, stages in (("F", (rank, rank + RANKS)), ("B", (rank + RANKS, rank))) for stage in stages
             for m in range(MICROBATCHES)] for rank in range(RANKS)]
    return "".join(",".join(row) + "\n" for row in rows)


def config_02(folder, schedule, pipelining_fn, chunked):
    """A configuration of torchtitan 0.2."""
    from torchtitan.config import JobConfig
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
    config = JobConfig()
    config.model.name = f"llama3_{next(numbers)}"
    register_train_spec(config.model.name, dataclasses.replace(get_train_spec("llama3"), pipelining_fn=pipelining_fn))
    config.model.flavor, config.model.hf_assets_path = "debugmodel", str(folder / "tokenizer")
    config.training.dataset_path = config.validation.dataset_path = str(folder / "text")
    config.validation.dataset, config.validation.local_batch_size, config.validation.seq_len = "c4_test", MICROBATCHES, LENGTH
    return config, config.validation, config.job


def config_03(folder, schedule, pipelining_fn, chunked):
    """A configuration of torchtitan 0.3."""
    from torchtitan.models.common import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel
    config = llama3_debugmodel()
    config.model_spec.pipelining_fn = pipelining_fn
    for layer in config.model_spec.model.layers:  # flex attention has no backward on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    if "Zero" in schedule:  # selective checkpoints allow one backward, and torchtitan's I and W are two
        config.activation_checkpoint = None
    config.hf_assets_path = str(folder / "tokenizer")
    config.validator.dataloader.dataset = "c4_test"
    config.dataloader.dataset_path = config.validator.dataloader.dataset_path = str(folder / "text")
    if not chunked:  # under ZBVZeroBubble torchtitan's chunked loss leaves the last norm without a gradient
        config.loss = config.loss.loss_fn
    config.training.disable_cuda_graphs, config.training.mixed_precision_param = True, "float32"
    return config, config.validator, config


def train(folder, schedule, pipelining_fn, chunked=False, csv=None, saved=None, steps=STEPS):
    """Trains the debug model; loss, gradient norm and loss of the Validator of each step, and a hash of this rank's parameters.

    saved: the folder of checkpoints; training goes on from the last one, and saves one at its end. None: no checkpoints
    """
    build = config_03 if Trainer.__module__ == "torchtitan.trainer" else config_02
    config, validation, job = build(folder, schedule, pipelining_fn, chunked)
    config.training.local_batch_size, config.training.seq_len, config.training.steps = MICROBATCHES, LENGTH, steps
    # An evaluation by PyTorch's own schedules over a V sends what its stages do not have.
    validation.enable = not chunked and not (schedule.startswith("ZBV") and pipelining_fn is pipeline_llm)
    validation.freq, validation.steps = 1, 2
    if saved is not None:
        job.dump_folder, config.checkpoint.enable, config.checkpoint.last_save_model_only = str(folder / saved), True, False
    config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_schedule = RANKS, schedule
    config.parallelism.pipeline_parallel_schedule_csv = csv or ""
    config.metrics.log_freq, config.debug.seed, config.lr_scheduler.warmup_steps = 1, 7, 1
    trainer, found = Trainer(config), []
    trainer.metrics_processor.log = lambda step, mean, largest, norm, **_: found.append((mean, norm))
    trainer.metrics_processor.log_validation = lambda loss, step: found.append((loss,))
    assert isinstance(trainer.pp_schedule, titan.TitanSchedule) == (pipelining_fn is not pipeline_llm), type(trainer.pp_schedule)
    trainer.train()
    trainer.close()
    local = [p.to_local() if hasattr(p, "to_local") else p for part in trainer.model_parts for p in part.parameters()]
    return found, hashlib.sha1(b"".join(p.detach().contiguous().numpy().tobytes() for p in local)).hexdigest()[:12]


def body(folder):
    def of_rank(rank):
        torch.set_num_threads(1)
        os.chdir(folder)
        torch.distributed.pipelining.PipelineStage._get_init_p2p_neighbors_ops = lambda self: []  # its message to itself fails over Gloo
        result = []
        for schedule, programs in CASES:
            result.append([train(folder, schedule, pipeline_llm)])
            for program in programs:
                csv = str(folder / program) if program == "order.csv" else None
                ours = titan.over(pipeline_llm, program) if program and not csv else titan.pipelining_fn
                result[-1].append(train(folder, schedule, ours, csv=csv))
        for schedule in RESUMED:
            train(folder, schedule, pipeline_llm, saved=f"{schedule} theirs")
            train(folder, schedule, titan.pipelining_fn, saved=f"{schedule} ours")
            torch.distributed.barrier()
            if rank == 0:
                shutil.copytree(folder / f"{schedule} theirs", folder / f"{schedule} taken")
            torch.distributed.barrier()
            go_on = [("theirs", pipeline_llm), ("ours", titan.pipelining_fn), ("taken", titan.pipelining_fn)]
            result.append([train(folder, schedule, made, saved=f"{schedule} {saved}", steps=2 * STEPS) for saved, made in go_on])
        if Trainer.__module__ == "torchtitan.trainer":  # a loss with a backward of its own, which is the head's
            result.append([train(folder, "ZBVZeroBubble", titan.pipelining_fn, chunked=True)])
        print("RESULT" + json.dumps(result))
        torch.distributed.destroy_process_group()  # as torchtitan's main does

    return of_rank


with tempfile.TemporaryDirectory() as name:
    os.environ["HF_HOME"] = name + "/hf"
    assets(pathlib.Path(name))
    pathlib.Path(name, "order.csv").write_text(order())
    ranks = run(RANKS, body(pathlib.Path(name)), how="torchrun")


def same(found, theirs):
    """Whether two runs are equal, but for losses of the Validator that torchtitan's own run lacks."""
    steps, parameters = found
    if all(len(step) == 2 for step in theirs[0]):
        validated = [step[0] for step in steps if len(step) == 1]
        check(len(validated) == len(theirs[0]) and all(map(math.isfinite, validated)), f"losses of the Validator: {validated}")
        steps = [step for step in steps if len(step) == 2]
    return [steps, parameters] == theirs


for rank, ended in enumerate(ranks):
    if ended.code != 0:
        continue
    result = json.loads(ended.out.split("RESULT")[1])
    for (schedule, programs), (theirs, *ours) in zip(CASES, result):
        for program, found in zip(programs, ours):
            print(f"rank {rank}, {program or schedule}: {found}, by torchtitan's {schedule} {theirs}")
            check(same(found, theirs), f"{program or schedule}, rank {rank}: {found}, by torchtitan's {schedule} {theirs}")
    for schedule, (theirs, *ours) in zip(RESUMED, result[len(CASES):]):
        for saved, found in zip(("ours", "theirs"), ours):
            words = f"{schedule}, rank {rank}, from the checkpoint of {saved}: {found}, torchtitan's {theirs}"
            print(words)
            check(same(found, theirs) and len(found[0]) == 2 * STEPS, words)
    for [[chunked, _]] in result[len(CASES) + len(RESUMED):]:
        whole = [step for step in result[len(CASES) - 1][0][0] if len(step) == 2]  # without the Validator's
        flat = [[figure for step in found for figure in step] for found in (chunked, whole)]
        check(all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(*flat)), f"chunked loss, rank {rank}: {flat[0]}, whole {flat[1]}")
finish()
