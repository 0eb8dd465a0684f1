"""chevron::fused_adamw and fused_sgd beside PyTorch's AdamW and SGD with fused=True, on the CPU: the same steps, compared by bytes.

Chevron's steps are those of a test of chevron-run-tests, which writes parameters and gradients before and parameters after each step.
"""
import os
import pathlib
import subprocess
import sys
import tempfile

try:
    import torch
except ImportError as problem:
    print(f"skipped: no PyTorch to compare with ({problem})")
    sys.exit(77)

program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-run-tests")
with tempfile.TemporaryDirectory() as folder:
    file = pathlib.Path(folder) / "steps.pt"
    subprocess.run([program, "--test-case=steps of the fused optimizers are written down"], check=True, stdin=subprocess.DEVNULL,
                   stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1", "CHEVRON_FUSED_STEPS": str(file)})
    written = iter(torch.load(file, weights_only=True))

PARAMETERS, STEPS = 4, 6
compared = different = 0
for dtype in (torch.float32, torch.float64, torch.bfloat16):
    adamw = [lambda p, amsgrad=amsgrad: torch.optim.AdamW(p, 0.05, (0.8, 0.95), 1e-6, 0.1, amsgrad, fused=True) for amsgrad in (False, True)]
    sgd = [lambda p, momentum=momentum: torch.optim.SGD(p, 0.05, momentum, weight_decay=0.1, fused=True) for momentum in (0.0, 0.7)]
    for make in adamw + (sgd if dtype != torch.bfloat16 else []):
        values, optimizer = None, None
        for step in range(STEPS):
            given = [(next(written), next(written)) for _ in range(PARAMETERS)]
            if values is None:
                values = [v.clone().requires_grad_() for v, _ in given]
                optimizer = make(values)
            for mine, (value, gradient) in zip(values, given):
                assert value.dtype == dtype and torch.equal(mine.detach(), value)
                # PyTorch's kernel walks through both memories side by side, whatever their strides: the gradient gets the parameter's.
                mine.grad = torch.empty_like(value).copy_(gradient) if gradient.shape == value.shape else None
            optimizer.step()
            for number, mine in enumerate(values):
                compared += 1
                if not torch.equal(mine.detach(), next(written)):
                    different += 1
                    print(f"FAILED: {dtype}, {optimizer.__class__.__name__}, step {step}, parameter {number}: other bits")
                    sys.exit(1)
        moved = max((v.detach() - f).abs().max().item() for v, f in zip(values, (g[0] for g in given)) if v.numel())
        assert moved > 0, "the last step changed nothing"
assert next(written, None) is None
print(f"{compared} parameters after a step: the bytes of PyTorch {torch.__version__} with fused=True")
