"""The state functions, re-exported at the path that users import."""

from fxqat.fake_quantize.state import (
    disable_all,
    enable_all,
    enable_calibration,
    enable_calibration_quantization,
    enable_calibration_woquantization,
    enable_quantization,
)

__all__ = [
    "disable_all",
    "enable_all",
    "enable_calibration",
    "enable_calibration_quantization",
    "enable_calibration_woquantization",
    "enable_quantization",
]
