"""Saving and loading under the path that users import them from."""

from fxqat.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint"]
