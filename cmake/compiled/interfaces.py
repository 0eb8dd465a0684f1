#!/usr/bin/env python3
"""interfaces.py HEADERS OUT: derives the interfaces and the sources of the library `chevron::compiled` from Chevron's headers.

Chevron's headers define each function where they declare it. From the folder HEADERS (with a folder `chevron` in it) come:

  OUT/interfaces/chevron/...     every header; the functions of the rooms of SOURCES are only declared
  OUT/SOURCE/bodies/chevron/...  the headers of a source's rooms, with an attribute by which the compiler emits these functions
                                 though no other function of the source calls them
  OUT/SOURCE/SOURCE.cpp          includes the headers of these rooms

Templates, constexpr functions, friends, and functions with a deduced return type keep their bodies in the interfaces. Copies keep
the line numbers of the headers. A file whose text did not change keeps its time of change. Run by ChevronCompiled.cmake.
"""
import os
import re
import sys

# The rooms of each source of the library. Functions of all other rooms keep their bodies.
SOURCES = {
    "run": ("base", "run"),
    "processes": ("jobs", "transports/gloo", "transports/shared_memory", "transports/streams", "checkpoint", "data"),
    "tools": ("csv", "tools"),
}
TOKEN = re.compile(r"""
    (?P<space>\s+|\\\n)
  | (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<raw>(?:u8|[uUL])?R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)")
  | (?P<string>(?:u8|[uUL])?"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')
  | (?P<number>\.?\d(?:[\w.']|[eEpP][+-])*)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<punctuation>::|->|<=>|\.\.\.|[^\s\w])
""", re.X | re.S)
OPEN = {"(": ")", "{": "}", "[": "]"}


class unknown_syntax(Exception):
    """A header has C++ that this script does not read; the text names file and line."""


class header:
    """The tokens of a header, and the changes to its text."""

    def __init__(self, path):
        self.path = path
        with open(path, encoding="utf-8") as f:
            self.text = f.read()
        self.tokens = []  # (text, begin, end)
        at = 0
        while at < len(self.text):
            if self.text[at] == "#" and self.text[:at].rpartition("\n")[2].strip() == "":
                at = re.compile(r"(?:[^\n]|(?<=\\)\n)*").match(self.text, at).end()
                continue
            m = TOKEN.match(self.text, at)
            if m.lastgroup not in ("space", "comment"):
                self.tokens.append((m[0], at, m.end()))
            at = m.end()
        # Of each function: where its declaration begins, where the part that its interface lacks begins and ends, the token `inline`.
        self.functions = []
        end = self.scope(0, False)
        if end != len(self.tokens):
            raise self.error(end, "a brace closes nothing")

    def error(self, i, text):
        at = self.tokens[i][1] if i < len(self.tokens) else len(self.text)
        line = self.text.count("\n", 0, at) + 1
        return unknown_syntax(f"{self.path}:{line}: {text}")

    def is_at(self, i, *texts):
        return i < len(self.tokens) and self.tokens[i][0] in texts

    def closed(self, i):
        """The index after the bracket that closes the one at i."""
        close, depth = OPEN[self.tokens[i][0]], 0
        opening = self.tokens[i][0]
        for k in range(i, len(self.tokens)):
            if self.tokens[k][0] == opening:
                depth += 1
            elif self.tokens[k][0] == close:
                depth -= 1
                if depth == 0:
                    return k + 1
        raise self.error(i, f"no {close} closes this bracket")

    def after_angle(self, i):
        """The index after the > that closes the < at i."""
        depth = 0
        while i < len(self.tokens):
            if self.is_at(i, "<"):
                depth += 1
            elif self.is_at(i, ">"):
                depth -= 1
                if depth == 0:
                    return i + 1
            elif self.is_at(i, *OPEN):
                i = self.closed(i)
                continue
            i += 1
        raise self.error(i - 1, "no > closes a <")

    def scope(self, i, of_template):
        """Reads declarations until the scope's brace closes; returns the index of this brace."""
        while i < len(self.tokens) and not self.is_at(i, "}"):
            i = self.declaration(i, of_template)
        return i

    def declaration(self, i, of_template):
        """Reads a declaration, or a definition, that begins at i; returns the index after it."""
        begin, template = i, of_template
        if self.is_at(i, ";"):
            return i + 1
        if self.is_at(i, "public", "protected", "private") and self.is_at(i + 1, ":"):
            return i + 2
        if self.is_at(i, "static_assert", "using", "typedef"):
            return self.to_semicolon(i)
        while self.is_at(i, "template"):
            template = True
            i = self.after_angle(i + 1)
        head, called, deduced = set(), False, False
        while i < len(self.tokens):
            text = self.tokens[i][0]
            if text == ";":
                return i + 1
            if text == "=":
                return self.to_semicolon(i)
            if text == "enum":
                return self.to_semicolon(i)
            if text in ("namespace", "extern", "class", "struct", "union") and not called:
                k = i + 1
                while not self.is_at(k, "{", ";", "(", "="):
                    k = self.after_angle(k) if self.is_at(k, "<") else self.closed(k) if self.is_at(k, "[") else k + 1
                if self.is_at(k, "{"):
                    end = self.scope(k + 1, template) + 1
                    return end if text in ("namespace", "extern") else self.to_semicolon(end)
            if text == "operator":
                i += 1
                i = i + 2 if self.is_at(i, "(") else i
                while not self.is_at(i, "("):
                    i += 1
                continue
            if text == "<":
                i = self.after_angle(i)
                continue
            if text == "[":
                i = self.closed(i)
                continue
            if text == "(":
                end = self.closed(i)
                if not called:
                    called = self.tokens[i - 1][0] not in ("alignas", "decltype", "noexcept", "explicit", "requires")
                    template = template or any(t[0] == "auto" for t in self.tokens[i:end] if called) and self.abbreviated(i, end)
                i = end
                continue
            if text == ":" and called:
                return self.define(begin, i, self.after_initialisers(i), template, head)
            if text == "{":
                if not called:
                    i = self.closed(i)
                    continue
                return self.define(begin, i, i, template or deduced and "->" not in head, head)
            deduced = deduced or text == "auto" and not called
            head.add(text)
            i += 1
        raise self.error(begin, "a declaration without end")

    def abbreviated(self, i, end):
        """Whether a parameter between the parentheses is declared `auto`; defaults may contain lambdas."""
        depth = 0
        for k in range(i, end):
            depth += self.is_at(k, "{") - self.is_at(k, "}")
            if depth == 0 and self.is_at(k, "auto"):
                return True
        return False

    def to_semicolon(self, i):
        """The index after the semicolon that ends the declaration around i."""
        while not self.is_at(i, ";"):
            if i >= len(self.tokens):
                raise self.error(i, "a declaration without semicolon")
            i = self.closed(i) if self.is_at(i, *OPEN) else i + 1
        return i + 1

    def after_initialisers(self, i):
        """The index of the body's brace after a constructor's `: member(value), member{value}`."""
        i += 1
        while True:
            while not self.is_at(i, "(", "{"):
                i = self.after_angle(i) if self.is_at(i, "<") else i + 1
            i = self.closed(i)
            if self.is_at(i, "..."):
                i += 1
            if self.is_at(i, "{"):
                return i
            if not self.is_at(i, ","):
                raise self.error(i, "neither a member's initialiser nor a body")

    def define(self, begin, lacks, body, template, head):
        """Notes the function whose initialisers or body begin at `lacks`; returns the index after its body, whose brace is `body`."""
        end = self.closed(body)
        if self.is_at(end, ";"):
            end += 1
        first, last = self.tokens[lacks - 1][2], self.tokens[end - 1][2]
        if not template and not head & {"constexpr", "consteval", "friend"}:
            inline = next((t for t in self.tokens[begin:lacks] if t[0] == "inline"), None)
            self.functions.append((self.tokens[begin][1], first, last, inline))
        return end

    def interface(self):
        """The header's text, its functions only declared."""
        text, at = [], 0
        for begin, first, last, inline in self.functions:
            if inline:
                text += [self.text[at:inline[1]]]
                at = inline[2] + 1
            text += [self.text[at:first], ";", "\n" * self.text.count("\n", first, last)]
            at = last
        return "".join(text) + self.text[at:]

    def bodies(self):
        """The header's text, its functions emitted."""
        text, at = [], 0
        for begin, *_ in self.functions:
            text += [self.text[at:begin], "[[gnu::used]] "]
            at = begin
        return "".join(text) + self.text[at:]


def write(path, text):
    """Writes a file, if it has other text."""
    try:
        with open(path, encoding="utf-8") as f:
            if f.read() == text:
                return
    except OSError:
        pass
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w", encoding="utf-8") as f:
        f.write(text)


def main():
    if len(sys.argv) != 3:
        sys.exit("usage: interfaces.py HEADERS OUT")
    headers, out = sys.argv[1:]
    if not os.path.isdir(os.path.join(headers, "chevron")):
        sys.exit(f"interfaces.py: {headers} has no folder chevron. Remedy: the folder of Chevron's headers, which programs include from")
    includes = {name: [] for name in SOURCES}
    functions = 0
    for folder, _, files in sorted(os.walk(os.path.join(headers, "chevron"))):
        for file in sorted(files):
            path = os.path.join(folder, file)
            name = os.path.relpath(path, headers)
            room = os.path.dirname(name).removeprefix("chevron/")
            source = next((s for s, rooms in SOURCES.items() for r in rooms if (room + "/").startswith(r + "/")), None)
            if "/shim/" in name:
                continue
            with open(path, encoding="utf-8") as f:
                text = f.read()
            if source and file.endswith(".hpp"):
                h = header(path)
                functions += len(h.functions)
                write(os.path.join(out, "interfaces", name), h.interface())
                write(os.path.join(out, source, "bodies", name), h.bodies())
                includes[source].append(name)
            else:
                write(os.path.join(out, "interfaces", name), text)
    for source, names in includes.items():
        write(os.path.join(out, source, source + ".cpp"), "".join(f"#include <{n}>\n" for n in names))
    print(f"{functions} functions of {sum(map(len, includes.values()))} headers")


if __name__ == "__main__":
    try:
        main()
    except unknown_syntax as e:
        sys.exit(str(e))
