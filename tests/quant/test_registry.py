"""Formats found by name: built in, from other packages, and the one that docs/adding-a-block-format.md builds."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import halfbyte.quant as quant
from halfbyte.quant import BlockFormat, FormatError, format_names, get_format, register
from halfbyte.quant import block as registry
from halfbyte.quant.block import foreign_sources
from halfbyte.quant.encoders import encode, has_kernel, tile
from halfbyte.quant.parts import NIBBLES, Nibbles, Part
from halfbyte.quant.scaled import ScaledIntegers
from halfbyte.quant.scales import Affine
from support import ROOT

PAGE = ROOT / "docs" / "adding-a-block-format.md"
CODE, TOML = (re.search(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL).group(1) for language in ("python", "toml"))


@pytest.fixture
def clean_registry(monkeypatch):
    """Formats that a test registers are forgotten after it."""
    monkeypatch.setattr(registry, "_formats", dict(registry._formats))
    monkeypatch.setattr(registry, "_entry_points_read", False)


@pytest.fixture
def installed(tmp_path, monkeypatch, clean_registry):
    """A package with the page's code and entry point, as pip would leave it."""
    (tmp_path / "my_formats.py").write_text(CODE)
    info = tmp_path / "my_formats-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-formats\nVersion: 1.0\n")
    line = TOML.strip().splitlines()
    assert line[0] == '[project.entry-points."halfbyte.formats"]'
    (info / "entry_points.txt").write_text("[halfbyte.formats]\n" + line[1].replace('"', "") + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("my_formats", None)


def test_names_in_order():
    assert format_names()[:7] == ["f32", "f16", "bf16", "q8_0", "q6_0", "q6_r", "q5_1"]
    bits = [get_format(name).bits_per_weight() for name in registry.BUILT_IN]
    assert bits == sorted(bits, reverse=True)
    for name in format_names():
        assert get_format(name).name == name and get_format(name) is get_format(name)
        assert name in repr(get_format(name))


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(FormatError, match=r"unknown block format 'q9_9'; known are f32, .*q4_0"):
        get_format("q9_9")


def test_a_second_format_of_a_name_is_refused(clean_registry):
    with pytest.raises(FormatError, match="two block formats are called 'q4_0'"):

        @register
        class Other(type(get_format("q4_0"))):
            pass

    assert type(get_format("q4_0")).__name__ == "Q4_0"


def test_the_package_loads_names_when_they_are_used():
    assert set(quant.__all__) == set(quant._HOME)
    for name in quant.__all__:
        assert getattr(quant, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        getattr(quant, "nothing")  # noqa: B009


def test_reading_files_needs_neither_numba_nor_entry_points():
    code = (
        "import sys, numpy\n"
        "from halfbyte.quant import get_format\n"
        "f = get_format('q4_0'); f.decode(f.encode(numpy.zeros((1, 32), 'f4')))\n"
        "assert not {'numba', 'llvmlite', 'ml_dtypes', 'gguf', 'importlib.metadata', 'halfbyte.quant.q8_0'} & set(sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_format_of_the_page_is_found_by_its_entry_point(installed):
    q2_0 = get_format("q2_0")
    assert format_names()[-1] == "q2_0" and isinstance(q2_0, BlockFormat)
    assert q2_0.bits_per_weight() == 2.5 and q2_0.tile_bytes == 160
    assert foreign_sources(["q4_0", "int8", "q2_0"]) == [str(installed / "my_formats.py")]


def test_the_format_of_the_page_keeps_its_promises(installed):
    q2_0 = get_format("q2_0")
    w = np.random.default_rng(0).standard_normal((37, 70)).astype(np.float32)
    nearest, search = (q2_0.decode(q2_0.encode(w, method=method), 70) for method in ("nearest", "search"))
    assert 0.1 < ((search - w) ** 2).mean() < ((nearest - w) ** 2).mean() < 0.5
    levels = np.random.default_rng(1).integers(-2, 2, (37, 64)).astype(np.float32) * np.float32(0.5)
    levels[:, ::32] = -1
    np.testing.assert_array_equal(q2_0.decode(q2_0.encode(levels)), levels)
    blocks = np.random.default_rng(2).integers(0, 256, (37, 3, 10), dtype=np.uint8)
    tiles = q2_0.tile(blocks)
    assert tiles.size == q2_0.tiles_nbytes(37, 70)
    np.testing.assert_array_equal(q2_0.untile(tiles, 37, 70), blocks)


def test_the_format_of_the_page_is_encoded_by_the_reference(installed):
    q2_0 = get_format("q2_0")
    assert not has_kernel(q2_0)  # it has a part of its own
    w = np.random.default_rng(0).standard_normal((37, 70)).astype(np.float32)
    np.testing.assert_array_equal(encode(q2_0, w).data, q2_0.tile(q2_0.encode(w)))


def test_an_entry_point_that_cannot_be_loaded_is_named(installed):
    (installed / "my_formats.py").write_text("import no_such_module")
    with pytest.raises(FormatError, match=r"entry point 'q2_0' .*my_formats:Q2_0.*no_such_module"):
        get_format("q2_0")


@pytest.mark.parametrize("name", ["q6_0", "nl4_16"])
def test_formats_of_the_page_are_the_real_ones(name):
    shown = re.search(rf"    @register\n(    class {name.upper()}.*?)\n\n", PAGE.read_text(), re.DOTALL).group(1)
    source = (Path(registry.__file__).parent / f"{name}.py").read_text()
    assert [line.strip() for line in shown.splitlines()] == [line.strip() for line in source.splitlines()[-len(shown.splitlines()) :]]


def test_parts_and_floats_without_all_methods_cannot_be_made():
    """Not when one of them is called, but when the class is used at all."""
    from halfbyte.quant.floats import Floats

    class Half(Part):
        block_bytes = 4

        def to_block(self, codes):
            return codes

    class Word(Floats):
        name = "word"
        word = "<f4"

        def to_words(self, values):
            return values

    with pytest.raises(TypeError, match=r"abstract methods .*from_block.*from_planes.*to_planes"):
        Half()
    with pytest.raises(TypeError, match=r"abstract method .*from_words"):
        Word()


PACKERS = '''
    def packers(self):
        from halfbyte.quant.jit.piece import inline
        from halfbyte.quant.jit.simd import I32, load, store, zeros
        from halfbyte.quant.parts import Packers

        @inline
        def four(codes, first, step):
            packed = zeros(I32)
            for q in range(4):
                packed = packed | ((load(I32, codes + 64 * (first + step * q)) & 0x03030303) << (2 * q))
            return packed

        @inline
        def to_planes(codes, out):
            store(out, four(codes, 0, 1))
            store(out + 64, four(codes, 4, 1))

        @inline
        def to_words(codes, out):
            store(out, four(codes, 0, 2))
            store(out + 64, four(codes, 1, 2))

        @inline
        def from_words(words, codes):
            for i in range(2):
                for q in range(4):
                    at = codes + 64 * (i + 2 * q)
                    store(at, load(I32, at) | ((load(I32, words + 64 * i) >> (2 * q)) & 0x03030303))

        return Packers(to_planes, to_words, from_words)

'''


def test_a_part_with_packers_is_encoded_by_compiled_code(installed):
    (installed / "my_formats.py").write_text(CODE.replace("\n\n@register", PACKERS + "\n\n@register"))
    q2_0 = get_format("q2_0")
    assert has_kernel(q2_0)
    w = np.random.default_rng(0).standard_normal((37, 70)).astype(np.float32)
    for method in ("nearest", "search"):
        blocks = q2_0.encode(w, method=method)
        np.testing.assert_array_equal(encode(q2_0, w, method=method).data, q2_0.tile(blocks))
        np.testing.assert_array_equal(encode(q2_0, w, "blocks", method=method).data, blocks)
    np.testing.assert_array_equal(tile(q2_0, blocks), q2_0.tile(blocks))


def test_a_part_that_moves_bits_does_not_inherit_the_compiled_side():
    class Moved(Nibbles):
        def to_planes(self, vectors):
            return super().to_planes(vectors) ^ np.uint8(1)

        def from_planes(self, planes):
            return super().from_planes(planes ^ np.uint8(1))

    class Named(Nibbles):
        """The same bits."""

    assert NIBBLES.compiled and Named().compiled and not Moved().compiled
    with pytest.raises(FormatError, match="Moved has no reader"):
        Moved().reader(32)
    with pytest.raises(FormatError, match="Moved has no packers"):
        Moved().packers()


def test_a_grid_with_a_minimum_needs_scales_with_one():
    with pytest.raises(FormatError, match=r"Wrong: an affine grid needs scales with a minimum, such as F16_WITH_MINIMUM"):

        class Wrong(ScaledIntegers):
            grid = Affine(4)


def test_what_gguf_calls_the_formats_is_what_the_gguf_package_says():
    from gguf import GGMLQuantizationType, LlamaFileType

    for form in map(get_format, registry.BUILT_IN):
        assert (form.gguf_type is None) == (form.gguf_file_type is None)
        if form.gguf_type is not None:
            assert form.gguf_type in GGMLQuantizationType.__members__
            name = LlamaFileType(form.gguf_file_type).name
            assert name.removeprefix("ALL_").removeprefix("MOSTLY_").removesuffix("_MOE") == form.gguf_type


def test_bits_of_codes():
    bits = {name: get_format(name).bits for name in registry.BUILT_IN}
    for name, count in bits.items():
        assert name.lstrip("abdfilmnpqrx").startswith(str(count)), "formats are named after the bits of their codes"
