"""What mkdocs does to the pages of docs/, which are written to be read as they stand: docs/site/front.md becomes the first page; files of the
source tree that pages link to become pages; fences that tests give a meaning to (`cpp prelude`, `says`, `python file NAME`) become plain ones.
"""
import pathlib
import re

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
LANGUAGES = {".cpp": "cpp", ".hpp": "cpp", ".py": "python", ".sh": "bash", ".cmake": "cmake"}
# What other programs put beside the guide; each link to one leads to this until it is there.
BESIDE = {"reference/index.html": "The reference is made by doxygen docs/site/Doxyfile.",
          "playground/index.html": "This copy of the site was made without the playground."}


def sources(docs):
    """Files of the source tree that pages link to."""
    found = {path for page in docs.glob("*.md") for path in OUTSIDE.findall(page.read_text())}
    return sorted(path for path in found if (ROOT / path).is_file())


def on_files(files, config):
    docs = pathlib.Path(config.docs_dir)
    files.append(File.generated(config, "index.md", content="---\nhide:\n  - navigation\n  - toc\n---\n\n" + (ROOT / "docs" / "site" / "front.md").read_text()))
    for path in sources(docs):
        text = (ROOT / path).read_text()
        if not path.endswith(".md"):
            text = f"# {path}\n\n``````{LANGUAGES.get(pathlib.Path(path).suffix, 'text')}\n{text}``````\n"
        files.append(File.generated(config, f"sources/{path}.md", content="---\nsearch:\n  exclude: true\n---\n\n" + text))
    for path, words in BESIDE.items():
        files.append(File.generated(config, path, content=f"<!doctype html><title>Chevron</title><p>{words}</p>\n"))
    return files


def on_page_markdown(markdown, page, config, files):
    if not page.file.src_uri.startswith("sources/"):
        markdown = OUTSIDE.sub(lambda m: f"](sources/{m[1]}.md" if (ROOT / m[1]).is_file() else m[0], markdown)
    markdown = re.sub(r"^( *)```cpp prelude$", r"\1```cpp", markdown, flags=re.M)
    markdown = re.sub(r"^```\n```says$", "```\n\n```text title=\"the compiler says\"", markdown, flags=re.M)
    markdown = re.sub(r"^```python file (\S+)$", r'```python title="\1"', markdown, flags=re.M)
    # Fences without a language are what programs print.
    return re.sub(r"^```console$", "```text", markdown, flags=re.M)
