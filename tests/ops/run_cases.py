"""What every case goes through: prepare, calibrate, train a step, export, compare with ONNX Runtime."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, fx

from fxqat import convert_export, enable_calibration, enable_quantization, prepare_by_platform
from fxqat.onnx.verify import ParityCertificate
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.quantization.report import ReportRow
from fxqat.quantization.split_ops import SPLITS
from fxqat.utils.contexts import collector_paused
from tests.models import EVERY_LAYER
from tests.ops.cases import Case, build


@dataclass(frozen=True)
class Spelled:
    """The result of one spelling.

    Args:
        case: its case.
        text: its text.
        branch: the path of its branch in the model.
        rows: the rows of the report with the op of the case; if it is split, that of the last op that it becomes.
        nodes: all rows of its branch, in execution order.
    """

    case: Case
    text: str
    branch: str
    rows: tuple[ReportRow, ...]
    nodes: tuple[ReportRow, ...]

    def line(self) -> str:
        """The placement in one line, for golden files: without running numbers, which depend on the group."""
        (row,) = self.rows
        reason = "; ".join(part for part in row.reason.split("; ") if not part.startswith("read quantized by"))
        reason = reason.replace(self.branch.replace(".", "_") + "_", "")
        numbers: dict[int | None, str] = {None: "-"}
        for node in self.nodes:
            numbers.setdefault(node.group, str(len(numbers)))
        nodes = " ".join(f"{node.op}{'*' if node.weight else ''}:{numbers[node.group]}" for node in self.nodes)
        cells = (self.case.name, self.text, row.status, row.output or "-", row.weight or "-", reason, nodes)
        return " | ".join(cells)


def prepare(cases: Sequence[Case], backend: str, check: str = "full") -> tuple[QuantGraphModule, tuple[Tensor, ...]]:
    """The prepared model of some cases and its inputs."""
    model, inputs = build(*cases)
    return prepare_by_platform(model, backend, EVERY_LAYER, example_inputs=inputs, check=check), inputs


def calibrate_and_train(gm: QuantGraphModule, inputs: tuple[Tensor, ...]) -> dict[str, Tensor | None]:
    """Calibrate on a batch, take one training step, and return the gradients by parameter."""
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


def spellings_of(cases: Sequence[Case], gm: QuantGraphModule) -> list[Spelled]:
    """The result of every spelling of the cases of a prepared model."""
    branches = {node.name: _branch_of(node) for node in gm.graph.nodes}
    found = []
    written = [(case, text) for case in cases for text in case.spellings]
    for number, (case, text) in enumerate(written):
        branch = f"branches.{number}"
        around = (f"{branch}.before", f"{branch}.other", f"{branch}.after")
        nodes = tuple(row for row in gm.quant_report if branches.get(row.node) == branch)
        rows = tuple(row for row in nodes if row.op == case.op and row.target not in around)
        rows = tuple(row for row in rows if not row.node.endswith("_output"))  # of a recurrent layer
        if not rows and case.op in SPLITS:  # of what it is split into, the op that computes its value
            rows = tuple(row for row in nodes if row.target not in around)[-1:]
        found.append(Spelled(case, text, branch, rows, nodes))
    return found


def _branch_of(node: fx.Node) -> str:
    """The path of the branch whose forward holds a node."""
    paths = [str(value[0]) for value in (node.meta.get("nn_module_stack") or {}).values()]
    return next((".".join(path.split(".")[:2]) for path in paths if path.startswith("branches.")), "")


def placement(cases: Sequence[Case], backend: str) -> list[str]:
    """A line for each spelling of some cases.

    The prepared model is compared with the float model in eval mode only. The models that are exported have the same
    spellings and are compared in training, too.
    """
    return [spelled.line() for spelled in spellings_of(cases, prepare(cases, backend, "quick")[0])]


def export(gm: QuantGraphModule, inputs: tuple[Tensor, ...], folder: Path) -> ParityCertificate:
    """Export the model and return the comparison with ONNX Runtime."""
    with collector_paused():
        certificate = convert_export(gm, inputs, folder / "model.onnx").certificate
    assert certificate is not None
    return certificate


def without_gradient(spelled: Spelled, gradients: dict[str, Tensor | None]) -> list[str]:
    """The parameters of a spelling's layers that should have a gradient but have none or zeros."""
    unread = {"before", "other"} if not spelled.case.gradient else {"other"} if spelled.case.op == "compare" else set()
    return [
        name
        for name, value in gradients.items()
        if name.startswith(f"{spelled.branch}.")
        and name.split(".")[2] not in unread
        and "fake_quant" not in name
        and (value is None or not value.abs().sum() > 0)
    ]


def alone(cases: Sequence[Case]) -> list[Case]:
    """Each spelling of some cases as a case."""
    return [replace(case, spellings=(text,)) for case in cases for text in case.spellings]
