"""Who gets quantized: backends as tables, and the interpreter that reads them."""

from fxqat.config.effective import effective_config
from fxqat.custom_quantizer.backend_type import BackendType
from fxqat.custom_quantizer.quantizer import BackendQuantizer
from fxqat.custom_quantizer.spec import BackendSpec, Rule

__all__ = ["BackendQuantizer", "BackendSpec", "BackendType", "Rule", "effective_config"]
