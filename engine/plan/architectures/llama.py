"""Llama 2 and 3.x, SmolLM, Mistral without a sliding window: pre-norm, grouped-query attention with RoPE, SwiGLU (Touvron et al. 2023)."""

from .decoder import decoder as build

__all__ = ["build"]
