"""A comparison on a terminal: answers in columns, or one below the other where the terminal is narrow; a table at the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..terminal.console import safe_text
from ..terminal.display import one_line, size_text, table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

NARROWEST = 32
"""Characters that a column of text must have; where there are fewer, answers stand one below the other."""

LONGEST_PROMPT = 400
"""Characters of a prompt that are shown."""


def print_prompt(data: dict[str, Any], number: int, prompts: int, console: Console | None = None) -> None:
    """Prints one prompt (see compare_data.prompt_data) with the answers to it."""
    from rich.console import Console
    from rich.padding import Padding
    from rich.text import Text

    out = console or Console(highlight=False, markup=False, emoji=False)
    mark = mark_of(out.encoding)
    out.print(Text.assemble((f"{number} of {prompts}  ", "dim"), (shown_prompt(data["shown"]), "bold")), overflow="fold")
    answers = data["answers"]
    bodies = [_body(answer, mark) for answer in answers]
    names = [Text(one_line(answer["model"]), "cyan") for answer in answers]
    facts = [Text(answer_facts(answer), "dim") for answer in answers]
    if out.width >= (NARROWEST + 3) * len(answers):
        out.print(_columns(names, bodies, facts))
    else:
        for name, body, fact in zip(names, bodies, facts, strict=True):
            out.print(name, overflow="fold")
            out.print(Padding(body, (0, 0, 0, 2)), overflow="fold")
            out.print(Padding(fact, (0, 0, 0, 2)), overflow="fold")
    out.print()


def _columns(names: Sequence[Text], bodies: Sequence[Text], facts: Sequence[Text]) -> Any:
    from rich.box import MINIMAL
    from rich.table import Table

    grid = Table(box=MINIMAL, expand=True, show_edge=False, pad_edge=False, header_style="")
    for name in names:
        grid.add_column(name, ratio=1, overflow="fold")
    grid.add_row(*bodies)
    grid.add_row(*facts)
    return grid


def _body(answer: dict[str, Any], mark: str) -> Text:
    """The answer, with a mark where it leaves the first model's."""
    from rich.text import Text

    text, at = answer["text"], answer["differs_at"]
    if at is None:
        return Text(safe_text(text))
    return Text.assemble(safe_text(text[:at]), (mark, "bold yellow"), (safe_text(text[at:]), "yellow"))


def mark_of(encoding: str) -> str:
    """The mark of a difference, in what an encoding has."""
    try:
        "▶".encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return ">>"
    return "▶"


def shown_prompt(text: str) -> str:
    """A prompt on one line, cut if it is long; safe for a terminal."""
    text = " ".join(text.split())
    return one_line(text if len(text) <= LONGEST_PROMPT else text[:LONGEST_PROMPT] + " …")


def answer_facts(answer: dict[str, Any]) -> str:
    """What was measured of an answer, in words."""
    count = len(answer["token_ids"])
    words = f"{count} token{'' if count == 1 else 's'}"
    if answer["finish_reason"] == "length":
        words += ", cut off"
    if answer["decode_tok_s"] is not None:
        words += f", {answer['decode_tok_s']:.1f} tokens/s"
    if answer["same"]:
        words += "; the same answer"
    elif answer["equal_tokens"] is not None:
        words += f"; first {answer['equal_tokens']} equal" if answer["equal_tokens"] else "; none equal"
    if answer["scored_tokens"]:
        words += f"; agreement {percent_text(answer['agreement'])}, KL {number_text(answer['kl_mean'])}"
    return words


HEADINGS = ("model", "size", "tokens/s", "equal start", "same answers", "agreement", "KL")


def summary_rows(models: Sequence[dict[str, Any]], prompts: int) -> list[tuple[str, ...]]:
    """Cells of the table at the end, under HEADINGS; models: compare_data.summary."""
    rows: list[tuple[str, ...]] = []
    for model in models:
        speed, equal, same = model["decode_tok_s"], model["equal_tokens_mean"], model["same_answers"]
        rows.append(
            (
                one_line(model["model"]),
                size_text(model["bytes"]),
                "-" if speed is None else f"{speed:.1f}",
                "" if equal is None else f"{equal:.1f}",
                "" if same is None else f"{same} of {prompts}",
                "-" if model["agreement"] is None and equal is not None else percent_text(model["agreement"]),
                "-" if model["kl_mean"] is None and equal is not None else number_text(model["kl_mean"]),
            )
        )
    return rows


def print_summary(models: Sequence[dict[str, Any]], prompts: int) -> None:
    """Prints the table at the end."""
    table(HEADINGS, summary_rows(models, prompts), right=range(1, len(HEADINGS)))


def percent_text(value: float | None) -> str:
    """A share as a percentage; "" for None."""
    if value is None:
        return ""
    return f"{value:.1%}" if math.isfinite(value) else str(value)


def number_text(value: float | None) -> str:
    """A divergence; "" for None."""
    if value is None:
        return ""
    return f"{value:.2e}" if 0 < abs(value) < 5e-5 else f"{value:.4f}"
