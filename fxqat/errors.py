"""The errors that fxqat raises: one class for each stage at which a user can act."""


class FxqatError(Exception):
    """Base of every error that fxqat raises on purpose."""


class ConfigError(FxqatError):
    """An argument or a configuration entry is unknown, out of range, or contradicts another one."""


class TraceError(FxqatError):
    """The model could not be traced into a graph; the message gives the module, the source line and the remedy."""


class CalibrationError(FxqatError):
    """Quantization was enabled on a model whose ranges are missing or not finite."""


class CheckpointError(FxqatError):
    """A checkpoint or parameter file does not fit the model it is loaded into."""


class ExportError(FxqatError):
    """The model cannot be exported with the given options."""


class ParityError(ExportError):
    """The exported file and the fake-quant model compute different results."""
