#!/usr/bin/env python3
"""The guide, opened from its folder: its search finds a name, no page is wider than the window, and code stands beside the contents on
a laptop's screen without being pushed aside. Skipped without mkdocs-material (./dev docs) or Chromium.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "shared"))
from browser import Browser, chromium

SOURCE = pathlib.Path(__file__).resolve().parents[2]
MKDOCS = pathlib.Path(os.environ.get("CHEVRON_BUILD", SOURCE / "build")).resolve() / "docs-tools/bin/mkdocs"

WIDER = """(() => { const scrolls = e => ['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX);
  const room = document.documentElement.clientWidth, out = [];
  if (document.documentElement.scrollWidth > room) out.push('the page');
  for (const e of document.querySelectorAll('.md-content *')) {
    if (e.getBoundingClientRect().right <= room + 1 || e.getBoundingClientRect().width === 0) continue;
    let within = e; while (within !== document.body && !scrolls(within)) within = within.parentElement;
    if (within === document.body) out.push(e.tagName + ' ' + e.textContent.trim().slice(0, 60)); }
  return JSON.stringify(out.slice(0, 3)); })()"""
PUSHED = """JSON.stringify([...document.querySelectorAll('pre > code')].filter(e => e.scrollWidth > e.clientWidth + 1 &&
  Math.max(...e.textContent.split('\\n').map(line => [...line].length)) <= 128).map(e => e.textContent.trim().slice(0, 60)))"""
SEARCH = """(() => { const field = document.querySelector('[data-md-component=search-query]');
  document.querySelector('[data-md-toggle=search]').click(); field.focus(); field.value = 'distributed_sampler';
  field.dispatchEvent(new Event('input', {bubbles: true})); field.dispatchEvent(new Event('keyup', {bubbles: true})); })()"""
FOUND = "[...document.querySelectorAll('.md-search-result__item a')].some(e => /batches.html.*#a-data-set-shuffled/.test(e.href))"


def main(site):
    chromium()
    done = subprocess.run([MKDOCS, "build", "--quiet", "--site-dir", site], cwd=SOURCE, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, "mkdocs fails"
    pages = sorted(page for page in site.rglob("*.html")
                   if page.name != "404.html" and page.relative_to(site).parts[0] not in ("sources", "api", "playground", "assets"))
    assert len(pages) > 50
    with Browser(width=1280) as page:
        for each in pages:
            page.open(each)
            pushed = json.loads(page.run(PUSHED)) + json.loads(page.run(WIDER))
            assert not pushed, f"{each.relative_to(site)}, 1280 pixels wide, has no room for: {pushed}"
        page.open(site / "tutorial" / "1-a-schedule.html")
        page.run(SEARCH)
        page.wait(FOUND)
        page.size(390, 844)
        for each in pages:
            page.open(each)
            wider = json.loads(page.run(WIDER))
            assert not wider, f"{each.relative_to(site)}, 390 pixels wide, is wider than the window: {wider}"
        assert not page.errors, page.errors


if not MKDOCS.exists():
    print(f"skipped: no {MKDOCS}; remedy: ./dev docs")
    sys.exit(77)
with tempfile.TemporaryDirectory() as folder:
    main(pathlib.Path(folder))
print("the guide can be searched and read")
