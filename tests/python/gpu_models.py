# timeout: 300
"""Models of transformers, and torchtitan's stages, on pretended GPUs: losses, parameters, saved folders and resumed runs have the bits of the
CPU's run."""
import copy
import pathlib
import shutil
import sys
import tempfile
from types import SimpleNamespace

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from support.gpus import communicators, contexts  # noqa: E402
from support.kinds import on_cpu  # noqa: E402
from support.ranks import BUILD, check, equal, finish, run  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402

import chevron_pipelining as cp  # noqa: E402
import chevron_pipelining.torchtitan as titan  # noqa: E402

try:
    import transformers  # noqa: E402
    from safetensors.torch import load_file  # noqa: E402
except ImportError as problem:
    transformers = None
    print(f"without models of transformers: {problem}")
sys.path[:] = [folder for folder in sys.path if pathlib.Path(folder).resolve() != HERE]  # torchtitan is the package, not a file of this folder

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def models():
    """Configuration, attention, schedule and that of the resumed run, whether masked, whether from a folder."""
    return [(transformers.LlamaConfig(**SMALL), "eager", "1F1B", "ZBVZeroBubble", False, True),
            (transformers.Qwen2Config(**SMALL, tie_word_embeddings=True), "sdpa", "ZBVZeroBubble", "ZB-H1", True, False)]


def batch(step, masked):
    """Token ids, mask and labels of eight samples; microbatches have different numbers of labels."""
    draws = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, 64, (8, 8 + step), generator=draws)
    mask = (torch.arange(8 + step) < torch.randint(5, 9 + step, (8, 1), generator=draws)).long()
    return (tokens, {"attention_mask": mask}, tokens.masked_fill(mask == 0, -100)) if masked else (tokens, {}, tokens.masked_fill(tokens < 9, -100))


def trained(source, schedule, masked, steps, device, saved=None, **options):
    """Steps of a Trainer on a device, resumed where `saved` is given: this rank's part of the model, the trainer and the losses."""
    mine = cp.from_pretrained(source, schedule, 4, device=device, **options)
    trainer = cp.Trainer(schedule, mine.stages, 4, mine.loss_fn, lambda parameters: torch.optim.AdamW(parameters, lr=1e-2), clip_grad_norm=0.5)
    if saved:
        mine.resume(saved, trainer)
    losses = []
    while trainer.next_step < steps:
        tokens, more, labels = batch(trainer.next_step, masked)
        losses.append(trainer.step(tokens, target=labels, **more).loss)
    return mine, trainer, losses


def pretrained(rank, folder):
    """A model on GPUs and on the CPU: three steps, a saved folder, and a fourth step of the run that goes on from the folder."""
    for number, (config, attention, schedule, other, masked, from_folder) in enumerate(models()):
        name = f"{config.model_type} under {schedule}, rank {rank}: "
        found = []
        for device in ("cpu", f"cuda:{rank}"):
            source, options = f"{folder}/{number}", {"attn_implementation": attention}
            if not from_folder:
                source, options = transformers.AutoModelForCausalLM.from_pretrained(source, **options).train().to(device), {}
            saved = f"{folder}/{number}.{device.split(':')[0]}"
            mine, trainer, losses = trained(source, schedule, masked, 3, device, **options)
            state = mine.model.state_dict()
            check(all(value.device == torch.device(device) for value in state.values()), name + f"weights are not all on {device}")
            mine.save_pretrained(saved, trainer)
            again, resumed, more = trained(saved, other, masked, 4, device, saved, attn_implementation=attention)
            moments = [value for p in again.model.parameters() for value in resumed.optimizer.state.get(p, {}).values()]
            found.append((losses + more, list(state), on_cpu(state.values()), on_cpu(again.model.state_dict().values()), on_cpu(moments)))
        of_cpu, on_gpu = found
        check(len(of_cpu[0]) == 4 and of_cpu[:2] == on_gpu[:2], name + f"losses {on_gpu[0]}, on the CPU {of_cpu[0]}")
        for which, (a, b) in zip(("parameters", "parameters of a resumed run", "the optimizer's state"), zip(of_cpu[2:], on_gpu[2:])):
            check(len(a) > 0 and equal(a, b), name + f"{which} differ")
    check(communicators() > 0 and contexts() == [rank], f"rank {rank}: {communicators()} communicators, contexts on the GPUs {contexts()}")
    finish()


class Decoder(nn.Module):
    """A model as torchtitan cuts it: modules that a stage lacks are None."""

    def __init__(self, layers):
        super().__init__()
        self.tok_embeddings, self.norm, self.output = nn.Embedding(16, 8), nn.LayerNorm(8), nn.Linear(8, 16)
        self.layers = nn.ModuleDict({str(i): nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for i in range(layers)})

    def forward(self, x):
        x = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for layer in self.layers.values():
            x = x + layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.output(x) if self.output is not None else x


def cross_entropy(output, labels):
    return nn.functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def own_cut(model, parallel_dims, job_config, device, model_args, parallelize_fn, loss_fn):
    """Cuts a model in the way of pipeline_llm of torchtitan 0.2, into a stage for each rank."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    stage, last = parallel_dims.rank, parallel_dims.pp - 1
    part = copy.deepcopy(model)
    for name in [name for name in part.layers if int(name) * parallel_dims.pp // len(part.layers) != stage]:
        del part.layers[name]
    part.tok_embeddings = part.tok_embeddings if stage == 0 else None
    part.norm, part.output = (part.norm, part.output) if stage == last else (None, None)
    part = parallelize_fn(part, parallel_dims, job_config)
    made = PipelineStage(part, stage, parallel_dims.pp, device)
    return Schedule1F1B(made, job_config.training.local_batch_size, loss_fn, scale_grads=False), [part], stage == 0, stage == last


def cuts_of_torchtitan():
    """pipeline_llm of torchtitan 0.2 and its schedules, where it is installed. To be imported by ranks: it asks for GPUs as it is imported, and
    forks of a process that has used CUDA cannot."""
    try:
        from torchtitan.distributed.pipeline_parallel import pipeline_llm
        from torchtitan.config import JobConfig
    except ImportError as problem:
        print(f"without torchtitan's own cut: {problem}")
        return []
    return [(pipeline_llm, "1F1B", JobConfig), (pipeline_llm, "ZBVZeroBubble", JobConfig)]


def configuration(schedule, kind):
    """What the cut reads of torchtitan's configuration."""
    if kind is None:
        return SimpleNamespace(training=SimpleNamespace(local_batch_size=8), parallelism=SimpleNamespace(pipeline_parallel_schedule_csv=None))
    config = kind()
    config.training.local_batch_size = 8
    config.parallelism.pipeline_parallel_degree, config.parallelism.pipeline_parallel_schedule = 2, schedule
    return config


def steps_of(cut, rank, schedule, kind, device, weights):
    """Two steps through torchtitan's pipelining_fn: losses of microbatches, and the parts' parameters."""
    mesh = SimpleNamespace(get_local_rank=lambda: rank, size=lambda: 2, get_group=lambda name: None)
    dims = SimpleNamespace(pp=2, world_size=2, rank=rank, get_mesh=lambda name: mesh)
    with torch.device("meta"):
        model = Decoder(4)
    run_, parts, first, last = titan.over(cut)(model, dims, configuration(schedule, kind), torch.device(device), SimpleNamespace(n_layers=4),
                                               lambda part, *_: part, cross_entropy)
    of_last = 0 if schedule == "ZBVZeroBubble" else 1
    check(isinstance(run_, titan.TitanSchedule) and (first, last) == (rank == 0, rank == of_last), f"rank {rank}: {run_}, first {first}, last {last}")
    for part in parts:  # torchtitan allocates and initializes parameters after the cut
        part.to_empty(device=device)
        part.load_state_dict({name: value for name, value in weights.items() if name in part.state_dict()})
    parameters = [p for part in parts for p in part.parameters()]
    optimizer, losses = torch.optim.AdamW(parameters, lr=1e-2), []
    for step in range(2):
        draws = torch.Generator().manual_seed(step)
        tokens, labels = (torch.randint(0, 16, (8, 6), generator=draws) for _ in range(2))
        optimizer.zero_grad()
        mine = []
        run_.step(*([tokens.to(device)] if first else []), **({"target": labels.to(device), "losses": mine} if last else {}), return_outputs=False)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        losses += [float(one) for one in mine]
    check(len(losses) == (16 if last else 0) and all(p.device == torch.device(device) for p in parameters), f"rank {rank} on {device}: {losses}")
    return losses, on_cpu(parameters)


def torchtitan(rank):
    torch.distributed.pipelining.PipelineStage._get_init_p2p_neighbors_ops = lambda self: []
    torch.manual_seed(1)
    weights = Decoder(4).state_dict()
    for cut, schedule, kind in [(own_cut, "1F1B", None)] + cuts_of_torchtitan():
        name = f"{cut.__name__} under {schedule}, rank {rank}: "
        of_cpu, on_gpu = (steps_of(cut, rank, schedule, kind, device, weights) for device in ("cpu", f"cuda:{rank}"))
        check(of_cpu[0] == on_gpu[0], name + f"losses {on_gpu[0]}, on the CPU {of_cpu[0]}")
        check(equal(of_cpu[1], on_gpu[1]), name + "parameters differ")
    check(communicators() > 0, "no communicator of NCCL")
    finish()


folder = tempfile.mkdtemp(dir=BUILD)  # ranks are forks, which would remove a TemporaryDirectory
torch.set_num_threads(1)
if transformers is not None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    # CUDA's fused kernels of attention have no counterpart on the CPU.
    torch.backends.cuda.enable_flash_sdp(False), torch.backends.cuda.enable_mem_efficient_sdp(False), torch.backends.cuda.enable_cudnn_sdp(False)
    for number, (config, *_) in enumerate(models()):
        torch.manual_seed(number)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/{number}")
    run(2, lambda rank: pretrained(rank, folder))
    for number in range(len(models())):
        of_cpu, on_gpu = ({name: value for file in sorted(pathlib.Path(f"{folder}/{number}.{device}").glob("*.safetensors"))
                           for name, value in load_file(file).items()} for device in ("cpu", "cuda"))
        check(sorted(of_cpu) == sorted(on_gpu) and len(of_cpu) > 10, f"model {number}: names that one folder has: {set(of_cpu) ^ set(on_gpu)}")
        check(all(torch.equal(value, on_gpu[name]) for name, value in of_cpu.items()), f"model {number}: saved weights differ")
run(2, torchtitan)
shutil.rmtree(folder)
finish()
