# timeout: 120
"""Docstrings of public headers: those of include/chevron/*.hpp and those that they include. Each public type and function says what it
is or does; a function speaks of its parameters, by `\\param` or by one's name or type in its words; and it says what it returns, by
`\\returns`, or by a first sentence that names the result ("The makespan of a plan", "Whether ..."). No public function returns a type
of a namespace `detail`. Read with doxygen; skipped without it.

    python3 tests/docstrings.py
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

ROOT = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[1]))
# Words that say nothing of a parameter by being in its type.
DULL = set("const std int double bool char string vector size_t auto int64_t chevron search show detail class span typename view".split())
WORDS = lambda node: re.sub(r"\s+", " ", "".join(node.itertext())).strip() if node is not None else ""


def entities(include):
    """(file, line, kind, name, node) of all that doxygen finds in the headers."""
    with tempfile.TemporaryDirectory() as folder:
        settings = (f'INPUT="{include}"\nOUTPUT_DIRECTORY="{folder}"\nSTRIP_FROM_PATH="{include}"\nFILE_PATTERNS=*.hpp\nRECURSIVE=YES\n'
                    "EXCLUDE_PATTERNS=*/shim/*\nGENERATE_HTML=NO\nGENERATE_LATEX=NO\nGENERATE_XML=YES\nXML_PROGRAMLISTING=NO\n"
                    "EXTRACT_ALL=YES\nJAVADOC_AUTOBRIEF=YES\nMACRO_EXPANSION=YES\nEXPAND_ONLY_PREDEF=YES\nPREDEFINED=DOXYGEN\n"
                    "QUIET=YES\nWARNINGS=NO\nWARN_IF_INCOMPLETE_DOC=NO\nWARN_IF_DOC_ERROR=NO\nHAVE_DOT=NO\n")
        subprocess.run(["doxygen", "-"], input=settings, text=True, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = {}
        for file in sorted(pathlib.Path(folder, "xml").glob("*.xml")):
            for unit in xml.etree.ElementTree.parse(file).getroot().iter("compounddef"):
                nodes = list(unit.iter("memberdef"))
                if unit.get("kind") in ("class", "struct", "union", "concept"):
                    nodes.append(unit)
                for node in nodes:
                    found[node.get("id")] = node
        for node in found.values():
            at = node.find("location")
            is_type = node.tag == "compounddef"
            name = WORDS(node.find("compoundname" if is_type else "qualifiedname")) or WORDS(node.find("name"))
            yield at.get("file"), int(at.get("line")), "type" if is_type else node.get("kind"), name, node


def public_headers(include):
    out = set()
    for umbrella in (include / "chevron").glob("*.hpp"):
        out |= {f"chevron/{umbrella.name}", *re.findall(r"^#include <(chevron/[^>]+)>", umbrella.read_text(), re.M)}
    return out


def speaks_of_parameters(node, text):
    low = " " + re.sub(r"[^a-z0-9_]+", " ", text.lower()) + " "
    named = False
    for one in node.findall("param"):
        name, kind = WORDS(one.find("declname")), WORDS(one.find("type"))
        if not name:
            continue  # it is not used
        named = True
        words = {word for whole in [name.lower(), *re.findall(r"[a-z_]+", kind.lower())] for word in [whole, *whole.split("_")]}
        # A plural, and the word of an abstract one: chunks_in_flight, shape for a size.
        if any(re.search(rf" {re.escape(word)}(s|es|ed|ing)? ", low) for word in words - DULL if len(word) > 2 or word == name.lower()):
            return True
    return not named


def says_what_it_returns(kind, text):
    """A first word such as `Plays` says what is done, not what comes of it."""
    words = [word for whole in re.findall(r"[a-z_]+", kind.lower()) for word in [whole, *whole.split("_")]]
    named = any(re.search(rf"\b{re.escape(word)}s?\b", text.lower()) for word in words if word not in DULL and len(word) > 2)
    return named or re.search(r"\b(returns?|gives?|whether)\b", text.lower()) or not re.match(r"[A-Z][a-z]+s\b", text)


def returns_detail(node):
    return re.search(r"\bdetail::", WORDS(node.find("type"))) is not None


def gaps(include):
    """How many public names there are, and what is missing, a sentence each."""
    public, missing, count = public_headers(include), [], 0
    for file, line, kind, name, node in entities(include):
        if file not in public or "detail" in name.split("::") or "@" in name or node.get("prot", "public") != "public":
            continue
        arguments = WORDS(node.find("argsstring"))
        say = lambda words: missing.append(f"include/{file}:{line}: {name}{arguments[:60]} {words}")
        if kind == "function" and returns_detail(node):
            say(f"returns {WORDS(node.find('type'))}, which users cannot name")
        if kind not in ("type", "function", "enum", "concept", "typedef") or arguments.endswith(("=delete", "=default")):
            continue
        count += 1
        details = node.find("detaileddescription")
        text = (WORDS(node.find("briefdescription")) + " " + WORDS(details)).strip()
        if not text:
            say("has no docstring")
            continue
        if kind != "function":
            continue
        if details.find('.//parameterlist[@kind="param"]') is None and not speaks_of_parameters(node, text):
            say("does not speak of its parameters")
        result, parts = WORDS(node.find("type")), name.split("::")
        made = len(parts) > 1 and parts[-1] == parts[-2]
        if result and not made and not re.search(r"\bvoid$", result) and details.find('.//simplesect[@kind="return"]') is None:
            if not says_what_it_returns(result, text):
                say("does not say what it returns")
    return count, missing


def main():
    if not shutil.which("doxygen"):
        print("skipped: no doxygen; remedy: ./dev docs, which installs it")
        return 77
    count, wrong = gaps(ROOT / "include")
    # The check tries itself.
    with tempfile.TemporaryDirectory() as folder:
        (one := pathlib.Path(folder) / "chevron").mkdir()
        (one / "own.hpp").write_text(
            "namespace chevron {\nstruct bare {};\n/// Plays.\nint plays(int);\n/// Plays a game.\n/// \\returns points\n"
            "int points(int ranks);\n/// The points of so many ranks.\nint right(int ranks);\nnamespace detail { struct own; }\n/// The inside of a plan.\ndetail::own& inside();\n/// Lets go.\nvoid lets_go();\n}\n")
        said = gaps(pathlib.Path(folder))[1]
        expected = ["chevron::bare has no", "chevron::plays(int) does not say", "chevron::points(int ranks) does not speak",
                    "chevron::inside() returns detail::own"]
        if len(said) != len(expected) or not all(any(part in one for one in said) for part in expected):
            wrong.append(f"this check finds in its own faulty header: {said}")
    print("\n".join(wrong), end="\n" if wrong else "")
    print(f"{count} public names, {len(wrong)} complaints")
    return 1 if wrong or count < 500 else 0


if __name__ == "__main__":
    sys.exit(main())
