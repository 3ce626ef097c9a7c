"""The table at the end of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from accuracy import Accuracy
from deploy import OffByAStep
from prettytable import PrettyTable


@dataclass(frozen=True)
class Row:
    """One form of the model; None for figures that it does not have.

    Args:
        name: name of the form.
        accuracy: on the validation images.
        size: bytes of the ONNX file.
        latency: milliseconds per call in ONNX Runtime.
        off_by_a_step: outputs compared with those of the fake-quant model.
    """

    name: str
    accuracy: Accuracy
    size: int | None = None
    latency: float | None = None
    off_by_a_step: OffByAStep | None = None


def make_table(rows: Sequence[Row], onnx_batch: int) -> str:
    """The rows as text, with an explanation of the last columns below."""
    table = PrettyTable(
        [
            "model",
            "Acc@1 %",
            "Acc@5 %",
            "ONNX file MB",
            f"latency ms (batch {onnx_batch})",
            "off by a step",
            "off, optimized",
        ]
    )
    table.align = "r"
    table.align["model"] = "l"
    for row in rows:
        off = row.off_by_a_step
        table.add_row(
            [
                row.name,
                f"{row.accuracy.acc1:.2f}",
                f"{row.accuracy.acc5:.2f}",
                "-" if row.size is None else f"{row.size / 1e6:.2f}",
                "-" if row.latency is None else f"{row.latency:.2f}",
                "-" if off is None else f"{off.plain:.3%}",
                "-" if off is None else f"{off.optimized:.3%}",
            ]
        )
    compared = next((row.off_by_a_step for row in rows if row.off_by_a_step), None)
    if compared is None:
        return str(table)
    return (
        f"{table}\nOff by a step: share of the output values, over {compared.images} validation images, for which ONNX "
        "Runtime differs from\nthe fake-quant model by a quantization step or more; without and with graph "
        "optimizations."
    )
