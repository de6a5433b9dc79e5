"""Small drawings: bars with their spread, and lines; plain SVG that a page shows in light and in dark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from benchmarks.results import Spread

WIDTH = 760
LEFT, RIGHT, TOP, BOTTOM = 190, 110, 46, 44
ROW = 26
HEIGHT = 300
COLOURS = 6
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f; }
.title { font-weight: 600; font-size: 15px; }
.faint { fill: #57606a; font-size: 12px; }
.grid { stroke: #d0d7de; stroke-width: 1; }
.whisker { stroke: #24292f; stroke-width: 1.5; }
.ours { fill: #0969da; } .other { fill: #8c959f; } .raw { fill: #bf8700; }
.line { fill: none; stroke-width: 2; }
.c0 { stroke: #0969da; } .c1 { stroke: #bf8700; } .c2 { stroke: #1a7f37; }
.c3 { stroke: #cf222e; } .c4 { stroke: #8250df; } .c5 { stroke: #57606a; }
.band { fill: #0969da; opacity: 0.08; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .faint { fill: #9198a1; } .grid { stroke: #3d444d; } .whisker { stroke: #e6edf3; }
  .ours { fill: #4493f8; } .other { fill: #656c76; } .raw { fill: #d29922; }
  .c0 { stroke: #4493f8; } .c1 { stroke: #d29922; } .c2 { stroke: #3fb950; }
  .c3 { stroke: #f85149; } .c4 { stroke: #ab7df8; } .c5 { stroke: #9198a1; }
  .band { fill: #4493f8; opacity: 0.14; }
}
"""
Point = tuple[float, float]


def bars(title: str, unit: str, rows: Sequence[tuple[str, Spread]]) -> str:
    """One bar each, the median; a whisker from the smallest to the largest."""
    height = TOP + ROW * len(rows) + 30
    scale = (WIDTH - LEFT - RIGHT) / _nice(max((spread.high for _, spread in rows), default=1.0))
    drawn = []
    for place, (label, spread) in enumerate(rows):
        y = TOP + ROW * place
        middle = y + ROW / 2
        drawn += [
            _text(LEFT - 8, middle + 4, label, anchor="end"),
            f'<rect class="{_kind(label)}" x="{LEFT}" y="{y + 4}" width="{spread.median * scale:.1f}"'
            f' height="{ROW - 8}"/>',
            f'<line class="whisker" x1="{LEFT + spread.low * scale:.1f}" x2="{LEFT + spread.high * scale:.1f}"'
            f' y1="{middle}" y2="{middle}"/>',
            _text(LEFT + spread.high * scale + 8, middle + 4, _number(spread.median)),
        ]
    note = _text(LEFT, height - 8, f"{unit}; bar: median, line: smallest to largest", kind="faint")
    return _page(title, height, [*drawn, note])


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[Point]],
    *,
    log_x: bool = False,
    band: tuple[float, float] | None = None,
) -> str:
    """One line each; ``band`` shades a stretch of x."""
    points = [point for some in series.values() for point in some]
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    top = _nice(max(y for _, y in points))

    def across(x: float) -> float:
        low, high, at = (math.log10(v) for v in (left, right, x)) if log_x else (left, right, x)
        return LEFT / 2 + (WIDTH - LEFT / 2 - RIGHT - 40) * ((at - low) / (high - low) if high > low else 0.5)

    def down(y: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / top

    drawn = [_grid(y, down(y)) for y in (0, top / 4, top / 2, 3 * top / 4, top)]
    if band:
        x, width = across(band[0]), across(band[1]) - across(band[0])
        drawn.append(f'<rect class="band" x="{x:.1f}" y="{TOP}" width="{width:.1f}" height="{HEIGHT - TOP - BOTTOM}"/>')
    marks = sorted({x for x, _ in points}) if log_x else [left, (left + right) / 2, right]
    drawn += [_text(across(x), HEIGHT - BOTTOM + 18, _number(x), anchor="middle", kind="faint") for x in marks]
    for place, (label, some) in enumerate(series.items()):
        path = " ".join(f"{across(x):.1f},{down(y):.1f}" for x, y in some)
        colour = f"c{place % COLOURS}"
        drawn.append(f'<polyline class="line {colour}" points="{path}"/>')
        y = TOP + 18 * place + 8
        drawn.append(
            f'<line class="line {colour}" x1="{WIDTH - RIGHT - 30}" x2="{WIDTH - RIGHT - 12}" y1="{y}" y2="{y}"/>'
        )
        drawn.append(_text(WIDTH - RIGHT - 8, y + 4, label))
    drawn.append(_text(LEFT / 2, HEIGHT - 8, f"{y_label} by {x_label}", kind="faint"))
    return _page(title, HEIGHT, drawn)


def _grid(value: float, y: float) -> str:
    line = f'<line class="grid" x1="{LEFT / 2}" x2="{WIDTH - RIGHT - 40}" y1="{y:.1f}" y2="{y:.1f}"/>'
    return line + _text(LEFT / 2 - 6, y + 4, _number(value), anchor="end", kind="faint")


def _page(title: str, height: float, drawn: Sequence[str]) -> str:
    body = "\n".join([_text(8, 24, title, kind="title"), *drawn])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}"'
        f' height="{height:.0f}" role="img" aria-label="{escape(title)}">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, words: str, *, anchor: str = "start", kind: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    return f'<text{style} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _kind(label: str) -> str:
    return "ours" if label.startswith("duly") else "raw" if label.startswith("raw") else "other"


def _nice(most: float) -> float:
    """The next round number."""
    if most <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(most))
    return next(step * power for step in (1, 1.5, 2, 3, 4, 5, 6, 8, 10) if step * power >= most)


def _number(value: float) -> str:
    if value >= 1_000_000 and value % 1_000_000 == 0:
        return f"{value / 1_000_000:,.0f}M"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}".rstrip("0").rstrip(".")
