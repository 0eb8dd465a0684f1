"""Text and conversations to tokens:  python3 tokenise.py [--template FILE] MODEL_FOLDER FILE.bin TEXT|FILE.jsonl...

Of a text: what the folder's tokenizer makes of it, and an end-of-text token after it. Of each line of a FILE.jsonl one document:

    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}
    {"prompt": "…", "completion": "…"}

Messages pass through the folder's chat template, and a line may have "tools" for it. FILE.mask then gets a byte for each token:
1 for labels, which the model shall learn to predict: tokens of the assistant's messages up to the end of its turn, of
completions with their end-of-text token, and of texts. Prompt and completion may be lists of messages; the assistant's messages
of the completion are labels.

Tokens are 16-bit numbers, as nanoGPT keeps them. For conversations, and where the vocabulary is too large for 16 bits,
Megatron-LM's index FILE.idx lies beside them, which says where each document ends.
"""
import argparse
import json
import os
import pathlib
import secrets
import struct
import sys

import numpy
from transformers import AutoTokenizer


def write_new(file, array):
    """Writes an array's bytes beside the file and renames them: a link in place of the file is replaced, its target unchanged."""
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder")
    beside = file.with_name(f"{file.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(beside, "xb") as to:
            array.tofile(to)
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def labelled(tokenizer, text, spans):
    """The tokens of a rendered text, and for each whether it has a character of one of the spans. A span ends with its last
    special token, if it has any: text that a template puts behind the end of a turn is nothing that a model has to say."""
    made = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    tokens, places, special = made["input_ids"], made["offset_mapping"], set(tokenizer.all_special_ids)
    mask = [0] * len(tokens)
    for first, behind in spans:
        inside = [i for i, (begin, end) in enumerate(places) if begin < behind and end > first]
        ends = [i for i in inside if tokens[i] in special]
        for i in inside:
            mask[i] = 1 if not ends or i <= ends[-1] else 0
    return tokens, mask


def of_messages(tokenizer, messages, first, tools):
    """Tokens and mask of a conversation. Labels are the assistant's messages from number `first` on."""
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} is {json.dumps(message)[:60]}. Remedy: an object with role and content")
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
    if not assistant:
        raise ValueError("no message of the role assistant is to be learned. Remedy: leave the line out")
    render = lambda count, **more: tokenizer.apply_chat_template(messages[:count], tools=tools, tokenize=False, **more)
    template = tokenizer.get_chat_template(tools=tools)
    if first == 0 and "generation" in template.replace("add_generation_prompt", ""):
        # The template itself marks the assistant's words.
        made = tokenizer.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
        tokens, mask = made["input_ids"], made["assistant_masks"]
        if not any(mask):
            raise ValueError("the chat template marks no token of the assistant. Remedy: {% generation %} around its words")
        return tokens, mask
    whole = render(len(messages))
    spans = []
    for i in assistant:
        before, through = render(i, add_generation_prompt=True) if i > 0 else "", render(i + 1)
        if not whole.startswith(before) or not whole.startswith(through) or len(through) <= len(before):
            raise ValueError(f"the chat template writes message {i} otherwise at the end of a conversation than within it, so "
                             "its tokens cannot be told from others. Remedy: --template FILE, a template that has "
                             "{% generation %} and {% endgeneration %} around the assistant's words")
        spans.append((len(before), len(through)))
    return labelled(tokenizer, whole, spans)


def of_completion(tokenizer, prompt, completion):
    """Tokens and mask of a prompt, as the tokenizer begins texts, and of the completion with an end-of-text token."""
    made = tokenizer(prompt + completion, return_offsets_mapping=True, verbose=False)
    tokens, end = made["input_ids"], tokenizer.eos_token_id
    mask = [int(last > len(prompt)) for _, last in made["offset_mapping"]]
    if not any(mask):
        raise ValueError("the completion has no token. Remedy: leave the line out")
    if tokens[-1] != end:
        tokens, mask = tokens + [end], mask + [0]
    return tokens, mask[:-1] + [1]


def of_line(tokenizer, line):
    """Tokens and mask of a line of JSON."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("this is no JSON object")
    if isinstance(row.get("messages"), list) and row["messages"]:
        return of_messages(tokenizer, row["messages"], 0, row.get("tools"))
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return of_messages(tokenizer, prompt + completion, len(prompt), row.get("tools"))
    if isinstance(prompt, str) and isinstance(completion, str):
        return of_completion(tokenizer, prompt, completion)
    raise ValueError(f"the object has {', '.join(row) or 'no keys'}. Remedy: messages, a list of objects with role and content; "
                     "or prompt and completion, two texts or two such lists")


def read(file):
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        sys.exit(f"{file} cannot be read: {e}. Remedy: files in UTF-8")


def conversations(tokenizer, file):
    for number, line in enumerate(read(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield of_line(tokenizer, line)
        except Exception as e:  # a chat template may raise anything
            remedy = "" if "Remedy" in str(e) else ". Remedy: a JSON object in each line that the folder's chat template takes"
            sys.exit(f"{file}, line {number}: {e}{remedy}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    path = pathlib.Path
    parser.add_argument("folder", metavar="MODEL_FOLDER", type=path, help="of a Hugging Face model, with its tokenizer's files")
    parser.add_argument("out", metavar="FILE.bin", type=path, help="to be written, with FILE.idx and FILE.mask where needed")
    parser.add_argument("texts", metavar="TEXT", nargs="+", type=path, help="files of text, or of conversations: FILE.jsonl")
    parser.add_argument("--template", metavar="FILE", type=path, help="chat template in Jinja, instead of the folder's own")
    given = parser.parse_args()
    folder, out, texts = given.folder, given.out, given.texts
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        sys.exit(f"{folder} holds no tokenizer (tokenizer.json, …). Remedy: the folder of a Hugging Face model, with its "
                 "tokenizer's files")
    if out.suffix != ".bin":
        sys.exit(f"{out} does not end in .bin, so chevron-finetune would not take it. Remedy: FILE.bin, before the texts")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    end = tokenizer.eos_token_id
    if end is None:
        sys.exit(f"the tokenizer of {folder} has no end-of-text token. Remedy: eos_token in its tokenizer_config.json")
    if given.template:
        tokenizer.chat_template = read(given.template)
    talks = any(text.suffix == ".jsonl" for text in texts)
    if talks and not tokenizer.is_fast:
        sys.exit(f"the tokenizer of {folder} does not tell which characters a token has, so no mask can be made. "
                 "Remedy: a folder with tokenizer.json")

    documents = []
    for text in texts:
        if text.suffix == ".jsonl":
            documents += conversations(tokenizer, text)
        else:
            tokens = tokenizer(read(text), verbose=False)["input_ids"] + [end]
            documents.append((tokens, [1] * len(tokens)))
    if not documents:
        sys.exit(f"{texts[0]} has no line with a conversation. Remedy: a JSON object in each line")

    tokens = numpy.concatenate([numpy.array(tokens, "<i4") for tokens, _ in documents])
    index, marks = out.with_suffix(".idx"), out.with_suffix(".mask")
    wide = max(len(tokenizer), tokens.max() + 1) > 1 << 16
    try:
        for earlier in (index, marks):  # it would be believed
            earlier.unlink(missing_ok=True)
        write_new(out, tokens.astype("<i4" if wide else "<u2"))
        if wide or talks:
            lengths = numpy.array([len(tokens) for tokens, _ in documents], "<i4")
            places = (numpy.cumsum(lengths, dtype="<i8") - lengths) * (4 if wide else 2)
            header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 4 if wide else 8, len(documents), len(documents) + 1)
            ends = numpy.arange(len(documents) + 1, dtype="<i8")
            write_new(index, numpy.frombuffer(header + lengths.tobytes() + places.tobytes() + ends.tobytes(), "u1"))
        if talks:
            mask = numpy.concatenate([numpy.array(mask, "u1") for _, mask in documents])
            write_new(marks, mask)
    except OSError as e:
        sys.exit(f"{out} cannot be written: {e}. Remedy: a file in an existing folder that is writable")
    width = f"{32 if wide else 16} bits each"
    if talks:
        print(f"{out}: {len(tokens):,} tokens of {len(documents):,} documents, {int(mask.sum()):,} of them labels, {width}, "
              f"with {index} and {marks}")
    else:
        print(f"{out}: {len(tokens):,} tokens of {len(texts)} {'text' if len(texts) == 1 else 'texts'}, {width}"
              + (f", with {index}" if wide else ""))


main()
