"""The tensors and config keys that nearly all decoders share; a family states how it differs.

A decoder here is: an embedding; layers of normalized grouped-query attention with a rotary embedding and a normalized gated
feed-forward network, each added to the stream; a last norm and a head, which may be the embedding itself.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from . import rope
from .family import Family, TensorSpec, UnsupportedFeatureError
from .layers import ExpertsSpec
from .metadata import Metadata, MetadataTypeError
from .tensor import Tensor

MOST_LAYERS = 4096
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
ROUTER = "ffn_gate_inp"
"""What scores the experts, in the name of its tensor."""
_MOST_EXPERTS = 1 << 12
_BIASES = {"attention_bias": ("attn_q", "attn_k", "attn_v", "attn_output"), "mlp_bias": ("ffn_gate", "ffn_up", "ffn_down")}
"""Key of config.json -> the matrices that have biases if it is true."""
_LARGEST = 1 << 24  # columns, heads and the like; far beyond any model, small enough that products stay in 64 bits


@dataclass(frozen=True)
class Dimensions:
    """The sizes of a decoder, read from complete metadata."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    experts: ExpertsSpec | None = None

    @classmethod
    def of(cls, metadata: Metadata, arch: str) -> Dimensions:
        """Raises MissingKeyError and MetadataTypeError by the key's name."""

        def count(key: str, high: int = _LARGEST) -> int:
            return metadata.count(f"{arch}.{key}", high=high)

        found = cls(
            layers=count("block_count", MOST_LAYERS),
            width=count("embedding_length"),
            inner=count("feed_forward_length"),
            heads=count("attention.head_count", 1 << 16),
            kv_heads=count("attention.head_count_kv", 1 << 16),
            head=count("attention.key_length", 1 << 16),
            vocabulary=count("vocab_size"),
            experts=_experts(metadata, arch),
        )
        if found.heads % found.kv_heads:
            many, few = (metadata.spelled(f"{arch}.attention.{key}") for key in ("head_count", "head_count_kv"))
            raise MetadataTypeError(f"{metadata.source}: {many!r} ({found.heads}) is not a multiple of {few!r} ({found.kv_heads})")
        if found.head % 2:
            raise MetadataTypeError(f"{metadata.source}: the head size is {found.head}; a rotary embedding needs an even one")
        return found


def _experts(metadata: Metadata, arch: str) -> ExpertsSpec | None:
    """The mixture that each layer has in the place of one feed-forward network, or None."""
    if not metadata.get(f"{arch}.expert_count", 0, int):
        return None
    many = metadata.count(f"{arch}.expert_count", high=_MOST_EXPERTS)
    used = metadata.count(f"{arch}.expert_used_count", high=_MOST_EXPERTS)
    if used > many:
        spelled, whole = (metadata.spelled(f"{arch}.{key}") for key in ("expert_used_count", "expert_count"))
        raise MetadataTypeError(f"{metadata.source}: {spelled!r} ({used}) is more than {whole!r} ({many})")
    return ExpertsSpec(many, used)


class Decoder(Family):
    """The common case. Subclasses set the class variables of Family and these:

    qkv_bias    whether q, k and v have biases: "never", "always", or "config": attention_bias of config.json says so, of o as well, and
                mlp_bias of the feed-forward matrices; where nothing says so, as in GGUF files, the tensors that are there do
    mixtures    what a mixture of experts is called in a layer of Hugging Face files: the router, and the gate, up and down matrix of expert
                {}; None for a family without
    """

    qkv_bias: ClassVar[str] = "never"
    mixtures: ClassVar[tuple[str, str, str, str] | None] = None
    activations: ClassVar[tuple[str, ...]] = ("silu", "swish")
    ignored = (r"(.*\.)?rotary_emb\.inv_freq", r"(.*\.)?self_attn\.(masked_)?bias")

    # GGUF key without the architecture -> key of config.json, how it is read
    _integers: ClassVar[dict[str, str]] = {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "context_length": "max_position_embeddings",
        "vocab_size": "vocab_size",
    }

    def spelling(self) -> dict[str, str]:
        ours = {
            **self._integers,
            "attention.head_count_kv": "num_key_value_heads",
            "attention.key_length": "head_dim",
            "attention.value_length": "head_dim",
            "attention.layer_norm_rms_epsilon": "rms_norm_eps",
            "rope.freq_base": "rope_theta",
        }
        return {f"{self.name}.{key}": value for key, value in ours.items()}

    def from_huggingface(self, config: Metadata) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
        self.check_config(config)
        keys: dict[str, Any] = {"general.architecture": self.name}
        for ours, theirs in self._integers.items():
            keys[f"{self.name}.{ours}"] = config.count(theirs, high=MOST_LAYERS if ours == "block_count" else 1 << 31)
        heads, width = keys[f"{self.name}.attention.head_count"], keys[f"{self.name}.embedding_length"]
        keys[f"{self.name}.attention.head_count_kv"] = config.count("num_key_value_heads", default=heads)
        if not config.has("head_dim") and width % heads:
            raise MetadataTypeError(
                f"{config.source}: 'hidden_size' ({width}) is not a multiple of 'num_attention_heads' ({heads}), without 'head_dim'"
            )
        head = config.count("head_dim", default=width // heads)
        keys[f"{self.name}.attention.key_length"] = keys[f"{self.name}.attention.value_length"] = head
        keys[f"{self.name}.attention.layer_norm_rms_epsilon"] = config.number("rms_norm_eps", high=1.0)
        ropes, factors, notes = rope.to_gguf(config, self.name, head)
        keys |= ropes
        return keys, {} if factors is None else {rope.FACTORS: factors}, notes

    def check_config(self, config: Metadata) -> None:
        """Refuses, by name, what this family does not do."""
        for key in ("hidden_act", "hidden_activation"):
            activation = config.get(key, self.activations[0], str)
            if activation not in self.activations:
                known = ", ".join(self.activations)
                raise UnsupportedFeatureError(f"{config.source}: {key} {activation!r:.60} is not supported for {self.name}, only {known}")
        if config.number("partial_rotary_factor", default=1.0) != 1.0 or rope.parameters(config).get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedFeatureError(f"{config.source}: 'partial_rotary_factor' other than 1 is not supported for {self.name}")
        layers = config.get("layer_types", [], list)
        other = next((kind for kind in layers if kind != "full_attention"), None)
        if other is not None:
            raise UnsupportedFeatureError(f"{config.source}: layer_types {str(other)!r:.60} is not supported for {self.name}")

    def to_huggingface(self, metadata: Metadata, tensors: dict[str, Tensor]) -> dict[str, Any]:
        values = metadata.updated(self.complete(metadata)[0])
        size = Dimensions.of(values, self.name)
        factors = tensors[rope.FACTORS].float32() if rope.FACTORS in tensors else None
        config: dict[str, Any] = {
            "architectures": [self.huggingface_class],
            "model_type": self.model_types[0],
            **{theirs: values.count(f"{self.name}.{ours}") for ours, theirs in self._integers.items()},
            "num_key_value_heads": size.kv_heads,
            "head_dim": size.head,
            "hidden_act": self.activations[0],
            "rms_norm_eps": _short_float(values.number(f"{self.name}.attention.layer_norm_rms_epsilon")),
            "tie_word_embeddings": HEAD not in tensors,
            **rope.to_config(values, self.name, factors),
        }
        if self.qkv_bias == "config":
            for key, biases in _BIASES.items():
                there = [f"blk.0.{name}.bias" in tensors for name in biases]
                if any(there) and not all(there):
                    problem = "has biases on some of them only, which a Hugging Face config cannot say"
                    raise UnsupportedFeatureError(f"{metadata.source}: of {', '.join(biases)} it {problem} ({key!r})")
                config[key] = all(there)
        return config

    def complete(self, metadata: Metadata) -> tuple[dict[str, Any], list[str]]:
        added: dict[str, Any] = {}
        arch, notes = self.name, []
        heads = metadata.count(f"{arch}.attention.head_count")
        kv = metadata.get(f"{arch}.attention.head_count_kv", heads)
        if not isinstance(kv, (int, np.integer)):
            raise UnsupportedFeatureError(f"{metadata.source}: '{arch}.attention.head_count_kv' differs by layer; that is not supported")
        width = metadata.count(f"{arch}.embedding_length")
        if not metadata.has(f"{arch}.attention.key_length") and width % heads:
            raise MetadataTypeError(f"{metadata.source}: '{arch}.embedding_length' ({width}) is not a multiple of the {heads} heads")
        head = metadata.count(f"{arch}.attention.key_length", default=width // heads)
        added[f"{arch}.attention.head_count_kv"] = int(kv)
        added[f"{arch}.attention.key_length"] = head
        added[f"{arch}.attention.value_length"] = metadata.count(f"{arch}.attention.value_length", default=head)
        added[f"{arch}.rope.dimension_count"] = metadata.count(f"{arch}.rope.dimension_count", default=head)
        for key, other in (("attention.value_length", "value"), ("rope.dimension_count", "rotary")):
            size = added[f"{arch}.{key}"]
            if size != head:
                problem = f"a {other} size other than the head's, {head}, is not supported"
                raise UnsupportedFeatureError(f"{metadata.source}: '{arch}.{key}' is {size}; {problem}")
        if self.mixtures is None and metadata.get(f"{arch}.expert_count", 0, int):
            raise UnsupportedFeatureError(f"{metadata.source}: '{arch}.expert_count': mixtures of experts are not supported for {arch}")
        if metadata.get(f"{arch}.attention.sliding_window", 0):
            raise UnsupportedFeatureError(f"{metadata.source}: '{arch}.attention.sliding_window' is not supported for {arch}")
        kind = metadata.get(f"{arch}.rope.scaling.type", "none", str)
        if kind not in ("none", "linear", "yarn"):
            raise rope.UnsupportedRopeError(f"{metadata.source}: '{arch}.rope.scaling.type' {kind!r:.60} is not supported")
        if kind != "none":
            metadata.number(f"{arch}.rope.scaling.factor", *rope.FACTOR_RANGE)
        base = f"{arch}.rope.freq_base"
        if not metadata.has(base):
            notes.append(f"{metadata.source} has no '{base}'; 10000 is used, as llama.cpp does")
        added[base] = metadata.number(base, low=rope.LEAST_BASE, default=10000.0)
        if kind == "yarn":
            rope.refuse_yarn_base(added[base], metadata.source, metadata.spelled(base))
        metadata.number(f"{arch}.attention.layer_norm_rms_epsilon", high=1.0)
        metadata.count(f"{arch}.context_length")
        if not metadata.has(f"{arch}.vocab_size"):
            tokens = metadata.require("tokenizer.ggml.tokens")
            added[f"{arch}.vocab_size"] = len(tokens)
        return added, notes

    def tensors(self, metadata: Metadata) -> list[TensorSpec]:
        size = Dimensions.of(metadata, self.name)
        specs = [TensorSpec(EMBEDDING, ("embed_tokens.weight",), (size.vocabulary, size.width))]
        for layer in range(size.layers):
            specs += self.layer_tensors(size, layer)
        return [
            *specs,
            TensorSpec("output_norm.weight", ("norm.weight",), (size.width,)),
            TensorSpec(HEAD, ("lm_head.weight",), (size.vocabulary, size.width), optional=True),
            TensorSpec(rope.FACTORS, (), (size.head // 2,), optional=True),
        ]

    def huggingface_tensors(self, metadata: Metadata, config: Metadata) -> list[TensorSpec]:
        specs = self.tensors(metadata)
        if self.qkv_bias != "config":
            return specs
        for key, biases in _BIASES.items():
            stated = config.get(key, None, bool)
            groups = [f"{name}.bias" for name in biases]
            if stated:
                specs = [replace(spec, optional=spec.optional and spec.group not in groups) for spec in specs]
            elif stated is False:  # a bias in the file is then one too many
                specs = [spec for spec in specs if spec.group not in groups]
        return specs

    def layer_tensors(self, size: Dimensions, layer: int) -> list[TensorSpec]:
        """The tensors of one layer."""
        gguf, theirs = f"blk.{layer}.", f"layers.{layer}."
        q, kv = size.heads * size.head, size.kv_heads * size.head
        matrices = [
            ("attn_q", "self_attn.q_proj", (q, size.width), size.heads, self.qkv_bias),
            ("attn_k", "self_attn.k_proj", (kv, size.width), size.kv_heads, self.qkv_bias),
            ("attn_v", "self_attn.v_proj", (kv, size.width), 0, self.qkv_bias),
            ("attn_output", "self_attn.o_proj", (size.width, q), 0, "config" if self.qkv_bias == "config" else "never"),
        ]
        if size.experts is None:
            matrices += [
                ("ffn_gate", "mlp.gate_proj", (size.inner, size.width), 0, "config" if self.qkv_bias == "config" else "never"),
                ("ffn_up", "mlp.up_proj", (size.inner, size.width), 0, "config" if self.qkv_bias == "config" else "never"),
                ("ffn_down", "mlp.down_proj", (size.width, size.inner), 0, "config" if self.qkv_bias == "config" else "never"),
            ]
        specs = []
        for ours, name, shape, rotary, bias in matrices:
            specs.append(TensorSpec(f"{gguf}{ours}.weight", (f"{theirs}{name}.weight",), shape, rotary_heads=rotary))
            if bias != "never":
                optional = bias == "config"
                group = f"{ours}.bias" if optional else ""
                specs.append(TensorSpec(f"{gguf}{ours}.bias", (f"{theirs}{name}.bias",), shape[:1], optional, group, rotary))
        norms = [("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")]
        attention, feed_forward = (TensorSpec(f"{gguf}{ours}.weight", (f"{theirs}{name}.weight",), (size.width,)) for ours, name in norms)
        split = next((i for i, spec in enumerate(specs) if ".ffn_" in spec.name), len(specs))
        mixture = [] if size.experts is None else self.expert_tensors(size, size.experts, layer)
        return [attention, *specs[:split], feed_forward, *specs[split:], *mixture]

    def expert_tensors(self, size: Dimensions, experts: ExpertsSpec, layer: int) -> list[TensorSpec]:
        """The tensors of a mixture of experts: the router, and three stacks of as many matrices as there are experts."""
        assert self.mixtures is not None
        router, *names = (f"layers.{layer}.{name}.weight" for name in self.mixtures)
        shapes = {"gate": (size.inner, size.width), "up": (size.inner, size.width), "down": (size.width, size.inner)}
        specs = [TensorSpec(f"blk.{layer}.{ROUTER}.weight", (router,), (experts.count, size.width))]
        for (ours, shape), theirs in zip(shapes.items(), names, strict=True):
            sources = tuple(theirs.format(number) for number in range(experts.count))
            specs.append(TensorSpec(f"blk.{layer}.ffn_{ours}_exps.weight", sources, (experts.count, *shape)))
        return specs


def _short_float(value: float) -> float:
    """The shortest decimal number that is the same in float32, so that 1e-05 does not come out as 9.999999747378752e-06."""
    return float(f"{np.float32(value)!s}")
