"""The kernels of a mixture of experts against NumPy: routing, grouping, gathering, products, activation and sum."""

import numpy as np
import pytest

from halfbyte.engine.kernels import structs as layout
from halfbyte.quant.block import get_format
from support import kernelbox as box

ROUTE = np.dtype([("expert", "<i4"), ("place", "<i4"), ("weight", "<f4")])


def padded(count, unit):
    return -(-count // unit) * unit


def route(scores, used, over="chosen", workers=1):
    """Routes [tokens, used] of a kernel; their places are not set."""
    tokens, experts = scores.shape
    held = box.floats(tokens, padded(experts, 32), 0.0)
    held[:, :experts] = scores
    out = box.aligned(tokens * used * layout.ROUTE_BYTES + 64)
    own = layout.route_scratch(experts)
    box.run(
        "route", (over,), workers, step=box.Step(tokens).address, scores=held, stride=held.strides[0], experts=experts, used=used, out=out,
        scratch=box.aligned(own * workers), scratch_worker=own,
    )  # fmt: skip
    assert (out[-64:] == 0xFF).all()
    return out[:-64].view(ROUTE).reshape(tokens, used)


def group(routes, experts, workers=2):
    """int64[experts, 2], start and count; sets the places."""
    tokens, used = routes.shape
    out = box.aligned(experts * layout.GROUP_BYTES).view(np.int64)
    box.run("group_tokens", (), workers, step=box.Step(tokens).address, routes=routes, used=used, experts=experts, out=out)
    return out.reshape(experts, 2)


@pytest.mark.parametrize("over", ["chosen", "all"])
@pytest.mark.parametrize(("experts", "used"), [(1, 1), (3, 1), (4, 2), (16, 16), (40, 6)])
def test_route(experts, used, over):
    rng = np.random.default_rng(experts)
    for tokens in (1, 2, 7, 13):
        scores = (rng.standard_normal((tokens, experts)) * 3).astype(np.float32)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :used]
        e = np.exp(scores.astype(float) - scores.max(1, keepdims=True))
        chosen = np.take_along_axis(e, order, 1)
        expected = chosen / (chosen if over == "chosen" else e).sum(1, keepdims=True)
        for workers in (1, 3):
            routes = route(scores, used, over, workers)
            np.testing.assert_array_equal(routes["expert"], order)
            np.testing.assert_allclose(routes["weight"], expected, rtol=2e-6)


def test_of_equal_scores_the_first_expert_goes_first():
    scores = np.array([[1, 2, 2, 1], [0, 0, 0, 0], [-1, -np.inf, -1, -2], [5, 5, 6, 6]], np.float32)
    np.testing.assert_array_equal(route(scores, 3)["expert"], [[1, 2, 0], [0, 1, 2], [0, 2, 3], [2, 3, 0]])


def test_scores_that_are_not_finite_still_choose_experts_that_there_are():
    scores = np.full((4, 5), np.nan, np.float32)
    scores[1] = -np.inf
    scores[2, 2:] = np.inf
    scores[3] = [np.nan, 1, np.nan, 2, np.inf]
    for row in route(scores, 5)["expert"]:
        assert sorted(row) == list(range(5))


@pytest.mark.parametrize("used", [1, 3])
def test_grouping(used):
    """Every choice has a place of its own among its expert's, in the order of tokens; experts begin at whole panels."""
    rng = np.random.default_rng(used)
    for tokens in (1, 5, 40):
        scores = rng.standard_normal((tokens, 6)).astype(np.float32)
        scores[:, 4] = -100  # never chosen
        routes = route(scores, used)
        groups = group(routes, 6)
        start = 0
        for expert, (first, count) in enumerate(groups):
            at, ranks = np.nonzero(routes["expert"] == expert)
            assert (first, count) == (start, len(at)) and (expert != 4 or count == 0)
            np.testing.assert_array_equal(routes["place"][at, ranks], np.arange(len(at)))
            start += padded(count, layout.TOKENS)
        assert start <= layout.expert_slots(tokens, 6, used)


def gathered(kind, x, routes, groups, slots):
    tokens, columns = x.shape
    out = box.aligned(layout.panel_bytes(kind, slots, columns))
    box.run(
        "gather_panels", (kind,), 3, step=box.Step(tokens).address, x=box.make_panels(kind, x), x_worker=0, columns=columns, routes=routes,
        used=routes.shape[1], groups=groups, out=out,
    )  # fmt: skip
    return out


def panels_of(kind, memory, start, count, columns):
    """What is in the panels of one expert."""
    return box.panel_tokens(kind, memory[layout.panel_bytes(kind, start, columns) if start else 0 :], count, columns)


@pytest.mark.parametrize("kind", ["int8", "f32"])
def test_gathered_panels_are_those_of_the_tokens(kind):
    rng = np.random.default_rng(3)
    columns = 72
    for tokens in (1, 2, 9, 31):
        x = rng.standard_normal((tokens, columns)).astype(np.float32)
        routes = route(rng.standard_normal((tokens, 4)).astype(np.float32), 2)
        groups = group(routes, 4)
        memory = gathered(kind, x, routes, groups, layout.expert_slots(tokens, 4, 2))
        for expert, (start, count) in enumerate(groups):
            if count:
                mine = x[np.nonzero(routes["expert"] == expert)[0]]
                found = panels_of(kind, memory, start, count, columns)
                wanted = box.panel_tokens(kind, box.make_panels(kind, mine), count, columns)
                for a, b in zip([found] if kind == "f32" else found, [wanted] if kind == "f32" else wanted, strict=True):
                    np.testing.assert_array_equal(a, b)


def mixture(name, kind, x, scores, used, stacks, workers=2):
    """float32[tokens, width]: what all kernels together add to a residual stream of zeros. stacks: decoded gate, up, down and tiles."""
    tokens, experts = len(x), scores.shape[1]
    slots = layout.expert_slots(tokens, experts, used)
    routes = route(scores, used)
    groups = group(routes, experts)

    def product(stack, memory):
        weights, tiles = stack
        out = box.floats(slots, padded(weights.shape[1], 32), 0.0)
        box.run(
            "expert_matmul", (name, kind), workers, groups=groups, experts=experts, weights=tiles, matrix_nbytes=tiles.size // experts,
            columns=weights.shape[2], rows=weights.shape[1], x=memory, out=out, out_stride=out.strides[0],
        )  # fmt: skip
        return out

    memory = gathered(kind, x, routes, groups, slots)
    gate, up = (product(stacks[n], memory) for n in ("gate", "up"))
    inner = stacks["down"][0].shape[2]
    made = box.aligned(layout.panel_bytes(kind, slots, inner))
    box.run(
        "expert_gated", (kind, "silu"), workers, groups=groups, experts=experts, gate=gate, up=up, stride=gate.strides[0], columns=inner,
        out=made,
    )  # fmt: skip
    down = product(stacks["down"], made)
    width = stacks["down"][0].shape[1]
    out = box.floats(tokens + 1, padded(width, 32), 0.0)
    out[-1] = np.nan
    box.run(
        "expert_sum", (), workers, step=box.Step(tokens).address, x=down, stride=down.strides[0], columns=width, routes=routes, used=used,
        groups=groups, out=out, out_stride=out.strides[0],
    )  # fmt: skip
    assert np.isnan(out[-1]).all() and (out[:-1, width:] == 0).all()
    return out[:-1, :width].copy(), routes


def stack(name, shape, rng):
    form = get_format(name)
    blocks = [form.encode(rng.standard_normal(shape[1:]).astype(np.float32), method="nearest") for _ in range(shape[0])]
    weights = np.stack([form.decode(b, shape[2]) for b in blocks])
    return weights, box.copied(np.concatenate([form.tile(b) for b in blocks]))


@pytest.mark.parametrize(("name", "kind"), [("q4_0", "int8"), ("nl4", "int8"), ("q4_1", "f32"), ("bf16", "f32")])
def test_a_whole_mixture(name, kind):
    """Against NumPy; and a token's bits are the same alone, among others, and with any number of workers."""
    rng = np.random.default_rng(4)
    experts, used, width, inner = 5, 2, 72, 41
    shapes = {"gate": (experts, inner, width), "up": (experts, inner, width), "down": (experts, width, inner)}
    stacks = {n: stack(name, shape, rng) for n, shape in shapes.items()}
    x = rng.standard_normal((29, width)).astype(np.float32)
    scores = rng.standard_normal((29, experts)).astype(np.float32)
    whole, routes = mixture(name, kind, x, scores, used, stacks)

    def rounded(v):
        if kind == "f32":
            return v.astype(float)
        codes, scales = box.quantized(v.astype(np.float32))
        return (codes * scales[..., None].astype(float)).reshape(len(v), -1)[:, : v.shape[1]]

    expected = np.zeros_like(whole, float)
    for t, chosen in enumerate(routes):
        for expert, _, weight in chosen:
            g, u = (stacks[n][0][expert].astype(float) @ rounded(x[t : t + 1])[0] for n in ("gate", "up"))
            expected[t] += weight * (stacks["down"][0][expert].astype(float) @ rounded((g / (1 + np.exp(-g)) * u)[None])[0])
    # With int8 a value at the edge of two codes may become either: a step of its block's scale.
    assert np.abs(whole - expected).max() < (2e-2 if kind == "int8" else 2e-5) * expected.std()
    for first, last in ((0, 1), (28, 29), (3, 5), (10, 17), (0, 28)):
        for workers in (1, 3):
            part, _ = mixture(name, kind, x[first:last], scores[first:last], used, stacks, workers)
            np.testing.assert_array_equal(part, whole[first:last], err_msg=f"{first}:{last}, {workers} workers")
