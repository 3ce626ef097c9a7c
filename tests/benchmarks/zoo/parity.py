"""Parity of real architectures: prepare, calibrate, one training step, export, and compare with ONNX Runtime.

Weights and BatchNorm statistics are random. Prints the table and, with ``--output``, writes the page.

``docs/evidence/parity.rst`` was last written on 2026-11-21; the next run removes its note about that.

    python tests/benchmarks/zoo/parity.py --output docs/evidence/parity.rst
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import onnx
import torch
import torchvision
from prettytable import PrettyTable, TableStyle
from torch import Tensor, nn
from tqdm import tqdm

import fxqat
from fxqat import BackendType

OPSET = 18
BACKENDS = ("TSQAT", "Experimental", "ONNXRuntime", "TensorRT")
MODELS: dict[str, dict[str, int | bool]] = {
    "resnet18": {},
    "resnet50": {},
    "mobilenet_v2": {},
    "mobilenet_v3_small": {},
    "mobilenet_v3_large": {},
    "efficientnet_b0": {},
    "regnet_x_400mf": {},
    "shufflenet_v2_x1_0": {},
    "densenet121": {},
    "googlenet": {"init_weights": True},
    "vgg11_bn": {},
    "squeezenet1_0": {},
    "mnasnet0_5": {},
    "vit_b_16": {},
    "swin_t": {},
    "convnext_tiny": {},
}


@dataclass(frozen=True)
class Cell:
    """One model on one backend."""

    model: str
    backend: str
    quantized: str
    step_off_by_1: float
    step_off_by_2: float
    first_off_by_1: float
    first_off_by_2: float
    free_off: float
    step_cosine: float
    cosine: float
    size_ratio: float
    seconds: float
    failure: str = ""

    @property
    def passed(self) -> bool:
        """Whether it is within the limits that the page names."""
        within = max(self.step_off_by_1, self.first_off_by_1) <= 0.005
        return not self.failure and within and self.step_off_by_2 == 0 == self.first_off_by_2 and self.cosine > 0.9999


def build(name: str, image: int) -> nn.Module:
    """A torchvision model with random weights and random BatchNorm statistics."""
    torch.manual_seed(0)
    size = {"image_size": image} if name.startswith("vit") else {}
    model: nn.Module = getattr(torchvision.models, name)(weights=None, **MODELS[name], **size)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return model


def classification_loss(output: object, target: Tensor) -> Tensor:
    """Cross entropy of the logits; of several outputs, of the first."""
    logits = output if isinstance(output, Tensor) else output[0]  # type: ignore[index]
    return nn.functional.cross_entropy(logits, target)


def run(name: str, backend: BackendType, image: int, folder: Path) -> Cell:
    """One model on one backend, from the float model to the comparison."""
    start = time.perf_counter()
    model = build(name, image)
    torch.manual_seed(1)
    example = torch.randn(1, 3, image, image)
    batches = [torch.randn(4, 3, image, image) for _ in range(2)]
    gm = fxqat.prepare_by_platform(model.eval(), backend, example_inputs=(example,))
    fxqat.calibrate(gm, batches)
    fxqat.enable_quantization(gm)
    gm.train()
    optimizer = torch.optim.SGD(gm.parameters(), lr=1e-4, momentum=0.9)
    classification_loss(gm(batches[0]), torch.arange(4)).backward()
    # Random networks at batch 4 have exploding gradients (in float, norms of 5e3 to 4e4 for the lightest models), and
    # BatchNorm multiplies them further when quantization makes a channel constant.
    nn.utils.clip_grad_norm_(gm.parameters(), 1.0)
    optimizer.step()
    gm.eval()
    path = folder / f"{name}.onnx"
    report = fxqat.convert_export(gm, (example,), path, opset_version=OPSET)
    certificate = report.certificate
    assert certificate is not None
    onnx.checker.check_model(str(path), full_check=True)
    tensors, first = certificate.tensors, [t for t in certificate.tensors if t.is_first]
    return Cell(
        model=name,
        backend=backend.value,
        quantized=f"{gm.quant_report.num_quantized}/{len(gm.quant_report)}",
        step_off_by_1=max(t.step.off_by_1 for t in tensors),
        step_off_by_2=max(t.step.off_by_2_plus for t in tensors),
        first_off_by_1=max(t.free.off_by_1 for t in first),
        first_off_by_2=max(t.free.off_by_2_plus for t in first),
        free_off=certificate.off_share,
        step_cosine=min(o.step_cosine for o in certificate.outputs),
        cosine=min(o.cosine for o in certificate.outputs),
        size_ratio=path.stat().st_size / (4 * sum(p.numel() for p in model.parameters())),
        seconds=time.perf_counter() - start,
    )


def failed(name: str, backend: BackendType, error: Exception) -> Cell:
    """A cell that shows why it failed."""
    nan = float("nan")
    text = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return Cell(name, backend.value, "-", nan, nan, nan, nan, nan, nan, nan, nan, 0.0, text)


def table(cells: list[Cell]) -> PrettyTable:
    """The cells as a table."""
    header = ["model", "backend", "nodes quantized", "step: worst off by 1", "step: 2+", "first: off by 1", "first: 2+"]
    header += ["free: off", "cosine step", "cosine free", "size / float", "s", "verdict"]
    result = PrettyTable(header, align="l")
    for c in cells:
        shares = [f"{share:.4%}" for share in (c.step_off_by_1, c.step_off_by_2, c.first_off_by_1, c.first_off_by_2)]
        verdict = "ok" if c.passed else (c.failure or "beyond the limits")
        cosines = [f"{c.step_cosine:.7f}", f"{c.cosine:.6f}"]
        size, seconds = f"{c.size_ratio:.3f}", f"{c.seconds:.0f}"
        result.add_row(
            [c.model, c.backend, c.quantized, *shares, f"{c.free_off:.3%}", *cosines, size, seconds, verdict]
        )
    return result


def page(cells: list[Cell], image: int) -> str:
    """The documentation page."""
    result = table(cells)
    result.set_style(TableStyle.DEFAULT)
    result.hrules = 1
    passed = sum(c.passed for c in cells)
    return f"""Parity of real architectures
============================

How well exported files reproduce the fake-quant model: torchvision models with random weights and random BatchNorm
statistics are prepared, calibrated on 2 batches, trained one step with clipped gradients, exported at opset {OPSET},
and run in ONNX Runtime with optimizations off on one image of {image} px. {passed} of {len(cells)} are within the
limits.

* *step*: each tensor is computed from the fake-quant model's own integers: the largest share, over all tensors, of
  values off by one step and by two or more. *first*: the same end to end, for tensors before which nothing is off.
* *free: off*: end to end, all tensors: the share of values that differ.
* *cosine step*, *cosine free*: cosine similarity of the outputs, with the last tensors computed from the fake-quant
  model's integers, and end to end.
* *size / float*: size of the file over that of the float weights. *s*: seconds for the whole row.
* *verdict*: ok if in *step* and *first* nothing is off by two steps or more and at most 0.5 % by one, and the cosine
  end to end is above 0.9999.

Written by ``tests/benchmarks/zoo/parity.py`` with torch {torch.__version__} on {date.today()}; do not edit.

{result.get_string()}
"""


def main() -> None:
    """Measure, print the table, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--backends", nargs="*", default=list(BACKENDS))
    parser.add_argument("--image", type=int, default=32, help="size of the images in pixels")
    parser.add_argument("--output", type=Path, help="write the documentation page here")
    arguments = parser.parse_args()
    cells = []
    work = [(name, BackendType(backend)) for name in arguments.models for backend in arguments.backends]
    with tempfile.TemporaryDirectory() as folder:
        for name, backend in tqdm(work):
            try:
                cells.append(run(name, backend, arguments.image, Path(folder)))
            except Exception as error:  # noqa: BLE001  a failing cell stays visible in the table
                cells.append(failed(name, backend, error))
            tqdm.write(table(cells[-1:]).get_string(header=False, border=False))
    print(table(cells))
    if arguments.output:
        arguments.output.write_text(page(cells, arguments.image), encoding="utf-8")


if __name__ == "__main__":
    main()
