"""Qwen2 and Qwen2.5: Llama's layer with biases on q, k and v, which are in the file where the model has them (Yang et al. 2024)."""

from .decoder import decoder as build

__all__ = ["build"]
