"""Keep integers and scales away from torch's exporter, and put them into the model that it makes.

``torch.export`` makes a fake tensor, a placeholder and an entry of the signature for each tensor of a module. A
quantized layer has ten of them, and torch would take almost twice as long. So the parts of a lowered graph hold theirs
where ``torch.export`` does not look, and the operators that it sees have the number of the part instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset18, opset21
from torch import Tensor, nn

from fxqat.fake_quantize import torch_ops  # noqa: F401  defines torch.ops.fxqat
from fxqat.nn.deployed import DeployedPart


class ExportedParts:
    """The parts of a lowered graph during one export.

    Args:
        module: the lowered graph; its parts are numbered here.
    """

    def __init__(self, module: nn.Module) -> None:
        self._parts: dict[int, tuple[str, DeployedPart]] = {}
        self._constants: dict[str, ir.Value] = {}
        for path, part in module.named_modules():
            if isinstance(part, DeployedPart):
                part.number = len(self._parts)
                self._parts[part.number] = (path, part)

    def translations(self) -> dict[Callable[..., Any], Callable[..., Any]]:
        """For ``torch.onnx.export(custom_translation_table=...)``.

        Source: ONNX QuantizeLinear and DequantizeLinear, opset 13; with blocks, opset 21.
        """

        def quantize_dequantize(x: Any, part: int) -> Any:
            op, scale, zero_point, attributes = self._parameters(part)
            q = op.QuantizeLinear(x, scale, zero_point, **attributes)
            return op.DequantizeLinear(q, scale, zero_point, **attributes)

        def dequantize(q: Any, part: int) -> Any:
            op, scale, zero_point, attributes = self._parameters(part)
            return op.DequantizeLinear(q, scale, zero_point, **attributes)

        def stored(part: int, shape: Sequence[int]) -> Any:
            path, module = self._parts[part]
            assert module.integers is not None
            return dequantize(self._constant(f"{path}.integers", module.integers), part)

        return {
            torch.ops.fxqat.quantize_dequantize.default: quantize_dequantize,
            torch.ops.fxqat.dequantize.default: dequantize,
            torch.ops.fxqat.dequantize.stored: stored,
        }

    def add_constants(self, model: ir.Model) -> None:
        """Make initializers of the tensors that the nodes of the exporter's model read, named ``<path>.<tensor>``.

        They come in the order of the parts.
        """
        for path, _ in self._parts.values():
            for name in (f"{path}.integers", f"{path}.scale", f"{path}.zero_point"):
                if name in self._constants:
                    model.graph.register_initializer(self._constants[name])

    def _parameters(self, part: int) -> tuple[Any, Any, Any, dict[str, int]]:
        """The operators, scale, zero point and attributes of a part."""
        path, module = self._parts[part]
        scale = self._constant(f"{path}.scale", module.scale)
        zero_point = self._constant(f"{path}.zero_point", module.zero_point)
        if module.block_size is None:
            return opset18, scale, zero_point, {"axis": module.axis or 0}
        return opset21, scale, zero_point, {"axis": module.axis or 0, "block_size": module.block_size}

    def _constant(self, name: str, tensor: Tensor) -> Any:
        if name not in self._constants:
            held = ir.tensor(tensor.numpy(), name=name)
            type_of = ir.TensorType(held.dtype)
            self._constants[name] = ir.Value(name=name, shape=ir.Shape(tensor.shape), type=type_of, const_value=held)
        return self._constants[name]
