"""Attention over pages against NumPy, and that nothing stale in a page, and nobody else in the step, changes a bit."""


import numpy as np
import pytest

from halfbyte.engine.kernels import structs as layout
from support import kernelbox as box


class Case:
    """Sequences with random keys and values in scattered pages; the rest of the pages is NaN.

    texts: (start, count) of each sequence: `start` positions are there already, `count` tokens are in the step.
    window, soft_cap: 0 for none; sinks: float32[heads] or None. Block tables of a window name pages that do not exist where no token of
    the step may look.
    """

    def __init__(self, texts, head_size, group, layout_name, kv_heads=2, seed=0, value_size=None, window=0, soft_cap=0.0, sinks=None):
        rng = np.random.default_rng(seed)
        self.key_size, self.value_size = head_size, value_size or head_size
        self.group, self.layout, self.kv_heads, self.heads = group, layout_name, kv_heads, kv_heads * group
        self.window, self.soft_cap, self.sinks = window, soft_cap, sinks
        self.texts = texts
        needed = [-(-(start + count) // layout.PAGE) for start, count in texts]
        numbers = rng.permutation(sum(needed) + 1)
        self.pages = box.Pages(len(numbers), kv_heads, self.key_size, self.value_size, layout_name)
        self.tables, at = [], 0
        for (start, count), n in zip(texts, needed, strict=True):
            table, at = numbers[at : at + n], at + n
            self.tables.append(table)
            k, v = (rng.standard_normal((start + count, kv_heads, size)) for size in (self.key_size, self.value_size))
            for p in range(start + count):
                self.pages.put(table, p, k[p], v[p])
        tokens = sum(count for _, count in texts)
        self.q = box.copied(rng.standard_normal((tokens, self.heads * self.key_size)).astype(np.float32))

    @property
    def features(self):
        return tuple(n for n, v in (("window", self.window), ("soft_cap", self.soft_cap), ("sinks", self.sinks is not None)) if v)

    def expected(self):
        out, first = [], 0
        for (start, count), table in zip(self.texts, self.tables, strict=True):
            k, v = self.pages.get(table, start + count)
            for t in range(count):
                i = start + t
                sees = [j for j in range(i + 1) if not self.window or i - j < self.window]
                q = self.q[first + t].reshape(self.kv_heads, self.group, self.key_size).astype(np.float64)
                scores = np.einsum("hgd,phd->hgp", q, k[sees])
                if self.soft_cap:
                    scores = self.soft_cap * np.tanh(scores / self.soft_cap)
                if self.sinks is not None:
                    scores = np.concatenate([scores, self.sinks.reshape(self.kv_heads, self.group, 1)], -1)
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                out.append(np.einsum("hgp,phd->hgd", weights[..., : len(sees)], v[sees]).reshape(-1))
            first += count
        return np.array(out)

    def run(self, workers=1, split=False, kind="f32", only=None):
        """float32[tokens, heads * value size] from attention_merge. split: lone tokens' attention in parts. only: one sequence."""
        chosen = range(len(self.texts)) if only is None else [only]
        first = sum(count for _, count in self.texts[: chosen[0]])
        sequences = []
        for i in chosen:
            start, count = self.texts[i]
            parts = -(-(start + 1) // layout.SPLIT) if split and count == 1 and start >= layout.SPLIT else 0
            table = np.array(self.tables[i], np.int64)
            if self.window:
                table[: max(start + 1 - self.window, 0) // layout.PAGE] = 1 << 40
            sequences.append((start, count, table, parts))
        tokens = sum(s[1] for s in sequences)
        columns, query_columns = self.heads * self.value_size, self.heads * self.key_size
        width, query_width = -(-columns // 32) * 32, -(-query_columns // 32) * 32
        step = box.Step(tokens, sequences=sequences)
        q = box.floats(tokens, query_width, 0.0)
        q[:, :query_columns] = self.q[first : first + tokens]
        out = box.floats(tokens, width, 0.0)
        own = layout.attention_scratch(self.key_size, self.value_size)
        own = -(-max(own, layout.part_bytes(self.value_size) + 4 * width + 64) // 128) * 128
        scratch = box.aligned(own * workers)
        parts = box.aligned(max(sum(s[3] for s in sequences), 1) * self.heads * layout.part_bytes(self.value_size))
        # with one token in the step, each worker reads queries of its own
        lone = box.copied(np.repeat(q[:1], workers, 0))
        sinks = 0 if self.sinks is None else self.sinks
        common = {
            "step": step.address, "heads": self.heads, "parts": parts, "scratch": scratch, "scratch_worker": own, "window": self.window,
            "sinks": sinks,
        }  # fmt: skip
        box.run(
            "attention", (self.key_size, self.value_size, self.group, self.layout, *self.features), workers,
            q=q if tokens > 1 else box.floats(1, query_width), lone=lone, lone_worker=lone.strides[0], q_stride=q.strides[0],
            out_stride=out.strides[0], cache=self.pages.memory, page_bytes=self.pages.page_bytes, kv_heads=self.kv_heads, out=out,
            soft_cap=self.soft_cap, **common,
        )  # fmt: skip
        private = -(-layout.panel_bytes(kind, 1, columns) // 128) * 128
        panels = box.aligned(max(layout.panel_bytes(kind, tokens, columns), private * workers))
        merged = [f for f in self.features if f != "soft_cap"]
        box.run(
            "attention_merge", (self.value_size, kind, *merged), workers, x=out, x_stride=out.strides[0], columns=columns, out=panels,
            out_worker=private, **common,
        )  # fmt: skip
        if tokens == 1:
            for w in range(1, workers):
                size = layout.RECORD[kind] * width // 32
                np.testing.assert_array_equal(panels[w * private : w * private + size], panels[:size])
        got = box.panel_tokens(kind, panels, tokens, columns)
        if kind == "int8":
            return got
        assert (got[:, columns:] == 0).all(), "columns that only pad a block must be zero"
        return got[:, :columns]


GROUPS = [(24, 1), (40, 2), (64, 3), (80, 5), (32, 6), (128, 7), (16, 8), (96, 12)]


def check(case):
    """Against NumPy, and every sequence alone or with the others, by any number of workers, split or not, with the same bits."""
    expected = case.expected()
    plain = case.run()
    assert np.abs(plain - expected).max() < 2e-5
    for options in ({"workers": 3}, {"split": True}, {"split": True, "workers": 3}):
        np.testing.assert_array_equal(case.run(**options), plain)
    first = 0
    for i, (_, count) in enumerate(case.texts):
        for workers in (1, 2):
            for split in (False, True):
                np.testing.assert_array_equal(case.run(workers, split, only=i), plain[first : first + count])
        first += count


TEXTS = [(0, 1), (0, 35), (300, 1), (250, 9), (511, 1), (512, 1), (600, 3)]


@pytest.mark.parametrize("cache_type", ["f16", "f32"])
@pytest.mark.parametrize(("head_size", "group"), GROUPS)
def test_against_numpy(head_size, group, cache_type):
    check(Case(TEXTS, head_size, group, cache_type))


@pytest.mark.parametrize(("head_size", "group"), [(24, 1), (128, 7)])
def test_keys_and_values_of_8_bits(head_size, group):
    check(Case(TEXTS, head_size, group, "q8"))


@pytest.mark.parametrize(("key_size", "value_size", "group", "cache_type"), [(96, 64, 1, "f16"), (20, 80, 6, "q8")])
def test_keys_and_values_of_different_sizes(key_size, value_size, group, cache_type):
    check(Case(TEXTS, key_size, group, cache_type, value_size=value_size))


@pytest.mark.parametrize(("group", "cache_type"), [(1, "f32"), (3, "q8"), (8, "f32")])
@pytest.mark.parametrize("window", [1, 3, 32, 100, 256, 300, 1000])
def test_windows(window, group, cache_type):
    """Within a page and over several, shorter than the tokens of a step and longer than a split; what is behind them may be gone."""
    check(Case([*TEXTS, (770, 1), (500, 40)], 24, group, cache_type, window=window))


def test_a_windowed_prompt_one_by_one():
    """A token alone, split or not, gives the bits that it gives in the middle of a prompt."""
    window, group = 70, 3
    whole = Case([(0, 620)], 24, group, "q8", kv_heads=1, window=window)
    everything = whole.run()
    assert np.abs(everything - whole.expected()).max() < 2e-5
    for start, count in ((0, 1), (69, 1), (70, 3), (255, 1), (256, 1), (290, 1), (325, 2), (326, 1), (520, 50), (619, 1)):
        piece = Case([(start, count)], 24, group, "q8", kv_heads=1, window=window)
        piece.pages, piece.tables = whole.pages, whole.tables
        piece.q = box.copied(whole.q[start : start + count])
        for split in (False, True):
            np.testing.assert_array_equal(piece.run(2, split), everything[start : start + count])


@pytest.mark.parametrize("cap", [0.5, 5.0, 50.0])
def test_soft_caps(cap):
    check(Case(TEXTS, 64, 3, "f16", soft_cap=cap))


@pytest.mark.parametrize("window", [0, 40, 290])
def test_sinks(window):
    """One so small that it changes nothing, some as large as scores are, and one that takes all weight."""
    sinks = np.array([-80.0, 0.0, 3.0, 200.0, -2.0, 6.0], np.float32)
    case = Case(TEXTS, 24, 3, "q8", sinks=sinks, window=window)
    check(case)
    heads = case.run().reshape(-1, 6, 24)
    assert not heads[:, 3].any() and np.ptp(heads[:, 0]) > 1


def test_all_at_once():
    sinks = np.linspace(-1, 3, 6).astype(np.float32)
    check(Case(TEXTS, 40, 3, "q8", value_size=24, window=45, soft_cap=8.0, sinks=sinks))


@pytest.mark.parametrize("group", [1, 3])
def test_a_prompt_in_pieces_and_one_by_one(group):
    """Token p of a text sees positions 0..p, whether it comes alone or with those before and after it."""
    head_size, length = (24, 520)
    whole = Case([(0, length)], head_size, group, "f16", kv_heads=1)
    everything = whole.run()
    assert np.abs(everything - whole.expected()).max() < 2e-5
    for start, count in ((0, 1), (255, 1), (256, 1), (257, 7), (511, 2), (512, 1), (500, 20), (519, 1)):
        piece = Case([(start, count)], head_size, group, "f16", kv_heads=1)
        piece.pages, piece.tables = whole.pages, whole.tables
        piece.q = box.copied(whole.q[start : start + count])
        for split in (False, True):
            np.testing.assert_array_equal(piece.run(2, split), everything[start : start + count])


def test_int8_panels_of_a_width_that_no_block_divides():
    """Split or whole, the padding of the last block is zero: it must not decide the block's scale."""
    case = Case([(700, 1)], 24, 3, "f16", kv_heads=1)
    whole, split = case.run(kind="int8"), case.run(2, True, kind="int8")
    for a, b in zip(whole, split, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (split[0][0, -1, 72 - 64 :] == 0).all()


@pytest.mark.parametrize("scale", [0.0, 1e-3, 60.0])
def test_scores_of_any_size(scale):
    """All alike, and so large that all but one weight is 0: never NaN."""
    case = Case([(400, 1), (0, 40)], 64, 3, "f16")
    case.q *= np.float32(scale)
    assert np.abs(case.run(2, True) - case.expected()).max() < 1e-3


NEIGHBOURS = [(24, 1, "f16"), (24, 1, "f32"), (24, 1, "q8"), (64, 3, "f16"), (32, 6, "f32"), (128, 7, "f16"), (128, 7, "q8")]


@pytest.mark.parametrize(("head_size", "group", "cache_type"), NEIGHBOURS)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_keys_and_values_of_later_tokens_change_nothing(head_size, group, cache_type, bad):
    """Token p does not see token p + 1 of the same chunk, not even where 0 times its values would be NaN."""
    for start, count in ((0, 9), (251, 12), (500, 4)):  # within a page, and over the ends of pages and splits
        case = Case([(start, count)], head_size, group, cache_type)
        expected = case.run()
        for p in range(start + 1, start + count):
            case = Case([(start, count)], head_size, group, cache_type)
            for later in range(p, start + count):
                case.pages.put(case.tables[0], later, *np.full((2, 2, head_size), bad))
            for workers in (1, 3):
                got = case.run(workers)
                np.testing.assert_array_equal(got[: p - start], expected[: p - start])
                assert not np.isfinite(got[p - start :]).any()
