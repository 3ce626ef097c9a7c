"""Fused float containers, QAT layers and the folding algebra."""

from fxqat.nn.fused import FusedLayer
from fxqat.nn.qat import QATLayer

__all__ = ["FusedLayer", "QATLayer"]
