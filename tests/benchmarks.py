# timeout: 60
"""docs/reference/benchmarks.md is what bench/results make of it, its commands exist, and the driver reads what programs print."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[1])).resolve()
BUILD = pathlib.Path(os.environ.get("CHEVRON_BUILD", ROOT / "build")).resolve()
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "bench"))
from suite import page, sections  # noqa: E402
from suite.chapters import CHAPTERS  # noqa: E402

wrong = []


def want(holds, words):
    if not holds:
        wrong.append(words)


def commands_of(text):
    """Code in lines and in blocks, one command a piece."""
    blocks = [line[4:].split("  #")[0].strip() for line in text.splitlines() if line.startswith("    ")]
    inline = [code.replace("\n", " ") for code in re.findall(r"`([^`]+)`", text)]
    return [part.strip(" ()") for code in blocks + inline for part in code.split("&&")]


def unknown(command):
    """What of a command there is not; nothing where all of it exists."""
    words = command.split()
    if words[0] == "./dev":
        verbs = re.findall(r"^  ([a-z]+)\)", (ROOT / "dev").read_text(), re.M)
        names = [w for w in words[2:] if re.fullmatch(r"[a-z-]+", w) and not w.startswith("--")]
        if words[1] not in verbs:
            return f"dev has no verb {words[1]}"
        if words[1] == "bench":
            return next((f"there is no section {w}" for w in names if w not in [*sections.ALL, "quick"]), None)
    if re.fullmatch(r"bench-[a-z_]+", words[0]):
        source = ROOT / "bench" / "run" / (words[0].removeprefix("bench-") + ".cpp")
        if not source.is_file():
            return f"there is no {source.relative_to(ROOT)}"
        return next(
            (f"{words[0]} has no {w}" for w in words if w.startswith("--") and f'"{w}"' not in source.read_text()), None
        )
    if re.match(r"(bench|tests|examples)/\S+\.(py|cpp|md)$", words[0]) and not (ROOT / words[0]).is_file():
        return f"there is no {words[0]}"
    if words[0].endswith(".py") and (ROOT / words[0]).is_file():
        text = (ROOT / words[0]).read_text()
        return next((f"{words[0]} has no {w}" for w in words if w.startswith("--") and f'"{w}"' not in text), None)
    return None


# The page is made of the figures, and a figure that somebody changes by hand is seen.
want(page.check(ROOT / "bench" / "results", ROOT) == 0, "docs/reference/benchmarks.md is not what bench/results make of it")
text = (ROOT / "docs" / page.PAGE).read_text()
with tempfile.TemporaryDirectory() as folder:
    copy = pathlib.Path(folder)
    shutil.copytree(ROOT / "docs", copy / "docs")
    changed = re.sub(r"(\| GPipe \| )(\d+)", lambda m: f"{m[1]}{int(m[2]) + 1}", text, count=1)
    want(changed != text, "the page has no figure of GPipe")
    (copy / "docs" / page.PAGE).write_text(changed)
    out = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, pathlib; from suite import page; "
            "sys.exit(page.check(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])))",
            str(ROOT / "bench" / "results"),
            folder,
        ],
        cwd=ROOT / "bench",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    want(
        out.returncode == 1 and "docs/reference/benchmarks.md is not what" in out.stdout,
        f"a changed figure is not seen: {out.stdout}{out.stderr}",
    )

# Every section has its chapter; README.md's three figures are those of the table "In short", unless the machine was not quiet.
want(sorted(sections.ALL) == sorted(c.name for c in CHAPTERS), "sections and chapters differ")
figures = re.search(r"plans (\S+) times faster, steps of small stages (\S+) times, a GPT's tokens (\S+)\s+times", (ROOT / "README.md").read_text())
want(figures is not None, "README.md has no figures beside PyTorch")
for name, figure in zip(("planning", "step", "gpt"), figures.groups() if figures else ()):
    [row] = re.findall(rf"^\| .* \| .* \| \[{name}\]\(#.*\) \|$", text, re.M)
    want("(not quiet)" in row or f" {figure} times" in row, f"README.md's {figure} times is not in the page's row of {name}")

# Where PyTorch was measured with fused=True, too, its columns, ratios and the best of each say so.
result = page.load(ROOT / "bench" / "results")["gpt"]
result["values"] = {row: {side: of[side] for side in of if "fused" not in side} for row, of in result["values"].items()}
chapter = next(c for c in CHAPTERS if c.name == "gpt")
values = {row: {**of, "torch fused": [2 * v for v in of["torch"]]} for row, of in result["values"].items() if "torch" in of}
label, fused = result["sides"]["torch"]["label"], {**result, "values": values}
want(f"| {label} fused |" in chapter.table(fused) and f"| Chevron / {label} fused |" in chapter.table(fused), "no fused column")
want("fused" not in chapter.table(result) + chapter.short(result), "a fused column that was not measured")
best = dict(re.findall(r"(PyTorch [^:]*): same .*?best of each ([0-9.]+) times", chapter.short(fused)))
want(
    abs(float(best.get(label, 0)) - 2 * float(best.get(label + " fused", 0))) < 0.02,
    f"twice the tokens a second, yet the best are {best}",
)

# PyTorch is prepared for sections that measure it, and for no others.
for name, section in sections.ALL.items():
    want(section.torch == ("peers" in section.measure.__code__.co_names), f"{name}: torch={section.torch}, and its function asks otherwise")
for names in (["order", "sleep"], ["order", "planning"]):
    with tempfile.TemporaryDirectory() as folder:
        told = subprocess.run(
            [
                sys.executable,
                "-c",
                "import pathlib, sys, types, benchmarks\n"
                "def prepared(with_newest):\n"
                "    print('prepared', with_newest)\n"
                "    return {'torch': {'label': 'PyTorch'}}\n"
                "def ran(name, builds, sides, *rest):\n"
                "    raise SystemExit(f'{name}: {list(sides)}')\n"
                "benchmarks.torch_sides, benchmarks.Run = prepared, ran\n"
                "benchmarks.machine.machine = lambda build: {}\n"
                "benchmarks.Build = lambda *words: types.SimpleNamespace(path=pathlib.Path(), commit='')\n"
                "given = types.SimpleNamespace(build='', beside=None, without_newest=False, names=sys.argv[2:], minutes=1, quick=True)\n"
                "benchmarks.ROOT = pathlib.Path(sys.argv[1])\n"
                "benchmarks.measure(given, benchmarks.ROOT / 'results')",
                folder,
                *names,
            ],
            cwd=ROOT / "bench",
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
    want(told.stderr.strip().endswith("order: []"), f"order has sides of PyTorch: {told.stderr}")
    want(told.stdout.count("prepared True") == names.count("planning"), f"{names}: PyTorch is prepared {told.stdout.count('prepared')} times")

# The commands of the page.
commands = commands_of(text)
want(
    len([c for c in commands if c.startswith("./dev bench ")]) >= len(page.load(ROOT / "bench" / "results")),
    "a section lacks its command",
)
for command in commands:
    said = unknown(command) if command else None
    want(said is None, f"`{command}` on the page: {said}")
for invented in ("./dev bench nothing", "bench-sleep --nothing", "bench/nothing.py", "bench-nothing", "./dev nothing"):
    want(unknown(invented) is not None, f"`{invented}` would pass")

# The fields that are read from bench-sleep, whose lines are for people.
sleep = BUILD / "bin" / "bench-sleep"
if sleep.is_file():
    said = subprocess.run(
        [
            str(sleep),
            "--schedule",
            "1F1B",
            "--backend",
            "threads",
            "--ranks",
            "2",
            "--microbatches",
            "2",
            "--milliseconds",
            "1",
            "--steps",
            "3",
        ],
        capture_output=True,
        text=True,
        timeout=50,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ).stdout
    lines = sections.SLEEP_LINE.findall(said)
    want(
        [line[:3] for line in lines] == [("1F1B", "threads", "synchronous"), ("1F1B", "threads", "post-validated")],
        f"bench-sleep printed {said}",
    )

print("\n".join(wrong) or f"{len(commands)} pieces of code, {len(CHAPTERS)} sections")
sys.exit(1 if wrong else 0)
