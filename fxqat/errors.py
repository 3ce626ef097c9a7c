"""The errors fxqat raises, one class per stage a user can act on."""


class FxqatError(Exception):
    """Base of every error that fxqat raises on purpose."""


class ConfigError(FxqatError):
    """An argument or a configuration entry is not one fxqat knows, or contradicts another."""


class TraceError(FxqatError):
    """The model could not be traced into a graph; the message names the module, the source line and the remedy."""


class CalibrationError(FxqatError):
    """Quantization was asked of a model whose ranges are missing or not finite."""


class CheckpointError(FxqatError):
    """A checkpoint or parameter file does not fit the model it is loaded into."""


class ExportError(FxqatError):
    """The model cannot be exported as asked."""


class ParityError(ExportError):
    """The exported file does not compute what the fake-quant model computes."""
