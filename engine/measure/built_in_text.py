"""The text that reports are made on if no other is named. Nothing is imported here: a command line needs these to explain itself."""

from __future__ import annotations

from pathlib import Path

BUILT_IN_TEXT = Path(__file__).with_name("data") / "austen.txt"
"""Passages of Emma, Mansfield Park and Northanger Abbey (Jane Austen, 1814 to 1817), in the public domain."""

TOKENS = 5120
"""Tokens that are run if nobody says otherwise."""
