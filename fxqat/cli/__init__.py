"""The ``fxqat`` command."""
