"""fxqat: quantization-aware training on ``torch.fx`` that exports the QDQ ONNX file it trained."""

from fxqat.cli import interrupt as _interrupt  # noqa: F401  before the imports below, which take seconds

# isort: split
from fxqat.calibrate import calibrate
from fxqat.checkpoint import load_checkpoint, load_quant_params, save_checkpoint
from fxqat.convert_export import ExportReport, convert_export
from fxqat.export_tflite import TfliteReport, export_tflite
from fxqat.fake_quantize.state import (
    disable_all,
    enable_all,
    enable_calibration,
    enable_calibration_quantization,
    enable_calibration_woquantization,
    enable_quantization,
)
from fxqat.prepare_by_platform import BackendType, prepare_by_platform
from fxqat.quantization.compare_with_float import compare_with_float
from fxqat.tools.ladder import quantize
from fxqat.version import __version__

__all__ = [
    "BackendType",
    "ExportReport",
    "TfliteReport",
    "__version__",
    "calibrate",
    "compare_with_float",
    "convert_export",
    "disable_all",
    "enable_all",
    "enable_calibration",
    "enable_calibration_quantization",
    "enable_calibration_woquantization",
    "enable_quantization",
    "export_tflite",
    "load_checkpoint",
    "load_quant_params",
    "prepare_by_platform",
    "quantize",
    "save_checkpoint",
]
