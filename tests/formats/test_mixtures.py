"""Mixtures of experts in files: Hugging Face's matrices one by one, GGUF's stacks, and what is refused."""

import gguf
import numpy as np
import pytest

from halfbyte.formats.checkpoint import TensorListError
from halfbyte.formats.conversion.convert import convert
from halfbyte.formats.conversion.recipe import Recipe
from halfbyte.formats.conversion.to_gguf import export_gguf
from halfbyte.formats.errors import TensorError
from halfbyte.formats.family import UnsupportedFeatureError
from halfbyte.formats.metadata import MetadataTypeError, MissingKeyError
from halfbyte.formats.opening import open_checkpoint
from support import tiny

EXPERTS = 3
GGUF_KEYS = {"llama.expert_count": (EXPERTS, gguf.GGUFValueType.UINT32), "llama.expert_used_count": (2, gguf.GGUFValueType.UINT32)}
PARTS = {"w1": "gate", "w2": "down", "w3": "up"}


def config(**changes):
    return tiny.llama_config(**{"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": EXPERTS,
                                "num_experts_per_tok": 2, **changes})  # fmt: skip


def weights():
    """float32 by Hugging Face's names."""
    found = {name: value for name, value in tiny.weights(tiny.llama_config()).items() if ".mlp." not in name}
    rng = np.random.default_rng(9)
    for layer in range(2):
        at = f"model.layers.{layer}.block_sparse_moe."
        found[f"{at}gate.weight"] = rng.standard_normal((EXPERTS, 64)).astype(np.float32)
        for expert in range(EXPERTS):
            for name, shape in (("w1", (96, 64)), ("w2", (64, 96)), ("w3", (96, 64))):
                found[f"{at}experts.{expert}.{name}.weight"] = rng.standard_normal(shape).astype(np.float32)
    return found


def stacked(tensors):
    """The same with the experts of a layer in one tensor, by GGUF's names, as llama.cpp's converter has them."""
    found = {name: value for name, value in tensors.items() if "block_sparse_moe" not in name}
    for layer in range(2):
        at = f"model.layers.{layer}.block_sparse_moe."
        found[f"blk.{layer}.ffn_gate_inp.weight"] = tensors[f"{at}gate.weight"]
        for theirs, ours in PARTS.items():
            parts = [tensors[f"{at}experts.{i}.{theirs}.weight"] for i in range(EXPERTS)]
            found[f"blk.{layer}.ffn_{ours}_exps.weight"] = np.stack(parts)
    return found


def test_experts_of_a_folder_are_stacked(tmp_path):
    held = tiny.write_folder(tmp_path, config(), weights(), shards=2)
    with open_checkpoint(tmp_path) as found:
        assert found.architecture == "llama"
        assert (found.metadata["llama.expert_count"], found.metadata["llama.expert_used_count"]) == (3, 2)
        names = [name for name in found.tensors if name.startswith("blk.1.ffn")]
        assert names == [f"blk.1.ffn_{n}.weight" for n in ("norm", "gate_inp", "gate_exps", "up_exps", "down_exps")]
        for name, value in stacked(held).items():
            if "_exps" in name:
                tensor = found.tensors[name]
                assert tensor.shape == value.shape and tensor.format == "bf16" and tensor.nbytes == 2 * value.size
                flat = value.reshape(-1, value.shape[-1])
                np.testing.assert_array_equal(tensor.float32(), value)
                height = value.shape[1]
                for rows in (slice(0, 5), slice(height - 3, height + 2), slice(7, 2 * height + 9), slice(4, 4), slice(None, None, 7),
                             slice(2 * height, 3, -5)):  # fmt: skip
                    np.testing.assert_array_equal(tensor.float32(rows), flat[rows], err_msg=str(rows))
                    np.testing.assert_array_equal(tensor.plain(rows).astype(np.uint32) << 16, flat[rows].view(np.uint32))
                tensor.release()


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0"])
def test_gguf_stacks_come_and_go_bit_for_bit(kind, tmp_path):
    """Written by the gguf package, read, exported, and read by the gguf package: the same bytes. Through a .hbf as well."""
    tensors = stacked(weights())
    tiny.write_gguf(tmp_path / "a.gguf", config() | {"model_type": "llama"}, tensors, kind, GGUF_KEYS)
    with open_checkpoint(tmp_path / "a.gguf") as found:
        for name, value in tensors.items():
            if "_exps" in name:
                blocks = gguf.quants.quantize(value, gguf.GGMLQuantizationType[kind])
                np.testing.assert_array_equal(found.tensors[name].blocks().reshape(-1), blocks.view(np.uint8).reshape(-1))
        export_gguf(found, tmp_path / "b.gguf")
        convert(found, tmp_path / "m.hbf", Recipe(format=kind.lower()))
    with open_checkpoint(tmp_path / "m.hbf") as found:
        assert found.tensors["blk.0.ffn_up_exps.weight"].shape == (3, 96, 64)
        assert found.tensors["blk.0.ffn_gate_inp.weight"].format == "f32"
        export_gguf(found, tmp_path / "c.gguf")
    first, second, third = ({t.name: t for t in gguf.GGUFReader(tmp_path / f"{n}.gguf").tensors} for n in "abc")
    assert first.keys() == second.keys() == third.keys()
    for name in first:
        if "_exps" in name:
            for other in (second[name], third[name]):
                assert other.tensor_type == first[name].tensor_type and list(other.shape) == list(first[name].shape)
                np.testing.assert_array_equal(other.data, first[name].data)
    fields = gguf.GGUFReader(tmp_path / "c.gguf").fields
    assert fields["llama.expert_count"].contents() == 3 and fields["llama.expert_used_count"].contents() == 2


def test_config_json_that_is_written_is_what_transformers_reads(tmp_path):
    tiny.write_folder(tmp_path, config(), weights())
    with open_checkpoint(tmp_path) as found:
        written = found.family.to_huggingface(found.metadata, found.tensors)
    for key in ("model_type", "architectures", "num_local_experts", "num_experts_per_tok", "intermediate_size"):
        assert written[key] == config()[key], key


def test_what_is_missing_or_odd_is_named(tmp_path):
    lone = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    tiny.write_folder(tmp_path / "a", config(), {k: v for k, v in weights().items() if k != lone})
    with pytest.raises(TensorListError) as caught:
        open_checkpoint(tmp_path / "a")
    assert lone in caught.value.missing
    tiny.write_folder(tmp_path / "b", config(), weights() | {lone: np.zeros((95, 64), np.float32)})
    with pytest.raises(TensorError, match=rf"{lone}: has shape \[95, 64\]; the metadata call for the shape \[96, 64\]"):
        open_checkpoint(tmp_path / "b")
    tiny.write_folder(tmp_path / "c", config(num_experts_per_tok=4), weights())
    with pytest.raises(MetadataTypeError, match=r"'num_experts_per_tok' \(4\) is more than 'num_local_experts' \(3\)"):
        open_checkpoint(tmp_path / "c")
    tiny.write_folder(tmp_path / "d", config(num_local_experts=None), weights())
    with pytest.raises(MissingKeyError, match="num_local_experts"):
        open_checkpoint(tmp_path / "d")


def test_a_family_without_mixtures_refuses_them(tmp_path):
    tensors = tiny.weights(tiny.qwen2_config())
    tiny.write_gguf(tmp_path / "q.gguf", tiny.qwen2_config(), tensors, extra={"qwen2.expert_count": (4, gguf.GGUFValueType.UINT32)})
    with pytest.raises(UnsupportedFeatureError, match=r"'qwen2.expert_count': mixtures of experts are not supported for qwen2"):
        open_checkpoint(tmp_path / "q.gguf")
