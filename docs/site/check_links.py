"""Every link of the built site leads to a file that is there and, where it names a heading of the guide, to that heading; and no page
fetches anything from elsewhere. Samples with such faults are tried first.

    python3 docs/site/check_links.py build/site
"""
import html
import pathlib
import re
import sys
import tempfile
import urllib.parse


TAG = re.compile(r"<(a|link|img|script|iframe)\b[^>]*>", re.I)
LINK = re.compile(r"\s(?:href|src)=(?:\"([^\"]*)\"|'([^']*)'|([^\s>]+))")
ANCHOR = re.compile(r"\s(?:id|name)=\"?([^\s\">]+)")


class Page:
    """Links and anchors of a page; by patterns, since the reference has a thousand pages and a parser takes its time."""

    def __init__(self, text):
        text = re.sub(r"<script\b(?![^>]*\ssrc=).*?</script>|<!--.*?-->", "", text, flags=re.S)
        self.links, self.fetched = [], set()
        self.anchors = set(map(html.unescape, ANCHOR.findall(text)))
        for tag in TAG.finditer(text):
            for link in LINK.findall(tag[0]):
                link = html.unescape("".join(link))
                if link:
                    self.links.append(link)
                    if tag[1].lower() != "a" and "canonical" not in tag[0]:
                        self.fetched.add(link)


def complaints(site):
    """(number of links looked at, lines about those that lead nowhere, those that leave the site)."""
    pages, wrong, seen, leaving = {}, [], 0, set()

    def page(path):
        if path not in pages:
            pages[path] = Page(path.read_text(errors="replace"))
        return pages[path]

    for path in sorted(site.rglob("*.html")):
        of = path.relative_to(site)
        if of.name == "404.html":
            continue  # its links are from the root of a server
        for link in dict.fromkeys(page(path).links):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme in ("javascript", "data", "mailto"):
                continue
            if parts.scheme or parts.netloc:
                leaving.add(link)
                if link in page(path).fetched:
                    wrong.append(f"{of}: {link} is fetched from elsewhere")
                continue
            seen += 1
            target = path if not parts.path else (path.parent / urllib.parse.unquote(parts.path)).resolve()
            if target.is_dir():
                target = target / "index.html"
            if not target.is_file():
                wrong.append(f"{of}: {link} is not there")
            elif parts.fragment and target.suffix == ".html" and of.parts[0] not in ("api", "playground"):
                fragment = urllib.parse.unquote(parts.fragment)
                if not fragment.startswith("__") and fragment not in page(target).anchors:
                    wrong.append(f"{of}: {link}: no such heading")
    return seen, wrong, leaving


def main():
    for text in ('<a href="nowhere.html">', '<a href="#nowhere">', '<img src="nowhere.svg">', '<script src="https://else.where/x.js">'):
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "page.html").write_text('<p id="here"><a href="#here">right</a>' + text)
            if len(complaints(pathlib.Path(folder).resolve())[1]) != 1:
                sys.exit(f"FAILED: this check does not find what is wrong with {text}")
    site = pathlib.Path(sys.argv[1]).resolve()
    seen, wrong, leaving = complaints(site)
    for line in wrong[:50]:
        print("FAILED: " + line)
    print(f"{seen} links inside the site, {len(wrong)} lead nowhere; these leave it: {', '.join(sorted(leaving)) or 'none'}")
    return 1 if wrong or seen < 100 else 0


if __name__ == "__main__":
    sys.exit(main())
