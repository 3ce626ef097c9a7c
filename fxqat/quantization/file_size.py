"""The size of the ONNX file, before it is made: ONNX holds at most 2 GiB in one file.

Integers of quantized weights have one byte, or two above 8 bits; torch's exporter knows no narrower type. Everything
else has the size that it has in the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from fxqat.errors import ExportError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.qat import QATLayer
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.fx_graph import attribute_of, called_module
from fxqat.utils.train_eval_graph import graph_of_mode

MAX_BYTES = 2**31 - 1
"""Protobuf, in which ONNX is written, has no larger messages."""


def check_size(gm: QuantGraphModule, weights: str = "integer") -> None:
    """Check that the parameters fit into one ONNX file.

    Args:
        gm: the prepared model.
        weights: ``"integer"`` or ``"float"``.

    Raises:
        ExportError: they do not.
    """
    floats: dict[int, int] = {}
    integers: dict[int, int] = {}
    for node in graph_of_mode(gm.graph, training=False).nodes:
        if node.op == "get_attr":
            _add(floats, [attribute_of(gm, node)])
        for module in _without_fake_quants(called_module(node)):
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            if isinstance(module, QATLayer) and weights == "integer":
                bytes_each = 1 if module.weight_fake_quant.scheme.bit_width <= 8 else 2
                integers[id(module)] = bytes_each * module.weight.numel()
                tensors = [tensor for tensor in tensors if tensor is not module.weight]
            _add(floats, tensors)
    size = sum(floats.values()) + sum(integers.values())
    if size > MAX_BYTES:
        raise ExportError(
            f"the file would hold {_gib(size)}, {_gib(sum(floats.values()))} of it in float tensors and "
            f"{_gib(sum(integers.values()))} in integers; one ONNX file holds at most {_gib(MAX_BYTES)}. Quantize more "
            "of the model (gm.quant_report tells what stays float, and why), use weights='integer', or prepare and "
            "export it in parts."
        )


def _without_fake_quants(module: nn.Module | None) -> Iterator[nn.Module]:
    """A module and those inside it, but no fake-quants and observers: the file has a few numbers of them."""
    if module is not None and not isinstance(module, FakeQuantizeBase):
        yield module
        for child in module.children():
            yield from _without_fake_quants(child)


def _add(sizes: dict[int, int], tensors: Sequence[object]) -> None:
    sizes.update({id(t): t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor)})


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
