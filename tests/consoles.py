# timeout: 120
"""Every ```console block of docs/**/*.md is typed into a shell, and must print what stands under each line that begins with `$ `.

Blocks of a page are typed one after the other in a folder of its own, where build/bin is this build's. White space counts as one space, so a page
may wrap long lines; a line `…` stands for any number of lines. A block after `<!-- run by: FILE -->` belongs to that test.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[1]))
BUILD = pathlib.Path(os.environ.get("CHEVRON_BUILD", ROOT / "build")).resolve()
BLOCK = re.compile(r"(?:^<!-- run by: (?P<other>\S+) -->\n\n?)?^```console\n(?P<text>.*?)^```$", re.M | re.S)


def steps_of(text):
    """(command, wanted output) for each `$ ` line."""
    parts = re.split(r"^\$ (.*)\n", text, flags=re.M)
    return list(zip(parts[1::2], parts[2::2]))


def matches(said, wanted):
    """Whether a command's output is that of the page: white space counts as one space, a line `…` stands for any lines."""
    pieces = [re.escape(" ".join(piece.split())) for piece in re.split(r"^…$", wanted, flags=re.M)]
    return re.fullmatch(r"\s*" + r"\s*.*\s*".join(pieces) + r"\s*", " ".join(said.split()), re.S) is not None


def complaints(name, text):
    wrong, typed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "build").mkdir()
        pathlib.Path(folder, "build", "bin").symlink_to(BUILD / "bin")
        for block in BLOCK.finditer(text):
            if block["other"]:
                # Somebody else's test must know the page.
                other = ROOT / block["other"]
                if not other.is_file() or pathlib.Path(name).name not in other.read_text():
                    wrong.append(f"{name}: {block['other']} does not read this page")
                continue
            steps = steps_of(block["text"])
            if not steps:
                wrong.append(f"{name}: a console without a line that begins with $")
            for command, wanted in steps:
                done = subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
                typed += 1
                said = done.stdout + done.stderr
                if done.returncode != 0:
                    wrong.append(f"{name}: `{command}` ended with {done.returncode}: {said[:500]}")
                elif not matches(said, wanted):
                    wrong.append(f"{name}: `{command}` prints something else than the page shows:\n{done.stdout}{done.stderr}")
    return wrong, typed


FAULTY = ["```console\n$ echo one\ntwo\n```\n", "```console\n$ false\n```\n", "```console\none\n```\n", "```console\n$ echo one; echo two\none\n```\n",
          "<!-- run by: tests/nobody.py -->\n```console\n$ echo one\n```\n"]


def main():
    wrong, typed = [], 0
    for page in sorted((ROOT / "docs").rglob("*.md")):
        found, count = complaints(str(page.relative_to(ROOT)), page.read_text())
        wrong += found
        typed += count
    for sample in FAULTY:
        if not complaints("a faulty sample", sample)[0]:
            wrong.append(f"this check does not find what is wrong here:\n{sample}")
    if complaints("a sample", "```console\n$ echo one; echo two; echo three\none\n…\nthree\n```\n")[0]:
        wrong.append("this check complains of a console that is right")
    for line in wrong:
        print("FAILED: " + line)
    print(f"{typed} lines typed, {len(wrong)} failed")
    return 1 if wrong or typed == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
