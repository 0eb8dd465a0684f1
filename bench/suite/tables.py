"""Tables of measured figures: medians, spreads, ratios, in Markdown."""

import statistics
import textwrap


# Behind a side's name: the column of its steps with `fused=True`.
FUSED = " fused"


def wrapped(text):
    """A paragraph in lines of at most 120 columns."""
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False) + "\n"


def figure(value):
    """Three digits, or all before the point."""
    size = abs(value)
    if size >= 10000:
        return f"{value:,.0f}".replace(",", " ")
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def median(result, row, column):
    values = result["values"].get(row, {}).get(column)
    return statistics.median(values) if values else None


def spread(result, row, column):
    """`12.3 (11.9–13.0)`: the median, the lowest and the highest."""
    values = result["values"].get(row, {}).get(column)
    if not values:
        return "–"
    low, middle, high = figure(min(values)), figure(statistics.median(values)), figure(max(values))
    return middle if low == high else f"{middle} ({low}–{high})"


def ratio(result, row, above, below):
    above, below = median(result, row, above), median(result, row, below)
    return above / below if above is not None and below else None


def times(value):
    return "–" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def span(values, form="{:.3g}"):
    """`1.2–3.4` of what there is; one figure where they are the same."""
    values = [v for v in values if v is not None]
    if not values:
        return "–"
    low, high = form.format(min(values)), form.format(max(values))
    return low if low == high else f"{low}–{high}"


def present(result, columns):
    """Of [(column, words)] those that were measured, each with its twin of the other build behind it."""
    there = {column for of in result["values"].values() for column in of}
    found = []
    for column, words in columns:
        if column in there:
            found.append((column, words))
        if column + " beside" in there:
            found.append((column + " beside", words + ", beside"))
    return found


def torch_columns(result):
    """[(column, words)] of PyTorch's sides, each with its optimizer that is fused behind it."""
    found = []
    for side in ("torch", "newest"):
        if side in result["sides"]:
            label = result["sides"][side]["label"]
            found += [(side, label), (side + FUSED, label + " fused")]
    return found


def table(head, rows):
    """The first column is words, the others are figures."""
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(cells) + " |" for cells in rows]) + "\n"
