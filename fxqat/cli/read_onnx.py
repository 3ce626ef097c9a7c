"""An ONNX file as a module, by onnx2torch: what this converter lacks is done here, before it.

Its last release (1.5.15) knows operators up to opset 17, takes weights from initializers only, and no Gelu.

1. Constants are folded, and Constant nodes become initializers;
2. the operators are written as they were in opset 17 (:mod:`fxqat.onnx.older_opset`).
"""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer
from torch import nn

from fxqat.errors import ConfigError
from fxqat.onnx.older_opset import AsOpset17


def read_onnx(path: Path) -> tuple[nn.Module, onnx.ModelProto]:
    """The module of an ONNX file, and the file.

    Raises:
        ConfigError: the file cannot be read, or has an operator that the converter does not know.
    """
    try:
        from onnx2torch import convert
    except ImportError as error:
        raise ConfigError(f"MODEL {path}: reading an ONNX file needs onnx2torch: pip install onnx2torch") from error
    try:
        proto = onnx.load(str(path))
    except Exception as error:
        raise ConfigError(f"MODEL {path} is not an ONNX file: {error}") from error
    try:
        module: nn.Module = convert(_as_it_knows(proto))
    except NotImplementedError as error:
        raise ConfigError(f"MODEL {path}: onnx2torch does not know an operator of it: {error}") from error
    except Exception as error:
        raise ConfigError(f"MODEL {path}: onnx2torch cannot convert it: {type(error).__name__}: {error}") from error
    return module, proto


def _as_it_knows(proto: onnx.ModelProto) -> onnx.ModelProto:
    model = ir.from_proto(proto)
    ir.passes.Sequential(common.InlinePass(), common.RemoveInitializersFromInputsPass())(model)
    optimizer.fold_constants(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True)(model)  # case 1
    common.RemoveUnusedNodesPass()(model)
    AsOpset17().call(model)  # case 2
    return ir.to_proto(model)
