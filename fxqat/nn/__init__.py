"""Fused float layers, QAT layers, deployed modules, and the algebra of folding."""

from fxqat.nn.fused import FusedLayer
from fxqat.nn.qat import QATLayer

__all__ = ["FusedLayer", "QATLayer"]
