"""Who gets quantized: backends as tables, and the interpreter that reads them."""

from fxqat.custom_quantizer.effective import effective_config
from fxqat.custom_quantizer.quantizer import BackendQuantizer
from fxqat.custom_quantizer.spec import BackendSpec, Rule
from fxqat.custom_quantizer.table import BackendType

__all__ = ["BackendQuantizer", "BackendSpec", "BackendType", "Rule", "effective_config"]
