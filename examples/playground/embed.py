#!/usr/bin/env python3
"""The viewer as C++: viewer.css, viewer.js and report.js of this folder as strings in include/chevron/show/html_viewer.hpp.

A report stands by itself and headers read no files, so the header holds the text. Without arguments: says whether it is
the same as the files (exit status 1 if not); with --write: writes it. Comments of the scripts stay in the sources.
"""

import pathlib
import re
import sys

HERE = pathlib.Path(__file__).resolve().parent
HEADER = HERE.parent.parent / "include/chevron/show/html_viewer.hpp"
PARTS = [
    ("viewer_style", "viewer.css", "How a report looks."),
    ("viewer_script", "viewer.js", "`chevron` in a page: reads models, draws them, says what is under the pointer."),
    ("report_script", "report.js", "Ties a report's buttons to the viewer."),
]


def packed(text):
    """Without comment lines and indentation: a quarter less in every report."""
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//")) + "\n"


def header():
    out = [
        "#pragma once",
        "",
        "/// \\file",
        "/// The viewer of a report's page as text. Written by `examples/playground/embed.py --write` from the files beside",
        "/// it: change those.",
        "// long: a script, not to be read here",
        "",
        "namespace chevron::show::detail {",
    ]
    for name, file, words in PARTS:
        text = packed((HERE / file).read_text())
        assert ')js"' not in text and "</script" not in text and text.isascii(), file
        # Compilers promise 64 KiB a literal.
        assert len(text) < 65000, file
        out += ["", f"/// {words}", f'inline constexpr char const* {name} = R"js({text})js";']
    return "\n".join(out + ["", "}  // namespace chevron::show::detail", ""])


def main():
    wanted = header()
    if sys.argv[1:] == ["--write"]:
        HEADER.write_text(wanted)
    elif sys.argv[1:]:
        sys.exit(__doc__)
    elif not HEADER.exists() or HEADER.read_text() != wanted:
        sys.exit(
            f"{HEADER.name} is not what viewer.css, viewer.js and report.js say. Remedy: python3 "
            "examples/playground/embed.py --write"
        )
    else:
        print(f"{HEADER.name}: {len(wanted)} bytes, the same as its sources")


if __name__ == "__main__":
    main()
