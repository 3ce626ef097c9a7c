"""Quantization after training, without labels."""
