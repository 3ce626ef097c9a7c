"""Every bit width: weights x activations x symmetry x granularity x layer, exported and compared in ONNX Runtime.

Every way to quantize is given to a model of all layers side by side, each with an input and an output of its own: it is
prepared, calibrated, trained one step and exported. The verdict of a layer is that of the export's own certificate
about its tensors: equal to ONNX Runtime within one step, or refused with a reason. Prints the table and, with
``--output``, writes it as a page of the documentation. Not part of pytest: it takes a while.

    python tests/benchmarks/bit_widths/matrix.py --output docs/evidence/bit_widths.rst
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import onnxruntime
import torch
from prettytable import HRuleStyle, PrettyTable
from torch import Tensor, nn
from tqdm import tqdm

import fxqat
from fxqat.errors import FxqatError

WEIGHT_BITS = (2, 3, 4, 8, 16)
ACTIVATION_BITS = (4, 8, 16)
SAME_COSINE = 0.999
PAGE = """Every bit width
===============

Whether ONNX Runtime computes the same integers as the fake-quant model at every bit width. Each row is a way to
quantize a model with six layers side by side (*matmul*: two linear layers and the product of their outputs; *linear3d*:
a linear layer on a 3-D input). It is prepared for TSQAT, calibrated, trained one step, exported at the opset it needs,
and run in ONNX Runtime with optimizations off.

* *W*, *A*: bits of weights and activations. Symmetric weights are narrow, asymmetric activations unsigned.
* The percentages: each tensor is computed from the fake-quant model's own integers; of the tensors of the layer, the
  largest share of values that are off by one step. No value is off by two: the export would be refused.
* *ONNX Runtime optimized*, for information: whether the outputs of the file at ONNX Runtime's full optimization have a
  cosine similarity above {same} with those of the fake-quant model, or its optimizer fails; :doc:`/reference/export`
  has the remedy. On processors without VNNI, 8-bit weights with 8-bit activations differ because their sums saturate.

{exported} of {cells} cells are exported, {refused} refused; the worst share is {worst}. A step of a 16-bit activation
is 1/65536 of its range: float32 sums in another order differ by some hundredths of such a step.

Written by ``tests/benchmarks/bit_widths/matrix.py`` with torch {torch} and ONNX Runtime {ort}; do not edit. How
the widths are stored is explained in :doc:`/reference/export`.

{table}

Refused
-------

{reasons}"""


class MatMul(nn.Module):
    """A product of two computed values, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(12, 8)
        self.key = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) @ self.key(x).transpose(-2, -1)


class Layers(nn.Module):
    """Every layer of the table, on an input of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.ReLU())
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.transposed = nn.ConvTranspose2d(6, 8, 3, stride=2)
        self.linear = nn.Linear(24, 16)
        self.linear3d = nn.Linear(12, 16)
        self.matmul = MatMul()

    def forward(
        self, conv: Tensor, depthwise: Tensor, transposed: Tensor, linear: Tensor, linear3d: Tensor, matmul: Tensor
    ) -> tuple[Tensor, ...]:
        return (
            self.conv(conv),
            self.depthwise(depthwise),
            self.transposed(transposed),
            self.linear(linear),
            self.linear3d(linear3d),
            self.matmul(matmul),
        )


LAYERS = {
    "conv": (4, 6, 8, 8),
    "depthwise": (4, 8, 8, 8),
    "transposed": (4, 6, 6, 6),
    "linear": (32, 24),
    "linear3d": (4, 9, 12),
    "matmul": (4, 9, 12),
}
"""The layers, with the shapes of their inputs."""


@dataclass(frozen=True)
class Way:
    """How a model is quantized.

    Args:
        weight_bits: bit width of the weights.
        activation_bits: bit width of the activations.
        weight_symmetric: whether the weights' zero point is 0.
        activation_symmetric: the same of activations; asymmetric ones are unsigned.
        per_channel: one weight scale per output channel.
    """

    weight_bits: int
    activation_bits: int
    weight_symmetric: bool
    activation_symmetric: bool
    per_channel: bool

    def config(self) -> dict[str, object]:
        """What ``prepare_by_platform`` is told."""
        return {
            "extra_qconfig_dict": {
                "w_qscheme": {
                    "bit": self.weight_bits,
                    "symmetry": self.weight_symmetric,
                    "per_channel": self.per_channel,
                    "narrow_range": self.weight_symmetric,
                },
                "a_qscheme": {
                    "bit": self.activation_bits,
                    "symmetry": self.activation_symmetric,
                    "signed": self.activation_symmetric,
                },
            }
        }


@dataclass(frozen=True)
class Result:
    """How a layer ended.

    Args:
        refused: the reason, empty if it was exported.
        off_by_1: share of values off by 1 when each tensor is computed from the fake-quant model's own integers
            (largest over the tensors).
        optimized: cosine similarity of the output at ONNX Runtime's full optimization; None if that fails.
    """

    refused: str = ""
    off_by_1: float = 0.0
    optimized: float | None = None


def ways() -> Iterator[Way]:
    """Every way, in the order of the page."""
    both = (True, False)
    for way in itertools.product(WEIGHT_BITS, ACTIVATION_BITS, both, both, both):
        yield Way(*way)


def run(way: Way) -> dict[str, Result]:
    """Prepare, calibrate, train one step, export; the result of each layer."""
    torch.manual_seed(0)
    gm = fxqat.prepare_by_platform(Layers(), "TSQAT", way.config())
    inputs = [torch.randn(shape) for shape in LAYERS.values()]
    fxqat.enable_calibration(gm.eval())
    with torch.no_grad():
        gm(*inputs)
    fxqat.enable_quantization(gm.train())
    optimizer = torch.optim.SGD(gm.parameters(), 1e-3)
    sum(output.square().mean() for output in gm(*inputs)).backward()
    optimizer.step()
    example = tuple(torch.randn(shape) for shape in LAYERS.values())
    with tempfile.TemporaryDirectory() as folder:
        try:
            report = fxqat.convert_export(
                gm, example, Path(folder) / "model.onnx", output_names=[f"{n}_output" for n in LAYERS]
            )
        except FxqatError as error:
            return dict.fromkeys(LAYERS, Result(refused=f"{type(error).__name__}: {error}".splitlines()[0]))
    assert report.certificate is not None
    results = {}
    for (layer, _), output in zip(LAYERS.items(), report.certificate.outputs, strict=True):
        tensors = [t for t in report.certificate.tensors if _layer_of(t.name) == layer]
        assert len(tensors) >= 2, layer
        assert all(t.step.off_by_2_plus == 0 for t in tensors)
        results[layer] = Result("", max(t.step.off_by_1 for t in tensors), output.cosine_optimized)
    return results


def _layer_of(tensor: str) -> str:
    """The layer that a tensor belongs to; those that are not named by a layer are of the functions in ``MatMul``."""
    word = tensor.split(".")[0].split("_")[0]
    return word if word in LAYERS else "matmul"


def table(results: dict[Way, dict[str, Result]]) -> PrettyTable:
    """One row for each way to quantize, one column for each layer."""
    header = ["W", "A", "weights", "activations", "scales"]
    made = PrettyTable([*header, *LAYERS, "ONNX Runtime optimized"], align="l")
    made.hrules = HRuleStyle.ALL
    for way, by_layer in results.items():
        row = [way.weight_bits, way.activation_bits]
        row += ["sym" if flag else "asym" for flag in (way.weight_symmetric, way.activation_symmetric)]
        row.append("channel" if way.per_channel else "tensor")
        row += ["refused" if result.refused else f"{result.off_by_1:.3%}" for result in by_layer.values()]
        made.add_row([*row, _optimized(by_layer)])
    return made


def _optimized(results: dict[str, Result]) -> str:
    """How the layers of a row fare at full optimization."""
    exported = {layer: result.optimized for layer, result in results.items() if not result.refused}
    if None in exported.values():
        return "fails"
    differ = [layer for layer, cosine in exported.items() if cosine is not None and cosine < SAME_COSINE]
    return f"{', '.join(differ)} differ" if differ else "same"


def page(results: dict[Way, dict[str, Result]]) -> str:
    """The page of the documentation."""
    flat = [result for by_layer in results.values() for result in by_layer.values()]
    refused = Counter(result.refused for result in flat if result.refused)
    return PAGE.format(
        torch=torch.__version__,
        ort=onnxruntime.__version__,
        cells=len(flat),
        exported=len(flat) - refused.total(),
        refused=refused.total(),
        worst=f"{max(result.off_by_1 for result in flat):.3%}",
        same=f"{SAME_COSINE:g}",
        table=table(results),
        reasons="".join(f"* {count} x {reason}\n" for reason, count in refused.items()) or "None.\n",
    )


def main() -> None:
    """Print the table and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="page to write")
    arguments = parser.parse_args()
    text = page({way: run(way) for way in tqdm(list(ways()))})
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
