#!/usr/bin/env python3
# timeout: 120
"""A report of chevron-plan in a headless Chromium: it draws, pans, zooms, answers what it is asked, and says nothing on
the console.

What needs what is worked out here once more, from the letters alone. CHEVRON_SHOTS=<folder> keeps pictures of what was seen.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "shared"))
from browser import Browser, chromium

BUILD = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build"))
AT = """((time, row) => { const t = report.timeline, r = t.host.getBoundingClientRect(), place = t.at.places[0];
  return [r.left + t.x_of(time), r.top + place.top + row * place.pitch + place.row / 2]; })"""


def plan(*words):
    return subprocess.run(
        [BUILD / "bin/chevron-plan", "show", *map(str, words)], check=True, capture_output=True, text=True
    ).stdout


def words_of_card(page):
    return page.run("(() => { const c = document.querySelector('.card'); return c.hidden ? '' : c.innerText; })()")


def needed(one, stages):
    stage, kind, micro_batch = re.fullmatch(r"(\d+)([FBIW])(\d+)", one).groups()
    stage = int(stage)
    if kind == "F":
        return {f"{stage - 1}F{micro_batch}"} if stage > 0 else set()
    if kind == "W":
        return {f"{stage}I{micro_batch}"}
    return {f"{stage}F{micro_batch}"} | ({f"{stage + 1}{kind}{micro_batch}"} if stage + 1 < stages else set())


def main():
    chromium()
    folder = pathlib.Path(tempfile.mkdtemp())
    shots = pathlib.Path(os.environ.get("CHEVRON_SHOTS", folder))
    shots.mkdir(parents=True, exist_ok=True)
    settings = ["--schedule", "ZBVZeroBubble", "--ranks", 4, "--microbatches", 8, "--communication", 0.5]
    (folder / "small.html").write_text(plan(*settings, "--format", "html"))
    truth = json.loads(plan(*settings, "--format", "json"))
    with Browser(1240, 900) as page:
        page.open(folder / "small.html")
        page.settle()
        # The actions that each action's card lists as needed.
        asked = page.run("""(() => { const p = report.pictures[0], out = {};
          for (let i = 0; i < p.count; ++i) out[chevron.spelled(p, i)] = p.needs(i).map((n) => chevron.spelled(p, n));
          return out; })()""")
        assert len(asked) == 4 * 2 * 8 * 3, len(asked)
        for one, needs in asked.items():
            assert set(needs) == needed(one, 8), (one, needs)
        # The same numbers as chevron-plan's.
        assert page.run("report.pictures[0].makespan") == truth["makespan"]
        assert page.run("report.pictures[0].peak") == truth["peak_in_flight"]
        assert page.run("report.pictures[0].critical.map((i) => chevron.spelled(report.pictures[0], i))") == [
            step["action"] for step in truth["critical_path"]
        ]
        # The pointer on an action, on an idle stretch, on the strip below, beside everything.
        page.move(*page.run(AT + "(0.5, 0)"))
        assert "0F0" in words_of_card(page) and "lets go on 1F0 on rank 1" in words_of_card(page), words_of_card(page)
        page.move(*page.run(AT + "(0.5, 2)"))
        said = words_of_card(page)
        assert "rank 2 is idle" in said and "waits for 1F0 of rank 1" in said and "that waited for 0F0 of rank 0" in said, said
        page.shot(shots / "report-idle.png")
        x, y = page.run(AT + "(20, 1)")
        page.move(x, y + 22)
        assert "in flight" in words_of_card(page) and "peak 8 chunks" in words_of_card(page), words_of_card(page)
        page.move(5, 5)
        assert words_of_card(page) == ""
        # Zoom, pan, fit.
        for key in "++":
            page.key(key)
        width = page.run("report.timeline.view[1] - report.timeline.view[0]")
        assert abs(width * 2.25 - page.run("report.timeline.length")) < 1e-6
        before = page.run("report.timeline.view[0]")
        x, y = page.run(AT + "(report.timeline.view[0] + 2, 1)")
        page.drag(x, y, x + 60, y)
        assert page.run("report.timeline.view[0]") < before
        page.key("0")
        assert page.run("report.timeline.is_whole()")
        # Each button and key changes its `aria-pressed`.
        for button in ["critical", "memory", "palette", "theme"]:
            now = page.run(f"document.getElementById('{button}').getAttribute('aria-pressed')")
            page.run(f"document.getElementById('{button}').click()")
            assert page.run(f"document.getElementById('{button}').getAttribute('aria-pressed')") != now, button
        assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(14, 18, 23)"
        page.shot(shots / "report-dark.png")
        page.run("document.getElementById('actions').open = true")
        page.settle()
        lists = page.run("document.querySelector('#actions pre').textContent").splitlines()
        assert [line.split(": ")[1].split() for line in lists] == truth["actions"], lists[0]

        # The largest that is promised: small, drawn quickly, nothing from elsewhere.
        (folder / "large.html").write_text(
            plan("--schedule", "ZBVZeroBubble", "--ranks", 64, "--microbatches", 256, "--format", "html")
        )
        size = (folder / "large.html").stat().st_size
        assert size < 1_000_000, size
        page.open(folder / "large.html")
        page.settle()
        page.shot(shots / "report-large.png")
        frame = page.run("""(() => { const t = report.timeline, from = performance.now();
              for (let k = 0; k < 10; ++k) t.draw();
              return (performance.now() - from) / 10; })()""")
        assert all(url.startswith(("file:", "data:", "about:")) for url in page.messages), page.messages
        assert page.errors == [], page.errors
        print(f"64 ranks, 256 microbatches: {size} bytes, {frame:.1f} ms a frame")


if __name__ == "__main__":
    main()
