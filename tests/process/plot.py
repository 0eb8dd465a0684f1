# timeout: 120
"""chevron-plan plot beside a reader of its own: curves are read back from the SVG by the labels of its axes, and compared with the numbers
in the files: each vertex is a value, in each pixel column the least and the greatest value are drawn, gaps and values that are not finite
interrupt the curve; wrong files are refused by file, line and remedy.
"""
import json
import math
import os
import pathlib
import random
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as tree

PLAN = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve() / "bin" / "chevron-plan"
SVG = "{http://www.w3.org/2000/svg}"
LOSS, SECONDS = "loss_metrics/global_avg_loss", "time_metrics/end_to_end(s)"
wrong = []


def expect(holds, words):
    if not holds:
        wrong.append(words)


def plan(*words, code=0, path=None, text=None):
    environment = dict(os.environ) if path is None else {**os.environ, "PATH": path}
    done = subprocess.run([PLAN, "plot", *map(str, words)], capture_output=True, env=environment, input=text, timeout=60, check=False)
    expect(done.returncode == code, f"{words}: exit code {done.returncode}, not {code}: {done.stderr.decode()[:300]}")
    if code == 2:
        expect(done.stdout == b"" and done.stderr.count(b"\n") == 1, f"{words}: not just one line: {done.stderr.decode()}")
    return done


def written(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def a_run(steps, seed, first=1, rate=3e-3):
    draw = random.Random(seed)
    seen = 0
    for step in range(first, first + steps):
        seen += 512
        yield {"step": step, LOSS: 2 + 3 * math.exp(-4 * step / steps) * draw.uniform(0.8, 1.2) + draw.uniform(-0.1, 0.1),
               "grad_norm": math.exp(draw.gauss(0, 1)), "lr": rate * (1 - 0.9 * (step - first) / steps), "n_tokens_seen": seen, SECONDS: draw.uniform(0.1, 0.3),
               "memory/max_reserved(GiB)": 1.5, "memory/max_reserved(%)": 6.0, "bubble": draw.uniform(0.1, 0.2)}


RAISED = {c: str(i) for i, c in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")} | {"⁻": "-"}


def number_of(words):
    words = words.replace(",", "")
    if "10" in words and any(c in RAISED for c in words):
        factor, _, power = words.rpartition("10")
        return float(factor.rstrip("·") or 1) * 10.0 ** int("".join(RAISED[c] for c in power))
    return float(words)


def factor_of(words):
    """The factor behind an axis' name, as in `learning rate, 10⁻³`."""
    last = words.rpartition(", ")[2]
    return number_of(last) if re.fullmatch(r"10[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", last) else 1.0


def line_through(marks, log):
    """From a pixel to a value, by the axis' labels, which must lie on one line."""
    marks = [(at, math.log(value) if log else value) for at, value in marks]
    (a, x), (b, y) = marks[0], marks[-1]
    slope = (y - x) / (b - a)
    for at, value in marks:
        expect(abs(x + slope * (at - a) - value) <= 1e-3 * abs(y - x), f"axis: {marks}")
    return lambda at: math.exp(x + slope * (at - a)) if log else x + slope * (at - a)


def read_back(svg, log=False):
    """Panels: (words, curves by name in values, curves in pixels, gaps, crosses, names beside the panel)."""
    root = tree.fromstring(svg)
    group = root.find(SVG + "g")
    foot = [t.text for t in group.findall(SVG + "text") if t.get("text-anchor") == "end"][0]
    marks = [(float(t.get("x")), number_of(t.text) * factor_of(foot)) for t in root.iter(SVG + "text") if t.get("class") == "x-mark"]
    x = line_through(marks, False)
    panels = []
    for panel in group.findall(SVG + "g"):
        texts = panel.findall(SVG + "text")
        words = texts[0].text
        ticks = [(float(t.get("y")) - 4, number_of(t.text) * factor_of(words)) for t in texts if t.get("class") == "y-mark"]
        expect(2 <= len(ticks) <= 24 and 2 <= len(marks) <= 16, f"{words}: {len(ticks)} and {len(marks)} labels")
        y = line_through(ticks, log)
        values, pixels, gaps, crosses, faint = {}, {}, {}, {}, {}
        for run in panel.findall(SVG + "g"):
            name = run.find(SVG + "title").text
            parts, behind = [], []
            for path in run.findall(SVG + "path"):
                if "not-finite" in path.get("class"):
                    numbers = [float(n) for n in re.findall(r"-?[0-9.]+", path.get("d"))]
                    crosses.setdefault(name, []).append(x((numbers[0] + numbers[2]) / 2))
                    continue
                points = [tuple(map(float, p.split(","))) for p in path.get("d")[1:].split(" L")]
                (behind if path.get("stroke-opacity") else parts).append(points)
            for circle in run.findall(SVG + "circle"):
                parts.append([(float(circle.get("cx")), float(circle.get("cy")))])
            pixels[name] = parts
            values[name] = [[(x(a), y(b)) for a, b in part] for part in parts]
            faint[name] = [[(x(a), y(b)) for a, b in part] for part in behind]
            gaps[name] = [tuple(x(float(one.get(k))) for k in ("x1", "x2")) for one in run.findall(SVG + "line")]
        beside = [t.text for t in texts if "name" in (t.get("class") or "")]
        panels.append({"words": words, "values": values, "pixels": pixels, "gaps": gaps, "crosses": crosses, "names": beside, "faint": faint,
                       "unit": abs(y(101) / y(100) - 1) if log else abs(y(101) - y(100)), "x_unit": abs(x(101) - x(100))})
    return panels


def compare(panel, name, points, log):
    """A drawn curve beside the values of the file, all finite and without a gap."""
    drawn = [p for part in panel["values"][name] for p in part]
    expect(len(panel["values"][name]) == 1, f"{name}: {len(panel['values'][name])} parts")
    off = lambda a, b: abs(a / b - 1) if log else abs(a - b)
    near = 0.02 * panel["unit"]
    # Each vertex is a value: the nearest in x within two hundredths of a pixel.
    at = 0
    by_x = sorted(points)
    for x, y in drawn:
        while at + 1 < len(by_x) and by_x[at][0] < x - 0.03 * panel["x_unit"]:
            at += 1
        k, found = at, False
        while k < len(by_x) and by_x[k][0] <= x + 0.03 * panel["x_unit"]:
            found = found or off(by_x[k][1], y) <= near
            k += 1
        if not found:
            return expect(False, f"{name}: the vertex {x}, {y} is no value of the file")
    # Extremes stay: in each half pixel, so also of the whole.
    for choose in (min, max):
        expect(off(choose(y for _, y in drawn), choose(y for _, y in points)) <= near, f"{name}: {choose.__name__} is lost")
    width = panel["x_unit"] / 2
    first = by_x[0][0]
    columns = {}
    for x, y in drawn:
        columns.setdefault(round((x - first) / width), []).append(y)
    for x, y in by_x[:: max(1, len(by_x) // 500)]:
        k = round((x - first) / width)
        close = [v for d in (-1, 0, 1) for v in columns.get(k + d, [])]
        low, high = min(close, default=math.inf), max(close, default=-math.inf)
        inside = low <= y * (1 + near) and high >= y * (1 - near) if log else low <= y + near and high >= y - near
        expect(inside, f"{name}: {y} at {x} lies outside of what is drawn there")
    expect(len(drawn) <= 4 * 2 * 960, f"{name}: {len(drawn)} vertices")


def curves(folder):
    for count in (1, 3, 8):
        for steps in (10, 1000):
            data = [list(a_run(steps, seed)) for seed in range(count)]
            files = [written(folder / f"r{i}.jsonl", run) for i, run in enumerate(data)]
            for log in (False, True):
                svg = plan(*files, "--format", "svg", "--y", "loss,grad_norm", *(["--log"] if log else [])).stdout.decode()
                panels = read_back(svg, log)
                expect([p["words"] for p in panels] == ["loss", "norm of the gradient"], f"panels: {[p['words'] for p in panels]}")
                for panel, key in zip(panels, (LOSS, "grad_norm")):
                    expect(sorted(panel["names"]) == ([f"r{i}" for i in range(count)] if count > 1 else []), f"names: {panel['names']}")
                    for i, run in enumerate(data):
                        compare(panel, f"r{i}", [(line["step"], line[key]) for line in run], log)
    # Names beside a panel do not cover one another, though eight runs end within a hair.
    root = tree.fromstring(plan(*files, "--format", "svg").stdout)
    heights = sorted(float(t.get("y")) for t in root.iter(SVG + "text") if "name" in (t.get("class") or ""))
    expect(len(heights) == 8 and all(b - a >= 14.9 for a, b in zip(heights, heights[1:])), f"names overlap: {heights}")

    rising = [written(folder / f"rising{i}.jsonl", [{"step": step, LOSS: step + i / 100} for step in range(1, 50)]) for i in range(8)]
    root = tree.fromstring(plan(*rising, "--format", "svg").stdout)
    heights = sorted(float(t.get("y")) for t in root.iter(SVG + "text") if "name" in (t.get("class") or ""))
    expect(heights[0] >= 92 and all(b - a >= 14.9 for a, b in zip(heights, heights[1:])), f"names above the panel, or overlapping: {heights}")

    run = list(a_run(100, 7))
    file = written(folder / "axes.jsonl", run)
    sums = [sum(line[SECONDS] for line in run[: i + 1]) for i in range(100)]
    for x, at in (("seconds", sums), ("tokens", [line["n_tokens_seen"] for line in run])):
        compare(read_back(plan(file, "--x", x, "--format", "svg").stdout.decode())[0], "axes", [(a, line[LOSS]) for a, line in zip(at, run)], False)
    # Small numbers and large ones: the factor stands beside the axis.
    panel = read_back(plan(file, "--y", "learning_rate", "--format", "svg").stdout.decode())[0]
    compare(panel, "axes", [(line["step"], line["lr"]) for line in run], False)
    tiny = written(folder / "tiny.jsonl", a_run(20000, 3, rate=2e-5, first=9_000_000))
    panel = read_back(plan(tiny, "--y", "lr", "--format", "svg").stdout.decode())[0]
    expect(panel["words"] == "learning rate, 10⁻⁵", panel["words"])
    compare(panel, "tiny", [(line["step"], line["lr"]) for line in map(json.loads, tiny.read_text().splitlines())], False)

    # Means over the last steps, by another sum; the values themselves stay behind them.
    panel = read_back(plan(file, "--smooth", "10", "--format", "svg").stdout.decode())[0]
    losses = [line[LOSS] for line in run]
    means = [sum(losses[max(0, i - 9) : i + 1]) / len(losses[max(0, i - 9) : i + 1]) for i in range(100)]
    compare(panel, "axes", list(zip(range(1, 101), means)), False)
    compare({**panel, "values": panel["faint"]}, "axes", list(zip(range(1, 101), losses)), False)

    # A hundred thousand steps, one of them far outside.
    run = list(a_run(100_000, 1))
    run[61_234][LOSS] = 40.0
    file = written(folder / "long.jsonl", run)
    svg = plan(file, "--format", "svg").stdout.decode()
    expect(len(svg) < 200_000, f"a picture of a long run has {len(svg)} bytes")
    compare(read_back(svg)[0], "long", [(line["step"], line[LOSS]) for line in run], False)


def interruptions(folder):
    run = list(a_run(60, 5))
    for k in (20, 21):
        run[k][LOSS] = None
    file = written(folder / "nan.jsonl", run)
    done = plan(file, "--format", "svg")
    panel = read_back(done.stdout.decode())[0]
    expect([len(p) for p in panel["values"]["nan"]] == [20, 38], "a value that is not finite does not interrupt the curve")
    expect(len(panel["crosses"]["nan"]) == 2 and abs(panel["crosses"]["nan"][0] - 21) < 0.1, f"crosses: {panel['crosses']}")
    expect(b"nan: 2 values are not finite, the first at step 21" in done.stderr, done.stderr.decode())

    run = list(a_run(60, 5))
    file = written(folder / "gap.jsonl", run[:30] + run[40:])
    done = plan(file, "--format", "svg")
    panel = read_back(done.stdout.decode())[0]
    expect([len(p) for p in panel["values"]["gap"]] == [30, 20], "missing steps do not interrupt the curve")
    expect(len(panel["gaps"]["gap"]) == 1 and all(abs(a - b) < 0.1 for a, b in zip(panel["gaps"]["gap"][0], (30, 41))), f"gaps: {panel['gaps']}")
    expect(b"gap: steps are missing in 1 place" in done.stderr, done.stderr.decode())
    # Every tenth step alone is written, and the first: nothing is missing.
    file = written(folder / "tenth.jsonl", [run[0]] + run[9::10])
    expect(plan(file, "--format", "svg").stderr == b"", "steps of a file with every tenth step are missing")

    # A run that was resumed at step 31: the later lines count, and none of the earlier lines from there on.
    again = list(a_run(20, 9, first=31))
    file = written(folder / "again.jsonl", run[:50] + again[:10])
    done = plan(file, "--format", "svg")
    drawn = [p for part in read_back(done.stdout.decode())[0]["values"]["again"] for p in part]
    expect(len(drawn) == 40, f"a resumed run has {len(drawn)} vertices, not 40")
    for (x, y), line in zip(drawn, run[:30] + again[:10]):
        expect(abs(x - line["step"]) < 0.1 and abs(y - line[LOSS]) < 0.05, f"a resumed run: {x}, {y} for {line['step']}, {line[LOSS]}")
    expect(b"again: the run goes back from step 50 to step 31 at line 51: from this step on the later lines count" in done.stderr, done.stderr.decode())
    file = written(folder / "once.jsonl", run[:10] + run[9:12])
    expect(b"once: step 10 occurs again at line 11" in plan(file).stdout, "a step that occurs twice is not said")

    # A last line of which a part is missing, at each place: left out and said. The same part with an end is an error.
    whole = "".join(json.dumps(line) + "\n" for line in run[:3])
    last = json.dumps(run[3])
    for cut in range(1, len(last), 7):
        (folder / "cut.jsonl").write_text(whole + last[:cut])
        done = plan(folder / "cut.jsonl")
        expect(b"cut: the last line, 4, is cut off, and left out" in done.stdout and b" 1-3 " in done.stdout, f"cut at {cut}: {done.stdout.decode()}")
        (folder / "cut.jsonl").write_text(whole + last[:cut] + "\n")
        expect(b"line 4: this is no JSON object" in plan(folder / "cut.jsonl", code=2).stderr, f"cut at {cut}, with an end")
    (folder / "cut.jsonl").write_text(whole + last)
    expect(b" 1-4 " in plan(folder / "cut.jsonl").stdout, "a last line that is whole counts, though its end is missing")

    one = written(folder / "one.jsonl", run[:1])
    expect(len(read_back(plan(one, "--format", "svg").stdout.decode())[0]["pixels"]["one"]) == 1, "a run of one step has no mark")
    zero = written(folder / "zero.jsonl", [{**line, LOSS: line[LOSS] if line["step"] != 3 else 0.0} for line in run])
    expect(b"1 value is not above 0, and not shown with --log" in plan(zero, "--log").stdout, "a value that --log cannot show is not said")


def refusals(folder):
    good = written(folder / "good.jsonl", a_run(5, 1))
    lines = good.read_text().splitlines()

    def refused(words, *arguments, text=None):
        found = plan(*arguments, code=2, text=text).stderr.decode()
        expect(words in found, f"{arguments}: no '{words}' in {found}")

    def refused_lines(words, *content):
        file = folder / "bad.jsonl"
        file.write_text("\n".join(content) + "\n")
        refused(f"'{file}', {words}", file)

    remedy = "name a file that chevron-train --metrics or chevron-finetune --metrics wrote"
    refused_lines("line 2: this is no JSON object: " + remedy, lines[0], "step 2 loss 3")
    refused_lines("line 1: this is no JSON object", "[1, 2]")
    refused_lines("line 3: this is no JSON object", lines[0], lines[1], lines[2] + lines[3])
    refused_lines("line 2: the object has no 'step'", lines[0], '{"loss": 1}')
    refused_lines("line 1: 'step' is not a whole number", '{"step": 1.5, "loss": 1}')
    refused_lines("line 1: 'step' is not a whole number", '{"step": {"step": 1}, "loss": 1}')
    refused_lines("line 1: 'step' is -4, below 0", '{"step": -4, "loss": 1}')
    refused("has no step yet", written(folder / "empty.jsonl", []))
    refused("cannot be read (No such file or directory)", folder / "nowhere.jsonl")
    refused("is not a file", folder)
    refused("is not a file", "/dev/zero")
    refused("no file is given")
    refused("this is no JSON object", written(folder / "trace.json", [[1]]))
    known = f"{LOSS}, grad_norm, lr, n_tokens_seen, {SECONDS}"
    refused(f"--y 'velocity' is no figure of the files: choose of {known}", good, "--y", "velocity")
    refused("--y 'gradnorm' is no figure of the files; did you mean grad_norm? There are " + known, good, "--y", "gradnorm")
    refused("--y 'max_reserved' may be any of memory/max_reserved(GiB), memory/max_reserved(%)", good, "--y", "max_reserved")
    other = written(folder / "other.jsonl", [{"step": 1, "perplexity": 3}])
    refused(f"'{other}' has no figure {LOSS}: leave the file out, or choose of perplexity", good, other)
    refused("has no figure " + SECONDS, other, "--y", "perplexity", "--x", "seconds")
    refused("--x 'hours' is not known: choose one of step, seconds, tokens", good, "--x", "hours")
    refused("--smooth '0' is not usable", good, "--smooth", "0")
    refused("--names 'a,b' has 2 names, and 1 files are given", good, "--names", "a,b")
    refused(".gif says no format this command has: choose one of text, svg, png, pdf", good, "-o", folder / "x.gif")
    refused("33 files are given", *[good] * 33)
    refused("standard input is given twice", "-", "-")
    nothing = written(folder / "nothing.jsonl", [{"step": 1, LOSS: 0.0}])
    refused("--log shows values above 0, and " + LOSS + " has none", nothing, "--log")

    text = plan(good).stdout.decode()
    losses = [json.loads(line)[LOSS] for line in lines]
    expect(f"{min(losses):.6g} at {losses.index(min(losses)) + 1} " in text and text.rstrip().endswith(f"{losses[-1]:.6g}"), text)
    expect(b" 1-5 " in plan("-", text=good.read_bytes()).stdout, "standard input is not read")
    for figure in ("end_to_end", "bubble", "throughput"):
        plan(good, "--y", figure, code=2 if figure == "throughput" else 0)
    # Runs are named by the parts in which their paths differ, or as asked.
    paths = []
    for name in ("a", "b/c"):
        (folder / "runs" / name).mkdir(parents=True)
        paths.append(written(folder / "runs" / name / "metrics.jsonl", a_run(5, 1)))
    expect(re.search(r"^a .*\n^b/c ", plan(*paths).stdout.decode(), re.M), plan(*paths).stdout.decode())
    expect(re.search(r"^long .*\n^short ", plan(*paths, "--names", "long,short").stdout.decode(), re.M), "--names")


def formats(folder):
    file = written(folder / "picture.jsonl", a_run(200, 2))
    tools = folder / "tools"
    tools.mkdir()
    found = plan(file, "-o", folder / "none.png", code=2, path=str(tools)).stderr.decode()
    expect("a png needs rsvg-convert, inkscape or chromium, and none of them is installed: write svg, or install" in found, found)
    expect(not (folder / "none.png").exists(), "a file was written though nothing could be converted")
    # A converter that fails, and one that writes something else.
    fake = tools / "rsvg-convert"
    for script, words in (("exit 3", "ended with exit code 3: write svg"), ('echo text > "$5"', "wrote none"), ("kill -9 $$", "was ended by signal 9")):
        fake.write_text(f"#!/bin/sh\n{script}\n")
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
        found = plan(file, "-o", folder / "none.pdf", code=2, path=str(tools)).stderr.decode()
        expect(words in found, f"{script}: {found}")
    plan(file, "-o", folder / "loss.svg")
    expect((folder / "loss.svg").read_bytes() == plan(file, "--format", "svg").stdout, "-o and --format differ")
    if not any(map(shutil.which, ("rsvg-convert", "inkscape", "chromium", "chromium-browser", "google-chrome"))):
        print("no png and pdf: neither rsvg-convert nor inkscape nor chromium is here")
        return
    plan(file, "-o", folder / "loss.png")
    data = (folder / "loss.png").read_bytes()
    size = tuple(int.from_bytes(data[k : k + 4], "big") for k in (16, 20))
    root = tree.fromstring((folder / "loss.svg").read_text())
    expect(data[:8] == b"\x89PNG\r\n\x1a\n" and size == tuple(2 * int(root.get(k)) for k in ("width", "height")), f"PNG: {data[:8]} {size}")
    plan(file, "-o", folder / "loss.pdf")
    data = (folder / "loss.pdf").read_bytes()
    expect(data.startswith(b"%PDF") and len(re.findall(rb"/Type\s*/Page\b", data)) in (0, 1), "PDF: not one page")


def main():
    with tempfile.TemporaryDirectory() as top:
        for part in (curves, interruptions, refusals, formats):
            folder = pathlib.Path(top, part.__name__)
            folder.mkdir()
            part(folder)
    for words in wrong[:20]:
        print(words)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
