"""What the commands that are parsed by argparse share: errors of usage as UsageError, and ranges of numbers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import NoReturn

from .console import UsageError


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UsageError instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} ({self.prog} --help shows the options)")


def check_ranges(arguments: argparse.Namespace, limits: Iterable[tuple[str, int, int]]) -> None:
    """Raises UsageError for options, (field, least, most), that were given and are not in their range."""
    for field, least, most in limits:
        value = getattr(arguments, field)
        if value is not None and not least <= value <= most:
            raise UsageError(f"--{field.replace('_', '-')} must be between {least} and {most}, not {value}")
