# timeout: 400
"""Models of transformers under schedules: parameters equal those of the whole model in a plain loop, bit for bit; and checkpoints."""
import copy
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = str(pathlib.Path(__file__).parent)
sys.path.insert(0, HERE)
from support.ranks import BUILD, SOURCE, check, equal, finish, run  # noqa: E402

import torch  # noqa: E402

try:
    import transformers  # noqa: E402
    from safetensors.torch import load_file  # noqa: E402
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)

import chevron_pipelining as cp  # noqa: E402

check("chevron_pipelining.transformers" not in sys.modules, "import chevron_pipelining imports transformers")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
GPT2 = dict(vocab_size=64, n_embd=32, n_layer=5, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1,
            eos_token_id=2)
#        configuration, schedule and microbatches, those of the resumed run, whether masked, whether from a folder
CASES = [(transformers.LlamaConfig(**SMALL), ("1F1B", 4), ("ZBVZeroBubble", 4), False, True),
         (transformers.Qwen2Config(**SMALL, tie_word_embeddings=True), ("ZBVZeroBubble", 4), ("ZB-H1", 4), True, True),
         (transformers.Qwen3Config(**SMALL, head_dim=8), ("V-Half", 3), ("GPipe", 3), True, False),
         (transformers.MistralConfig(**SMALL, sliding_window=4), ("InterleavedZeroBubble", 4), ("1F1B", 4), True, True),
         (transformers.GPT2Config(**GPT2), ("ZB-H1", 4), ("Interleaved1F1B", 4), False, False)]


def batch(step, masked):
    """Token ids, mask and labels; microbatches have different numbers of labels, and steps different lengths."""
    draws = torch.Generator().manual_seed(step)
    tokens = torch.randint(3, 64, (8, 8 + step), generator=draws)
    mask = (torch.arange(8 + step) < torch.randint(5, 9 + step, (8, 1), generator=draws)).long()
    return (tokens, mask, tokens.masked_fill(mask == 0, -100)) if masked else (tokens, None, tokens.masked_fill(tokens < 9, -100))


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def plain(model, m, masked, steps):
    """The plain loop: losses, and states after three steps and at the end. A tied head has a sum of its own, which is added at the end of
    a step, as the rank of the head adds it."""
    head, words = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head.weight is words.weight
    if tied:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    optimizer, losses, states = adamw(model.parameters()), [], []
    for step in range(steps):
        tokens, mask, labels = batch(step, masked)
        count, total = int((labels[:, 1:] != -100).sum()), 0.0
        optimizer.zero_grad()
        for i in range(m):
            given = None if mask is None else mask.tensor_split(m)[i]
            logits = model(input_ids=tokens.tensor_split(m)[i], attention_mask=given, use_cache=False).logits
            loss = model.loss_function(logits=logits, labels=labels.tensor_split(m)[i], vocab_size=64, num_items_in_batch=count)
            loss.backward()
            total += loss.item()
        if tied:
            words.weight.grad += head.weight.grad
            head.weight.grad.copy_(words.weight.grad)
        optimizer.step()
        losses.append(total)
        if step in (2, steps - 1):
            states.append({name: value.clone() for name, value in model.state_dict().items()})
    return losses, states


def train(source, schedule, m, masked, steps, folder=None):
    """Steps of a pipeline, resumed where `folder` is given."""
    mine = cp.from_pretrained(source, schedule, m)
    trainer = cp.Trainer(schedule, mine.stages, m, mine.loss_fn, adamw)
    if folder:
        mine.resume(folder, trainer)
    losses = []
    while trainer.next_step < steps:
        tokens, mask, labels = batch(trainer.next_step, masked)
        losses.append(trainer.step(tokens, target=labels, **({} if mask is None else {"attention_mask": mask})).loss)
    return mine, trainer, losses


def case(rank, number, made, folder, wanted):
    config, (schedule, m), (other, _), masked, from_folder = CASES[number]
    losses, states = wanted
    name = f"{config.model_type} under {schedule}, rank {rank}: "
    mine, trainer, found = train(f"{folder}/{number}" if from_folder else made, schedule, m, masked, 3)
    check(all(abs(a - b) < 1e-5 for a, b in zip(found, losses)), name + f"losses {found}, plain {losses}")
    own = mine.model.state_dict()
    check(0 < len(own) < len(states[0]) or schedule != "1F1B", name + "all weights are on this rank")
    for key, value in own.items():
        check(torch.equal(value, states[0][key]), name + f"{key} differs by {(value - states[0][key]).abs().max()}")
    for _ in range(2):  # the second into a folder that is there
        mine.save_pretrained(f"{folder}/{number}.saved", trainer)
    mine, _, found = train(f"{folder}/{number}.saved", other, m, masked, 4, f"{folder}/{number}.saved")
    check(len(found) == 1 and abs(found[0] - losses[3]) < 1e-5, name + f"the resumed step's loss {found}, plain {losses[3]}")
    for key, value in mine.model.state_dict().items():
        check(torch.equal(value, states[1][key]), name + f"after a resumed step under {other}, {key} differs")


def refuses(rank, made):
    """Sizes that do not fit, and classes that cannot be cut."""
    for text, arguments in (("5 layers for 2 stages as layers=[2, 2]", dict(model=made, layers=[2, 2])),
                            ("a value of type int", dict(model=7))):
        try:
            cp.from_pretrained(arguments.pop("model"), "1F1B", 4, **arguments)
            check(False, f"not refused: {text}")
        except cp.UsageError as error:
            check(text in str(error) and "Remedy" in str(error), f"refused as {error}")
    one = cp.from_pretrained(made, "1F1B", 4, layers=[4, 1], recompute=True)
    check([f"model.layers.{4 if rank else 0}.mlp.up_proj.weight" in one.model.state_dict()] == [True] and one.stages[0].recompute, "layers=[4, 1]")


def halves(model, steps):
    """The plain loop of two replicas: each sums gradients over its half of a batch, and the loss is the mean over the labels of both."""
    optimizer, losses = adamw(model.parameters()), []
    for step in range(steps):
        tokens, mask, labels = batch(step, True)
        count, total, sums = int((labels[:, 1:] != -100).sum()), 0.0, []
        for half in range(2):
            optimizer.zero_grad()
            for i in range(2 * half, 2 * half + 2):
                logits = model(input_ids=tokens.tensor_split(4)[i], attention_mask=mask.tensor_split(4)[i], use_cache=False).logits
                loss = model.loss_function(logits=logits, labels=labels.tensor_split(4)[i], vocab_size=64, num_items_in_batch=count)
                loss.backward()
                total += loss.item()
            sums.append([p.grad for p in model.parameters()])
        for p, first, second in zip(model.parameters(), *sums):
            p.grad = first + second
        optimizer.step()
        losses.append(total)
    return losses, model.state_dict()


def replicated(rank, made, folder, wanted):
    """Two replicas of two ranks, whose halves of a batch have different numbers of labels; one copy is saved."""
    mine = cp.from_pretrained(made, "1F1B", 2, replicas=2)
    trainer = cp.Trainer("1F1B", mine.stages, 2, mine.loss_fn, adamw, replicas=2)
    losses, state = wanted
    for step in range(3):
        tokens, mask, labels = (of.tensor_split(2)[trainer.replica] for of in batch(step, True))
        loss = trainer.step(tokens, target=labels, attention_mask=mask).loss
        check(abs(loss - losses[step]) < 1e-5, f"step {step} of two replicas, rank {rank}: loss {loss}, plain {losses[step]}")
    for key, value in mine.model.state_dict().items():
        check(torch.equal(value, state[key]), f"two replicas, rank {rank}: {key} differs by {(value - state[key]).abs().max()}")
    mine.save_pretrained(f"{folder}/replicas", trainer)
    mine.resume(f"{folder}/replicas", trainer)
    check(trainer.next_step == 3, f"resumed at step {trainer.next_step}")
    for count in (3, 0):
        try:
            cp.from_pretrained(made, "1F1B", 2, replicas=count)
            check(False, f"not refused: {count} replicas on 4 ranks")
        except cp.UsageError as error:
            check(f"replicas={count} on 4 ranks. Remedy" in str(error), f"refused as {error}")
    finish()


def script(folder):
    """The script of docs/guides/python.md, which trains, saves, and resumes."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = "one rank computes the first layers and sends hidden states to next which has loss".split()
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<pad>", "<unk>"] + words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", unk_token="<unk>").save_pretrained(f"{folder}/0")
    pathlib.Path(f"{folder}/text").write_text("\n".join(" ".join(words[i:i + 3 + i % 5]) for i in range(12)))
    page = (SOURCE / "docs" / "guides" / "python.md").read_text()
    (pathlib.Path(folder) / "finetune.py").write_text(re.search(r"```python file finetune.py\n(.*?)```", page, re.S).group(1))
    said = []
    for begin, steps in ((f"{folder}/0", "20"), (f"{folder}/tuned", "30")):
        ran = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", f"{folder}/finetune.py", begin,
                              f"{folder}/text", f"{folder}/tuned", steps], capture_output=True, text=True,
                             env=dict(os.environ, PYTHONPATH=str(SOURCE / "python")))
        check(ran.returncode == 0, f"finetune.py ended with {ran.returncode}: {ran.stdout}{ran.stderr[-3000:]}")
        said += [(int(step), float(loss)) for step, loss in re.findall(r"step (\d+): loss ([0-9.]+)", ran.stdout)]
    check([step for step, _ in said] == list(range(30)) and said[-1][1] < 0.75 * said[0][1], f"finetune.py: {said}")
    tuned = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/tuned")
    tokens = transformers.AutoTokenizer.from_pretrained(f"{folder}/tuned")("one rank", return_tensors="pt").input_ids
    check(tuned.generate(tokens, max_new_tokens=4, do_sample=False).shape[1] > 2, "transformers generates from the saved folder")


folder = tempfile.mkdtemp(dir=BUILD)  # ranks are forks, which would remove a TemporaryDirectory
torch.set_num_threads(1)
made, wanted = [], []
for number, (config, (_, m), _, masked, _) in enumerate(CASES):
    torch.manual_seed(number)
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    model.save_pretrained(f"{folder}/{number}", max_shard_size="60KB")
    made.append(model)
    wanted.append(plain(copy.deepcopy(model), m, masked, 4))


def body(rank):
    for number in range(len(CASES)):
        case(rank, number, made[number], folder, wanted[number])
    refuses(rank, made[0])
    finish()


torch.manual_seed(len(CASES))
model = transformers.AutoModelForCausalLM.from_config(CASES[0][0]).train()
two = halves(copy.deepcopy(model), 3)
run(2, body)
run(4, lambda rank: replicated(rank, model, folder, two))
files = sorted(file.name for file in pathlib.Path(f"{folder}/replicas").iterdir() if "safetensors" in file.name or file.suffix == ".pt")
check([name for name in files if name.endswith(".pt")] == ["trainer-00000.pt", "trainer-00001.pt"], f"two replicas saved {files}")
read = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/replicas").state_dict()
check(all(torch.equal(value, two[1][name]) for name, value in read.items()), "transformers reads other weights than two replicas saved")
for number, (config, *_) in enumerate(CASES):
    saved = pathlib.Path(f"{folder}/{number}.saved")
    names = lambda path: sorted(name for file in path.glob("*.safetensors") for name in load_file(file))  # noqa: E731
    differ = set(names(saved)) ^ set(names(saved.with_suffix("")))
    check(not differ, f"{config.model_type}: names of tensors that one folder has: {differ}")
    check(not saved.with_name(saved.name + ".part").exists(), f"{saved}.part remains")
    read = transformers.AutoModelForCausalLM.from_pretrained(saved).state_dict()
    check(equal([read[name] for name in sorted(read)], [wanted[number][1][0][name] for name in sorted(read)]),
          f"{config.model_type}: transformers reads other weights than were saved")
script(folder)
shutil.rmtree(folder)
finish()
