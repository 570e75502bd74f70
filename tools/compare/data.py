"""A comparison as plain data: what `qcompare --json` prints, and what the columns, the table and the page are made of."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ...engine.generate.kept_sequence import common_prefix
from .answers import ModelAnswer
from .models import Candidate
from .prompts import Prompt


def prompt_data(prompt: Prompt, models: Sequence[Candidate], answers: Sequence[ModelAnswer]) -> dict[str, Any]:
    """One prompt and the answers of all models to it, in the models' order. See docs/comparing.md for the keys."""
    first = answers[0]
    return {
        "prompt": prompt.text,
        "messages": prompt.messages,
        "shown": prompt.shown,
        "answers": [_answer(model, answer, None if answer is first else first) for model, answer in zip(models, answers, strict=True)],
    }


def _answer(model: Candidate, answer: ModelAnswer, first: ModelAnswer | None) -> dict[str, Any]:
    equal = at = same = None
    if first is not None:
        equal, at, same = _difference(answer, first, model.same_tokens)
    measured = answer.agreement
    count = 0 if measured is None else measured.same.size
    return {
        "model": model.name,
        "text": answer.text,
        "token_ids": answer.ids,
        "prompt_tokens": answer.timings.prompt_tokens,
        "finish_reason": answer.finish_reason,
        "first_token_s": answer.timings.first_token_s,
        "decode_tok_s": answer.timings.decode_tok_s,
        "decoded_tokens": answer.timings.decoded,
        "decode_s": answer.timings.decode_s,
        "equal_tokens": equal,
        "differs_at": at,
        "same": same,
        "scored_tokens": count,
        "agreement": float(measured.same.mean()) if measured is not None and count else None,
        "kl_mean": float(measured.kl.mean()) if measured is not None and count else None,
    }


def _difference(answer: ModelAnswer, first: ModelAnswer, same_tokens: bool) -> tuple[int, int | None, bool]:
    """(equal tokens at the start; the character where the answer leaves the first model's, None if nowhere; whether they are the same).

    If tokens mean different things, texts are compared, and tokens are counted whose text ends before the difference.
    """
    if same_tokens:
        equal = common_prefix(answer.ids, first.ids)
        same = answer.chosen == first.chosen and answer.text == first.text
        at = answer.ends[equal - 1] if equal else 0
    else:
        at = common_prefix(*([*map(ord, text)] for text in (answer.text, first.text)))
        equal = sum(end <= at for end in answer.ends)
        same = answer.text == first.text
    return equal, None if same else at, same


def summary(models: Sequence[Candidate], prompts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each model did over all prompts. Means of agreement and divergence are over tokens, not over prompts."""
    found = []
    for i, model in enumerate(models):
        answers = [prompt["answers"][i] for prompt in prompts]
        scored = [a for a in answers if a["scored_tokens"]]
        count = sum(a["scored_tokens"] for a in scored)
        found.append(
            {
                "model": model.name,
                "path": os.fspath(model.path),
                "bytes": model.nbytes,
                "answer_tokens": sum(len(a["token_ids"]) for a in answers),
                "decode_tok_s": _ratio(sum(a["decoded_tokens"] for a in answers), sum(a["decode_s"] for a in answers)),
                "equal_tokens_mean": None if i == 0 else sum(a["equal_tokens"] for a in answers) / len(answers),
                "same_answers": None if i == 0 else sum(a["same"] for a in answers),
                "scored_tokens": count,
                "agreement": sum(a["agreement"] * a["scored_tokens"] for a in scored) / count if count else None,
                "kl_mean": sum(a["kl_mean"] * a["scored_tokens"] for a in scored) / count if count else None,
            }
        )
    return found


def _ratio(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None
