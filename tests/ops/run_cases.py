"""What every case goes through: prepare, calibrate, train a step, export, compare with ONNX Runtime."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, fx

from fxqat import convert_export, enable_calibration, enable_quantization, prepare_by_platform
from fxqat.onnx.verify import ParityCertificate
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.report import ReportRow
from tests.models import EVERY_LAYER
from tests.ops.cases import Case, build


@dataclass(frozen=True)
class Spelled:
    """What became of one spelling.

    Args:
        case: its case.
        text: its text.
        rows: the rows of the report with the op of the case.
        gradient: the gradient of the layer in front; None if there is none.
    """

    case: Case
    text: str
    rows: tuple[ReportRow, ...]
    gradient: Tensor | None = None


def prepare(cases: Sequence[Case], backend: str) -> tuple[QuantGraphModule, tuple[Tensor, ...]]:
    """The prepared model of some cases and its inputs."""
    model, inputs = build(*cases)
    return prepare_by_platform(model, backend, EVERY_LAYER, example_inputs=inputs), inputs


def calibrate_and_train(gm: QuantGraphModule, inputs: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    """Calibrate on a batch, take one training step, and give the gradients by parameter."""
    enable_calibration(gm)
    with torch.no_grad():
        gm(*inputs)
    enable_quantization(gm)
    gm.train()
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(gm.parameters(), lr=1e-4)
    sum((torch.randn_like(output) * output).sum() for output in gm(*inputs)).backward()
    gradients = {name: parameter.grad for name, parameter in gm.named_parameters()}
    optimizer.step()
    gm.eval()
    return gradients


def spellings_of(
    cases: Sequence[Case], gm: QuantGraphModule, gradients: dict[str, Tensor | None] | None = None
) -> list[Spelled]:
    """What became of every spelling of the cases of a model."""
    paths = {node.name: _branch_of(node) for node in gm.graph.nodes}
    found = []
    written = [(case, text) for case in cases for text in case.spellings]
    for number, (case, text) in enumerate(written):
        branch = f"branches.{number}"
        around = (f"{branch}.before", f"{branch}.other", f"{branch}.after")
        here = [row for row in gm.quant_report if paths.get(row.node) == branch]
        rows = tuple(row for row in here if row.op == case.op and row.target not in around)
        found.append(Spelled(case, text, rows, (gradients or {}).get(f"{branch}.before.weight")))
    return found


def _branch_of(node: fx.Node) -> str:
    """The path of the branch whose forward holds a node."""
    paths = [str(value[0]) for value in (node.meta.get("nn_module_stack") or {}).values()]
    return next((".".join(path.split(".")[:2]) for path in paths if path.startswith("branches.")), "")


def export(gm: QuantGraphModule, inputs: tuple[Tensor, ...], folder: Path) -> ParityCertificate:
    """Export the model and give the comparison with ONNX Runtime."""
    certificate = convert_export(gm, inputs, folder / "model.onnx").certificate
    assert certificate is not None
    return certificate
