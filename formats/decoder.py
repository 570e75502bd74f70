"""The tensors and config keys that nearly all decoders share; a family is a table of how it differs.

A decoder here is: an embedding; layers of normalized grouped-query attention with a rotary embedding and a normalized gated
feed-forward network, each added to the stream; a last norm and a head, which may be the embedding itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from . import rope
from .expression import Expression, Halves, Rows, Source, Stack
from .family import Family, TensorSpec, UnsupportedFeatureError
from .layers import AttentionSpec, ExpertsSpec, FeedForwardSpec, LayerSpec, ModelSpec, RopeSpec
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

_INTEGERS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
    "vocab_size": "vocab_size",
}
"""GGUF key without the architecture -> key of config.json."""

_SPELLING = {
    **_INTEGERS,
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}

_HUGGINGFACE = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip
"""GGUF's name of a layer's tensor -> Hugging Face's."""


def _one_rope(metadata: Metadata) -> dict[str, RopeSpec]:
    return {"rope": rope.rope_spec(metadata, metadata.require("general.architecture", str))}


def _as_it_is(layer: LayerSpec, index: int, metadata: Metadata) -> LayerSpec:
    return layer


@dataclass(frozen=True)
class Fused:
    """Matrices that files hold as one, one below the other: `parts` by GGUF's names, and what the whole is called on both sides."""

    parts: tuple[str, ...]
    huggingface: str
    gguf: str


@dataclass(frozen=True)
class Mixture:
    """Layers with experts in the place of one feed-forward network, which some of a family's models have.

    model_type, huggingface_class  of these models in config.json
    count, used  keys of config.json: experts, and those that compute a token
    router       the matrix that scores experts, in a layer of Hugging Face files
    expert       what stands before the names of an expert's matrices, its number at {}
    matrices     the names of its gate, up and down matrix
    """

    model_type: str
    huggingface_class: str
    count: str
    used: str
    router: str
    expert: str
    matrices: tuple[str, str, str]


@dataclass(frozen=True)
class Decoder(Family):
    """The common case. What a family may say besides Family's own fields:

    interleaved  True if GGUF files hold the rotary rows of q and k as interleaved pairs
    qkv_bias     whether q, k and v have biases: "never", "always", or "config": attention_bias of config.json says so, of o as well, and
                 mlp_bias of the feed-forward matrices; where nothing says so, as in GGUF files, the tensors that are there do
    activations  values of hidden_act, all names of one function, the first as config.json is written
    fused        matrices that lie in one tensor
    mixture      how those of the family's models with experts are spelled; None for a family without
    windowed     True if sliding_window of config.json, where it is there and shorter than the context, is the window of every layer
    refused      keys of config.json that must be absent, null or false, because what they ask for is not done
    ropes        the rotary tables by name, from complete metadata; layers use "rope" unless `layer` says otherwise
    layer        gives a layer its own: called with the layer that all have, its number and complete metadata
    more_keys    GGUF's keys that only this family has, from config.json
    more_config  the same the other way
    """

    interleaved: bool = False
    qkv_bias: Literal["never", "always", "config"] = "never"
    activations: tuple[str, ...] = ("silu", "swish")
    fused: tuple[Fused, ...] = ()
    mixture: Mixture | None = None
    windowed: bool = False
    refused: tuple[str, ...] = ()
    ropes: Callable[[Metadata], dict[str, RopeSpec]] = _one_rope
    layer: Callable[[LayerSpec, int, Metadata], LayerSpec] = _as_it_is
    more_keys: Callable[[Metadata], dict[str, Any]] = lambda config: {}
    more_config: Callable[[Metadata], dict[str, Any]] = lambda metadata: {}
    ignored: tuple[str, ...] = (r"(.*\.)?rotary_emb\.inv_freq", r"(.*\.)?self_attn\.(masked_)?bias")

    # ---- keys ----------------------------------------------------------------------------------------------------------

    def spelling(self) -> dict[str, str]:
        return {f"{self.name}.{ours}": theirs for ours, theirs in (_SPELLING | self._mixture_keys()).items()}

    def _mixture_keys(self) -> dict[str, str]:
        return {} if self.mixture is None else {"expert_count": self.mixture.count, "expert_used_count": self.mixture.used}

    def from_huggingface(self, config: Metadata) -> tuple[dict[str, Any], dict[str, np.ndarray], list[str]]:
        self._check_config(config)
        keys: dict[str, Any] = {"general.architecture": self.name}
        for ours, theirs in _INTEGERS.items():
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
        if self.mixture is not None and config.get("model_type") == self.mixture.model_type:
            keys |= {f"{self.name}.{ours}": config.count(theirs) for ours, theirs in self._mixture_keys().items()}
        window = config.count("sliding_window", default=None) if self.windowed else None
        if window is not None and window < keys[f"{self.name}.context_length"]:  # a longer one hides nothing
            keys[f"{self.name}.attention.sliding_window"] = window
        ropes, factors, notes = rope.to_gguf(config, self.name, head)
        return keys | ropes | self.more_keys(config), {} if factors is None else {rope.FACTORS: factors}, notes

    def _check_config(self, config: Metadata) -> None:
        """Refuses, by name, what this family does not do."""
        for key in ("hidden_act", "hidden_activation"):
            activation = config.get(key, self.activations[0], str)
            if activation not in self.activations:
                known = ", ".join(self.activations)
                raise UnsupportedFeatureError(f"{config.source}: {key} {activation!r:.60} is not supported for {self.name}, only {known}")
        if config.number("partial_rotary_factor", default=1.0) != 1.0 or rope.parameters(config).get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedFeatureError(f"{config.source}: 'partial_rotary_factor' other than 1 is not supported for {self.name}")
        other = next((kind for kind in config.get("layer_types", [], list) if kind != "full_attention"), None)
        if other is not None:
            raise UnsupportedFeatureError(f"{config.source}: layer_types {str(other)!r:.60} is not supported for {self.name}")
        for key in self.refused:
            if value := config.get(key, False):
                raise UnsupportedFeatureError(f"{config.source}: {key!r} ({value!s:.20}) is not supported yet for {self.name}")

    def to_huggingface(self, metadata: Metadata, tensors: dict[str, Tensor]) -> dict[str, Any]:
        values = metadata.updated(self.defaults(metadata)[0])
        factors = tensors[rope.FACTORS].float32() if rope.FACTORS in tensors else None
        config: dict[str, Any] = {
            "architectures": [self.huggingface_class],
            "model_type": self.model_types[0],
            **{theirs: values.count(f"{self.name}.{ours}") for ours, theirs in _INTEGERS.items()},
            "num_key_value_heads": values.count(f"{self.name}.attention.head_count_kv"),
            "head_dim": values.count(f"{self.name}.attention.key_length"),
            "hidden_act": self.activations[0],
            "rms_norm_eps": _short_float(values.number(f"{self.name}.attention.layer_norm_rms_epsilon")),
            "tie_word_embeddings": HEAD not in tensors,
            **rope.to_config(values, self.name, factors),
            **({"sliding_window": window} if (window := values.get(f"{self.name}.attention.sliding_window", 0, int)) else {}),
            **self.more_config(values),
        }
        if self.mixture is not None and values.get(f"{self.name}.expert_count", 0, int):
            config |= {"architectures": [self.mixture.huggingface_class], "model_type": self.mixture.model_type}
            config |= {theirs: values.count(f"{self.name}.{ours}") for ours, theirs in self._mixture_keys().items()}
        elif self.qkv_bias == "config":
            for key, biases in _BIASES.items():
                there = [f"blk.0.{name}.bias" in tensors for name in biases]
                if any(there) and not all(there):
                    problem = "has biases on some of them only, which a Hugging Face config cannot say"
                    raise UnsupportedFeatureError(f"{metadata.source}: of {', '.join(biases)} it {problem} ({key!r})")
                config[key] = all(there)
        return config

    def defaults(self, metadata: Metadata) -> tuple[dict[str, Any], list[str]]:
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
        if self.mixture is None and metadata.get(f"{arch}.expert_count", 0, int):
            raise UnsupportedFeatureError(f"{metadata.source}: '{arch}.expert_count': mixtures of experts are not supported for {arch}")
        if metadata.get(f"{arch}.attention.sliding_window", 0) and not self.windowed:
            raise UnsupportedFeatureError(f"{metadata.source}: '{arch}.attention.sliding_window' is not supported for {arch}")
        base = f"{arch}.rope.freq_base"
        if not metadata.has(base):
            notes.append(f"{metadata.source} has no '{base}'; 10000 is used, as llama.cpp does")
        added[base] = metadata.number(base, low=rope.LEAST_BASE, default=10000.0)
        rope.check(metadata, arch, added[base])
        metadata.number(f"{arch}.attention.layer_norm_rms_epsilon", high=1.0)
        metadata.count(f"{arch}.context_length")
        if not metadata.has(f"{arch}.vocab_size"):
            tokens = metadata.require("tokenizer.ggml.tokens")
            added[f"{arch}.vocab_size"] = len(tokens)
        return added, notes

    # ---- layers and tensors --------------------------------------------------------------------------------------------

    def model(self, metadata: Metadata) -> ModelSpec:
        arch = self.name

        def count(key: str, high: int = _LARGEST) -> int:
            return metadata.count(f"{arch}.{key}", high=high)

        heads, kv_heads = count("attention.head_count", 1 << 16), count("attention.head_count_kv", 1 << 16)
        if heads % kv_heads:
            many, few = (metadata.spelled(f"{arch}.attention.{key}") for key in ("head_count", "head_count_kv"))
            raise MetadataTypeError(f"{metadata.source}: {many!r} ({heads}) is not a multiple of {few!r} ({kv_heads})")
        size = count("attention.key_length", 1 << 16)
        if size % 2:
            raise MetadataTypeError(f"{metadata.source}: the head size is {size}; a rotary embedding needs an even one")
        epsilon = metadata.number(f"{arch}.attention.layer_norm_rms_epsilon")
        window, context = metadata.count(f"{arch}.attention.sliding_window", low=0, default=0), count("context_length", 1 << 31)
        layer = LayerSpec(
            AttentionSpec(
                heads, kv_heads, size, count("attention.value_length", 1 << 16), size**-0.5,
                window=window if window < context else 0,
            ),
            FeedForwardSpec(count("feed_forward_length"), self.activations[0], _experts(metadata, arch)),
            epsilon,
        )
        return ModelSpec(
            width=count("embedding_length"),
            vocabulary=count("vocab_size"),
            context=context,
            layers=tuple(self.layer(layer, i, metadata) for i in range(count("block_count", MOST_LAYERS))),
            ropes=self.ropes(metadata),
            epsilon=epsilon,
        )

    def tensors(self, metadata: Metadata) -> list[TensorSpec]:
        model = self.model(metadata)
        return [
            TensorSpec(EMBEDDING, "embed_tokens.weight", (model.vocabulary, model.width)),
            *(spec for i, layer in enumerate(model.layers) for spec in self._layer_tensors(model, layer, i)),
            TensorSpec("output_norm.weight", "norm.weight", (model.width,)),
            TensorSpec(HEAD, "lm_head.weight", (model.vocabulary, model.width), optional=True),
            TensorSpec(rope.FACTORS, None, (model.ropes["rope"].dimensions // 2,), optional=True),
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

    def _layer_tensors(self, model: ModelSpec, layer: LayerSpec, index: int) -> list[TensorSpec]:
        attention, inner, width = layer.attention, layer.feed_forward.inner, model.width
        q, k = attention.heads * attention.key_size, attention.kv_heads * attention.key_size
        v, attended = attention.kv_heads * attention.value_size, attention.heads * attention.value_size
        shapes: dict[str, tuple[int, ...]] = {
            "attn_norm": (width,), "attn_q": (q, width), "attn_k": (k, width), "attn_v": (v, width), "attn_output": (width, attended),
            "ffn_norm": (width,),
        }  # fmt: skip
        matrices = {"gate": (inner, width), "up": (inner, width), "down": (width, inner)}
        experts = layer.feed_forward.experts
        if experts is None:
            shapes |= {f"ffn_{name}": shape for name, shape in matrices.items()}
        rotary = {"attn_q": attention.heads, "attn_k": attention.kv_heads} if self.interleaved else {}
        whole = {part: fused for fused in self.fused for part in fused.parts}
        specs = []
        for name, shape in shapes.items():
            for kind in self._kinds(name):
                theirs: Expression = Source(f"layers.{index}.{_HUGGINGFACE[name]}.{kind}")
                ours: Expression = Source(f"blk.{index}.{name}.{kind}")
                if fused := whole.get(name):
                    at = [shapes[part][0] for part in fused.parts]
                    start = sum(at[: fused.parts.index(name)])
                    theirs = Rows(Source(f"layers.{index}.{fused.huggingface}.{kind}"), start, start + shape[0], sum(at))
                    ours = Rows(Source(f"blk.{index}.{fused.gguf}.{kind}"), start, start + shape[0], sum(at))
                if name in rotary:
                    ours = Halves(ours, rotary[name])
                optional = kind == "bias" and self.qkv_bias == "config"
                wanted = shape if kind == "weight" else shape[:1]
                group = f"{name}.bias" if optional else ""
                specs.append(TensorSpec(f"blk.{index}.{name}.{kind}", theirs, wanted, optional, group, ours))
        return specs if experts is None else specs + self._expert_tensors(matrices, width, experts, index)

    def _expert_tensors(self, matrices: dict[str, tuple[int, int]], width: int, experts: ExpertsSpec, index: int) -> list[TensorSpec]:
        """The router, and three stacks of as many matrices as there are experts."""
        assert self.mixture is not None
        here = f"layers.{index}."
        specs = [TensorSpec(f"blk.{index}.{ROUTER}.weight", f"{here}{self.mixture.router}.weight", (experts.count, width))]
        for (ours, shape), theirs in zip(matrices.items(), self.mixture.matrices, strict=True):
            each = tuple(Source(f"{here}{self.mixture.expert.format(i)}{theirs}.weight") for i in range(experts.count))
            specs.append(TensorSpec(f"blk.{index}.ffn_{ours}_exps.weight", Stack(each), (experts.count, *shape)))
        return specs

    def _kinds(self, name: str) -> tuple[str, ...]:
        """Whether a tensor of a layer has a bias beside its weights."""
        with_bias = name in _BIASES["attention_bias"][:3] if self.qkv_bias == "always" else name in sum(_BIASES.values(), ())
        return ("weight", "bias") if with_bias and self.qkv_bias != "never" else ("weight",)


def _experts(metadata: Metadata, arch: str) -> ExpertsSpec | None:
    if not metadata.get(f"{arch}.expert_count", 0, int):
        return None
    many = metadata.count(f"{arch}.expert_count", high=_MOST_EXPERTS)
    used = metadata.count(f"{arch}.expert_used_count", high=_MOST_EXPERTS)
    if used > many:
        spelled, whole = (metadata.spelled(f"{arch}.{key}") for key in ("expert_used_count", "expert_count"))
        raise MetadataTypeError(f"{metadata.source}: {spelled!r} ({used}) is more than {whole!r} ({many})")
    return ExpertsSpec(many, used)


def _short_float(value: float) -> float:
    """The shortest decimal number that is the same in float32, so that 1e-05 does not come out as 9.999999747378752e-06."""
    return float(f"{np.float32(value)!s}")
