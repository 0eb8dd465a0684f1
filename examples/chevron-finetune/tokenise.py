"""Text to tokens:  python3 tokenise.py MODEL_FOLDER FILE.bin TEXT...

Writes what the folder's tokenizer makes of each text, and an end-of-text token after it: 16-bit numbers, as nanoGPT keeps them. Where
the vocabulary is too large for these, 32-bit ones, with Megatron-LM's index FILE.idx beside them.
"""
import os
import pathlib
import secrets
import struct
import sys

import numpy
from transformers import AutoTokenizer


def write_new(file, array):
    """Writes an array's bytes beside the file and renames them: a link in place of the file is replaced, and its target unchanged."""
    if file.is_dir():
        raise IsADirectoryError(f"{file} is a folder")
    beside = file.with_name(f"{file.name}.{secrets.token_hex(8)}.partial")
    try:
        with open(beside, "xb") as to:
            array.tofile(to)
        os.replace(beside, file)
    finally:
        beside.unlink(missing_ok=True)


def main():
    if len(sys.argv) < 4:
        sys.exit("usage: tokenise.py MODEL_FOLDER FILE.bin TEXT...")
    folder, out, texts = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3:]
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        sys.exit(f"{folder} holds no tokenizer (tokenizer.json, …). Remedy: the folder of a Hugging Face model, with its tokenizer's files")
    if out.suffix != ".bin":
        sys.exit(f"{out} does not end in .bin, so chevron-finetune would not take it. Remedy: FILE.bin, before the texts")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    end = tokenizer.eos_token_id
    if end is None:
        sys.exit(f"the tokenizer of {folder} has no end-of-text token. Remedy: eos_token in its tokenizer_config.json")

    documents = []
    for text in texts:
        try:
            words = pathlib.Path(text).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            sys.exit(f"{text} cannot be read: {e}. Remedy: files of text in UTF-8")
        documents.append(numpy.array(tokenizer(words, verbose=False)["input_ids"] + [end], "<i4"))

    tokens, index = numpy.concatenate(documents), out.with_suffix(".idx")
    wide = max(len(tokenizer), tokens.max() + 1) > 1 << 16
    try:
        index.unlink(missing_ok=True)  # an earlier one would be believed
        write_new(out, tokens.astype("<i4" if wide else "<u2"))
        if wide:
            lengths = numpy.array([len(d) for d in documents], "<i4")
            places = (numpy.cumsum(lengths, dtype="<i8") - lengths) * 4
            header = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 4, len(documents), len(documents) + 1)
            ends = numpy.arange(len(documents) + 1, dtype="<i8")
            write_new(index, numpy.frombuffer(header + lengths.tobytes() + places.tobytes() + ends.tobytes(), "u1"))
    except OSError as e:
        sys.exit(f"{out} cannot be written: {e}. Remedy: a file in an existing folder that is writable")
    print(f"{out}: {len(tokens):,} tokens of {len(texts)} {'text' if len(texts) == 1 else 'texts'}, "
          + (f"32 bits each, with {index}" if wide else "16 bits each"))


main()
