"""Helpers for quantization-aware training."""
