"""What a model is made of, layer by layer: read once from complete metadata by its family.

Files go by it (which tensors a layer has, in which shapes), and so does the engine (which rows of the plan compute it). Whatever
differs between architectures in the mathematics is a field here; whatever differs in names and keys stays in the family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeSpec:
    """One table of rotary position embeddings (Su et al. 2021).

    dimensions  rotated dimensions of a head
    base        of the frequencies base ** (-2i / dimensions)
    scaling     "none", "linear" (kaiokendev 2023), "dynamic" (as transformers has it; frequencies change only beyond the trained context)
                or "yarn" (arXiv 2309.00071)
    factor      by which the context is stretched
    original    context that yarn stretches
    beta_fast, beta_slow  rotations within the original context beyond which yarn keeps a frequency, and below which it stretches it whole
    amplitude   factor of cosines and sines
    factors     name of the tensor that frequencies are divided by, float32[dimensions / 2], where the checkpoint has it; "" for none
    """

    dimensions: int
    base: float
    scaling: str = "none"
    factor: float = 1.0
    original: float = 0.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    amplitude: float = 1.0
    factors: str = ""


@dataclass(frozen=True)
class AttentionSpec:
    """Grouped-query attention of one layer (Ainslie et al. 2023).

    heads, kv_heads  query heads, and key and value heads, of which each serves heads / kv_heads query heads
    key_size         dimensions of a query and a key
    value_size       dimensions of a value
    scale            what scores are multiplied by
    rope             which of ModelSpec.ropes turns queries and keys; "" for none
    window           positions that a token sees, itself included; 0 for all
    soft_cap         scores s become soft_cap · tanh(s / soft_cap); 0 for none
    sinks            True if every query head has a learned score that belongs to no position
    """

    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    scale: float
    rope: str = "rope"
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts in the place of one feed-forward network (Shazeer et al. 2017; Jiang et al. 2024).

    count       experts, each a gated network of FeedForwardSpec.inner columns
    used        experts that compute a token: those with the highest router scores
    normalize   True if the weights of the chosen experts are made to sum to 1 (softmax over the chosen ones), False if they are
                those of the softmax over all
    """

    count: int
    used: int
    normalize: bool = True


@dataclass(frozen=True)
class FeedForwardSpec:
    """The feed-forward network of one layer: activation(gate) · up, then down (Shazeer 2020).

    inner       columns between
    activation  one that the kernel of gated activations knows
    experts     None for a single network
    """

    inner: int
    activation: str = "silu"
    experts: ExpertsSpec | None = None


@dataclass(frozen=True)
class LayerSpec:
    """One layer: attention, then a feed-forward network, each normalized before and added to the residual stream.

    epsilon  of the root-mean-square norms
    """

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    epsilon: float


@dataclass(frozen=True)
class ModelSpec:
    """A whole decoder.

    width       columns of the residual stream
    vocabulary  rows of the embedding and of the head
    context     positions that the model was trained for
    layers      from the first to the last
    ropes       rotary tables by the name that layers call them by
    epsilon     of the norm before the head
    """

    width: int
    vocabulary: int
    context: int
    layers: tuple[LayerSpec, ...]
    ropes: Mapping[str, RopeSpec]
    epsilon: float
