"""Bits by tensor: the choice under a budget, against all choices there are."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfbyte.engine.convert.allocation import Option, allocate, allocate_cost, hull, largest, smallest, total


@st.composite
def matrices(draw, most=5):
    """Options by names; whole numbers as costs, so that sums are exact."""
    found = {}
    for i in range(draw(st.integers(1, most))):
        sizes = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
        found[f"m{i}"] = [Option(f"f{k}", nbytes, float(draw(st.integers(0, 200)))) for k, nbytes in enumerate(sizes)]
    return found


def all_choices(options):
    return [dict(zip(options, each, strict=True)) for each in itertools.product(*options.values())]


def nbytes(chosen):
    return sum(option.nbytes for option in chosen.values())


def largest_step(options):
    """The most cost that a step between neighbours on a hull takes away."""
    hulls = [hull(each) for each in options.values()]
    return max((a.cost - b.cost for each in hulls for a, b in itertools.pairwise(each)), default=0.0)


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=8))
def test_hull_is_what_some_price_makes_best(points):
    options = [Option(f"f{i}", n, float(cost)) for i, (n, cost) in enumerate(points)]
    found = hull(options)
    assert [o.nbytes for o in found] == sorted({o.nbytes for o in found})
    assert all(a.cost > b.cost for a, b in itertools.pairwise(found))
    assert found[0].nbytes == min(n for n, _ in points) and found[-1].cost == min(cost for _, cost in points)
    gains = [(a.cost - b.cost) / (b.nbytes - a.nbytes) for a, b in itertools.pairwise(found)]
    assert all(a > b for a, b in itertools.pairwise(gains)), "a point between its neighbours is no corner"
    for price in (0.0, 0.3, 1.0, 2.5, 100.0, *(g * f for g in gains for f in (0.999, 1.001))):
        best = min(o.cost + price * o.nbytes for o in options)
        assert min(o.cost + price * o.nbytes for o in found) == pytest.approx(best)


@settings(max_examples=300)
@given(matrices(), st.integers(0, 120))
def test_allocate_against_all_choices(options, more):
    budget = smallest(options) + more
    chosen = allocate(options, budget)
    assert list(chosen) == list(options) and all(chosen[name] in options[name] for name in options)
    assert nbytes(chosen) <= budget
    best = min(total(each) for each in all_choices(options) if nbytes(each) <= budget)
    assert best <= total(chosen) <= best + largest_step(options)


@given(matrices(), st.floats(0.0, 8.0))
def test_allocate_is_the_optimum_where_a_price_lands_on_the_budget(options, price):
    """At any price all matrices choose for themselves, and with the bytes that this takes no choice is better."""
    by_price = {name: min(hull(each), key=lambda o: (o.cost + price * o.nbytes, o.nbytes)) for name, each in options.items()}
    budget = nbytes(by_price)
    best = min(total(each) for each in all_choices(options) if nbytes(each) <= budget)
    assert total(by_price) == best
    assert total(allocate(options, budget)) == best


@given(matrices(), st.integers(0, 100), st.integers(1, 40))
def test_more_bytes_never_cost_more(options, more, step):
    budget = smallest(options) + more
    assert total(allocate(options, budget + step)) <= total(allocate(options, budget))
    whole = allocate(options, largest(options))
    assert total(whole) == sum(min(o.cost for o in each) for each in options.values())
    assert nbytes(whole) == largest(options)


@given(matrices(), st.integers(0, 600))
def test_allocate_cost_is_the_smallest_budget_that_is_good_enough(options, cost):
    chosen = allocate_cost(options, float(cost))
    least = sum(min(o.cost for o in each) for each in options.values())
    if cost < least:
        assert total(chosen) == least
        return
    assert total(chosen) <= cost
    for budget in range(smallest(options), nbytes(chosen)):
        assert total(allocate(options, budget)) > cost
    # No choice that is good enough is smaller than the budget by which a whole step might be missed.
    fewest = min(nbytes(each) for each in all_choices(options) if total(each) <= cost)
    steps = [b.nbytes - a.nbytes for each in options.values() for a, b in itertools.pairwise(hull(each))]
    assert fewest <= nbytes(chosen) < fewest + max(steps, default=1) or nbytes(chosen) == fewest


def test_a_budget_below_the_smallest_choice_is_refused():
    options = {"a": [Option("x", 10, 1.0), Option("y", 20, 0.5)], "b": [Option("x", 7, 3.0)]}
    assert nbytes(allocate(options, 17)) == 17
    with pytest.raises(ValueError, match="17 bytes, not 16"):
        allocate(options, 16)


def test_what_is_left_goes_to_smaller_steps():
    options = {"big": [Option("x", 10, 100.0), Option("y", 60, 0.0)], "small": [Option("x", 10, 10.0), Option("y", 20, 0.0)]}
    chosen = allocate(options, 40)  # big has the better step, but it does not fit
    assert (chosen["big"].format, chosen["small"].format) == ("x", "y")


def test_a_step_that_does_not_fit_is_not_jumped_over():
    steps = [Option("x", 10, 100.0), Option("y", 50, 20.0), Option("z", 55, 12.0)]
    options = {"a": steps, "b": [Option("x", 10, 4.0), Option("y", 22, 0.0)]}
    chosen = allocate(options, 35)  # the step from y to z would fit
    assert (chosen["a"].format, chosen["b"].format) == ("x", "y")


def test_cheaper_and_better_beats_larger():
    options = {"a": [Option("x", 10, 5.0), Option("worse", 30, 6.0), Option("same size", 10, 4.0)]}
    assert [o.format for o in hull(options["a"])] == ["same size"]
    assert allocate(options, 100)["a"].format == "same size"
