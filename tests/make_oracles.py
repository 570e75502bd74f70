#!/usr/bin/env python3
"""Rebuilds tests/oracles, the tiny random models and the logits that transformers gives for them.

    python tests/make_oracles.py [NAME...]        needs the extra `oracles` (torch, transformers)

Each folder is a checkpoint as transformers saves it, and `ref.npz`: `ids` [tokens], `at` (the positions whose logits are kept) and `logits`
[positions, vocabulary], computed in float32 with eager attention from exactly the weights that are saved. Weights are larger than the usual
initialization, so that mistakes show. Sizes are chosen to be awkward: not multiples of 16 or 32, heads that do not divide the width.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers as hf

ORACLES = Path(__file__).parent / "oracles"


@dataclass
class Oracle:
    """A model to make.

    dtype: of the saved weights. older: config.json as transformers 4 wrote it. every: the logits of each n-th position are kept.
    """

    config: Any
    dtype: torch.dtype = torch.bfloat16
    tokens: int = 40
    older: bool = False
    every: int = 1
    edit: dict[str, Any] = field(default_factory=dict)


def llama(hidden: int, inner: int, heads: int, kv: int, vocabulary: int, kind: Any = hf.LlamaConfig, **more: Any) -> Any:
    sizes = {
        "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads, "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "num_hidden_layers": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    return kind(**sizes | more)


def oracles() -> dict[str, Oracle]:
    llama3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64}  # fmt: skip
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return {
        # the plain ones, float32
        "llama": Oracle(llama(64, 128, 4, 2, 256, tie_word_embeddings=True), torch.float32, 24),
        "llama3rope": Oracle(llama(64, 128, 4, 2, 256, rope_parameters=llama3), torch.float32, 24),
        "qwen2": Oracle(llama(64, 128, 4, 2, 256, hf.Qwen2Config), torch.float32, 24),
        # head sizes, KV heads, widths that no block or vector divides
        "head24": Oracle(llama(72, 100, 3, 3, 50)),
        "head32": Oracle(llama(40, 72, 5, 1, 50, head_dim=32, tie_word_embeddings=True)),
        "head80": Oracle(llama(72, 100, 4, 2, 70, head_dim=80, num_hidden_layers=1), torch.float16),
        "head96": Oracle(llama(100, 72, 4, 4, 33, head_dim=96, num_hidden_layers=1)),
        "head128": Oracle(llama(72, 40, 3, 1, 61, head_dim=128, tie_word_embeddings=True, num_hidden_layers=1)),
        "qwen2_odd": Oracle(llama(72, 40, 6, 1, 50, hf.Qwen2Config, head_dim=40, tie_word_embeddings=True)),
        # biases everywhere
        "biases": Oracle(llama(72, 40, 4, 2, 50, head_dim=16, attention_bias=True, mlp_bias=True)),
        # q, k and v in one matrix, gate and up in another
        "phi3": Oracle(llama(72, 40, 6, 2, 50, hf.Phi3Config, sliding_window=None, original_max_position_embeddings=128)),
        # layers without a rotary embedding
        "smollm3": Oracle(llama(72, 40, 6, 2, 50, hf.SmolLM3Config, num_hidden_layers=4, use_sliding_window=False)),
        # rotary scalings, and the spelling of older config files
        "linear": Oracle(llama(40, 40, 2, 1, 50, head_dim=32, rope_parameters=linear), older=True),
        "yarn": Oracle(llama(40, 40, 2, 1, 50, head_dim=32, rope_parameters=yarn), tokens=100, every=3),
        "dynamic": Oracle(llama(40, 40, 2, 1, 50, head_dim=32, rope_parameters=dynamic), older=True),
        # mixtures of experts: two of four, and one of three in sizes that no tile divides
        "mixtral": Oracle(llama(64, 48, 4, 2, 256, hf.MixtralConfig, num_local_experts=4, num_experts_per_tok=2), tokens=40),
        "mixtral_odd": Oracle(llama(72, 40, 3, 1, 50, hf.MixtralConfig, head_dim=24, num_local_experts=3, num_experts_per_tok=1)),
        # more positions than attention takes in two parts
        "long": Oracle(
            llama(72, 40, 3, 1, 50, head_dim=20, max_position_embeddings=1024, num_hidden_layers=1), tokens=700, every=29
        ),
    }  # fmt: skip


def make(name: str, oracle: Oracle) -> None:
    torch.manual_seed(0)
    oracle.config._attn_implementation = "eager"
    model = hf.AutoModelForCausalLM.from_config(oracle.config, dtype=torch.float32).eval()
    vocabulary = oracle.config.vocab_size
    ids = torch.randint(3, vocabulary, (1, oracle.tokens), generator=torch.Generator().manual_seed(1))
    at = np.arange(oracle.tokens - 1, -1, -oracle.every)[::-1]
    with torch.no_grad():
        for key, p in model.named_parameters():
            centre = 1.0 if p.ndim == 1 and "norm" in key else 0.0
            p.copy_((torch.randn_like(p) * 0.1 + centre).to(oracle.dtype))
        logits = model(ids).logits[0].numpy()[at]
    folder = ORACLES / name
    model.to(oracle.dtype).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if oracle.older:
        write_older(folder / "config.json")
    np.savez_compressed(folder / "ref.npz", ids=ids[0].numpy().astype(np.int32), at=at.astype(np.int32), logits=logits)
    print(name, sum(f.stat().st_size for f in folder.iterdir()))


def write_older(path: Path) -> None:
    """rope_theta beside rope_scaling, torch_dtype: what most checkpoints on the hub have."""
    config = json.loads(path.read_text("utf-8"))
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for name, oracle in oracles().items():
        if not args.names or name in args.names:
            make(name, oracle)


if __name__ == "__main__":
    main()
