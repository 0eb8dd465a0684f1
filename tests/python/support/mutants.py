#!/usr/bin/env python3
"""Does random_programs.py notice mistakes in chevron_pipelining? Puts mistakes into a copy of the package, one at a time, and runs programs
until one fails. Run by hand, some minutes:

    env CHEVRON_BUILD=build .venv/bin/python tests/python/support/mutants.py              all of them
    env CHEVRON_BUILD=build .venv/bin/python tests/python/support/mutants.py losses cut   those whose name contains one of these words

The Python that runs it has torch. The exit code is 1 where a mistake is not found, and where programs fail without a mistake; a mistake whose
text is no longer in its file is an error, too.
"""
import pathlib
import re
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "support"))
from header_mutants import ROOT, Mutant, package_with, tell, verdict_of  # noqa: E402

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


def told(output):
    """The program that fails, and its first difference."""
    found = re.search(r"FAILED: (seed|whole) (\d+): .*\n\s*(.*)", output)
    return f"{found[1]} {found[2]}, {found[3][:120]}" if found else ""


def verdict(source):
    """Returns why the drawn programs fail with the package of a folder, in one line; else empty."""
    command = [sys.executable, str(ROOT / "tests/python/random_programs.py"), "--until-failed"]
    return verdict_of(command, told, -1, 300, CHEVRON_SOURCE=str(source))[0]


def main():
    errors, wanted = [], [Mutant(name, file, text, instead, "", []) for name, file, text, instead in MUTANTS
                          if len(sys.argv) == 1 or any(word in name for word in sys.argv[1:])]
    if without := verdict(ROOT):
        print(f"without a mistake: {without}")
        return 1
    for mutant in wanted:
        with tempfile.TemporaryDirectory() as folder:
            package_with(mutant, ROOT, pathlib.Path(folder))
            if tell(mutant, verdict(folder)):
                errors.append(mutant.name)
    print(f"\n{len(wanted) - len(errors)} of {len(wanted)} found")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
