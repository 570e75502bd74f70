"""Bits by tensor: which format each matrix gets, so that the sum of what they cost the predictions is least for the bytes they take.

Costs add up (sensitivity.py), so for a price of a byte each matrix can choose for itself: the format with the least cost + price * bytes
(Everett 1963, generalized Lagrange multipliers). As the price falls, matrices go up the lower convex hulls of their options step by step,
in the order of what a step saves per byte, until one does not fit. What is left then is less than that step takes, and is filled by the
best of the steps that still fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Option:
    """A format that a matrix may get. cost: what it adds to the KL divergence, nats per token; nbytes: what it takes in the file."""

    format: str
    nbytes: int
    cost: float


Options = Mapping[str, Sequence[Option]]
"""By names of matrices: at least one option each."""


def hull(options: Sequence[Option]) -> list[Option]:
    """The lower convex hull of cost over bytes: the options that are best at some price, the smallest first."""
    found: list[Option] = []
    for option in sorted(options, key=lambda o: (o.nbytes, o.cost)):
        if found and option.cost >= found[-1].cost:
            continue
        while len(found) > 1 and _gain(found[-2], found[-1]) <= _gain(found[-2], option):
            found.pop()
        found.append(option)
    return found


def _gain(a: Option, b: Option) -> float:
    """Cost that a byte takes away on the way from one option to a larger one."""
    return (a.cost - b.cost) / (b.nbytes - a.nbytes)


def smallest(options: Options) -> int:
    """Bytes of the smallest choice of all."""
    return sum(min(o.nbytes for o in each) for each in options.values())


def largest(options: Options) -> int:
    """Bytes of the choice with the least cost."""
    return sum(hull(each)[-1].nbytes for each in options.values())


def allocate(options: Options, nbytes: int) -> dict[str, Option]:
    """The choice with the least summed cost that takes at most so many bytes, in the order of the options.

    None costs less by more than one step saves, the first that does not fit. Raises ValueError if even the smallest is larger.
    """
    if smallest(options) > nbytes:
        raise ValueError(f"the smallest choice takes {smallest(options)} bytes, not {nbytes}")
    hulls = {name: hull(each) for name, each in options.items()}
    at = dict.fromkeys(hulls, 0)
    steps = sorted(
        ((_gain(each[i], each[i + 1]), name, i) for name, each in hulls.items() for i in range(len(each) - 1)), key=lambda step: -step[0]
    )
    left = nbytes - sum(each[0].nbytes for each in hulls.values())
    # On a hull gains fall from step to step, so in the order of gains every matrix takes its steps in order. Where one does not fit, that
    # matrix has had its last; what is left is for smaller ones.
    stopped: set[str] = set()
    for _, name, i in steps:
        more = hulls[name][i + 1].nbytes - hulls[name][i].nbytes
        if name in stopped or more > left:
            stopped.add(name)
            continue
        at[name], left = i + 1, left - more
    return {name: hulls[name][i] for name, i in at.items()}


def allocate_cost(options: Options, cost: float) -> dict[str, Option]:
    """The choice of the fewest bytes whose summed cost is at most `cost`; the one with the least cost if there is none."""
    # Bisection, because with more bytes the cost never rises: the first step that fits only then saves more per byte, and takes more bytes,
    # than all that has stood in its place.
    low, high = smallest(options), largest(options)
    while low < high:
        middle = (low + high) // 2
        if total(allocate(options, middle)) <= cost:
            high = middle
        else:
            low = middle + 1
    return allocate(options, high)


def total(chosen: Mapping[str, Option]) -> float:
    """Summed cost of a choice."""
    return sum(option.cost for option in chosen.values())
