"""Every processor path that this machine can run, in processes of their own: the same integers, right operations, nearly the same logits.

And machine code for processors that this machine is not: it must at least come out of LLVM.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.opening import open_checkpoint
from halfbyte.quant.jit import target
from support import ORACLES, TESTS
from support import jit_ops as ops

OPS = TESTS / "support" / "jit_ops.py"

ON_X86 = platform.machine() in ("x86_64", "AMD64")
PATHS = {"vnni512": "znver4", "vnni256": "alderlake", "avx2": "haswell", "portable": "x86-64"}
NEEDS = {"vnni512": {"avx512_vnni", "avx512bw", "avx512vl"}, "vnni256": {"avx_vnni"}, "avx2": {"avx2", "fma", "f16c"}, "portable": set()}


def flags():
    """What this processor can, as Linux names it."""
    try:
        line = next(line for line in Path("/proc/cpuinfo").read_text().split("\n") if line.startswith("flags"))
    except (OSError, StopIteration):
        return set()
    return set(line.split())


def environment(cache, **more):
    """For a child that imports this very package, with a cache folder of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NUMBA_", "HALFBYTE_"))}
    return env | {"HALFBYTE_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | more


def child(arguments, env):
    done = subprocess.run([sys.executable, *map(str, arguments)], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("paths") / "m.hbf"
    with open_checkpoint(ORACLES / "long") as checkpoint:
        convert(checkpoint, path, Recipe(format="q4_0"))
    return path


@pytest.fixture(scope="module")
def ran(model, tmp_path_factory):
    """A function: what jit_ops.py computed on a path, or with a loader; skips what this machine cannot run."""
    made = {}

    def run(name):
        if name not in made:
            folder, more = tmp_path_factory.mktemp(name), {}
            if name in PATHS:
                if not ON_X86 or not flags() >= NEEDS[name]:
                    pytest.skip(f"this processor cannot run the path {name}")
                if run("map")["path"] == name:
                    return run("map")
                more = {"NUMBA_CPU_NAME": PATHS[name]}
            elif name == "link":
                more = {"HALFBYTE_LOADER": "link", "WITHOUT_OPS": "1"}
            child([OPS, folder / "out.npz", model], environment(folder / "cache", **more))
            with np.load(folder / "out.npz") as found:
                made[name] = dict(found)
        return made[name]

    return run


@pytest.mark.parametrize("name", PATHS)
def test_operations(name, ran):
    got, given = ran(name), ops.inputs()
    assert got["path"] == name, "the name of the processor did not choose this path"
    x = given["floats"]
    wide = x.astype(np.float64)

    inside = (x >= -87) & (x <= 88)
    np.testing.assert_allclose(got["exp"][inside], np.exp(wide[inside]), rtol=3e-7)
    assert (got["exp"][x < -87] == 0).all() and np.isfinite(got["exp"]).all()
    assert got["exp"][x == 0].tolist() == [1.0] * (x == 0).sum()
    small = np.abs(x) < 2**22
    np.testing.assert_array_equal(got["round_even"][small], np.rint(x[small]))
    np.testing.assert_array_equal(got["absolute"], np.abs(x))
    with np.errstate(over="ignore"):
        lower = np.abs(x) - np.float32(3)
        np.testing.assert_array_equal(got["maximum"], np.maximum(x, lower))
        np.testing.assert_array_equal(got["minimum"], np.minimum(x, lower))
        once, twice = (wide * wide + wide).astype(np.float32), x * x + x
    np.testing.assert_array_equal(got["fma"], once if got["has_fma"] else twice)

    halves = given["halves"].view(np.float16)
    same(got["from_f16"], halves.astype(np.float32))
    same(got["from_bf16"], (given["halves"].astype(np.uint32) << 16).view(np.float32))
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = given["narrow"].astype(np.float16)
    same(got["to_f16"], narrow)
    same(got["store_f16"], narrow)
    np.testing.assert_array_equal(got["from_i32"], given["start"].reshape(-1).astype(np.float32))
    np.testing.assert_array_equal(got["signed"], given["signed"].reshape(-1))
    np.testing.assert_array_equal(got["unsigned"], given["codes"].reshape(-1))
    n = given["numbers"].reshape(-1)
    np.testing.assert_array_equal(got["where"], np.where(n < (n & 255), n * 2, (n.view(np.uint32) >> 28).astype(np.int32)))

    rows = x.reshape(-1, ops.LANES)[: ops.TILES]
    folded = rows
    while folded.shape[1] > 1:
        half = folded.shape[1] // 2
        folded = folded[:, :half] + folded[:, half:]
    np.testing.assert_array_equal(got["lanes_sum"], folded[:, 0])
    np.testing.assert_array_equal(got["lanes_max"], rows.max(-1))
    counted = given["numbers"] + np.arange(ops.LANES) + np.arange(ops.TILES)[:, None]
    np.testing.assert_array_equal(got["lanes_sum_i32"], counted.sum(-1))


@pytest.mark.parametrize("name", PATHS)
def test_tables(name, ran):
    got, given = ran(name), ops.inputs()
    np.testing.assert_array_equal(got["lookup"], np.array(ops.TABLE, np.uint8)[given["codes"] & 15])
    np.testing.assert_array_equal(got["lookup_wide"], np.array(ops.WIDE, np.uint8)[given["codes"] & 31])
    for key in ("", "_16", "_32"):
        edges, values = getattr(ops, "EDGES" + key), np.array(getattr(ops, "VALUES" + key), np.float32)
        np.testing.assert_array_equal(got["staircase" + key], values[np.searchsorted(edges, given["floats"])])


def same(got, wanted):
    """Equal bits, and NaN where NaN is wanted, whatever its payload."""
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(got), nan)
    bits = {2: np.uint16, 4: np.uint32}[wanted.itemsize]
    np.testing.assert_array_equal(got[~nan].view(bits), wanted[~nan].view(bits))


@pytest.mark.parametrize("name", PATHS)
def test_integers_are_the_same_on_every_path(name, ran):
    got, given = ran(name), ops.inputs()
    x = given["signed"].reshape(ops.TILES, 16, 4).astype(np.int64)
    for key, codes in (("dot4", given["codes"] & 127), ("dot4_full", given["codes"])):
        w = codes.reshape(ops.TILES, 16, 4).astype(np.int64)
        start = np.ascontiguousarray(codes).view(np.int32).astype(np.int64)
        first = np.arange(ops.TILES) // 2 * 2
        wanted = start[first][:, None] + np.einsum("ilc,itc->itl", w, x[first][:, :3])
        np.testing.assert_array_equal(got[key], wanted.astype(np.int32), err_msg=key)
    for kind in ops.MATRICES:
        np.testing.assert_array_equal(got[f"matmul_{kind}"], got[f"exact_{kind}"])


@pytest.mark.skipif(not ON_X86, reason="the test names an x86 processor")
def test_tables_by_the_oldest_byte_shuffle(tmp_path):
    """Portable integers, but SSSE3's shuffle of 16 bytes."""
    code = (
        f"import sys; sys.path.insert(0, {str(TESTS)!r}); from support import jit_ops; found = jit_ops.matmul_sums(('nl5',))\n"
        "from halfbyte.quant.jit import target; features = target.current().features\n"
        "print(target.current().dot, 'sse4.2' in features, (found['matmul_nl5'] == found['exact_nl5']).all())"
    )
    assert child(["-c", code], environment(tmp_path, NUMBA_CPU_NAME="x86-64-v2")).split() == ["portable", "True", "True"]


@pytest.mark.parametrize("name", PATHS)
def test_logits_of_every_path(name, ran):
    """A prompt of more than one part of attention, and tokens one by one: the same bits wherever there is a fused multiply-add."""
    got, host = ran(name), ran("map")
    np.testing.assert_array_equal(got["decoded"], got["logits"][-10:])
    if got["has_fma"]:
        np.testing.assert_array_equal(got["logits"], host["logits"])
    else:  # products are rounded before they are added
        assert np.abs(got["logits"] - host["logits"]).max() < 1e-5 * host["logits"].std()


def test_the_loader_changes_nothing(ran):
    """Machine code mapped as it is, or linked by LLVM."""
    np.testing.assert_array_equal(ran("link")["logits"], ran("map")["logits"])
    np.testing.assert_array_equal(ran("link")["decoded"], ran("map")["decoded"])


def test_the_wait_changes_nothing(model, ran, monkeypatch):
    """Workers that park in the kernel of the operating system, or wait in Python."""
    monkeypatch.setenv("HALFBYTE_WAIT", "portable")
    got = ops.model_logits(model)
    monkeypatch.delenv("HALFBYTE_WAIT")
    np.testing.assert_array_equal(got["logits"], ops.model_logits(model)["logits"])
    np.testing.assert_array_equal(got["decoded"], got["logits"][-10:])


# ---- processors that are not here ----------------------------------------------------------------------------------------

FOREIGN = [
    ("aarch64-unknown-linux-gnu", "aarch64", "generic", "+neon,+dotprod", "neon", "sdot"),
    ("arm64-apple-darwin", "arm64", "apple-m2", "+neon,+dotprod,+i8mm", "usdot", "usdot"),
]


@pytest.mark.parametrize(("triple", "machine", "cpu", "features", "path", "instruction"), FOREIGN)
def test_other_processors_get_machine_code(triple, machine, cpu, features, path, instruction, tmp_path):
    """With the dot product that the path is for, f16 conversions and fma in hardware, and nothing from a library."""
    llvm = pytest.importorskip("llvmlite.binding")
    llvm.initialize_all_targets()
    try:
        llvm.Target.from_triple(triple)
    except RuntimeError:
        pytest.skip(f"this LLVM does not know {triple}")
    said = child([OPS.with_name("jit_foreign.py"), triple, machine, cpu, features], environment(tmp_path))
    first, *kernels = said.split("\nkernel ")
    assert first == f"path {path}"
    assembly = {text.split("\n", 1)[0]: text for text in kernels}
    assert set(assembly) == {"matmul", "matmul nl5", "attention", "interpreter"}
    for name, text in assembly.items():
        assert "\noutside ." in text, f"{name} needs {text.rsplit('outside', 1)[1]}"
        words = {line.split()[0] for line in text.split("\n") if line.startswith("\t") and line.strip()}
        assert "ret" in words
        if name == "interpreter":
            assert "blr" in words  # calls kernels, by address
        else:
            assert {"bl", "blr"}.isdisjoint(words), f"{name} calls a function"
        assert (instruction in words or any(w.startswith(instruction + ".") for w in words)) == name.startswith("matmul")
        assert any(w.startswith("tbl") for w in words) == (name == "matmul nl5"), "a table is one byte shuffle"
        if name == "attention":
            assert any(w.startswith("fmla") for w in words) and any(w.startswith("fcvtl") for w in words)


def test_targets_by_features():
    """What is chosen for processors that nobody here has."""
    vnni = {"avx512vnni", "avx512bw", "avx512vl", "avx2", "fma", "f16c"}
    cases = [
        ("x86_64", vnni, "vnni512"), ("AMD64", vnni, "vnni512"), ("x86_64", vnni | {"prefer-256-bit"}, "vnni256"),
        ("x86_64", {"avx2", "fma", "f16c", "avxvnni"}, "vnni256"), ("x86_64", {"avx2", "fma", "f16c"}, "avx2"),
        ("x86_64", {"sse4.2"}, "portable"), ("arm64", {"dotprod"}, "neon"), ("aarch64", {"dotprod", "i8mm"}, "usdot"),
        ("aarch64", set(), "portable"), ("riscv64", {"v"}, "portable"),
    ]  # fmt: skip
    for machine, features, dot in cases:
        chosen = target.choose(machine, "some", frozenset(features))
        assert chosen.dot == dot, (machine, features)
    assert not target.choose("x86_64", "some", frozenset({"avx2"})).has_fma


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("NUMBA_CPU_NAME", "nonsense", "'nonsense' is not a recognized processor"),
        ("NUMBA_CPU_NAME", "pentium", "64-bit code requested"),
        ("NUMBA_CPU_FEATURES", "+nonsense", "'+nonsense' is not a recognized feature"),
    ],
)
def test_processors_that_llvm_does_not_know_are_a_named_error(variable, value, says, tmp_path):
    """LLVM would write to stderr, twelve times, and abort the process."""
    if value == "pentium" and not ON_X86:
        pytest.skip("another machine's processor")
    command = (
        "import sys; from halfbyte.tools.terminal.console import run; from halfbyte.quant.jit.store import find; "
        "sys.exit(run(lambda: find('halfbyte.engine.kernels.matmul', 'q4_0', 'int8')))"
    )
    done = subprocess.run([sys.executable, "-c", command], env=environment(tmp_path, **{variable: value}), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    assert done.stderr.startswith(f"error: {variable}={value}: {says}") and done.stderr.count("\n") == 1
    code = "from halfbyte.quant.jit import target; target.current()"
    done = subprocess.run([sys.executable, "-c", code], env=environment(tmp_path, **{variable: value}), capture_output=True, text=True)
    assert done.returncode == 1 and "ProcessorError: " in done.stderr.splitlines()[-1]
