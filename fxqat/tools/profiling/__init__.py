"""The parts of ``fxqat.tools.profile``."""
