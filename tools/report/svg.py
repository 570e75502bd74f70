"""Small plots as SVG text: lines, points, bars, axes with round numbers. Colours come from CSS variables of the page that holds them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
"""Okabe and Ito's palette, which people who are colour-blind can tell apart."""

CHARACTER = 6.2  # width of a character of the labels, about
_LINE = 13.0  # height of one
_LABEL = 40  # characters of a label of a point, at most
_PLACES = ((1, -0.7), (1, 0.7), (-1, 0.7), (-1, -0.7), (1, 0), (-1, 0), (0, -1), (0, 1))  # of labels around their points, the best first


def round_steps(low: float, high: float, most: int = 6) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten within [low, high], at most about `most` of them."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def label_of(value: float, step: float) -> str:
    """A number with as many digits as its neighbours need to differ from it."""
    if value == 0:
        return "0"
    if abs(value) < 1e-4 or abs(value) >= 1e6:
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    digits = max(0, -math.floor(math.log10(step) + 1e-9)) if step > 0 else 3
    return f"{value:.{digits}f}"


@dataclass
class Plot:
    """A plot that shapes are added to; `svg()` gives the text.

    x, y: (lowest, highest) of the data shown. log_x, log_y: logarithmic axes; then the range must be above 0.
    percent: y labels as percentages. Values outside the range, or not finite, are clipped or left out.
    """

    title: str
    x_label: str
    y_label: str
    x: tuple[float, float]
    y: tuple[float, float]
    width: int = 720
    height: int = 300
    log_x: bool = False
    log_y: bool = False
    percent: bool = False
    whole_x: bool = False
    _shapes: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str, bool]] = field(default_factory=list)
    _points: list[tuple[float, float, str, str, str]] = field(default_factory=list)

    LEFT, RIGHT, TOP, BOTTOM = 62, 14, 26, 42

    def line(self, xs: Iterable[float], ys: Iterable[float], colour: str, name: str = "", dashed: bool = False) -> None:
        """A line through points, broken where a value is not finite."""
        parts: list[list[str]] = [[]]
        for x, y in zip(xs, ys, strict=True):
            if math.isfinite(x) and math.isfinite(y):
                parts[-1].append(f"{self._x(x):.1f},{self._y(y):.1f}")
            elif parts[-1]:
                parts.append([])
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        for points in parts:
            if len(points) == 1:
                across, up = points[0].split(",")
                self._shapes.append(f'<circle cx="{across}" cy="{up}" r="2.5" fill="{colour}"/>')
            elif points:
                self._shapes.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
        self._name(name, colour, dashed)

    def point(self, x: float, y: float, label: str, colour: str, tip: str = "") -> None:
        """A dot with a label beside it, where there is room."""
        if math.isfinite(x) and math.isfinite(y):
            self._points.append((self._x(x), self._y(y), label, colour, tip))

    def bar(self, left: float, right: float, top: float, colour: str, tip: str = "", name: str = "") -> None:
        """A bar from the foot of the plot up to `top`, between two values of x."""
        if not math.isfinite(top):
            return
        a, b, head, foot = self._x(left), self._x(right), self._y(top), self.height - self.BOTTOM
        text = f"<title>{escape(tip)}</title>" if tip else ""
        size = f'width="{max(b - a, 0.5):.1f}" height="{max(foot - head, 0):.1f}"'
        self._shapes.append(f'<rect x="{a:.1f}" y="{head:.1f}" {size} fill="{colour}">{text}</rect>')
        self._name(name, colour, False)

    def rule(self, x: float, text: str, left: bool = False) -> None:
        """A vertical line with a text at its top, to the right of it or to the left."""
        if not (math.isfinite(x) and self.x[0] <= x <= self.x[1]):
            return
        at, length = self._x(x), CHARACTER * len(text) + 5
        left = (left and at - length > self.LEFT) or at + length > self.width
        anchor, gap = ("end", -5) if left else ("start", 5)
        foot = self.height - self.BOTTOM
        self._shapes += [
            f'<line x1="{at:.1f}" y1="{self.TOP}" x2="{at:.1f}" y2="{foot}" stroke="var(--ink)" stroke-dasharray="3 3"/>',
            f'<text x="{at + gap:.1f}" y="{self.TOP + 12}" text-anchor="{anchor}" class="tick halo">{escape(text)}</text>',
        ]

    def svg(self) -> str:
        """The whole plot as an <svg> element."""
        right, foot = self.width - self.RIGHT, self.height - self.BOTTOM
        out = [
            f'<svg viewBox="0 0 {self.width} {self.height}" width="{self.width}" height="{self.height}" role="img" '
            f'aria-label="{escape(self.title)}" xmlns="http://www.w3.org/2000/svg">',
            f'<text x="{self.LEFT}" y="15" class="title">{escape(self.title)}</text>',
        ]
        for value, text in self._ticks(self.y, self.log_y, self.percent, self.height - self.TOP - self.BOTTOM, 38):
            at = self._y(value)
            out.append(f'<line x1="{self.LEFT}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" class="grid"/>')
            out.append(f'<text x="{self.LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end" class="tick">{text}</text>')
        for value, text in self._ticks(self.x, self.log_x, False, right - self.LEFT, 60, self.whole_x):
            at = self._x(value)
            out.append(f'<line x1="{at:.1f}" y1="{foot}" x2="{at:.1f}" y2="{foot + 4}" class="axis"/>')
            out.append(f'<text x="{at:.1f}" y="{foot + 16}" text-anchor="middle" class="tick">{text}</text>')
        out += self._shapes
        out += self._point_shapes(right, foot)
        out.append(f'<line x1="{self.LEFT}" y1="{foot}" x2="{right}" y2="{foot}" class="axis"/>')
        centre, middle = (self.LEFT + right) / 2, (self.TOP + foot) / 2
        out.append(f'<text x="{centre:.1f}" y="{self.height - 6}" text-anchor="middle">{escape(self.x_label)}</text>')
        out.append(f'<text transform="translate(13 {middle:.1f}) rotate(-90)" text-anchor="middle">{escape(self.y_label)}</text>')
        out += self._legend_shapes(right)
        out.append("</svg>")
        return "".join(out)

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _name(self, name: str, colour: str, dashed: bool) -> None:
        if name and (name, colour, dashed) not in self._legend:
            self._legend.append((name, colour, dashed))

    def _point_shapes(self, right: float, foot: float) -> list[str]:
        """Dots, and their labels where they hide no dot and no other label; a thin line leads to a label that is farther away."""
        taken: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y, *_ in self._points]
        dots, lines, texts = [], [], []
        for i, (x, y, label, colour, tip) in sorted(enumerate(self._points), key=lambda p: (p[1][1], p[1][0])):
            label = shortened(label, _LABEL)
            size = CHARACTER * len(label) + 2
            best: tuple[float, float, Box, float] | None = None
            for away in (7.0, 20.0, 34.0, 50.0, 70.0):
                for across, up in _PLACES:
                    left = x + across * away - (0 if across > 0 else size if across < 0 else size / 2)
                    top = y + up * away - (_LINE if up < 0 else 0 if up > 0 else _LINE / 2)
                    box = left, top, left + size, top + _LINE
                    outside = max(self.LEFT - box[0], 0) + max(box[2] - right, 0) + max(self.TOP - box[1], 0) + max(box[3] - foot, 0)
                    cost = 1000 * outside + sum(_overlap(box, other) for j, other in enumerate(taken) if j != i)
                    if best is None or cost < best[0]:
                        best = cost, away, box, across
                if best is not None and best[0] == 0:
                    break
            assert best is not None
            _, away, box, side = best
            taken.append(box)
            hint = f"<title>{escape(tip)}</title>" if tip else ""
            dots.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}" stroke="var(--paper)">{hint}</circle>')
            if away > 7:
                end = box[0] if side > 0 else box[2] if side < 0 else (box[0] + box[2]) / 2
                lines.append(f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{end:.1f}" y2="{(box[1] + box[3]) / 2:.1f}" class="grid"/>')
            texts.append(f'<text x="{box[0] + 1:.1f}" y="{box[3] - 3.5:.1f}" class="tick halo">{escape(label)}</text>')
        return [*lines, *texts, *dots]

    def _legend_shapes(self, right: float) -> list[str]:
        """One row at the top right, beside the title."""
        out, x = [], right
        for name, colour, dashed in reversed(self._legend):
            x -= CHARACTER * len(name)
            out.append(f'<text x="{x:.1f}" y="15" class="tick">{escape(name)}</text>')
            dash = ' stroke-dasharray="5 4"' if dashed else ""
            out.append(f'<line x1="{x - 24:.1f}" y1="11" x2="{x - 6:.1f}" y2="11" stroke="{colour}" stroke-width="3"{dash}/>')
            x -= 38
        return out

    def _x(self, value: float) -> float:
        return self.LEFT + _share(value, self.x, self.log_x) * (self.width - self.LEFT - self.RIGHT)

    def _y(self, value: float) -> float:
        return self.height - self.BOTTOM - _share(value, self.y, self.log_y) * (self.height - self.TOP - self.BOTTOM)

    @staticmethod
    def _ticks(
        limits: tuple[float, float], log: bool, percent: bool, pixels: float, room: float, whole: bool = False
    ) -> Sequence[tuple[float, str]]:
        most = max(2, int(pixels / room))
        if log:
            low, high = (math.log10(v) for v in limits)
            powers = range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1)
            finer = [m * 10.0**p for p in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
            finer = [v for v in finer if limits[0] * (1 - 1e-9) <= v <= limits[1] * (1 + 1e-9)]
            if 2 <= len(finer) <= most:
                return [(v, _short(v, percent)) for v in finer]
            if len(powers) >= 2:
                kept = powers[:: -(-len(powers) // most)]
                return [(10.0**p, _short(10.0**p, percent)) for p in kept]
        steps = round_steps(*limits, most)
        if whole:
            steps = [s for s in steps if s == int(s)]
        step = abs(steps[1] - steps[0]) if len(steps) > 1 else 1.0
        if percent:
            return [(s, label_of(100 * s, 100 * step) + " %") for s in steps]
        return [(s, label_of(s, step)) for s in steps]


Box = tuple[float, float, float, float]
"""left, top, right, bottom"""


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters, with its middle left out."""
    return text if len(text) <= most else text[: most - most // 2 - 1] + "…" + text[-(most // 2) :]


def escape(text: str) -> str:
    """Text for HTML and SVG, attributes included."""
    return html.escape(text, quote=True)


def _share(value: float, limits: tuple[float, float], log: bool) -> float:
    low, high = limits
    if log:
        value, low, high = (math.log10(max(v, 1e-300)) for v in (value, low, high))
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


def _short(value: float, percent: bool) -> str:
    """A round number on a logarithmic axis."""
    if percent:
        return f"{100 * value:g} %"
    return f"{value:g}" if 1e-4 <= value < 1e5 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def _overlap(a: Box, b: Box) -> float:
    """The area that two boxes share."""
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def horizontal_bars(title: str, x_label: str, bars: Sequence[tuple[str, float, str, str]], width: int = 500) -> str:
    """Named bars, one below the other, from 0 to the right, as an <svg> element. bars: (name, length, colour, tip); "" if there is none."""
    lengths = [length for _, length, _, _ in bars if math.isfinite(length)]
    if not lengths or max(lengths) <= 0:
        return ""
    step, head, foot = 19, 26, 38
    names = [shortened(name, _LABEL) for name, *_ in bars]
    left = min(CHARACTER * max(map(len, names)) + 14, width / 2)
    height, right, most = head + step * len(bars) + foot, width - 16, max(lengths)
    bottom = height - foot
    out = [
        f'<svg viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg"><text x="{left:.1f}" y="15" class="title">{escape(title)}</text>'
    ]
    steps = round_steps(0.0, most, max(2, int((right - left) / 70)))
    for value in steps:
        at = left + value / most * (right - left)
        out.append(f'<line x1="{at:.1f}" y1="{head}" x2="{at:.1f}" y2="{bottom}" class="grid"/>')
        label = label_of(value, steps[1] if len(steps) > 1 else most)
        out.append(f'<text x="{at:.1f}" y="{bottom + 14}" text-anchor="middle" class="tick">{label}</text>')
    for i, (name, (_, length, colour, tip)) in enumerate(zip(names, bars, strict=True)):
        top = head + step * i
        long = max(length, 0.0) / most * (right - left) if math.isfinite(length) else 0.0
        out.append(f'<text x="{left - 6:.1f}" y="{top + 13.5}" text-anchor="end" class="name">{escape(name)}</text>')
        hint = f"<title>{escape(tip)}</title>" if tip else ""
        size = f'width="{max(long, 0.5):.1f}" height="{step - 5}"'
        out.append(f'<rect x="{left:.1f}" y="{top + 2.5}" {size} fill="{colour}">{hint}</rect>')
    out.append(f'<line x1="{left:.1f}" y1="{head}" x2="{left:.1f}" y2="{bottom}" class="axis"/>')
    out.append(f'<text x="{(left + right) / 2:.1f}" y="{height - 6}" text-anchor="middle">{escape(x_label)}</text></svg>')
    return "".join(out)


def heat_map(
    title: str, x_label: str, columns: Sequence[str], rows: Sequence[str], cells: dict[tuple[int, int], tuple[float, str]], unit: str
) -> str:
    """A map of values above 0 on a logarithmic scale of at most three powers of ten, as an <svg> element; "" if there is none.

    cells: (row, column) -> (value, tip). What is not above 0 has the lightest colour, what is not finite the darkest, and where there
    is no cell the map is empty. unit: stands beside the scale.
    """
    values = [value for value, _ in cells.values() if math.isfinite(value) and value > 0]
    if not values:
        return ""
    high = max(values)
    low = min(max(min(values), high / 1000), high / 2)
    names = [shortened(name, _LABEL) for name in rows]
    left, top = CHARACTER * max(map(len, names)) + 14, 52
    side = max(5.0, min(26.0, (1000 - left - 14) / max(len(columns), 1)))
    tall = max(side, 15.0) if side < 20 else 20.0
    width, foot = max(left + side * len(columns) + 14, left + 330), top + tall * len(rows)
    height = foot + 40
    out = [
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" aria-label="{escape(title)}" '
        f'xmlns="http://www.w3.org/2000/svg"><text x="{left:.1f}" y="15" class="title">{escape(title)}</text>'
    ]
    for i in range(20):  # the scale
        out.append(f'<rect x="{left + 60 + 6 * i:.1f}" y="26" width="6.3" height="11" {_shade(i / 19)}/>')
    out.append(f'<text x="{left + 55:.1f}" y="36" text-anchor="end" class="tick">{_figure(low)}</text>')
    out.append(f'<text x="{left + 186:.1f}" y="36" class="tick">{_figure(high)} {escape(unit)}</text>')
    for r, name in enumerate(names):
        at = top + tall * (r + 0.5) + 3.5
        out.append(f'<text x="{left - 6:.1f}" y="{at:.1f}" text-anchor="end" class="name">{escape(name)}</text>')
    every = max(1, math.ceil(24 / side))
    for c, name in enumerate(columns):
        if c % every == 0:
            at = left + side * (c + 0.5)
            out.append(f'<text x="{at:.1f}" y="{foot + 14:.1f}" text-anchor="middle" class="tick">{escape(name)}</text>')
    for (r, c), (value, tip) in cells.items():
        share = 1.0 if not math.isfinite(value) else _share(max(value, low), (low, high), True)
        box = f'x="{left + side * c + 0.5:.1f}" y="{top + tall * r + 0.5:.1f}" width="{side - 1:.1f}" height="{tall - 1:.1f}"'
        out.append(f"<rect {box} {_shade(share)}><title>{escape(tip)}</title></rect>")
    centre = left + side * len(columns) / 2
    out.append(f'<text x="{centre:.1f}" y="{foot + 32:.1f}" text-anchor="middle">{escape(x_label)}</text></svg>')
    return "".join(out)


def _shade(share: float) -> str:
    """A colour between paper and ink, for the attributes of a shape: as an opacity, so that it suits light pages and dark ones."""
    return f'fill="{COLOURS[1]}" fill-opacity="{0.06 + 0.94 * share:.3f}"'


def _figure(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-") if value < 1e-3 else f"{value:.2g}"
