"""Saving and loading of checkpoints, re-exported at the path that users import."""

from fxqat.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
