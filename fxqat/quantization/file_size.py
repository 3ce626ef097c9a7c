"""The size of the ONNX file, before it is made: ONNX holds at most 2 GiB in one file.

Integers of quantized weights have one byte, or two above 8 bits; torch's exporter knows no narrower type. Everything
else has the size that it has in the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from fxqat.errors import ExportError
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.embedding import QATEmbedding
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
    tensors = list(stored_tensors(gm))
    is_float = [bits is None or weights == "float" for _, bits in tensors]
    floats = float_bytes(tensor for (tensor, _), left in zip(tensors, is_float, strict=True) if left)
    integers = sum(
        tensor.numel() * (1 if bits and bits <= 8 else 2)
        for (tensor, bits), left in zip(tensors, is_float, strict=True)
        if not left
    )
    size = floats + integers
    if size > MAX_BYTES:
        raise ExportError(
            f"the file would hold {_gib(size)}, {_gib(floats)} of it in float tensors and "
            f"{_gib(integers)} in integers; one ONNX file holds at most {_gib(MAX_BYTES)}. Quantize more "
            "of the model (gm.quant_report tells what stays float, and why), use weights='integer', or prepare and "
            "export it in parts."
        )


def float_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors as they are, each counted once."""
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def stored_tensors(gm: QuantGraphModule) -> Iterator[tuple[Tensor, int | None]]:
    """The parameters and buffers that a file holds, with their bit width; None for those that stay float.

    A tensor that is read both as a float and as integers comes twice.
    """
    seen: set[tuple[int, int | None]] = set()
    for node in graph_of_mode(gm.graph, training=False).nodes:
        found: list[tuple[object, int | None]] = []
        if node.op == "get_attr":
            found.append((attribute_of(gm, node), None))
        for module in _without_fake_quants(called_module(node)):
            layer = module if isinstance(module, (QATLayer, QATEmbedding)) else None
            bits = None if layer is None else layer.weight_fake_quant.scheme.bit_width
            weight = None if layer is None else layer.weight
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            found += [(tensor, bits if tensor is weight else None) for tensor in tensors]
        for tensor, bits in found:
            if isinstance(tensor, Tensor) and (id(tensor), bits) not in seen:
                seen.add((id(tensor), bits))
                yield tensor, bits


def _without_fake_quants(module: nn.Module | None) -> Iterator[nn.Module]:
    """A module and those inside it, but no fake-quants and observers: the file has a few numbers of them."""
    if module is not None and not isinstance(module, FakeQuantizeBase):
        yield module
        for child in module.children():
            yield from _without_fake_quants(child)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
