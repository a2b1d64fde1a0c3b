"""Charts as SVG: lines, bars and a timeline, with a tooltip at every point. Colours are the page's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 760, 220
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 12, 30
POINTS_MAX = 1000
"""Of a line; of more, the highest of each stretch: peaks are what a chart of costs is for."""

Say = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Point:
    """A point with its tooltip; `look` is a class of the page's style sheet."""

    x: float
    y: float
    tip: str
    look: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Points joined by a line."""

    label: str
    points: Sequence[Point]
    look: str


def ticks(low: float, high: float, count: int = 4) -> list[float]:
    """Round numbers in [low, high], about so many."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * m for m in (1, 2, 5, 10) if size * m >= rough)
    first = math.ceil(low / step)
    return [n * step for n in range(first, math.floor(high / step + 1e-9) + 1)]


class _Frame:
    """Where values lie in the picture."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], *, from_zero: bool) -> None:
        self.x0, self.x1 = _span(xs)
        self.y0, self.y1 = _span(ys)
        if from_zero and self.y0 > 0:
            self.y0 = 0.0

    def x(self, value: float) -> float:
        return LEFT + (value - self.x0) / (self.x1 - self.x0) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.y0) / (self.y1 - self.y0) * (HEIGHT - TOP - BOTTOM)

    def axes(self, say_x: Say, say_y: Say) -> str:
        parts = []
        for value in ticks(self.y0, self.y1):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{LEFT},{y:.1f}H{WIDTH - RIGHT}"/>')
            parts.append(_text(LEFT - 6, y + 4, say_y(value), "end"))
        for value in ticks(self.x0, self.x1, 6):
            x = self.x(value)
            parts.append(_text(x, HEIGHT - BOTTOM + 18, say_x(value), "middle"))
        parts.append(f'<path class="axis" d="M{LEFT},{HEIGHT - BOTTOM}H{WIDTH - RIGHT}"/>')
        return "".join(parts)


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _dot(frame: _Frame, point: Point, look: str, radius: float) -> str:
    return (
        f'<circle class="{point.look or look}" cx="{frame.x(point.x):.1f}" '
        f'cy="{frame.y(point.y):.1f}" r="{radius:g}"><title>{escape(point.tip)}</title></circle>'
    )


def _picture(inner: str, label: str, height: float = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}">{inner}</svg>'


def thin(points: Sequence[Point], most: int = POINTS_MAX) -> Sequence[Point]:
    """At most about so many points: of each stretch the highest."""
    if len(points) <= most:
        return points
    size = math.ceil(len(points) / most)
    stretches = (points[at : at + size] for at in range(0, len(points), size))
    return [max(stretch, key=lambda point: point.y) for stretch in stretches]


def lines(label: str, chosen: Sequence[Line], say_x: Say, say_y: Say, *, from_zero: bool) -> str:
    """Lines over one axis; empty where no line has a finite point."""
    made = [
        Line(line.label, thin([p for p in line.points if math.isfinite(p.y)]), line.look)
        for line in chosen
    ]
    every = [point for line in made for point in line.points]
    if not every:
        return ""
    frame = _Frame([p.x for p in every], [p.y for p in every], from_zero=from_zero)
    parts = [frame.axes(say_x, say_y)]
    for line in made:
        path = " ".join(f"{frame.x(p.x):.1f},{frame.y(p.y):.1f}" for p in line.points)
        parts.append(f'<polyline class="line {line.look}" points="{path}"/>')
        parts += [_dot(frame, point, line.look, 2.6) for point in line.points]
    return legend([(line.label, line.look) for line in made]) + _picture("".join(parts), label)


def timeline(label: str, points: Sequence[Point], say_x: Say, say_y: Say) -> str:
    """Points alone, the later ones on top."""
    if not points:
        return ""
    frame = _Frame([p.x for p in points], [p.y for p in points], from_zero=False)
    dots = (_dot(frame, point, "a", 3.6) for point in points)
    return _picture(frame.axes(say_x, say_y) + "".join(dots), label)


def stacks(label: str, rows: Sequence[tuple[str, float, float]], say_y: Say) -> str:
    """Two parts on each other for each row: (tooltip, lower part, upper part), in their order."""
    if not rows:
        return ""
    if len(rows) > POINTS_MAX // 2:
        rows = rows[-POINTS_MAX // 2 :]
    frame = _Frame([0.0, float(len(rows))], [0.0, max(a + b for _, a, b in rows)], from_zero=True)
    width = (WIDTH - LEFT - RIGHT) / len(rows)
    parts = [frame.axes(lambda _: "", say_y)]
    for at, (tip, lower, upper) in enumerate(rows):
        x = LEFT + at * width
        base, middle, top = frame.y(0.0), frame.y(lower), frame.y(lower + upper)
        wide = f'x="{x + width * 0.1:.2f}" width="{width * 0.8:.2f}"'
        parts.append(
            f"<g><title>{escape(tip)}</title>"
            f'<rect class="a" {wide} y="{middle:.1f}" height="{base - middle:.1f}"/>'
            f'<rect class="pale" {wide} y="{top:.1f}" height="{middle - top:.1f}"/></g>'
        )
    return _picture("".join(parts), label)


def bars(label: str, rows: Sequence[tuple[str, int]], say: Callable[[int], str]) -> str:
    """A bar to the right for each row, with its label and its size."""
    if not rows:
        return ""
    most, high, left = max(size for _, size in rows), 22, 280
    parts = []
    for at, (name, size) in enumerate(rows):
        width, y = (WIDTH - left - 90) * size / most, at * high
        short = name if len(name) <= 42 else name[:20] + "…" + name[-21:]
        parts.append(_text(left - 8, y + 15, short, "end"))
        parts.append(
            f'<rect class="a" x="{left}" y="{y + 4}" width="{max(1.0, width):.1f}" height="14">'
            f"<title>{escape(name)}: {escape(say(size))}</title></rect>"
        )
        parts.append(_text(left + width + 6, y + 15, say(size), "start"))
    return _picture("".join(parts), label, len(rows) * high + 4)


def legend(rows: Sequence[tuple[str, str]]) -> str:
    """What each colour stands for."""
    items = "".join(f'<span><i class="{look}"></i>{escape(text)}</span>' for text, look in rows)
    return f'<p class="legend">{items}</p>'
