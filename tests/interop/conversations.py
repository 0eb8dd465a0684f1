# timeout: 600
"""Conversations in chevron-finetune beside transformers: a model of random weights, a tokenizer and chat templates that are made
here, and 20 drawn conversations.

tokenise.py writes the tokens and the masks that transformers computes for a template which marks the assistant's words, from that
template and from its twin without marks. Losses of packed and of masked windows are those of a plain loop over transformers'
model, one conversation at a time, over pipeline ranks, replicas, shards and slices. Validation, epochs, learning rates, betas and
resumed runs are as formulas say.
"""
import contextlib
import functools
import io
import json
import math
import os
import pathlib
import random
import re
import runpy
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import finetune_runs
from finetune_runs import expect, lines_of, losses_of, wrong
from random_models import decay, tolerance

import numpy
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

script = pathlib.Path(os.environ.get("CHEVRON_SOURCE", ".")) / "examples/chevron-finetune/tokenise.py"
steps, rate = 7, 3e-3
finetune = functools.partial(finetune_runs.finetune, timeout=200)


def template(message):
    """A chat template that writes each message `m` between the marks of its turn as `message` says."""
    begin = "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    end = "{%- endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
    return begin + message + end


said, behind = "{{ m['content'] + '<|im_end|>' }}", "{{ '\\n' }}"
plain_template = template(said + behind)
marked_template = template("{%- if m['role'] == 'assistant' %}{% generation %}" + said + "{% endgeneration %}{%- else %}" + said
                           + "{%- endif %}" + behind)
# Earlier answers lose a part, as some templates do with thoughts.
rewriting_template = template("{%- if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
                              "{%- else %}{{ m['content'] }}{%- endif %}{{ '<|im_end|>\\n' }}")


def tokenise(*words, code=0):
    """The script in this process, which has its libraries already."""
    arguments, out, message = sys.argv, io.StringIO(), ""
    sys.argv = [str(script), *map(str, words)]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        message = str(end.code)
    finally:
        sys.argv = arguments
    expect(bool(message) == bool(code), f"tokenise.py {words} ended with: {message}{out.getvalue()}")
    return out.getvalue() + message


def apart(ours, theirs):
    return max(abs(a - b) / b for a, b in zip(ours, theirs)) if len(ours) == len(theirs) else math.inf


def learning_rate(step, all_steps=steps, **curve):
    return finetune_runs.learning_rate(step, all_steps, rate, **curve)


def draw(random_source):
    """A conversation of words, white space, other scripts and special characters."""
    words = ["the", "quick", " fox", "jumps", "\n", "\n\n", "assistant", "é", "日本", "{}", "  ", "over", ".", "'s", "<|im", "🙂"]
    word = lambda: random_source.choice(words) + random_source.choice(["", " "])
    text = lambda: "".join(word() for _ in range(random_source.randint(1, 9)))
    messages = [{"role": "system", "content": text()}] if random_source.random() < 0.5 else []
    for _ in range(random_source.randint(1, 3)):
        messages += [{"role": "user", "content": text()}, {"role": "assistant", "content": text()}]
    return messages


def documents_of(file):
    """Tokens and mask of each document, as the files' formats say."""
    tokens, mask = numpy.fromfile(file, "<u2"), numpy.fromfile(file.with_suffix(".mask"), "u1")
    index = file.with_suffix(".idx").read_bytes()
    count = int.from_bytes(index[18:26], "little")
    lengths = numpy.frombuffer(index[34:34 + 4 * count], "<i4")
    expect(index[:18] == b"MMIDIDX\0\0" + (1).to_bytes(8, "little") + bytes([8]) and lengths.sum() == len(tokens) == len(mask),
           "index, tokens and mask do not fit")
    ends = numpy.cumsum(lengths)
    return [(tokens[end - n:end].tolist(), mask[end - n:end].tolist()) for end, n in zip(ends, lengths)]


def windows_of(lengths, room):
    """How many windows the pieces take: the longest first, each where the least room is left."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [r for r in rooms if r >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(room - length)
    return len(rooms)


def plain_losses(folder, samples, count, rate_of=learning_rate, betas=(0.9, 0.95), learned=None):
    """AdamW over transformers' model; a step's loss is the mean over all labels of all samples, each (tokens, labels) alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=betas, weight_decay=decay)
    labels = sum(int((y != -100).sum()) for _, y in samples)
    losses = []
    for step in range(1, count + 1):
        optimizer.param_groups[0]["lr"] = rate_of(step)
        optimizer.zero_grad()
        whole = 0.0
        for x, y in samples:
            if (y != -100).sum() == 0:
                continue
            loss = torch.nn.functional.cross_entropy(model(x[None]).logits[0], y, reduction="sum") / labels
            loss.backward()
            whole += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(whole)
    return losses


def sample(tokens, mask, length):
    """What a model reads of a document, and its labels."""
    kept = tokens[:length + 1]
    return torch.tensor(kept[:-1]), torch.tensor([t if m else -100 for t, m in zip(kept[1:], mask[1:])])


def main(folder):
    source = random.Random(11)
    conversations = [draw(source) for _ in range(20)]
    corpus = [m["content"] for c in conversations for m in c] * 3
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=330, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>",
                                                     additional_special_tokens=["<|im_start|>", "<|im_end|>"])
    tokenizer.chat_template = plain_template
    torch.manual_seed(3)
    # The largest context in use; embedding and head tied, over two stages.
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.15, tie_word_embeddings=True))
    place = folder / "model"
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)

    # Tokens and masks.
    talks, marked, tokens = folder / "talks.jsonl", folder / "marked.jinja", folder / "talks.bin"
    talks.write_text("".join(json.dumps({"messages": c}) + "\n" for c in conversations))
    marked.write_text(marked_template)
    expected = []
    for conversation in conversations:
        made = tokenizer.apply_chat_template(conversation, chat_template=marked_template, return_dict=True,
                                             return_assistant_tokens_mask=True)
        expected.append((made["input_ids"], made["assistant_masks"]))
    for flags in (["--template", marked], []):
        said = tokenise(*flags, place, tokens, talks)
        labels = sum(sum(mask) for _, mask in expected)
        expect(f"of 20 documents, {labels:,} of them labels" in said, said)
        ours = documents_of(tokens)
        expect([t for t, _ in ours] == [t for t, _ in expected], f"tokens differ from transformers', {flags}")
        expect([m for _, m in ours] == [m for _, m in expected], f"masks differ from transformers', {flags}")
    expect(all(0 < sum(mask) < len(mask) for _, mask in expected), "the drawn conversations have no prompts or no answers")
    print(f"20 conversations: {sum(len(t) for t, _ in expected)} tokens, {labels} of them labels, as transformers has them",
          flush=True)

    # Prompts with completions, as texts and as messages; a text beside them; and the files of an earlier run go.
    pairs = folder / "pairs.jsonl"
    # A conversation with an answer in the prompt, which is no label.
    number = next(i for i, c in enumerate(conversations) if sum(m["role"] == "assistant" for m in c) > 1)
    chat = conversations[number]
    last = max(i for i, m in enumerate(chat) if m["role"] == "assistant")
    pairs.write_text(json.dumps({"prompt": "the quick", "completion": " fox jumps"}) + "\n\n"
                     + json.dumps({"prompt": chat[:last], "completion": chat[last:]}) + "\n")
    (folder / "text.txt").write_text("over the fox")
    tokenise(place, folder / "pairs.bin", pairs, folder / "text.txt")
    first, second, third = documents_of(folder / "pairs.bin")
    prompt, both = tokenizer("the quick")["input_ids"], tokenizer("the quick fox jumps")["input_ids"]
    expect(first == (both + [0], [0] * len(prompt) + [1] * (len(both) - len(prompt) + 1)), f"a prompt with completion is {first}")
    ids, mask = expected[number]
    answers = [i for i in range(len(ids)) if mask[i] and not mask[i - 1]]
    expect(second == (ids, [int(m and i >= answers[-1]) for i, m in enumerate(mask)]), f"a completion of messages is {second}")
    expect(third == (tokenizer("over the fox")["input_ids"] + [0], [1] * len(third[0])), f"a text is {third}")
    tokenise(place, folder / "pairs.bin", folder / "text.txt")
    expect(not (folder / "pairs.mask").exists() and not (folder / "pairs.idx").exists(), "mask and index of an earlier run stay")

    # Whole conversations in windows; one is longer than a window.
    documents = documents_of(tokens)
    longest = max(len(t) for t, _ in documents)
    # Two replicas share the windows evenly.
    context = next(c for c in range(longest - 20, longest + 40, 2)
                   if windows_of([min(len(t) - 1, c) for t, _ in documents], c) % 2 == 0)
    cut = sum(len(t) - 1 > context for t, _ in documents)
    samples = [sample(t, m, context) for t, m in documents]
    windows = windows_of([len(x) for x, _ in samples], context)
    shared = ["--model", place, "--data", tokens, "--context", context, "--steps", steps, "--learning-rate", rate,
              "--weight-decay", decay]
    logits = folder / "logits"
    said = finetune(*shared, "--out", folder / "out", "--ranks", 2, "--microbatches", windows // 2, "--microbatch-size", 2,
                    "--logits", logits, "--metrics", folder / "1f1b")
    expect(f"{windows} windows of {context}, packed with 20 documents" in " ".join(said.split()),
           f"{windows} windows of {context}:\n{said}")
    expect((f"{cut} document" in said) == (cut > 0), said)
    # The program's own tensors are these documents, and padding.
    seen, got = [], load_file(logits)
    for x, y, z in zip(got["tokens"].tolist(), got["labels"].tolist(), got["positions"].tolist()):
        begins = [i for i, p in enumerate(z) if p == 0]
        for begin, behind in zip(begins, begins[1:] + [len(z)]):
            expect(z[begin:behind] == list(range(behind - begin)), f"positions {z}")
            if any(label != -100 for label in y[begin:behind]):
                seen.append((x[begin:behind], y[begin:behind]))
            else:
                expect(behind - begin == 1 and x[begin] == 0, f"padding {x[begin:behind]}")
    expect(sorted(seen) == sorted((x.tolist(), y.tolist()) for x, y in samples), "packed windows have other documents or labels")

    plain = plain_losses(place, samples, steps)
    expect(plain[-1] < plain[0] - 0.2, f"nothing is learned: {plain}")
    compared = {"1f1b": (losses_of(folder / "1f1b"), plain)}
    layouts = {"replicas": ["--ranks", 2, "--replicas", 2, "--microbatches", windows // 2, "--schedule", "ZB-H1"],
               "slices": ["--ranks", 2, "--microbatches", windows // 2, "--microbatch-size", 2, "--schedule", "Seq1F1B",
                          "--slices", 2],
               "shards": ["--ranks", 1, "--shards", 2, "--microbatches", windows, "--recompute"],
               "processes": ["--ranks", 2, "--microbatches", windows, "--schedule", "ZBVZeroBubble", "--backend", "gloo"]}
    for name, flags in layouts.items():
        finetune(*shared, "--out", folder / "out", "--metrics", folder / name, *flags)
        compared[name] = losses_of(folder / name), plain

    # Masked windows of one stream, some of which have few labels or none.
    flat, flags = [t for ids, _ in documents for t in ids], [m for _, mask in documents for m in mask]
    short = 24
    stream = [sample(flat[i:i + short + 1], flags[i:i + short + 1], short) for i in range(0, len(flat) - short, short)]
    counts = [int((y != -100).sum()) for _, y in stream]
    expect(min(counts) == 0 and len(set(counts)) > 5, f"the windows have labels alike: {counts}")
    finetune(*shared, "--context", short, "--windows", "stream", "--out", folder / "out", "--ranks", 2, "--microbatches",
             len(stream), "--metrics", folder / "stream")
    compared["stream"] = losses_of(folder / "stream"), plain_losses(place, stream, steps)

    # Rates, betas and validation. All windows are in each step, so the loss behind a step is the next step's.
    linear = lambda step: learning_rate(step, warm_up=3, lowest=1e-4, cosine=False)
    other = plain_losses(place, samples, steps + 1, lambda step: linear(min(step, steps)), betas=(0.8, 0.9))
    chosen = ["--warm-up", 3, "--lowest-learning-rate", 1e-4, "--decay", "linear", "--betas", "0.8,0.9"]
    all_of = ["--out", folder / "out", "--ranks", 2, "--microbatches", windows]
    said = finetune(*shared, *all_of, *chosen, "--validation", tokens, "--validate-every", 3, "--metrics", folder / "rates",
                    "--checkpoint", folder / "saved", "--save-every", 4)
    compared["rates"] = losses_of(folder / "rates"), other[:steps]
    validations = {int(step): float(loss) for step, loss in re.findall(r"step: *(\d+)  validation loss: *([0-9.]+)", said)}
    expect(sorted(validations) == [3, 6] and all(abs(validations[k] - other[k]) < 2e-5 for k in validations),
           f"validations {validations}: {other}")
    lines = lines_of(folder / "rates")
    in_file = {line["step"]: line["validation_metrics/loss"] for line in lines if "validation_metrics/loss" in line}
    expect(sorted(in_file) == [3, 6] and apart([in_file[k] for k in (3, 6)], [other[3], other[6]]) < tolerance,
           f"metrics have {in_file}")
    around = re.search(r"validation  loss ([0-9.]+) → ([0-9.]+)", said)
    expect(around and abs(float(around[1]) - other[0]) < 1e-4 and abs(float(around[2]) - other[steps]) < 1e-4,
           f"{other}:\n{said}")
    ours = [line["lr"] for line in lines]
    expect(apart(ours, [linear(s) for s in range(1, steps + 1)]) < 1e-12, f"rates {ours}")
    finetune(*shared, *all_of, *chosen, "--metrics", folder / "alone")
    expect(losses_of(folder / "alone") == losses_of(folder / "rates"), "validation changes the training")

    # A resumed run has the rates of the step's number, and of its own flags.
    (folder / "saved/step-00000007").rename(folder / "step-00000007")
    resumed = ["--validation", tokens, "--metrics", folder / "rates", "--checkpoint", folder / "saved", "--resume"]
    before = losses_of(folder / "rates")
    said = finetune(*shared, *all_of, *chosen, *resumed)
    expect("at step 5" in said and "goes on as another run" not in said, said)
    expect(losses_of(folder / "rates") == before, "a resumed run has other losses")
    (folder / "saved/step-00000007").rename(folder / "again")
    changed = ["--decay", "cosine", "--betas", "0.9,0.95", "--warm-up", 6]
    said = " ".join(finetune(*shared, *all_of, *chosen, *changed, *resumed).split())
    for words in ("--decay is cosine, and was linear: it goes on as another run", "--betas is 0.9,0.95, and was 0.8,0.9",
                  "--warm-up is 6, and was 3", "the learning rate of step 5 is"):
        expect(words in said, f"no word of {words}: {said}")
    ours = [line["lr"] for line in lines_of(folder / "rates")]
    theirs = [linear(s) for s in range(1, 5)] + [learning_rate(s, warm_up=6, lowest=1e-4) for s in range(5, steps + 1)]
    expect(apart(ours, theirs) < 1e-12, f"rates of a resumed run are {ours}, and should be {theirs}")

    # Two and a half passes over the windows.
    said = finetune("--model", place, "--data", tokens, "--context", context, "--out", folder / "out", "--ranks", 1,
                    "--microbatches", 2, "--epochs", 2.5, "--metrics", folder / "epochs")
    expected_steps = math.ceil(2.5 * (windows // 2))
    expect(len(lines_of(folder / "epochs")) == expected_steps, f"2.5 epochs are not {expected_steps} steps:\n{said}")
    ours = [line["lr"] for line in lines_of(folder / "epochs")]
    theirs = [learning_rate(s, expected_steps) * 2e-5 / rate for s in range(1, expected_steps + 1)]
    expect(apart(ours, theirs) < 1e-9, f"rates of epochs {ours}: {theirs}")

    for name, (ours, theirs) in compared.items():
        print(f"{name}: loss {ours[0]:.5f} -> {ours[-1]:.5f}, at most {apart(ours, theirs):.1e} from the plain loop's",
              flush=True)
        expect(apart(ours, theirs) < tolerance, f"{name}: losses {ours}, the plain loop's are {theirs}")

    # What cannot be used is refused.
    def refused(words, *flags, code=2):
        said = finetune("--model", place, "--out", folder / "none", "--ranks", 1, "--microbatches", 1, "--context", 24,
                        "--steps", 1, *flags, code=code)
        expect(all(word in said for word in words), f"refused with other words than {words}:\n{said}")

    other = folder / "other.bin"
    def with_files(mask, index):
        other.write_bytes(tokens.read_bytes())
        for suffix, content in ((".mask", mask), (".idx", index)):
            other.with_suffix(suffix).unlink(missing_ok=True)
            if content is not None:
                other.with_suffix(suffix).write_bytes(content)
        return ["--data", other]
    whole, index = tokens.with_suffix(".mask").read_bytes(), tokens.with_suffix(".idx").read_bytes()
    refused([f"other.mask has {len(whole) - 1} bytes, and", "Remedy: the mask that was written with these tokens"],
            *with_files(whole[1:], index))
    refused(["other.mask: byte 9 is 2", "Remedy: a mask of bytes 0 and 1"], *with_files(whole[:9] + b"\2" + whole[10:], index))
    refused(["no document with a label in its first 25 tokens"], *with_files(bytes(len(whole)), index))
    refused(["--data has no label in its windows", "Remedy"], *with_files(bytes(len(whole)), index), "--windows", "stream")
    refused(["other.bin has no index beside it, which says where documents end", "--windows stream"], *with_files(whole, None))
    refused(["--epochs and --steps both say"], "--data", tokens, "--epochs", 1)
    refused(["--betas: 1 is not a number from 0 to below 1"], "--data", tokens, "--betas", "0.9,1")
    refused(["--lowest-learning-rate 0.1 is above --learning-rate 2e-05"], "--data", tokens, "--lowest-learning-rate", 0.1)
    refused(["--validate-every requires --validation"], "--data", tokens, "--validate-every", 2)

    def refused_talk(words, text, *flags):
        (folder / "wrong.jsonl").write_text(text)
        said = tokenise(*flags, place, folder / "wrong.bin", folder / "wrong.jsonl", code=1)
        expect(all(word in said for word in [*words, "Remedy"]) and not (folder / "wrong.bin").exists(),
               f"refused with other words than {words}:\n{said}")

    good = json.dumps({"messages": conversations[0]}) + "\n"
    refused_talk(["wrong.jsonl, line 2", "Expecting"], good + "{\n")
    refused_talk(["line 1: the object has chat.", "messages, a list of objects with role and content"], '{"chat": []}\n')
    refused_talk(["line 1: message 1 is \"hello\""], '{"messages": [{"role": "user", "content": "a"}, "hello"]}\n')
    refused_talk(["line 1: no message of the role assistant"], '{"messages": [{"role": "user", "content": "a"}]}\n')
    refused_talk(["line 1: the completion has no token"], '{"prompt": "a", "completion": ""}\n')
    refused_talk(["has no line with a conversation"], "\n")
    (folder / "rewriting.jinja").write_text(rewriting_template)
    thoughts = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b</think>c"}] * 2
    refused_talk(["line 1: the chat template writes message 1 otherwise", "{% generation %}"],
                 json.dumps({"messages": thoughts}) + "\n", "--template", folder / "rewriting.jinja")


with tempfile.TemporaryDirectory() as place:
    main(pathlib.Path(place))
print(f"{len(wrong)} failed" if wrong else "as transformers does")
sys.exit(1 if wrong else 0)
