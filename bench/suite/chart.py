"""Two kinds of pictures, as SVG: for each row a mark for each side at its median, on a line from its lowest to its highest; and a
mark for each row at two of its figures."""

import html
import math
import statistics

# A side has one colour in all charts. PyTorch's marks are squares, Chevron's circles; predictions are hollow.
SQUARES = {"torch": "#b3541e", "newest": "#e0a458"}
HOLLOW = {"predicted": "#5b6472"}
CIRCLES = ["#1f5fae", "#3fa39b", "#7a4fb0", "#c26ba4", "#8fb7e6", "#a9d8d3", "#c4b0e0", "#e6bdd6"]
WIDTH, RIGHT, TOP, LINE = 900, 30, 74, 13
FONT = "system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"


def number(value):
    return f"{value:,.0f}".replace(",", " ") if value >= 1000 else f"{value:g}"


def linear_ticks(low, high):
    """Round numbers from just below the least, at most 0, to just above the most."""
    rough = max(high - min(0, low), 1e-9) / 6
    power = 10 ** math.floor(math.log10(rough))
    each = next(power * by for by in (1, 2, 5, 10) if power * by >= rough)
    return [round(each * i, 10) for i in range(math.floor(min(0, low) / each), math.ceil(high / each) + 1)]


def logarithmic_ticks(low, high):
    """1, 2, 5, 10 … around the values; only powers of ten where there are many."""
    ticks = [m * 10.0**e for e in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1) for m in (1, 2, 5)]
    first = max(i for i, tick in enumerate(ticks) if tick <= low)
    last = min(i for i, tick in enumerate(ticks) if tick >= high)
    return ticks[first : max(last, first + 1) + 1]


def mark(side, colour, x, y):
    if side in SQUARES:
        return f'<rect x="{x - 4:g}" y="{y - 4:g}" width="8" height="8" fill="{colour}" stroke="#ffffff"/>'
    if side in HOLLOW:
        return f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="#ffffff" stroke="{colour}" stroke-width="2"/>'
    return f'<circle cx="{x:g}" cy="{y:g}" r="4.5" fill="{colour}" stroke="#ffffff"/>'


def dots(title, unit, rows, sides, logarithmic=False):
    """
    title, unit   what is drawn, and what the axis is in
    rows          [(name, {side: [values]})], from the top
    sides         [(side, words for the legend)]
    """
    rows = [(name, {side: of[side] for side, _ in sides if of.get(side)}) for name, of in rows]
    rows = [(name, of) for name, of in rows if of]
    sides = [(side, words) for side, words in sides if any(side in of for _, of in rows)]
    values = [v for _, of in rows for some in of.values() for v in some]
    if not values:
        return None
    scale = math.log10 if logarithmic else float
    ticks = (logarithmic_ticks if logarithmic else linear_ticks)(min(values), max(values))
    left = max(110, 36 + round(7.2 * max(len(name) for name, _ in rows)))

    def at(value):
        return round(left + (scale(value) - scale(ticks[0])) / (scale(ticks[-1]) - scale(ticks[0])) * (WIDTH - left - RIGHT), 1)

    circles = iter(CIRCLES)
    colours = {side: SQUARES.get(side) or HOLLOW.get(side) or next(circles, "#5b6472") for side, _ in sides}
    band = LINE * len(sides) + 10
    bottom = TOP + band * len(rows)
    height = bottom + 46
    size = f'viewBox="0 0 {WIDTH} {height}" role="img" width="{WIDTH}" height="{height}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
        f"<title>{html.escape(title)}</title>",
        '<rect class="sheet" width="100%" height="100%" rx="6" fill="#ffffff"/>',
        f'<g font-family="{FONT}" font-size="12" fill="#1f2630">',
        f'<text x="20" y="30" font-size="16" font-weight="600">{html.escape(title)}</text>',
    ]
    x = 20
    for side, words in sides:
        out.append(mark(side, colours[side], x + 5, 50) + f'<text x="{x + 15}" y="54">{html.escape(words)}</text>')
        x += 34 + round(6.8 * len(words))
    for i, (name, _) in enumerate(rows):
        y = TOP + band * i
        if i % 2 == 0:
            out.append(f'<rect x="12" y="{y}" width="{WIDTH - 24}" height="{band}" fill="#f3f5f8"/>')
        out.append(f'<text x="{left - 12}" y="{y + band / 2 + 4:g}" text-anchor="end">{html.escape(name)}</text>')
    for tick in ticks:
        out.append(f'<line x1="{at(tick)}" y1="{TOP}" x2="{at(tick)}" y2="{bottom}" stroke="#d5dae2"/>')
        small = 'text-anchor="middle" font-size="11" fill="#5b6472"'
        out.append(f'<text x="{at(tick)}" y="{bottom + 16}" {small}>{number(tick)}</text>')
    out.append(f'<text x="{WIDTH - RIGHT}" y="{bottom + 35}" text-anchor="end" fill="#5b6472">{html.escape(unit)}</text>')
    for i, (name, of) in enumerate(rows):
        for j, (side, words) in enumerate(sides):
            if side not in of:
                continue
            y = TOP + band * i + 5 + LINE * j + LINE / 2
            low, middle, high = min(of[side]), statistics.median(of[side]), max(of[side])
            said = f"{name}, {words}: {middle:.4g}" + (f" ({low:.4g} to {high:.4g})" if low != high else "")
            line = ""
            if low != high:
                line = f'<line x1="{at(low)}" y1="{y:g}" x2="{at(high)}" y2="{y:g}" stroke="{colours[side]}" stroke-width="3" '
                line += 'stroke-opacity="0.5"/>'
            out.append(f"<g><title>{html.escape(said)}</title>{line}{mark(side, colours[side], at(middle), y)}</g>")
    return "\n".join(out + ["</g>", "</svg>", ""])


def scatter(title, axes, points, groups):
    """
    title    what is drawn
    axes     words for the two axes, which have the same unit and one scale: where both figures are equal is a line
    points   [(words, group, x, [y])]: a mark at the median of y, on a line from the lowest to the highest
    groups   the groups in the order of the legend; each has a colour
    """
    values = [v for _, _, x, y in points for v in [x, *y]]
    low, high = min(values) * 0.95, max(values) * 1.05
    tens = range(math.floor(math.log10(low)), math.ceil(math.log10(high)))
    ticks = [round(m * 10.0**e, 10) for e in tens for m in (1, 1.5, 2, 3, 4, 5, 7)]
    left, size = 84, 560
    bottom = TOP + size

    def along(value):
        return (math.log10(value) - math.log10(low)) / (math.log10(high) - math.log10(low)) * size

    colours = dict(zip(groups, CIRCLES + ["#5b6472"]))
    frame = f'viewBox="0 0 {WIDTH} {bottom + 56}" role="img" width="{WIDTH}" height="{bottom + 56}"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {frame}>',
        f"<title>{html.escape(title)}</title>",
        '<rect class="sheet" width="100%" height="100%" rx="6" fill="#ffffff"/>',
        f'<g font-family="{FONT}" font-size="12" fill="#1f2630">',
        f'<text x="20" y="30" font-size="16" font-weight="600">{html.escape(title)}</text>',
        f'<text x="{left}" y="{TOP - 10}" fill="#5b6472">{html.escape(axes[1])}</text>',
        f'<text x="{left + size}" y="{bottom + 38}" text-anchor="end" fill="#5b6472">{html.escape(axes[0])}</text>',
        f'<rect x="{left}" y="{TOP}" width="{size}" height="{size}" fill="#f3f5f8"/>',
    ]
    small = 'font-size="11" fill="#5b6472"'
    for tick in (tick for tick in ticks if low <= tick <= high):
        x, y = round(left + along(tick), 1), round(bottom - along(tick), 1)
        out.append(f'<path d="M{x} {TOP}V{bottom}M{left} {y}H{left + size}" stroke="#d5dae2"/>')
        out.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle" {small}>{number(tick)}</text>')
        out.append(f'<text x="{left - 8}" y="{y + 4:g}" text-anchor="end" {small}>{number(tick)}</text>')
    out.append(f'<path d="M{left} {bottom}L{left + size} {TOP}" stroke="#5b6472" stroke-dasharray="4 4"/>')
    for i, group in enumerate(groups):
        y = TOP + 12 + 20 * i
        out.append(mark("", colours[group], left + size + 28, y))
        out.append(f'<text x="{left + size + 42}" y="{y + 4}">{html.escape(group)}</text>')
    for words, group, x, y in points:
        at, middle = round(left + along(x), 1), statistics.median(y)
        ends = [round(bottom - along(v), 1) for v in (min(y), max(y))]
        line = ""
        if ends[0] != ends[1]:
            line = f'<path d="M{at} {ends[0]}V{ends[1]}" stroke="{colours[group]}" stroke-width="3" stroke-opacity="0.5"/>'
        said = f"{words}: {x:.4g}, {middle:.4g}" + (f" ({min(y):.4g} to {max(y):.4g})" if min(y) != max(y) else "")
        spot = mark("", colours[group], at, round(bottom - along(middle), 1))
        out.append(f"<g><title>{html.escape(said)}</title>{line}{spot}</g>")
    return "\n".join(out + ["</g>", "</svg>", ""])
