"""Small plots as SVG text: lines, bars, axes with round numbers. Colours come from CSS variables of the page that holds them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c564b")
"""Okabe and Ito's palette, which people who are colour-blind can tell apart."""

_CHARACTER = 6.2  # width of a character of the labels, about


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
        at, length = self._x(x), _CHARACTER * len(text) + 5
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

    def _legend_shapes(self, right: float) -> list[str]:
        """One row at the top right, beside the title."""
        out, x = [], right
        for name, colour, dashed in reversed(self._legend):
            x -= _CHARACTER * len(name)
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
            if len(powers) >= 2:
                kept = powers[:: -(-len(powers) // most)]
                return [(10.0**p, _power(p, percent)) for p in kept]
        steps = round_steps(*limits, most)
        if whole:
            steps = [s for s in steps if s == int(s)]
        step = abs(steps[1] - steps[0]) if len(steps) > 1 else 1.0
        if percent:
            return [(s, label_of(100 * s, 100 * step) + " %") for s in steps]
        return [(s, label_of(s, step)) for s in steps]


def escape(text: str) -> str:
    """Text for HTML and SVG, attributes included."""
    return html.escape(text, quote=True)


def _share(value: float, limits: tuple[float, float], log: bool) -> float:
    low, high = limits
    if log:
        value, low, high = (math.log10(max(v, 1e-300)) for v in (value, low, high))
    return min(1.0, max(0.0, (value - low) / (high - low))) if high > low else 0.5


def _power(exponent: int, percent: bool) -> str:
    if percent:
        return f"{10.0 ** (exponent + 2):g} %"
    return f"{10.0**exponent:g}" if -4 <= exponent <= 4 else f"1e{exponent}"
