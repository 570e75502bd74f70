"""What the pages of reports share: the frame with its styles, tables, numbers as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from .svg import escape

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1f24; --soft: #59636e; --rule: #d8dee4; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e6e9ec; --soft: #9aa4ae; --rule: #33393f; --card: #1d2125; }
}
body { margin: 2rem auto; max-width: 1060px; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
body { background: var(--paper); color: var(--ink); }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .5rem; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: .7rem; margin: 1.2rem 0; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .6rem 1rem; min-width: 8.5rem; }
.card b { display: block; font-size: 1.25rem; } .card span { color: var(--soft); font-size: .85rem; }
.card b, table { font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; font-size: .88rem; margin: .6rem 0; }
th, td { padding: .22rem .75rem .22rem 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; } .plots { display: flex; flex-wrap: wrap; gap: .8rem; align-items: flex-start; }
details { margin: .8rem 0; } summary { cursor: pointer; }
details.model { border: 1px solid var(--rule); border-radius: 8px; padding: .5rem 1rem; overflow-wrap: anywhere; }
details.model > summary b { font-weight: 600; }
svg { max-width: 100%; height: auto; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg .title { font-weight: 600; font-size: 12.5px; fill: var(--ink); }
svg .halo { paint-order: stroke; stroke: var(--paper); stroke-width: 4px; fill: var(--ink); }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg .axis { stroke: var(--soft); stroke-width: 1; }
svg .name { fill: var(--ink); } svg .empty { fill: var(--card); }
"""


def page(title: str, about: str, parts: Iterable[str]) -> str:
    """A whole page. title and about are text; parts are HTML."""
    head = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f'<h1>{escape(title)}</h1><p class="soft">{escape(about)}</p>',
    ]
    return "".join([*head, *parts, "</body></html>\n"])


def heading(text: str, level: int) -> str:
    """A heading: level 2 for a section of the page, 3 within a model of several."""
    return f"<h{level}>{escape(text)}</h{level}>"


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Cells are text; all but the first column are set flush right."""
    head = "".join(f"<th>{escape(h)}</th>" for h in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def number(value: float | None) -> str:
    """Four digits; "" for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return str(value)
    return f"{value:.2e}" if 0 < abs(value) < 5e-5 else f"{value:.4g}"


def percent(value: float | None) -> str:
    """A share as a percentage; "" for None."""
    if value is None:
        return ""
    return f"{value:.2%}" if math.isfinite(value) else str(value)
