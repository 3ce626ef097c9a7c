"""Measure a profile: forward passes with all, none and one of the fake-quants on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from fxqat.fake_quantize.base import WEIGHT, FakeQuantizeBase
from fxqat.fake_quantize.state import disable_all, enable_quantization, named_fake_quants
from fxqat.nn.embedding import QATEmbedding
from fxqat.nn.qat import QATLayer
from fxqat.numerics import covered_range
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.profiling.profiled_tensor import Histogram, ProfiledTensor
from fxqat.utils.compare import Comparison
from fxqat.utils.contexts import hooked
from fxqat.utils.fx_graph import called_module
from fxqat.utils.tensors import flatten_tensors
from fxqat.utils.train_eval_graph import graph_of_mode

BINS = 120


@dataclass(frozen=True)
class QuantizedTensor:
    """A layer's weight or an activation, with the layer that computes it.

    Args:
        name: the name in the exported file.
        quant: its fake-quant.
        layer: the layer that has the weight or computes the activation; None if no layer does.
    """

    name: str
    quant: FakeQuantizeBase
    layer: QATLayer | QATEmbedding | None

    @property
    def is_weight(self) -> bool:
        """Whether it is a layer's weight."""
        return self.layer is not None and self.quant is self.layer.weight_fake_quant

    def channel_axis(self, x: Tensor) -> int | None:
        """The layer's channel axis; without a layer the second, or the last of ``(batch, tokens, channels)``."""
        if x.dim() < 2:
            return None
        if self.layer is None:
            return -1 if x.dim() == 3 else 1
        if self.is_weight:
            return self.quant.axis
        return -1 if self.layer.weight.dim() == 2 else 1

    @contextmanager
    def only_quantized(self) -> Iterator[None]:
        """Quantize only this tensor, in a model whose fake-quants are off."""

        def only(quant: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Any:
            return output if kwargs["tensor_name"] == self.name else args[0]

        self.quant.fake_quant_enabled = True
        try:
            with hooked([] if self.is_weight else [self.quant], only, with_kwargs=True):
                yield
        finally:
            self.quant.fake_quant_enabled = False


class Measurements:
    """The comparisons of all quantized tensors, added up over batches."""

    def __init__(self, gm: QuantGraphModule, quantized: Mapping[str, QuantizedTensor]) -> None:
        self.gm, self.quantized = gm, quantized
        self.own: dict[str, Comparison] = {}
        self.output = {name: Comparison() for name in quantized}
        self.cumulative = {name: Comparison() for name in quantized}
        self.all_quantized = Comparison()

    def add(self, batch: Sequence[Any], bar: tqdm[Any]) -> None:
        """Measure one batch; the fake-quants are off before and afterwards."""
        float_values: dict[str, Tensor] = {}
        with _watching(self.gm, float_values.__setitem__):
            expected = self.gm(*batch)
        for tensor in self.quantized.values():
            if tensor.is_weight:
                assert tensor.layer is not None
                float_values[tensor.name] = tensor.layer.folded()[0]
            if tensor.name in float_values:  # else it is an optional input that was not given
                x = float_values[tensor.name]
                own = self.own.setdefault(tensor.name, Comparison(tensor.channel_axis(x)))
                own.add(x, tensor.quant.quantize(x))
        bar.update()
        enable_quantization(self.gm)
        with _watching(self.gm, lambda name, x: self.cumulative[name].add(float_values[name], x), rounded=True):
            _add_all(self.all_quantized, expected, self.gm(*batch))
        disable_all(self.gm)
        bar.update()
        for name in self.quantized:
            with self.quantized[name].only_quantized():
                _add_all(self.output[name], expected, self.gm(*batch))
            bar.update()

    def tensors(self) -> list[ProfiledTensor]:
        """The results in the order of execution."""
        result = []
        for order, (name, tensor) in enumerate(self.quantized.items()):
            if name in self.own:
                own = self.own[name].difference()
                result.append(
                    ProfiledTensor(
                        name=name,
                        kind="weight" if tensor.quant.kind == WEIGHT else "activation",
                        order=order,
                        scheme=str(tensor.quant.scheme),
                        own=own,
                        output=self.output[name].difference(),
                        cumulative=own if tensor.is_weight else self.cumulative[name].difference(),
                        channels=self.own[name].channels(),
                    )
                )
        return result


def find_quantized(gm: QuantGraphModule) -> dict[str, QuantizedTensor]:
    """Every tensor that is quantized, by name, in the order of execution."""
    found: dict[str, QuantizedTensor] = {}
    graph = graph_of_mode(gm.graph, training=False)
    for node in graph.nodes:
        module = called_module(node)
        if isinstance(module, (QATLayer, QATEmbedding)):
            name = f"{node.target}.weight"
            found.setdefault(name, QuantizedTensor(name, module.weight_fake_quant, module))
        elif isinstance(module, FakeQuantizeBase) and not node.kwargs.get("on_grid"):
            source = called_module(node.args[0])
            name = str(node.kwargs["tensor_name"])
            found[name] = QuantizedTensor(name, module, source if isinstance(source, QATLayer) else None)
    return found


@contextmanager
def _watching(gm: QuantGraphModule, watch: Callable[[str, Tensor], None], rounded: bool = False) -> Iterator[None]:
    """Call a function with the name and value of each quantized activation, before or after rounding."""

    def hook(quant: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if isinstance(output, Tensor) and not kwargs.get("on_grid"):
            watch(kwargs["tensor_name"], output if rounded else args[0])

    with hooked([quant for _, quant in named_fake_quants(gm)], hook, with_kwargs=True):
        yield


def _add_all(comparison: Comparison, expected: Any, found: Any) -> None:
    for one, other in zip(flatten_tensors(expected), flatten_tensors(found), strict=True):
        if one.is_floating_point():
            comparison.add(one, other)


def histograms_of(
    gm: QuantGraphModule,
    batches: Sequence[Any],
    quantized: Mapping[str, QuantizedTensor],
    tensors: Sequence[ProfiledTensor],
) -> dict[str, Histogram]:
    """Histograms of the float values of some tensors, over all batches."""
    limits = {tensor.name: max(tensor.channels.ranges) or 1.0 for tensor in tensors}
    counts = {name: torch.zeros(BINS, dtype=torch.int64) for name in limits}

    def count(name: str, x: Tensor) -> None:
        if name in counts:
            found = torch.histc(x.float(), BINS, -limits[name], limits[name])
            counts[name] += found.to("cpu", torch.int64)

    with _watching(gm, count):
        for batch in batches:
            gm(*batch)
    for name in counts:
        layer = quantized[name].layer
        if layer is not None and quantized[name].is_weight:
            count(name, layer.folded()[0])
    result = {}
    for name, limit in limits.items():
        quant = quantized[name].quant
        low, high = covered_range(*quant.qparams(), quant.scheme)
        grid = float(low.min()), float(high.max())
        result[name] = Histogram(-limit, limit, tuple(counts[name].tolist()), grid)
    return result
