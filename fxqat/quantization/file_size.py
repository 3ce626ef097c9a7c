"""The tensors that the ONNX file will hold, before it is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor, nn
from torch.nn.utils import parametrize

from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.parametrized import BIAS, computed_tensors
from fxqat.nn.quantized_layer import QuantizedLayer
from fxqat.onnx.opset import DEFAULT
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.fx_graph import attribute_of, called_module
from fxqat.utils.train_eval_graph import graph_of_mode


def float_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors as they are, each counted once."""
    return sum({id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def stored_tensors(gm: QuantGraphModule) -> Iterator[tuple[Tensor, int | None]]:
    """The parameters and buffers that a file holds, with the bits of its integers; None for those that stay float.

    A tensor that is read both as a float and as integers comes twice.
    """
    seen: dict[tuple[int, int | None], Tensor] = {}  # which keeps computed weights, and so their ids
    for node in graph_of_mode(gm.graph, training=False).nodes:
        found: list[tuple[object, int | None]] = []
        if node.op == "get_attr":
            found.append((attribute_of(gm, node), None))
        for module in _without_fake_quants(called_module(node)):
            rounded = _rounded(module) if isinstance(module, QuantizedLayer) else {}
            found += rounded.values()
            tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            found += [(tensor, None) for tensor in tensors if id(tensor) not in rounded]
            computed = (name for name in computed_tensors(module) if name == BIAS or not rounded)
            found += [(getattr(module, name), None) for name in computed]
        for tensor, bits in found:
            if isinstance(tensor, Tensor) and (id(tensor), bits) not in seen:
                seen[id(tensor), bits] = tensor
                yield tensor, bits


def _rounded(layer: QuantizedLayer) -> dict[int, tuple[Tensor, int]]:
    """By the id of a tensor, the tensor and the bits of the integers that it becomes."""
    parts = zip(layer.weight_fake_quants(), layer.weight_tensors(), strict=True)
    return {id(tensor): (tensor, quant.scheme.storage_width(DEFAULT)) for quant, tensors in parts for tensor in tensors}


def _without_fake_quants(module: nn.Module | None) -> Iterator[nn.Module]:
    """A module and those inside it that the file has tensors of.

    Of fake-quants and observers it has a few numbers, and of a parametrization what that computes.
    """
    if module is not None and not isinstance(module, (FakeQuantizeBase, parametrize.ParametrizationList)):
        yield module
        for child in module.children():
            yield from _without_fake_quants(child)
