"""A comparison as one page that needs nothing else. Whatever models and files say is text in it, and nothing in it can run."""

from __future__ import annotations

from typing import Any

from ..report.svg import escape
from ..terminal.console import safe_text
from ..terminal.display import one_line
from .text import HEADINGS, answer_facts, shown_prompt, summary_rows

_STYLE = """
:root { --paper: #fff; --ink: #1b1f24; --soft: #59636e; --rule: #d8dee4; --card: #f6f8fa; --other: #a04000; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #14171a; --ink: #e6e9ec; --soft: #9aa4ae; --rule: #33393f; --card: #1d2125; --other: #f0a860; }
}
body { margin: 2rem auto; max-width: 1400px; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; }
body { background: var(--paper); color: var(--ink); }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 2rem 0 .6rem; overflow-wrap: anywhere; }
p { margin: .4rem 0; } .soft { color: var(--soft); }
table { border-collapse: collapse; font-size: .88rem; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .22rem .75rem .22rem 0; text-align: right; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } th:first-child, td:first-child { text-align: left; }
.scroll { overflow-x: auto; }
.answers { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(22rem, 100%), 1fr)); gap: .8rem; }
.answer { background: var(--card); border: 1px solid var(--rule); border-radius: 8px; padding: .6rem 1rem; min-width: 0; }
.answer h3 { font-size: .85rem; margin: 0 0 .4rem; color: var(--soft); overflow-wrap: anywhere; }
.answer pre { font: inherit; margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.answer p { font-size: .82rem; margin-top: .6rem; }
.other { color: var(--other); } .other::before { content: "\\25B6"; }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def compare_html(data: dict[str, Any]) -> str:
    """The page. data: the object that `qcompare --json` prints."""
    settings, prompts = data["settings"], data["prompts"]
    title = ", ".join(one_line(model["model"]) for model in data["models"])
    how = "greedy" if settings["temperature"] == 0 else f"temperature {settings['temperature']:g}, seed {settings['seed']}"
    template = "no chat template" if settings["raw"] else "chat template of each model"
    rows = summary_rows(data["models"], len(prompts))
    head = "".join(f"<th>{escape(heading)}</th>" for heading in HEADINGS)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    parts = [
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">Answers side by side, by Halfbyte: {len(prompts)} prompts, at most {settings["max_tokens"]} tokens each, '
        f"{escape(how)}; {template}; {'8-bit' if settings['compute'] == 'int8' else 'float32'} activations.</p>",
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>',
        '<p class="soft">Equal start: tokens before the first that differs from the first model\'s. Agreement: share of the tokens of the '
        "first model's answers that the model, too, finds most likely there. KL: mean divergence of its predictions, nats.</p>",
    ]
    for number, prompt in enumerate(prompts, 1):
        parts.append(f'<h2><span class="soft">{number}</span> {escape(shown_prompt(prompt["shown"]))}</h2><div class="answers">')
        parts += [_answer(answer) for answer in prompt["answers"]]
        parts.append("</div>")
    if data["notes"]:
        parts.append("<h2>Notes</h2><ul>" + "".join(f"<li>{escape(one_line(note))}</li>" for note in data["notes"]) + "</ul>")
    parts.append("</body></html>\n")
    return "".join(parts)


def _answer(answer: dict[str, Any]) -> str:
    text, at = answer["text"], answer["differs_at"]
    shown = escape(safe_text(text[:at]))
    if at is not None:
        shown += f'<span class="other">{escape(safe_text(text[at:]))}</span>'
    # The line end after <pre> is dropped by browsers, so one that the answer begins with is kept.
    return (
        f'<div class="answer"><h3>{escape(one_line(answer["model"]))}</h3><pre>\n{shown}</pre>'
        f'<p class="soft">{escape(answer_facts(answer))}</p></div>'
    )
