"""Expressions: canonical tensors of a file's, a file's of canonical ones, both ways bit for bit."""

import itertools

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.conversion.to_gguf import export_gguf
from halfbyte.formats.conversion.to_huggingface import export_huggingface
from halfbyte.formats.errors import TensorError
from halfbyte.formats.expression import (
    Blocks,
    Concat,
    ExpressionError,
    Halves,
    Offset,
    Pairs,
    Rows,
    Select,
    Source,
    Stack,
    Transpose,
    evaluate,
    invert,
    respelled,
    sources,
)
from halfbyte.formats.gguf.reader import GGUFFile
from halfbyte.formats.opening import open_checkpoint
from halfbyte.formats.safetensors.reader import SafetensorsFolder
from halfbyte.formats.tensor import RowsTensor
from halfbyte.quant import get_format
from support import ORACLES


@pytest.fixture
def tensors(tmp_path):
    """A function: arrays by name -> tensors of a file that holds them."""
    opened = []

    def make(**arrays):
        path = tmp_path / f"{len(opened)}.safetensors"
        save_file(arrays, path)
        opened.append(open_checkpoint(path))
        return opened[-1].tensors

    yield make
    for checkpoint in opened:
        checkpoint.close()


def matrix(rows, columns, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal((rows, columns)).astype(dtype)


def made(expression, file, name="made"):
    return evaluate(expression, name, file.__getitem__, "a.safetensors")


def check(tensor, expected):
    """The values, whole and by rows that begin and end anywhere."""
    assert tensor.shape == expected.shape and tensor.name == "made"
    np.testing.assert_array_equal(tensor.float32(), expected)
    flat = expected.reshape(-1, expected.shape[-1])
    for start, stop in ((0, 1), (1, len(flat)), (len(flat) // 3, len(flat) // 3 + 5), (3, 3)):
        np.testing.assert_array_equal(tensor.float32(slice(start, stop)), flat[start:stop])
        tensor.release(slice(start, stop))
    plain = tensor.plain(slice(1, 4))
    if plain is not None and plain.dtype == np.float32:
        np.testing.assert_array_equal(plain, flat[1:4])


def test_each_kind(tensors):
    a, b = matrix(12, 8, 1), matrix(12, 8, 2)
    file = tensors(a=a, b=b, s=np.stack([a, b, a + b]))
    check(made(Source("a"), file), a)
    check(made(Rows(Source("a"), 3, 11, 12), file), a[3:11])
    check(made(Concat((Source("a"), Source("b")), (12, 12)), file), np.concatenate([a, b]))
    check(made(Stack((Source("a"), Source("b"))), file), np.stack([a, b]))
    check(made(Select(Source("s"), 1, 3), file), b)
    check(made(Transpose(Source("a")), file), np.ascontiguousarray(a.T))
    check(made(Offset(Source("a"), 1.0), file), a + np.float32(1))
    pairs = a.reshape(2, 3, 2, 8).swapaxes(1, 2).reshape(12, 8)
    check(made(Halves(Source("a"), 2), file), pairs)
    check(made(Pairs(Halves(Source("a"), 2), 2), file), a)
    check(made(Rows(Transpose(Source("a")), 2, 6, 8), file), np.ascontiguousarray(a.T[2:6]))
    check(made(Rows(Concat((Source("a"), Source("b")), (12, 12)), 10, 15, 24), file), np.concatenate([a, b])[10:15])
    check(made(Rows(Halves(Source("a"), 2), 3, 9, 12), file), pairs[3:9])


def test_vectors(tensors):
    v = np.arange(12, dtype=np.float32)
    file = tensors(v=v, w=v + 100)
    for expression, expected in (
        (Rows(Source("v"), 4, 10, 12), v[4:10]),
        (Halves(Source("v"), 3), v.reshape(3, 2, 2).swapaxes(1, 2).reshape(-1)),
        (Rows(Halves(Source("v"), 3), 4, 8, 12), v.reshape(3, 2, 2).swapaxes(1, 2).reshape(-1)[4:8]),
        (Concat((Source("v"), Source("w")), (12, 12)), np.concatenate([v, v + 100])),
        (Rows(Concat((Source("v"), Source("w")), (12, 12)), 11, 13, 24), np.float32([11, 100])),
        (Offset(Source("v"), -1.0), v - 1),
    ):
        tensor = made(expression, file)
        assert tensor.vector and tensor.shape == expected.shape
        np.testing.assert_array_equal(tensor.float32(), expected)


def test_views_of_a_file_are_not_copies(tensors):
    file = tensors(a=matrix(64, 32))
    whole = file["a"].plain(slice(0, 64))
    part = made(Rows(Source("a"), 8, 40, 64), file).plain(slice(0, 32))
    assert np.shares_memory(whole, part)
    assert np.shares_memory(whole, made(Pairs(Halves(Source("a"), 2), 2), file).plain(slice(0, 64)))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_inverted_gives_the_file_again(tmp_path_factory, data):
    """Random fusions: every tensor of a file, from the canonical ones that were made of it, bit for bit."""
    columns = 2 * data.draw(st.integers(1, 6))
    arrays, canonical = {}, []
    for number in range(data.draw(st.integers(1, 3))):
        name, seed = f"t{number}", data.draw(st.integers(0, 99))
        kind = data.draw(st.sampled_from(["plain", "fused", "stacked", "one by one", "transposed", "pairs", "fused transposed"]))
        heights = [4 * h for h in data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))]
        total = sum(heights)
        starts = np.cumsum([0, *heights])
        cuts = [(int(a), int(b)) for a, b in itertools.pairwise(starts)]
        if kind == "plain":
            arrays[name] = matrix(total, columns, seed)
            canonical.append((f"c{number}", Source(name)))
        elif kind == "fused":
            arrays[name] = matrix(total, columns, seed)
            canonical += [(f"c{number}.{i}", Halves(Rows(Source(name), a, b, total), 2)) for i, (a, b) in enumerate(cuts)]
        elif kind == "stacked":
            arrays[name] = matrix(4 * len(cuts), columns, seed).reshape(len(cuts), 4, columns)
            canonical += [(f"c{number}.{i}", Select(Source(name), i, len(cuts))) for i in range(len(cuts))]
        elif kind == "one by one":
            names = [f"{name}.{i}" for i in range(len(cuts))]
            arrays |= {one: matrix(4, columns, seed + i) for i, one in enumerate(names)}
            canonical.append((f"c{number}", Stack(tuple(map(Source, names)))))
        elif kind == "transposed":
            arrays[name] = matrix(total, columns, seed)
            canonical.append((f"c{number}", Transpose(Source(name))))
        elif kind == "pairs":
            arrays[name] = matrix(total, columns, seed)
            canonical.append((f"c{number}", Halves(Source(name), 2)))
        else:
            arrays[name] = matrix(columns, total, seed)
            canonical += [(f"c{number}.{i}", Rows(Transpose(Source(name)), a, b, total)) for i, (a, b) in enumerate(cuts)]
    path = tmp_path_factory.mktemp("e") / "a.safetensors"
    save_file(arrays, path)
    with open_checkpoint(path) as file:
        ours = {name: evaluate(e, name, file.tensors.__getitem__, path) for name, e in canonical}
        back = invert(data.draw(st.permutations(canonical)))
        assert back.keys() == arrays.keys()
        for name, expression in back.items():
            tensor = evaluate(expression, name, ours.__getitem__, path)
            assert tensor.shape == arrays[name].shape
            np.testing.assert_array_equal(tensor.float32(), arrays[name])


def test_blocks_pass_bit_for_bit(tmp_path):
    """Rows of quantized matrices, fused, cut and reordered, keep the blocks that they have."""
    form = get_format("q8_0")
    blocks = form.encode(matrix(24, 64))
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "none")
    writer.add_tensor("a", blocks[:8].reshape(8, -1), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("b", blocks[8:].reshape(16, -1), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with GGUFFile(tmp_path / "m.gguf") as file:
        found = {name: RowsTensor(name, t.shape, t.type, file, t.raw()) for name, t in file.tensors.items()}
        joined = made(Concat((Source("a"), Source("b")), (8, 16)), found)
        assert joined.format == "q8_0"
        np.testing.assert_array_equal(joined.blocks(slice(2, 20)), blocks[2:20])
        cut = made(Rows(Halves(Source("b"), 2), 1, 9, 16), found)
        order = np.arange(16).reshape(2, 4, 2).swapaxes(1, 2).reshape(-1)
        np.testing.assert_array_equal(cut.blocks(), blocks[8:][order][1:9])
        stacked = made(Stack((Source("a"), Rows(Source("b"), 8, 16, 16))), found)
        assert stacked.shape == (2, 8, 64)
        np.testing.assert_array_equal(stacked.blocks(slice(6, 10)), np.concatenate([blocks[6:8], blocks[16:18]]))


def test_codes_and_scales_of_mxfp4_in_two_tensors(tensors):
    """gpt-oss's experts, held against the decoder of the gguf package and against the table of the OCP specification."""
    rng = np.random.default_rng(4)
    codes = rng.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8)
    scales = rng.integers(110, 140, (2, 6, 3)).astype(np.uint8)
    tensor = made(Blocks(Source("codes"), Source("scales")), tensors(codes=codes, scales=scales))
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    weights = np.stack([table[codes & 15], table[codes >> 4]], axis=-1).reshape(2, 6, 3, 32) * np.exp2(scales - 127.0)[..., None]
    expected = weights.reshape(2, 6, 96).astype(np.float32)
    assert tensor.shape == (2, 6, 96) and tensor.format == "mxfp4"
    np.testing.assert_array_equal(tensor.float32(), expected)
    np.testing.assert_array_equal(tensor.float32(slice(5, 8)), expected.reshape(12, 96)[5:8])
    theirs = gguf.quants.dequantize(tensor.blocks().reshape(12, -1), gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(theirs, expected.reshape(12, 96))
    with pytest.raises(ExpressionError, match="codes: weights cannot be written"):
        invert([("w", Blocks(Source("codes"), Source("scales")))])


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        (Rows(Source("a"), 0, 4, 10), "a: has shape \\[12, 8\\]; the metadata call for 10 rows"),
        (Concat((Source("a"), Source("b")), (12, 9)), "b: has shape \\[5, 8\\]; the metadata call for 9 rows"),
        (Stack((Source("a"), Source("b"))), "b: has shape \\[5, 8\\]"),
        (Select(Source("a"), 0, 12), "12 matrices"),
        (Halves(Source("b"), 2), "b: has shape"),
        (Blocks(Source("a"), Source("b")), "16 bytes of codes"),
    ],
)
def test_shapes_that_do_not_fit_are_named(tensors, expression, words):
    with pytest.raises(TensorError, match=words):
        made(expression, tensors(a=matrix(12, 8), b=matrix(5, 8)))


def test_a_part_that_is_missing_is_named():
    with pytest.raises(ExpressionError, match="qkv: not all of its rows are known, each once"):
        invert([("q", Rows(Source("qkv"), 0, 4, 12)), ("v", Rows(Source("qkv"), 8, 12, 12))])


def test_what_is_claimed_twice_is_refused():
    with pytest.raises(ExpressionError, match="w: two canonical tensors claim it"):
        invert([("a", Source("w")), ("b", Transpose(Source("w")))])
    with pytest.raises(ExpressionError, match="each once"):
        invert([("a", Rows(Source("w"), 0, 4, 8)), ("b", Rows(Source("w"), 2, 8, 8))])


def test_fusions_within_fusions_in_any_order(tensors):
    """Halves of a fused matrix that is fused again: the outer ones are put together before the inner, whatever comes first."""
    w = matrix(24, 8)
    twice = Transpose(Transpose(Rows(Source("w"), 8, 24, 24)))
    parts = {"a": Rows(Source("w"), 0, 8, 24), "b": Rows(twice, 0, 4, 16), "c": Rows(twice, 4, 16, 16)}
    file = tensors(w=w)
    for order in itertools.permutations(parts):
        ours = {name: evaluate(parts[name], name, file.__getitem__, "a") for name in order}
        back = invert([(name, parts[name]) for name in order])
        assert list(back) == ["w"]
        np.testing.assert_array_equal(evaluate(back["w"], "w", ours.__getitem__, "a").float32(), w)


def test_names_of_sources():
    expression = Halves(Concat((Source("a"), Rows(Source("b"), 0, 2, 4)), (2, 2)), 1)
    assert sources(expression) == ("a", "b")
    assert sources(respelled(expression, "model.{}".format)) == ("model.a", "model.b")
    assert sources(respelled(Blocks(Source("c"), Source("d")), str.upper)) == ("C", "D")


@pytest.mark.parametrize("name", ["phi3", "smollm3", "llama", "qwen2", "biases", "mixtral"])
def test_to_gguf_and_back_gives_the_folder_again(tmp_path, name):
    """Fused matrices, permuted rows, biases, experts: every tensor of the folder comes back bit for bit."""
    with open_checkpoint(ORACLES / name) as folder:
        export_gguf(folder, tmp_path / "m.gguf", None)
        theirs = gguf.GGUFReader(tmp_path / "m.gguf")
        if name == "phi3":
            assert {"blk.0.attn_qkv.weight", "blk.1.ffn_up.weight"} < {t.name for t in theirs.tensors}
            assert not any("attn_q.weight" in t.name or "ffn_gate" in t.name for t in theirs.tensors)
        with open_checkpoint(tmp_path / "m.gguf") as file:
            assert list(file.tensors) == list(folder.tensors)
            for key, tensor in file.tensors.items():
                np.testing.assert_array_equal(tensor.float32(), folder.tensors[key].float32(), err_msg=key)
            export_huggingface(file, tmp_path / "again", Recipe(format=next(iter(folder.tensors.values())).format))
    with SafetensorsFolder(ORACLES / name) as before, SafetensorsFolder(tmp_path / "again") as after:
        assert before.tensors.keys() == after.tensors.keys()
        for key, tensor in before.tensors.items():
            other = after.tensors[key]
            if len(tensor.shape) > 1:
                assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape), key
                np.testing.assert_array_equal(tensor.raw(), other.raw(), err_msg=key)
            np.testing.assert_array_equal(tensor.float32(), other.float32(), err_msg=key)


@pytest.mark.parametrize("name", ["phi3", "smollm3"])
def test_a_layer_of_the_model_as_its_spec_says(name):
    with open_checkpoint(ORACLES / name) as found:
        model = found.model
        assert [layer.attention.rope for layer in model.layers] == (["rope"] * 2 if name == "phi3" else ["rope"] * 3 + [""])
        assert (model.width, model.vocabulary, model.context) == (72, 50, 128)


def test_what_was_measured_goes_with_joined_tensors(tmp_path):
    """A .hbf to GGUF: blocks are kept, and a fused matrix is as bad as the worst of its parts."""
    with open_checkpoint(ORACLES / "phi3") as folder:
        convert(folder, tmp_path / "m.hbf", Recipe(format="q8_0"))
    with open_checkpoint(tmp_path / "m.hbf") as file:
        known = [file.tensors[f"blk.0.attn_{one}.weight"].recorded["cosine"] for one in "qkv"]
        find = file.tensors.__getitem__
        joined = evaluate(Concat(tuple(Source(f"blk.0.attn_{one}.weight") for one in "qkv"), (72, 24, 24)), "qkv", find, tmp_path)
    assert joined.recorded["cosine"] == min(known) < 1 and "method" in joined.recorded
