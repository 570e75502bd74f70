"""Tiny checkpoints for tests, written by other people's libraries: safetensors, gguf, tokenizers."""

import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

DTYPES = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16, "f64": np.float64}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def llama_config(**changes):
    """A config.json in the older spelling; a change to None leaves the key out."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 128,
        "vocab_size": 272,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "torch_dtype": "bfloat16",
        **changes,
    }
    return {key: value for key, value in config.items() if value is not None}


def qwen2_config(**changes):
    return llama_config(**{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False, **changes})


def mixtral_config(**changes):
    """Three experts, of which a token uses two."""
    mixture = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 3, "num_experts_per_tok": 2}
    return llama_config(**{**mixture, **changes})


def weights(config, seed=0, head=False, prefix="model."):
    """float32 weights by Hugging Face's names."""
    rng = np.random.default_rng(seed)
    width, inner = config["hidden_size"], config["intermediate_size"]
    size = config.get("head_dim", width // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * size, config.get("num_key_value_heads", config["num_attention_heads"]) * size

    def draw(*shape, centre=0.0):
        return (centre + 0.1 * rng.standard_normal(shape)).astype(np.float32)

    found = {f"{prefix}embed_tokens.weight": draw(config["vocab_size"], width), f"{prefix}norm.weight": draw(width, centre=1.0)}
    biased = config["model_type"] == "qwen2" or config.get("attention_bias")
    for layer in range(config["num_hidden_layers"]):
        at = f"{prefix}layers.{layer}."
        shapes = {
            "self_attn.q_proj": (q, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (width, q),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
        }
        experts = config.get("num_local_experts", 0)
        if experts:
            moe = "block_sparse_moe."
            shapes = {name: shape for name, shape in shapes.items() if not name.startswith("mlp.")} | {f"{moe}gate": (experts, width)}
            parts = (("w1", (inner, width)), ("w2", (width, inner)), ("w3", (inner, width)))
            shapes |= {f"{moe}experts.{i}.{name}": shape for i in range(experts) for name, shape in parts}
        for name, shape in shapes.items():
            found[f"{at}{name}.weight"] = draw(*shape)
        if biased:
            names = ["q_proj", "k_proj", "v_proj"] + (["o_proj"] if config.get("attention_bias") else [])
            for name in names:
                found[f"{at}self_attn.{name}.bias"] = draw(shapes[f"self_attn.{name}"][0])
        found[f"{at}input_layernorm.weight"] = draw(width, centre=1.0)
        found[f"{at}post_attention_layernorm.weight"] = draw(width, centre=1.0)
    if head:
        found["lm_head.weight"] = draw(config["vocab_size"], width)
    return found


def tokenizer_json():
    """A byte-level tokenizer: 256 bytes, two special tokens, no merges."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    return made.to_str().encode()


def write_json(path, value):
    Path(path).write_text(json.dumps(value, indent=1), encoding="utf-8")


def write_folder(folder, config=None, tensors=None, dtype="bf16", shards=1, tokenizer=True):
    """A Hugging Face folder; returns the float32 weights that it holds after rounding to `dtype`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = llama_config() if config is None else config
    tensors = weights(config) if tensors is None else tensors
    stored = {name: value.astype(DTYPES[dtype]) if value.dtype == np.float32 else value for name, value in tensors.items()}
    if shards == 1:
        save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    else:
        names = sorted(stored)
        parts = [names[i::shards] for i in range(shards)]
        weight_map = {}
        for i, part in enumerate(parts, 1):
            file = f"model-{i:05d}-of-{shards:05d}.safetensors"
            save_file({name: stored[name] for name in part}, folder / file, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file)
        write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": 0}, "weight_map": weight_map})
    write_json(folder / "config.json", config)
    if tokenizer:
        (folder / "tokenizer.json").write_bytes(tokenizer_json())
        write_json(
            folder / "tokenizer_config.json",
            {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "add_bos_token": False, "chat_template": TEMPLATE},
        )
    return {name: value.astype(np.float32) for name, value in stored.items()}


PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    """Hugging Face's name of a tensor -> GGUF's."""
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    part, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{PARTS[part]}.{suffix}"


def interleave(rows, heads):
    """Rows of q and k from Hugging Face's order to that of llama's GGUF files, written out pair by pair."""
    size = len(rows) // heads
    out = np.empty_like(rows)
    for head in range(heads):
        for pair in range(size // 2):
            out[head * size + 2 * pair] = rows[head * size + pair]
            out[head * size + 2 * pair + 1] = rows[head * size + size // 2 + pair]
    return out


def write_gguf(path, config, tensors, quantization="F32", extra=None, leave_out=()):
    """A GGUF file by the gguf package, as llama.cpp's converter lays it out. Matrices get the type `quantization`."""
    arch = config["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    for key, value in (extra or {}).items():
        writer.add_key_value(key, *value)
    kind = gguf.GGMLQuantizationType[quantization]
    for name, value in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            value = interleave(value, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            value = interleave(value, config["num_key_value_heads"])
        ours = gguf_name(name) if name.startswith(("model.", "lm_head.")) else name
        if ours in leave_out:
            continue
        if value.ndim == 1 or kind == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(ours, value.astype(np.float32))
        else:
            writer.add_tensor(ours, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
