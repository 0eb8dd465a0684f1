"""Private metaphors that the field has a word for do not come back: headers, programs and the guide are searched for them.

    python3 tests/names.py [folder]     without it the repository, and then a copy with each word in it, which must be found
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


def main():
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    wrong = found(root)
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
    for one in wrong:
        print(one)
    print(f"{len(WORDS)} words looked for, {len(wrong)} complaints")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
