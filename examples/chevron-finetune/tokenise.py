"""Text to tokens as nanoGPT keeps them:  python3 tokenise.py MODEL_FOLDER FILE.bin TEXT..."""
import sys

import numpy
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
documents = [tokenizer(open(text, encoding="utf-8").read())["input_ids"] + [tokenizer.eos_token_id] for text in sys.argv[3:]]
tokens = numpy.concatenate(documents)
assert tokens.max() < 1 << 16, "more than 65536 tokens do not fit 16 bits: Megatron-LM's tools/preprocess_data.py writes wider ones"
tokens.astype(numpy.uint16).tofile(sys.argv[2])
