"""Options of a command line that say how tokens are chosen, and the SamplingParams that they mean.

Nothing is imported at the top that reading arguments does not need: see qrun.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from .console import UsageError

if TYPE_CHECKING:
    from ...engine.generate.params import SamplingParams


def whole(least: int) -> Any:
    """A reader of whole numbers from an option, not below `least`."""
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, not {value}")
        return value

    return number


def real(text: str) -> float:
    """Reads a number from an option."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None


SAMPLING = (
    # option, another spelling, field of SamplingParams, type, metavar, help
    ("--max-tokens", "-n", "max_tokens", whole(0), "N", "the most tokens of an answer (default {most_tokens})"),
    ("--temperature", "--temp", "temperature", real, "T", "0: the likeliest token, always (default); 1: the model's own spread"),
    ("--top-k", None, "top_k", whole(0), "K", "choose among the K likeliest tokens (default 0: all)"),
    ("--top-p", None, "top_p", real, "P", "among the likeliest that together reach probability P (default 1: all)"),
    ("--min-p", None, "min_p", real, "P", "among those at least P times as likely as the likeliest (default 0: all)"),
    ("--repeat-penalty", "--repetition-penalty", "repetition_penalty", real, "R", "above 1: repeat less (default 1)"),
    ("--repeat-last-n", None, "repetition_window", whole(0), "N", "how far the repeat penalty looks back (default 64; 0: all)"),
    ("--frequency-penalty", None, "frequency_penalty", real, "F", "taken off a token for each time it was said (default 0)"),
    ("--presence-penalty", None, "presence_penalty", real, "F", "taken off a token once it was said (default 0)"),
    ("--seed", None, "seed", whole(-(1 << 63)), "N", "same seed, same text (default: another one each time)"),
    ("--logprobs", None, "logprobs", whole(0), "N", "with --json: log-probabilities, with N alternatives of each token"),
)
"""The options that are one number of SamplingParams."""


def add_sampling_options(
    parser: argparse.ArgumentParser, most_tokens: int, fields: Collection[str] | None = None
) -> None:
    """Adds the options of SAMPLING, or those for some fields only. most_tokens: what an answer has at most, if nothing is said."""
    for option, other, field, type, metavar, text in SAMPLING:
        if fields is None or field in fields:
            names = filter(None, (option, other))
            parser.add_argument(*names, dest=field, type=type, metavar=metavar, help=text.format(most_tokens=most_tokens))


def sampling_params(arguments: argparse.Namespace, **others: Any) -> SamplingParams:
    """The SamplingParams of a command line. others: fields that it does not give, or what they are when it leaves them out.

    Raises UsageError that names the option.
    """
    # A BLAS that numpy brings starts its threads on import, 50 ms; nothing here uses it.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from ...engine.generate.params import SamplingError, SamplingParams

    given = {field: getattr(arguments, field, None) for _, _, field, *_ in SAMPLING}
    try:
        return SamplingParams(**others | {field: value for field, value in given.items() if value is not None})
    except SamplingError as error:
        option = next((option for option, _, field, *_ in SAMPLING if field == error.field), "--" + error.field.replace("_", "-"))
        raise UsageError(option + str(error)[len(error.field) :]) from None
