"""transformers' models of random weights, tokens to train on, and a plain loop of training, for tests that compare chevron-finetune with
them. Where transformers is missing, the import ends the test as skipped."""
import os
import sys

from finetune_runs import learning_rate

os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
    import transformers
except ImportError as problem:
    print(f"skipped: no transformers to compare with ({problem})")
    sys.exit(77)

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)
context, samples, steps, decay = 16, 8, 20, 0.1
tolerance = 1e-5
common = dict(vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=6, max_position_embeddings=64, initializer_range=0.15)


def random_model(config, seed):
    """A model in float32, whose biases and norms are not the 0 and 1 with which a model that ignores them would have the same results."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn_like(p) * 0.1)
    return model


def opened(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def tokens_to_learn():
    """Tokens of all windows, every other of which follows from the one before."""
    tokens = torch.randint(0, 97, (samples * context + 1,), generator=torch.Generator().manual_seed(5))
    tokens[1::2] = (tokens[0:-1:2] * 3 + 1) % 97
    return tokens


def plain_losses(model, trained, tokens, rate):
    """Losses of AdamW over the parameters `trained`, with all windows in each step, so that their order does not matter."""
    trained = list(trained)
    x, y = tokens[:-1].view(samples, context), tokens[1:].view(samples, context)
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.95), weight_decay=decay)
    losses = []
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = learning_rate(step, steps, rate)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses
