"""Causal language models of transformers as the stages of a schedule, cut between their layers: docs/guides/python.md."""
import copy
import json
import os
import pathlib
import re
import shutil

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers import __version__ as transformers_version

from . import binding
from .errors import UsageError
from .job import place, ranks_of
from .runtime import text_of
from .stage import PipelineStage, device_of

TRAINER = "trainer-{:05d}.pt"  # of a rank


class Absent(nn.Module):
    """In the place of a module that another stage has: returns its hidden states, or zero in place of an embedding."""

    def __init__(self, module, outputs=None):
        super().__init__()
        # Models choose a layer's mask and positions by attributes of the layer.
        self.__dict__.update((k, v) for k, v in vars(module).items() if k not in vars(self) and isinstance(v, (str, int, float)))
        self.outputs = outputs   # of a layer that returns a tuple: its length
        self.entering = None     # the hidden states of the stage before
        self.leaving = None      # the hidden states that were passed last

    def forward(self, *args, **kwargs):
        hidden = self.entering if self.entering is not None else args[0] if args else kwargs.get("hidden_states")
        self.leaving = hidden
        if not torch.is_tensor(hidden) or hidden.dim() < 3:  # token ids, positions, or a mask
            return torch.zeros(())
        return hidden if self.outputs is None else (hidden,) + (None,) * (self.outputs - 1)


class Layout:
    """The parts of a model class: its layers, and its modules before and after them, in the order of a forward on the meta device."""

    def __init__(self, model):
        count = model.config.get_text_config().num_hidden_layers
        lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == count]
        self.kind = type(model).__name__
        if not lists or not lists[0].startswith(model.base_model_prefix + "."):
            self._refuse(f"has no list of {count} layers")
        self.list = lists[0]
        path = self.list.split(".")
        self.containers = [".".join(path[:i]) for i in range(len(path))]
        self.layers = [f"{self.list}.{i}" for i in range(count)]
        beside = [f"{name}.{child}" if name else child for name in self.containers
                  for child, _ in model.get_submodule(name).named_children() if f"{name}.{child}".strip(".") not in self.containers + [self.list]]
        for name in self.containers:
            for parameter, _ in model.get_submodule(name).named_parameters(recurse=False):
                self._refuse(f"has the parameter `{parameter}` outside of its modules")
        self.outputs = None  # of a layer: None, or the length of a tuple
        called = self._order(model, beside)
        first, last = called.index(self.layers[0]), called.index(self.layers[-1])
        carried = [name for name in beside if isinstance(model.get_submodule(name), nn.Dropout)
                   or any(True for _ in model.get_submodule(name).parameters())]
        self.after = [name for name in carried if name in called[last:]]
        self.before = [name for name in carried if name not in self.after]
        if called[first:last + 1] != self.layers or set(self.before) & set(called[last:]):
            self._refuse("does not call its layers one after another, each once")
        self.sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in self.pieces}
        self.tied = {target: source for target, source in model.all_tied_weights_keys.items() if self._piece(target) != self._piece(source)}

    @property
    def pieces(self):
        """The names of all modules with weights."""
        return self.before + self.layers + self.after

    def _refuse(self, why):
        """Raises the error of a class that cannot be cut."""
        raise UsageError(f"{self.kind} {why}, and cannot be cut between layers. Remedy: stages of your own (PipelineStage)")

    def _piece(self, parameter):
        """The piece that has a parameter."""
        return next(name for name in self.pieces if parameter.startswith(name + "."))

    def _order(self, model, beside):
        """The order of calls, in a forward; checks that only hidden states are passed from layer to layer."""
        called, passed = [], []

        def before(name, module, args, kwargs):
            called.append(name)
            if name in beside:
                return
            given = list(args) + list(kwargs.values())
            hidden = args[0] if args else kwargs["hidden_states"]
            if passed and hidden is not passed[0]:
                self._refuse("changes hidden states between its layers")
            flat = [v for value in given if value is not hidden for v in (value if isinstance(value, (tuple, list)) else [value])]
            if any(torch.is_tensor(v) and v.requires_grad for v in flat):
                self._refuse("gives its layers more than hidden states, masks and positions")

        def after(module, args, output):
            passed[:] = [output[0] if isinstance(output, (tuple, list)) else output]
            self.outputs = len(output) if isinstance(output, (tuple, list)) else None

        for name in beside + self.layers:
            model.get_submodule(name).register_forward_pre_hook(lambda m, a, k, name=name: before(name, m, a, k), with_kwargs=True)
        for name in self.layers:
            model.get_submodule(name).register_forward_hook(after)
        tokens = torch.ones(1, 4, dtype=torch.long, device="meta")
        model(input_ids=tokens, attention_mask=tokens, use_cache=False)
        return called

    def of_stage(self, counts, stage):
        """The pieces of a stage, and its ties. A tied head has its embedding beside it, whose weight it shares."""
        begin = sum(counts[:stage])
        first, last = stage == 0, stage == len(counts) - 1
        own = (self.before if first else []) + self.layers[begin:begin + counts[stage]] + (self.after if last else [])
        sources = [source for target, source in self.tied.items() if self._piece(target) in own]
        ties = sources if last and not first else list(self.tied.values()) if first and not last else []
        return own + [self._piece(source) for source in sources if self._piece(source) not in own], {name: name for name in ties}

    def remove(self, model, kept):
        """Replaces all pieces of a model but those that are kept."""
        for name in self.pieces:
            if name not in kept:
                model.set_submodule(name, Absent(model.get_submodule(name), self.outputs if name in self.layers else None))
        model.all_tied_weights_keys = {target: source for target, source in model.all_tied_weights_keys.items()
                                       if self._piece(target) in kept and self._piece(source) in kept}
        return model

    def cut(self, model, kept):
        """A model that shares its pieces with `model`, and has only those that are kept."""
        def container(name):
            """A copy of a module, with a list of children of its own."""
            made = copy.copy(model.get_submodule(name))
            made._modules = dict(made._modules)
            return made

        made = container("")
        for name in self.containers[1:] + [self.list]:
            made.set_submodule(name, container(name))
        return self.remove(made, kept)


class Part(nn.Module):
    """One stage's module: runs the model's own forward, which computes masks and positions of its layers."""

    def __init__(self, model, layout, counts, stage):
        super().__init__()
        self.model = model
        self.is_first, self.is_last = stage == 0, stage == len(counts) - 1
        # In a tuple, so that no module has two names. The first layer is absent from all stages but the first, the last from all but the last.
        self.ends = model.get_submodule(layout.layers[0]), model.get_submodule(layout.layers[-1])

    def forward(self, hidden, mask=None, positions=None, *, attention_mask=None, position_ids=None):
        """hidden: token ids for the first stage, else hidden states; masks and positions are passed to the next stage."""
        mask, positions = attention_mask if attention_mask is not None else mask, position_ids if position_ids is not None else positions
        run = self.model if self.is_last else self.model.base_model
        given = {"attention_mask": mask, "use_cache": False, **({"position_ids": positions} if positions is not None else {})}
        entry, leave = self.ends
        if self.is_first:
            out = run(input_ids=hidden, **given)
        else:
            entry.entering = hidden
            out = run(inputs_embeds=hidden.detach(), **given)
            entry.entering = entry.leaving = None
        if self.is_last:
            return out.logits
        hidden, leave.leaving = leave.leaving, None
        return hidden, mask, positions


class _Sum(torch.autograd.Function):
    """A loss times a factor, whose backward starts with 1: gradients of microbatches are summed as they are."""

    @staticmethod
    def forward(ctx, loss, factor):
        return loss * factor

    @staticmethod
    def backward(ctx, given):
        return torch.ones_like(given), None


class MeanOverTokens:
    """The model's loss, as the mean over all labelled tokens of a step, those of all replicas: microbatches weigh as many labels as
    they have.

    ranks: the global ranks with the last stage, of all replicas; None: there is one, or this rank does not have that stage
    """

    def __init__(self, model, ranks=None):
        self.function, self.vocab_size = model.loss_function, model.config.get_text_config().vocab_size
        self._group = dist.new_group(ranks, backend="gloo", use_local_synchronization=True) if ranks else None

    def begin(self, targets, weighed):
        """Begins a step with these labels of this replica. `weighed`: whether the report weighs losses by samples, else alike. Collective
        over the ranks with the last stage."""
        counts = torch.tensor([sum(int((labels[..., 1:] != -100).sum()) for labels in targets), sum(len(labels) for labels in targets)])
        if self._group is not None:
            dist.all_reduce(counts, group=self._group)
        self.tokens, samples = max(1, int(counts[0])), int(counts[1])
        self.factor = (lambda labels: samples / len(labels)) if weighed else lambda labels: len(targets)

    def __call__(self, logits, labels):
        return _Sum.apply(self.function(logits=logits, labels=labels, vocab_size=self.vocab_size, num_items_in_batch=self.tokens),
                          self.factor(labels))


def balanced(layers, head, stages):
    """The number of layers of each stage, for costs of layers and of the head, which the last stage has; the sum of squares is least."""
    ends = [0]
    for cost in layers:
        ends.append(ends[-1] + cost)
    best = {0: (0, [])}  # by the number of layers so far
    for stage in range(stages):
        last, found = stage == stages - 1, {}
        for begin, (squares, counts) in best.items():
            for end in range(begin + (not last or stages == 1), len(ends)) if not last else [len(layers)]:
                total = squares + (ends[end] - ends[begin] + (head if last else 0)) ** 2
                if end not in found or total < found[end][0]:
                    found[end] = total, counts + [end - begin]
        best = found
    return best[len(layers)][1] if len(layers) in best else None


class CausalLM:
    """This rank's stages of a causal language model, and its loss: `from_pretrained`.

    stages: what Schedule and Trainer take
    loss_fn: the mean over the labelled tokens (labels, shifted by the loss, that are not -100) of a step
    model: this rank's part of the transformers model; pieces of other ranks are empty
    layers: the number of layers of each stage
    """

    def __init__(self, model, layout, layers, where, recompute, group, replicas, device):
        """where: the pipeline rank of each stage. Other arguments as of `from_pretrained`."""
        self.model, self.layers, self._group, self._ranks = model, layers, group, place(group)[1] // replicas
        rank = place(group)[0]
        numbers = [number for number, at in enumerate(where) if at == rank % self._ranks]
        if model.is_gradient_checkpointing:
            recompute = True
            model.gradient_checkpointing_disable()
        self.stages = []
        for number in numbers:
            kept, ties = layout.of_stage(layers, number)
            self.stages.append(PipelineStage(Part(layout.cut(model, kept), layout, layers, number), number, len(layers), device, group=group,
                                             recompute=recompute, ties={"model." + name: name for name in ties}))
        of_loss = [ranks_of(group)[where[-1] + r * self._ranks] for r in range(replicas)] if replicas > 1 and rank % self._ranks == where[-1] else None
        self.loss_fn = MeanOverTokens(model, of_loss)
        # A tied embedding is written by the rank of the first stage.
        self._written_elsewhere = set() if 0 in numbers else {name for pair in layout.tied.items() for name in pair}

    def save_pretrained(self, folder, trainer=None):
        """Writes the whole model as transformers' save_pretrained does, one or more files a rank of replica 0; with `trainer` also the
        optimizer's state and the number of the next step, for `resume`. Collective. All files are written beside, in `folder`.part, and renamed
        when every rank's are complete."""
        folder = pathlib.Path(folder)
        part = folder.with_name(folder.name + ".part")
        rank, world = place(self._group)
        if world > 1 and not dist.is_initialized():
            raise UsageError("save_pretrained on several ranks needs their process group. Remedy: torch.distributed.init_process_group('gloo')")
        if rank == 0:
            shutil.rmtree(part, ignore_errors=True)
        self._agree(world, "")
        files, names, problem, size = [], {}, "", 0
        try:
            if rank < self._ranks:
                files, names, size = self._write(part, rank, trainer)
        except Exception as error:
            problem = f"rank {rank}: {type(error).__name__}: {error}"
        every = self._agree(world, problem, files, names, size)[:self._ranks]
        if rank == 0:
            try:
                _join(part, every)
                _move(part, folder)
            except Exception as error:
                problem = f"rank 0: {type(error).__name__}: {error}"
        self._agree(world, problem)

    def _write(self, part, rank, trainer):
        """Writes this rank's stages, and the state of `trainer` unless it is None. Returns the names of the files, the file of each tensor,
        and the bytes of all."""
        state = {k: v for k, v in self.model.state_dict().items() if k not in self._written_elsewhere}
        self.model.should_save_on_this_rank = lambda is_main_process: True  # transformers writes on rank 0 alone
        self.model.save_pretrained(part / str(rank), state_dict=state)
        files = sorted(file.name for file in (part / str(rank)).glob("model*.safetensors"))
        index = part / str(rank) / "model.safetensors.index.json"
        names = json.loads(index.read_text())["weight_map"] if index.exists() else dict.fromkeys(_names(part / str(rank) / files[0]), files[0])
        if trainer is not None:
            torch.save(self._state(trainer), part / TRAINER.format(rank))
        return files, names, sum(p.numel() * p.element_size() for p in state.values())

    def _agree(self, world, problem, *what):
        """Gathers a problem, or "", and further values of all ranks; a problem of any rank is raised on all."""
        every = [None] * world
        if world > 1:
            dist.all_gather_object(every, (problem, *what), group=self._group)
        else:
            every = [(problem, *what)]
        problems = [one[0] for one in every if one[0]]
        if problems:
            raise UsageError(f"save_pretrained: {'; '.join(problems)}. Remedy: a folder that all ranks can write")
        return every

    def _state(self, trainer):
        """The optimizer's state by names of parameters, and the number of the next step."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        optimizer = trainer.optimizer
        return {"state": {names[id(p)]: value for p, value in optimizer.state.items()},
                "groups": [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups if group["params"]],
                "next_step": trainer.next_step}

    def resume(self, folder, trainer):
        """Gives a trainer the optimizer's state and the number of the next step that `save_pretrained(folder, trainer)` has written,
        by names of parameters: on any number of ranks, and under any schedule."""
        saved = [torch.load(file, mmap=True, map_location="cpu") for file in sorted(pathlib.Path(folder).glob("trainer-*.pt"))]
        if not saved:
            raise UsageError(f"{folder} has no trainer-*.pt. Remedy: save_pretrained(folder, trainer)")
        state = {name: value for one in saved for name, value in one["state"].items()}
        names = {id(p): name for name, p in self.model.named_parameters()}
        optimizer = trainer.optimizer
        given = optimizer.state_dict()
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        given["state"] = {i: {k: v.clone() if torch.is_tensor(v) else v for k, v in state[name].items()}
                          for i, name in enumerate(order) if name in state}
        groups = next((one["groups"] for one in saved if one["groups"]), [])  # a rank that trains nothing has written none
        for group, read in zip(given["param_groups"], groups if order else []):
            group.update(read)
        optimizer.load_state_dict(given)
        trainer.next_step = saved[0]["next_step"]


def _names(file):
    """The names of a file's tensors."""
    with safe_open(file, "pt") as opened:
        return list(opened.keys())


def _join(part, every):
    """Makes one model of the ranks' folders in `part`: numbers the files, and writes their index."""
    count, number, weights = sum(len(files) for _, files, _, _ in every), 0, {}
    for rank, (_, files, names, _) in enumerate(every):
        renamed = {}
        for file in files:
            number += 1
            renamed[file] = f"model-{number:05d}-of-{count:05d}.safetensors" if count > 1 else file
            os.replace(part / str(rank) / file, part / renamed[file])
        weights.update((name, renamed[file]) for name, file in names.items())
        (part / str(rank) / "model.safetensors.index.json").unlink(missing_ok=True)
        for file in (part / str(rank)).iterdir():
            os.replace(file, part / file.name)
        (part / str(rank)).rmdir()
    if count > 1:
        index = {"metadata": {"total_size": sum(size for *_, size in every)}, "weight_map": weights}
        (part / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def _move(part, folder):
    """Renames `part` to `folder`; into a folder that is there, file by file, and removes the model that it had."""
    if not folder.exists():
        os.rename(part, folder)
        return
    made = [file.name for file in part.iterdir()]
    for name in sorted(made, key=lambda name: name.endswith(".json")):
        os.replace(part / name, folder / name)
    for file in folder.iterdir():
        if file.name not in made and re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?|trainer-\d{5}\.pt", file.name):
            file.unlink()
    part.rmdir()


def from_pretrained(model, schedule, n_microbatches, *, stages_per_rank=0, layers=None, recompute=False, group=None, replicas=1,
                    device=None, **options):
    """Cuts a causal language model of transformers into the stages that this rank has under a schedule.

    model: a folder or name as of AutoModelForCausalLM.from_pretrained, of which each rank reads the weights of its own stages; or a
           model, equal on all ranks, whose modules the stages take
    schedule, n_microbatches: as of Schedule and Trainer
    stages_per_rank: 0: the schedule's default
    layers: the number of layers of each stage; None: balanced by numbers of parameters, with the head, without embeddings
    recompute: of the stages: F keeps their inputs only
    replicas: copies of the pipeline, as of Trainer; the loss is the mean over the labelled tokens of all
    device: of this rank's stages, as of PipelineStage; None: of the given model, and the CPU for a folder
    options: of AutoModelForCausalLM.from_pretrained: dtype, attn_implementation, values of the configuration, ...
    """
    if int(transformers_version.split(".")[0]) < 5:
        raise UsageError(f"from_pretrained needs transformers 5, and {transformers_version} is installed. Remedy: pip install 'transformers>=5'")
    rank, world = place(group)
    whole = isinstance(model, PreTrainedModel)
    if not whole and not isinstance(model, (str, os.PathLike)):
        raise UsageError(f"from_pretrained is given a value of type {type(model).__name__}. Remedy: a folder, a name, or a PreTrainedModel")
    if replicas < 1 or world % replicas != 0:
        raise UsageError(f"replicas={replicas} on {world} ranks. Remedy: as many processes as ranks of the pipeline times replicas")
    if replicas > 1 and not dist.is_initialized():
        raise UsageError("from_pretrained for replicas counts their tokens over a process group. Remedy: torch.distributed.init_process_group('gloo')")
    where = binding.Program(text_of(schedule), world // replicas, n_microbatches, stages_per_rank).ranks_of_stages
    config, options = (model.config, options) if whole else AutoConfig.from_pretrained(model, return_unused_kwargs=True, **options)
    if getattr(config, "output_router_logits", False):
        raise UsageError("the loss of router logits sums over all layers, and the loss of a pipeline is the last stage's. Remedy: "
                         "output_router_logits=False")
    with torch.device("meta"):
        code = {"trust_remote_code": options["trust_remote_code"]} if "trust_remote_code" in options else {}
        skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager", dtype=torch.bfloat16, **code)
    kind, layout = type(model) if whole else type(skeleton), Layout(skeleton)
    if layers is None:
        layers = balanced([layout.sizes[name] for name in layout.layers], sum(layout.sizes[name] for name in layout.after), len(where))
    if layers is None or len(layers) != len(where) or sum(layers) != len(layout.layers) or min(layers[:-1], default=1) < 1 or layers[-1] < 0:
        raise UsageError(f"{len(layout.layers)} layers for {len(where)} stages" + (f" as layers={layers}" if layers else "") + ". Remedy: "
                         "`layers` with a number for each stage that add up to all layers, at least 1 for each but the last")
    numbers = [number for number, at in enumerate(where) if at == rank % (world // replicas)]
    kept = {name for number in numbers for name in layout.of_stage(layers, number)[0]}
    if whole:
        return CausalLM(layout.cut(model, kept), layout, layers, where, recompute, group, replicas, model.device if device is None else device)
    device = device_of(numbers[0], "cpu" if device is None else device)

    def init(self, config, *args, **kwargs):
        kind.__init__(self, config, *args, **kwargs)
        layout.remove(self, kept)
        absent = [name.removeprefix(kind.base_model_prefix + ".") for name in layout.pieces if name not in kept]
        self._keys_to_ignore_on_load_unexpected |= {rf"^({kind.base_model_prefix}\.)?{re.escape(name)}\." for name in absent}

    own = type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})
    read, found = own.from_pretrained(model, config=config, output_loading_info=True, **options)
    if found["missing_keys"]:
        raise UsageError(f"{model} has no weights {sorted(found['missing_keys'])[:3]} of {kind.__name__}. Remedy: a complete folder")
    read.__class__ = kind
    return CausalLM(read.train().to(device), layout, layers, where, recompute, group, replicas, device)
