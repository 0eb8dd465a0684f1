#!/usr/bin/env python3
"""Does random_programs.py notice mistakes in chevron_pipelining? Puts mistakes into a copy of the package, one at a time, and runs programs
until one fails. Run by hand, some minutes:

    env CHEVRON_BUILD=build .venv/bin/python tests/python/support/mutants.py              all of them
    env CHEVRON_BUILD=build .venv/bin/python tests/python/support/mutants.py losses cut   those whose name contains one of these words

The Python that runs it has torch. The exit code is 1 where a mistake is not found; one whose text is no longer in its file is an error, too.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
RUNTIME, STAGE, SCHEDULES, TRAINER = (f"python/chevron_pipelining/{name}.py" for name in ("runtime", "stage", "schedules", "trainer"))

# name; file; regular expression; replacement
MUTANTS = [
    ("gradients: not divided by the number of microbatches", SCHEDULES, r"if self\._divisor != 1:", "if False:"),
    ("gradients: divided although scale_grads is off", SCHEDULES, r"n_microbatches if scale_grads and", "n_microbatches if"),
    ("gradients: those that are there are lost", SCHEDULES, r"            p\.grad\.add_\(gradient\)", "            pass"),
    ("gradients: those that are there change with the step", SCHEDULES, r"p\.grad\.clone\(\)\)", "p.grad)"),
    ("gradients: a schedule that is made takes them", RUNTIME, r"            p\.grad = gradient", "            pass"),
    ("losses: the first place holds the last loss", RUNTIME, r"self\._losses\[number\] = loss", "self._losses[0] = loss"),
    ("losses: of earlier steps stay", RUNTIME, r"losses\[:\] = self", "losses[len(losses):] = self"),
    ("targets: cut otherwise than inputs", RUNTIME, r"list\(torch\.tensor_split\(target, m\)\)", "list(target.split(len(target) // m)[:m])"),
    ("inputs: cut without the rest", RUNTIME, r"torch\.tensor_split\(value, m\) for", "value.split(len(value) // m)[:m] for"),
    ("keywords: of the first microbatch", STAGE, r"\*\*self\.keywords\[number\]", "**self.keywords[0]"),
    ("outputs: of the first place", STAGE, r"self\.outputs\[number\] = result", "self.outputs[0] = result"),
    ("outputs: in another order", RUNTIME, r"torch\.cat\(kept\)", "torch.cat(kept[::-1])"),
    ("form: a row of values comes as one tensor", STAGE, r"        return flat\n", "        return flat[:1]\n"),
    ("trainer: microbatches weigh alike", TRAINER, r"weighed=True", "weighed=False"),
    ("trainer: no clipping", TRAINER, r"clip_grad_norm=clip_grad_norm,", "clip_grad_norm=0.0,"),
    ("trainer: the optimizer's own rate", TRAINER, r"learning_rate=learning_rate\)", "learning_rate=None)"),
    ("trainer: steps that are not finite are errors", TRAINER, r"skip_not_finite=when_not_finite == \"skip\"", "skip_not_finite=False"),
    ("trainer: restored without the optimizer", TRAINER, r"        self\.optimizer\.load_state_dict\(state\[\"optimizer\"\]\)\n", ""),
    ("trainer: restored without the number of the step", TRAINER, r"        self\.next_step = state\[\"next_step\"\]\n", ""),
    ("trainer: restored without the parameters", TRAINER, r"stage\.submod\.load_state_dict\(state", "dict(state"),
    ("ties: none", STAGE, r"list\(\(ties or \{\}\)\.items\(\)\)", "[]"),
]


def main():
    missed = []
    for name, file, text, replacement in MUTANTS:
        if len(sys.argv) > 1 and not any(word in name for word in sys.argv[1:]):
            continue
        with tempfile.TemporaryDirectory() as made:
            folder = pathlib.Path(made)
            for linked in ("include", "tests"):
                (folder / linked).symlink_to(ROOT / linked)
            shutil.copytree(ROOT / "python", folder / "python")
            whole, count = re.subn(text, replacement, (folder / file).read_text(), flags=re.DOTALL)
            if count != 1:
                sys.exit(f"\"{name}\": {file} has its text {count} times")
            (folder / file).write_text(whole)
            programs = [sys.executable, ROOT / "tests/python/random_programs.py", "--until-failed"]
            ran = subprocess.run(programs, capture_output=True, text=True, env={**os.environ, "CHEVRON_SOURCE": str(folder), "OMP_NUM_THREADS": "1"})
        said = ran.stdout + ran.stderr
        found = re.search(r"(?:seed|whole) \d+", said)
        print(f"{'found' if found else 'MISSED'}: {name}" + (f", by {found[0]}" if found else f"\n{said[-500:]}"), flush=True)
        missed += [] if found else [name]
    print(f"{len(missed)} not found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
