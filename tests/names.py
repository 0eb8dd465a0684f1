"""Private metaphors that the field has a word for do not come back: headers, programs and the guide are searched for them. A message
of a header names its subject and has no pronoun in place of it. A header or source that a page names exists, and so does a page that a
source names; docs/index.md lists every page; no line of a page, a program or the viewer is too wide to be read.

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
SOURCE = re.compile(r"(?<![\w./:-])((?:[\w-]+/)+[\w-]+\.(?:hpp|inc|cpp))(?!\w)")
PAGE = re.compile(r"(?<![\w/])docs/[\w/-]+\.md")
BELOW = ("", "include", "include/chevron", "examples", "bench", "tests", "tests/run")  # what a page's paths may begin at
GENERATED = ("docs/reference/benchmarks.md",)  # a page of measured numbers
# In a message these words stand for a thing that the reader would have to look for in the code.
PRONOUN = re.compile(r"\b(what|who|whoever|that which|somebody|nobody)\b", re.I)
LITERAL = re.compile(r"""//.*|"((?:[^"\\]|\\.)*)"|(?<![0-9A-Za-z])'(?:[^'\\]|\\.)+'""")  # comments and characters are passed over
RAW = re.compile(r'R"(\w*)\((?!.*\)\1")')  # begins a raw string that goes on in the next line
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


def vague(root):
    """Which strings of headers are messages with such a pronoun, a sentence each. A string of one word is no message."""
    out = []
    for path in sorted((root / "include").rglob("*.[hi]pp")):
        for number, line in enumerate(path.read_text().split("\n"), 1):
            for text in (literal[1] for literal in LITERAL.finditer(line)):
                if text and " " in text and (pronoun := PRONOUN.search(text)):
                    out.append(f"{path.relative_to(root)}:{number}: `{pronoun[1]}` in the message \"{text}\"; name the rank, stage, "
                               "tensor or value")
    return out


def wide(root):
    """Which lines of pages, programs and the viewer are too wide, a sentence each (of headers: tests/rooms.py). Rows of tables cannot be
    broken, nor what a program prints: on pages the fences without a language and those of consoles, in programs raw strings."""
    out = []
    for folder, endings in (("include", (".inc",)), ("docs", (".md",)), ("examples", (".hpp", ".cpp"))):
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix not in endings or name in GENERATED:
                continue
            fence = raw = None
            for number, line in enumerate(path.read_text().split("\n"), 1):
                if path.suffix == ".md" and (mark := re.match(r" *(```+)(\w*)[^`]*$", line)):
                    fence = mark[2] or "printed" if fence is None else None
                printed = raw is not None or fence in ("printed", "console") or (path.suffix == ".md" and line.startswith("|"))
                rest = line
                if raw is not None and f'){raw}"' in line:
                    rest, raw = line.partition(f'){raw}"')[2], None
                if raw is None and path.suffix in (".hpp", ".cpp") and (begun := RAW.search(rest)):
                    raw = begun[1]
                if len(line) > WIDEST and not printed:
                    out.append(f"{name}:{number}: {len(line)} columns, more than {WIDEST}")
    return out


def missing(root):
    """Headers, sources and pages that are named and that the repository lacks, and pages that docs/index.md does not list, a sentence each."""
    out = []
    index = root / "docs" / "index.md"
    listed = {(index.parent / link).resolve() for link in re.findall(r"\]\(([^)#\s]+)\)", index.read_text())}
    for path in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        name = path.relative_to(root).as_posix()
        for number, line in enumerate(path.read_text().split("\n"), 1):
            out += [f"{name}:{number}: there is no {m[1]}" for m in SOURCE.finditer(line)
                    if not any((ROOT / below / m[1]).is_file() for below in BELOW)]
        if path.parent.parent == root / "docs" and path.parent.name != "site" and path.resolve() not in listed:
            out.append(f"docs/index.md does not list {name}")
    for folder in ("include", "examples", "bench", "tests", "cmake"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".hpp", ".cpp", ".py", ".sh", ".txt", ".cmake") and path.name not in ("fences.py", "names.py"):  # these invent pages
                for number, line in enumerate(path.read_text().split("\n"), 1):
                    out += [f"{path.relative_to(root)}:{number}: there is no {page}" for page in PAGE.findall(line) if not (ROOT / page).is_file()]
    return out


def main():
    root = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT
    wrong = found(root) + vague(root) + wide(root) + missing(root)
    if len(sys.argv) == 1:
        with tempfile.TemporaryDirectory() as folder:
            copy = pathlib.Path(folder)
            for name in ("include", "examples", "docs"):
                shutil.copytree(ROOT / name, copy / name)
            shutil.copy(ROOT / "README.md", copy)
            header = copy / "include" / "chevron" / "version.hpp"
            text = header.read_text()
            for word in WORDS:
                header.write_text(f"{text}// {word}\n")
                if not any(f"`{word}`" in one for one in found(copy) if "version.hpp" in one):
                    wrong.append(f"`{word}` was written into a header and not found")
            for word in ("what tells its rows", "nobody waits"):
                header.write_text(f"{text}inline char const* message = \"a rank was not given {word}\";\n")
                if not any("version.hpp" in one for one in vague(copy)):
                    wrong.append(f"a message with `{word}` was written into a header and not found")
            for name in ("include/chevron/tools/show/viewer/report.js.inc", "docs/guides/which-schedule.md",
                         "examples/chevron-plan/plane_drawing.hpp"):
                (copy / name).write_text(f"{(copy / name).read_text()}\n{'w ' * WIDEST}\n")
                if not any(f"{name}:" in one and "columns" in one for one in wide(copy)):
                    wrong.append(f"a wide line was written into {name} and not found")
            (copy / "docs" / "guides" / "new.md").write_text("# New\n\n`run/nowhere/none.hpp`\n")
            header.write_text(f"{text}// docs/nowhere/{'none.md'}\n")
            found_now = " ".join(missing(copy))
            for one in ("there is no run/nowhere/none.hpp", "there is no docs/nowhere/none.md", "does not list docs/guides/new.md"):
                if one not in found_now:
                    wrong.append(f"this check does not find `{one}`")
    for one in wrong:
        print(one)
    print(f"{len(WORDS)} words looked for, messages and widths of lines looked at, {len(wrong)} complaints")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
