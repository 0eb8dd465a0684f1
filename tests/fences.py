# timeout: 600
"""Every C++ fence of README.md and docs/**/*.md compiles, as it stands on the page.

A fence is one of these:
- a whole program or header: nothing is added, but the page's ```cpp prelude, if it has one. One with a main is run, and must end with
  0. Where a ```says block follows, the compiler must refuse it, in these words;
- a wrong program, known by a first line `// expect: <regex>`: refused in these words, and with -DLEGAL accepted;
- a fragment, after a comment `<!-- compiled in: NAME -->`: it stands in that context of tests/fence_contexts.cpp. All fragments
  make one translation unit;
- a part of a program that the build compiles, after a comment `<!-- from: FILE -->`: these lines stand in FILE as they are;
- none of these: `<!-- not compiled: reason -->`.

The same translation unit holds each fragment once more with one of its names misspelt, and each must be an error: so a fence that
nobody looked at would be noticed. Faulty samples of a page are tried, too. Links between pages must lead somewhere.

    python3 tests/fences.py COMPILER SCHEDULE_FOLDERS [RUN_FOLDERS [RUN_DEFINITIONS]]     lists with ; between
"""
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[1]))
FENCE = re.compile(r"(?:<!-- (?P<how>compiled in|not compiled|from): (?P<what>.*?) -->\n\n?)?"
                   r"^(?P<indent> *)```cpp(?P<prelude> prelude)?\n(?P<text>.*?)^ *```$(?:\n```says\n(?P<says>.*?)^```$)?", re.M | re.S)
SAYS = re.compile(r"^```says$", re.M)
BESIDE = ("docs/api/index.html", "docs/playground/index.html")  # made beside the pages: ./dev docs looks at links to these
NAMES = re.compile(r"(?:chevron::|\.|->)([a-z_]{3,})|\b([a-z_]{4,})(?=\()")


class fence:
    def __init__(self, page, match, whole):
        self.page, self.line = page, whole.count("\n", 0, match.start("text")) + 1
        self.text = re.sub(r"^" + match["indent"], "", match["text"], flags=re.M)
        self.says = match["says"].strip().splitlines() if match["says"] else []
        self.context = match["what"] if match["how"] == "compiled in" else None
        self.reason = match["what"] if match["how"] == "not compiled" else None
        self.source = match["what"] if match["how"] == "from" else None
        self.prelude = bool(match["prelude"])
        self.expected = re.findall(r"^// expect: (.*)$", self.text, re.M)

    def __str__(self):
        return f"{self.page}:{self.line}"


def fences_of(page, text):
    return [fence(page, m, text) for m in FENCE.finditer(text)]


def contexts():
    parts = re.split(r"^// context: (\S+)\n", (ROOT / "tests" / "fence_contexts.cpp").read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2]))


def misspelt(text):
    """The text with its last name of the library's misspelt; an `#include` has none."""
    code = [m for m in NAMES.finditer(re.sub(r"^#include.*$|//.*$|\"[^\"\n]*\"", lambda m: " " * len(m[0]), text, flags=re.M))
            if m[1] or m[2] not in ("for", "if", "while", "return", "sizeof", "static_assert", "main")]
    if not code:
        return None
    last = code[-1]
    end = last.end(1) if last[1] else last.end(2)
    return text[:end] + "_misspelt" + text[end:]


def compile_text(command, text):
    return subprocess.run([*command, "-x", "c++", "-"], input=text, capture_output=True, text=True, timeout=560)


def first_errors(stderr):
    return "\n".join(line[:300] for line in stderr.splitlines() if "error" in line or "invalid_schedule" in line)[:3000]


def refused_in_words(command, text, words, as_regex=False):
    """What is wrong with a text that must be refused in these words; empty: nothing."""
    done = compile_text(command, text)
    said = " ".join(done.stderr.split())
    if done.returncode == 0:
        return "it compiles, but must not"
    missing = [w for w in words if not (re.search(w, said) if as_regex else w in said)]
    return f"the compiler does not say: {missing[0]}\n{first_errors(done.stderr)}" if missing else ""


def program_complaint(command, each, prelude):
    """What is wrong with a whole program; empty: nothing."""
    text = prelude + f'#line {each.line} "{each.page}"\n' + each.text
    if each.says:
        return refused_in_words(command, text, each.says)
    if each.expected:
        legal = compile_text([*command, "-DLEGAL"], text)
        if legal.returncode != 0:
            return "with -DLEGAL it must compile; the compiler says:\n" + first_errors(legal.stderr)
        return refused_in_words(command, text, each.expected, as_regex=True)
    if re.search(r"^int main\(", each.text, re.M):
        return run_complaint(command, text)
    done = compile_text(command, text)
    return "it must compile; the compiler says:\n" + first_errors(done.stderr) if done.returncode != 0 else ""


def run_complaint(command, text):
    """What is wrong with a program that has a main: it must compile, and end with 0."""
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(folder, "program")
        done = compile_text([word for word in command if word != "-fsyntax-only"] + ["-o", program], text)
        if done.returncode != 0:
            return "it must compile; the compiler says:\n" + first_errors(done.stderr)
        ran = subprocess.run([program], capture_output=True, text=True, timeout=60)
        return f"it ended with {ran.returncode}: {ran.stderr[:500]}" if ran.returncode != 0 else ""


def fragment_complaints(command, fragments, known):
    """Compiles all fragments, and each once more with a misspelt name, as one translation unit."""
    wrong, unit, tried = [], [known["head"]], []
    unit[:0] = sorted({line for each in fragments for line in re.findall(r"^#include .*\n", each.text, re.M)})
    for number, each in enumerate(fragments):
        if each.context not in known or each.context == "head":
            wrong.append(f"{each}: tests/fence_contexts.cpp has no context `{each.context}`")
            continue
        mutant = misspelt(each.text)
        if mutant is None:
            wrong.append(f"{each}: no name in it could be wrong")
            continue
        tried.append(each)
        for name, place, text in ((f"fence_{number}", str(each.page), each.text), (f"mutant_{number}", f"mutant {number}", mutant)):
            before, after = known[each.context].split("// FENCE\n")
            unit.append(f'namespace {name} {{\n#line 1 "context of {place}"\n{before}#line {each.line} "{place}"\n{text}\n'
                        f'#line 1 "context of {place}"\n{after}\n}}\n')
    # As one text, errors of one fragment do not hide those of the next: a misspelt name leaves all braces in place.
    done = compile_text([*command, "-fmax-errors=0"], "".join(unit))
    in_mutants, others, asked_by = set(), [], None
    for line in done.stderr.splitlines():
        # An error in a header belongs to the fragment that instantiated it; g++ names that line before the error.
        if re.search(r": In (?:instantiation|substitution|member function|function|constructor)", line):
            asked_by = None
        elif line.endswith("required from here"):
            asked_by = re.match(r"mutant (\d+):", line)
        if re.search(r": (?:fatal )?error: ", line):
            of_mutant = re.match(r"mutant (\d+):", line) or (asked_by if not re.match(r"\S+\.md:", line) else None)
            in_mutants.add(int(of_mutant[1])) if of_mutant else others.append(line[:300])
    if others:
        wrong.append("fragments must compile; the compiler says:\n" + "\n".join(others[:30]))
    for number, each in enumerate(fragments):
        if each in tried and number not in in_mutants:
            wrong.append(f"{each}: with a misspelt name it compiles, too")
    return wrong


def quotes(each):
    """Whether the file that a fence names has its lines."""
    file = ROOT / each.source
    return file.is_file() and f"\n{each.text}" in "\n" + file.read_text()


def whole_complaints(command, pages):
    """What is wrong with fences that stand alone, and with fences that could not be looked at."""
    jobs, wrong, refused = [], [], 0
    for page, text in pages.items():
        found = fences_of(page, text)
        prelude = next((each.text for each in found if each.prelude), "")
        opened = len(re.findall(r"^ *```(?:cpp|c\+\+|cc|cxx|C\+\+)", text, re.M))
        if opened != len(found):
            wrong.append(f"{page}: {opened} fences begin as C++, {len(found)} were understood")
        wrong += [f"{each}: these lines are not in {each.source}" for each in found if each.source and not quotes(each)]
        if len(SAYS.findall(text)) != sum(bool(each.says) for each in found):
            wrong.append(f"{page}: a ```says block does not follow a fence")
        jobs += [(each, prelude) for each in found 
                 if not each.prelude and not (each.context or each.reason or each.source)]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for (each, _), said in zip(jobs, pool.map(lambda job: program_complaint(command, *job), jobs)):
            if said:
                wrong.append(f"{each}: {said}")
            refused += bool(each.says or each.expected)
    return wrong, len(jobs), refused


def anchors_of(text):
    """What GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def link_complaints(pages):
    """Links to pages, files and headings that are not there."""
    wrong = []
    for page, text in pages.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, heading = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            if re.match(r"[a-z]+:", target) or os.path.relpath(file, ROOT) in BESIDE:
                continue
            if not file.exists():
                wrong.append(f"{page}: {target} is not there")
            elif heading and heading not in anchors_of(file.read_text()):
                wrong.append(f"{page}: {target}: no such heading")
    return wrong


FAULTY = {
    "a name that is not there": "```cpp\n#include <chevron/schedule.hpp>\nconstexpr chevron::shapes size{};\n```\n",
    "a fragment without a context": "```cpp\ntrainer.step(inputs, targets);\n```\n",
    "words that nobody says": "```cpp\nint one = two;\n```\n```says\nthree\n```\n",
    "an error that is none": "```cpp\nint one = 1;\n```\n```says\none\n```\n",
    "a wrong program that is right": "```cpp\n// expect: one\nint one = 1;\n```\n",
    "a program that fails": "```cpp\nint main() { return 3; }\n```\n",
    "lines that are not in the file": "<!-- from: examples/hello.cpp -->\n```cpp\nint main() { return 0; }\n```\n",
    "words without a fence": "```says\none\n```\n",
    "a fence of another kind": "```c++\nint one = 1;\n```\n",
}


def main():
    compiler, schedule, run, definitions = (sys.argv[1:] + [""] * 3)[:4]
    # The compiler's own folder, given once more, would come before the standard library's.
    folders = lambda words: [f"-isystem{f}" for f in dict.fromkeys(words.split(";")) if f not in ("", "/usr/include")]
    flags = [compiler, "-std=c++20", "-fsyntax-only", "-w", "-fconstexpr-ops-limit=268435456"]
    small = flags + folders(schedule)
    pages = {str(p.relative_to(ROOT)): p.read_text() for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
             if p.parent != ROOT / "docs" / "site"}

    wrong, programs, refused = whole_complaints(small, pages)
    for what, sample in FAULTY.items():
        if not whole_complaints(small, {"a faulty sample": sample})[0]:
            wrong.append(f"this check does not find {what}")
    if not refused:
        wrong.append("no program had to be refused")

    wrong += link_complaints(pages)
    if len(link_complaints({"README.md": "[a](docs/nowhere.md) [b](docs/guides/losses.md#nowhere) [c](docs/guides/losses.md)"})) != 2:
        wrong.append("this check does not find links that lead nowhere")

    all_fences = [each for page, text in pages.items() for each in fences_of(page, text)]
    for each in all_fences:
        if each.reason is not None:
            print(f"{each} is not compiled: {each.reason}")
    fragments = [each for each in all_fences if each.context is not None]
    if "USE_C10D_NCCL" not in definitions:
        for each in [each for each in fragments if "<chevron/nccl.hpp>" in each.text]:
            print(f"{each} is left out: this build has no chevron::nccl")
            fragments.remove(each)
    if run:
        command = flags + folders(f"{run};{ROOT / 'examples'}") + [f"-D{d}" for d in definitions.split(";") if d]
        wrong += fragment_complaints(command, fragments, contexts())
    else:
        print(f"{len(fragments)} fragments are left out: this build has no chevron::run")
    for line in wrong:
        print("FAILED: " + line)
    print(f"{programs} programs, {refused} of them refused in the words that the page shows; {len(fragments)} fragments; "
          f"{len(wrong)} failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
