"""A progress bar for work that goes through named stages, which say themselves how far they are."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[str, float, float], None]
"""progress(stage, done, total), as the engine calls it."""
Rate = Callable[[str, float, float, float], str]
"""rate(stage, done, total, seconds): the speed in words, "" for none. total and seconds are above 0."""


def token_rate(tokens: int) -> Rate:
    """Tokens per second in the stage "text", which goes through so many of them."""
    return lambda stage, done, total, seconds: f"{tokens * done / total / seconds:.0f} tokens/s" if stage == "text" else ""


@contextmanager
def stages(rate: Rate | None = None, name: str | None = None) -> Iterator[Progress]:
    """A bar with rate and time left on stderr, if that is a terminal; nothing otherwise.

    name: what stands beside the bar; None: the name of the stage.
    """
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield lambda stage, done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from .display import one_line

    columns = [TextColumn("{task.description:8}", markup=False), BarColumn(), TaskProgressColumn()]
    if rate is not None:
        columns.append(TextColumn("{task.fields[rate]:>14}", markup=False))
    columns.append(TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, speed_estimate_period=120) as bar:
        task, now, begun, shown = bar.add_task("", total=1, rate="", visible=False), "", 0.0, 0.0

        def progress(stage: str, done: float, total: float) -> None:
            nonlocal now, begun, shown
            moment = time.monotonic()
            if stage != now:
                now, begun, shown = stage, moment, 0.0
                what = stage if name is None or stage == "kernels" else one_line(name)
                bar.reset(task, description=what, total=total, rate="", visible=True)
            if done < total and moment - shown < 0.05:
                return
            shown = moment
            speed = rate(stage, done, total, max(moment - begun, 1e-3)) if rate is not None and total > 0 else ""
            bar.update(task, completed=done, total=total, rate=speed)

        yield progress
