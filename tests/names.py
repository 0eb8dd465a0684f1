"""Private metaphors that the field has a word for do not come back: headers, programs and the guide are searched for them. And
no line of a header or a page is too wide to be read.

    python3 tests/names.py [folder]     without it the repository, and then a copy with each fault in it, which must be found
"""
import pathlib
import re
import shutil
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORDS = {  # what it was called: what the field calls it
    "weather": "sampled durations", "bell": "futex word", "bells": "futex words", "board_of": "gather buffer",
    "failure_board": "failure reports", "failure_watch": "failure monitor", "connection_watch": "connection monitor",
    "stream_watch": "stream monitor", "operator_watch": "operator guard", "storage_watch": "storage recorder",
    "schedule_news": "replan report", "length_news": "length report", "made_to_measure": "searched schedule",
    "actions_keeper": "flight recorder", "CHEVRON_RINGS": "flight logs", "write_rings": "flight logs",
    "situation": "rank parameters", "known_cases": "dominance table", "whole_times": "integer durations",
    "telling_errors": "error report", "stage_task": "stage call", "near_sums_": "sums in shared memory",
}
WIDEST = 130
# Pages of measured numbers, and headers with so many lines that are yet to be shortened.
GENERATED = ("docs/benchmarks.md",)
STILL_WIDE = {
    "include/chevron/plan/lengths.hpp": 2,
    "include/chevron/plan/profile.hpp": 1,
    "include/chevron/run/checkpoint/safetensors.hpp": 1,
    "include/chevron/run/comm/gloo/process_group.hpp": 1,
    "include/chevron/run/optimizer/copy_agreement.hpp": 1,
    "include/chevron/run/optimizer/gradient_norm.hpp": 1,
    "include/chevron/run/optimizer/optimizer_share.hpp": 1,
    "include/chevron/run/optimizer/rank_gradients.hpp": 1,
    "include/chevron/run/optimizer/step_names.hpp": 2,
    "include/chevron/run/optimizer/trainer_options.hpp": 1,
    "include/chevron/run/training/auto_schedule.hpp": 1,
    "include/chevron/run/training/evaluator.hpp": 2,
    "include/chevron/run/training/length_schedule.hpp": 1,
    "include/chevron/run/training/separate_tensors.hpp": 2,
    "include/chevron/run/training/trainer.hpp": 1,
}
PATTERN = re.compile(r"(?<![A-Za-z0-9_])(" + "|".join(WORDS) + r")(?![A-Za-z0-9_])")


def found(root):
    """Where the words are, a sentence each."""
    out = []
    for folder, endings in (("include", (".hpp",)), ("examples", (".hpp", ".cpp")), ("docs", (".md",))):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in endings or path.name in ("CHANGELOG.md", "contributing.md"):  # that quotes some
                continue
            for number, line in enumerate(path.read_text().split("\n"), 1):
                out += [f"{path.relative_to(root)}:{number}: `{m[1]}`; the field says: {WORDS[m[1]]}" for m in PATTERN.finditer(line)]
    return out


def wide(root):
    """Which lines of headers and pages are too wide, a sentence each. Rows of tables cannot be broken, nor what a program printed:
    the fences without a language, and those of consoles."""
    out = []
    for folder, endings in (("include", (".hpp", ".inc", ".h")), ("docs", (".md",))):
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix not in endings or name in GENERATED:
                continue
            here, fence = [], None
            for number, line in enumerate(path.read_text().split("\n"), 1):
                if path.suffix == ".md" and (mark := re.match(r" *(```+)(\w*)$", line)):
                    fence = mark[2] or "printed" if fence is None else None
                if len(line) > WIDEST and not (path.suffix == ".md" and (line.startswith("|") or fence in ("printed", "console"))):
                    here.append(f"{name}:{number}: {len(line)} columns, more than {WIDEST}")
            out += here if len(here) > STILL_WIDE.get(name, 0) else []
    return out


def main():
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    wrong = found(root) + wide(root)
    if len(sys.argv) == 1:
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder)
            for name in ("include", "examples", "docs"):
                shutil.copytree(ROOT / name, copy / name)
            header = copy / "include" / "chevron" / "version.hpp"
            text = header.read_text()
            for word in WORDS:
                header.write_text(f"{text}// {word}\n")
                if not any(f"`{word}`" in one for one in found(copy) if "version.hpp" in one):
                    wrong.append(f"`{word}` was written into a header and not found")
            header.write_text(f"{text}// {'w' * WIDEST}\n")
            page = copy / "docs" / "zoo.md"
            page.write_text(f"{page.read_text()}\n{'w ' * WIDEST}\n")
            for name in ("version.hpp", "zoo.md"):
                if not any(f"{name}:" in one and "columns" in one for one in wide(copy)):
                    wrong.append(f"a wide line was written into {name} and not found")
    for one in wrong:
        print(one)
    print(f"{len(WORDS)} words looked for, widths of lines looked at, {len(wrong)} complaints")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
