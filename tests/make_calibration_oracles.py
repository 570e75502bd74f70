#!/usr/bin/env python3
"""Rebuilds tests/oracles/*/inputs.npz: Gram matrices of what every linear layer reads, seen by hooks in transformers' own models.

    python tests/make_calibration_oracles.py        needs the extra `oracles` (torch, transformers), and tests/oracles

`ids` is [chunks, tokens], each chunk a context of its own; every other array is the upper triangle, row by row, of Σ x xᵀ over all tokens,
summed in float64, of the input of the module of that name (Hugging Face's; q_proj stands for k_proj and v_proj, gate_proj for up_proj).
Of experts, "LAYER.gate_up_proj.N" and "LAYER.down_proj.N" are those of the tokens that expert N of a layer computes.
"""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers as hf

ORACLES = Path(__file__).parent / "oracles"
NAMES = ("biases", "linear", "mixtral")
MODULES = ("q_proj", "o_proj", "gate_proj", "down_proj", "lm_head")


def make(name: str) -> None:
    config = hf.AutoConfig.from_pretrained(ORACLES / name)
    model = hf.AutoModelForCausalLM.from_pretrained(ORACLES / name, config=config, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(3, config.vocab_size, (2, 45), generator=torch.Generator().manual_seed(7))
    grams: dict[str, torch.Tensor] = {}

    def hook(key):
        def see(module, arguments):
            x = arguments[0].double().reshape(-1, arguments[0].shape[-1])
            grams[key] = grams.get(key, 0) + x.T @ x

        return see

    def experts(layer):
        def see(module, arguments):
            states, chosen, _ = arguments
            for number in range(module.num_experts):
                x = states[(chosen == number).any(-1)]
                gate, up = torch.nn.functional.linear(x, module.gate_up_proj[number]).chunk(2, dim=-1)
                for part, v in (("gate_up_proj", x.double()), ("down_proj", (module.act_fn(gate) * up).double())):
                    key = f"{layer}.{part}.{number}"
                    grams[key] = grams.get(key, 0) + v.T @ v

        return see

    for key, module in model.named_modules():
        if key.endswith(".experts"):
            module.register_forward_pre_hook(experts(key.split(".")[2]))
        if key.rpartition(".")[2] in MODULES:
            module.register_forward_pre_hook(hook(key))
    with torch.no_grad():
        for row in ids:
            model(row[None])
    packed = {key: gram.numpy()[np.triu_indices(len(gram))].astype(np.float32) for key, gram in grams.items()}
    np.savez_compressed(ORACLES / name / "inputs.npz", ids=ids.numpy().astype(np.int32), **packed)
    print(name, (ORACLES / name / "inputs.npz").stat().st_size, list(packed))


if __name__ == "__main__":
    for each in NAMES:
        make(each)
