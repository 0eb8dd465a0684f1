"""What mkdocs does to the pages of docs/, which are written to be read as they stand: docs/site/front.md goes before the list of pages on
the first page, docs/index.md; files of the source tree that pages link to become pages; fences that tests give a meaning to (`cpp prelude`, `says`, `from: FILE`, `python file NAME`, also of other languages) become plain ones.
"""
import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUTSIDE = re.compile(r"\]\(((?:\.\./)+)([^)#\s]+)")
LANGUAGES = {".cpp": "cpp", ".hpp": "cpp", ".py": "python", ".sh": "bash", ".cmake": "cmake"}
# What other programs put beside the guide; each link to one leads to this until it is there.
BESIDE = {"api/index.html": "The reference is made by doxygen docs/site/Doxyfile.",
          "playground/index.html": "This copy of the site was made without the playground."}


def outside(page, docs, up, path):
    """The path, from the top of the source tree, of a link of a page to a file outside docs/; nothing for other links."""
    file = (page.parent / up / path).resolve()
    return file.relative_to(ROOT).as_posix() if file.is_file() and not file.is_relative_to(docs) else None


def sources(docs):
    """Files of the source tree that pages link to."""
    found = {outside(page, docs, *link) for page in docs.rglob("*.md") for link in OUTSIDE.findall(page.read_text())}
    return sorted(found - {None})


def on_files(files, config):
    docs = pathlib.Path(config.docs_dir)
    for path in sources(docs):
        text = (ROOT / path).read_text()
        if not path.endswith(".md"):
            text = f"# {path}\n\n``````{LANGUAGES.get(pathlib.Path(path).suffix, 'text')}\n{text}``````\n"
        files.append(File.generated(config, f"sources/{path}.md", content="---\nsearch:\n  exclude: true\n---\n\n" + text))
    for path, words in BESIDE.items():
        files.append(File.generated(config, path, content=f"<!doctype html><title>Chevron</title><p>{words}</p>\n"))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.file.src_uri == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
        front = (ROOT / "docs" / "site" / "front.md").read_text()
        markdown = front + "\n" + re.sub(r"^(#+ )", r"#\1", markdown, flags=re.M)
    if not page.file.src_uri.startswith("sources/"):
        docs = pathlib.Path(config.docs_dir)
        top = "../" * page.file.src_uri.count("/")

        def to_source(link):
            path = outside(docs / page.file.src_uri, docs, link[1], link[2])
            return f"]({top}sources/{path}.md" if path else link[0]

        markdown = OUTSIDE.sub(to_source, markdown)
    markdown = re.sub(r"^( *)```cpp prelude$", r"\1```cpp", markdown, flags=re.M)
    markdown = re.sub(r"^```\n```says$", "```\n\n```text title=\"the compiler says\"", markdown, flags=re.M)
    markdown = re.sub(r"^<!-- from: (\S+) -->\n```cpp$", r'```cpp title="\1"', markdown, flags=re.M)
    markdown = re.sub(r"^```(\w+) file (\S+)$", r'```\1 title="\2"', markdown, flags=re.M)
    # Fences without a language are what programs print.
    return re.sub(r"^```console$", "```text", markdown, flags=re.M)
