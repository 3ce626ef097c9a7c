"""Accuracy after quantization without training, beside other tools: same weights, same images, each tool's own recipe.

DIR as for ``ptq.py``. Each row adds a line to ``results/peers.jsonl``; rows that have a line there are skipped, and so
are tools that are not installed. Some of them ask for versions that others cannot use: run them one after another, each
on a path of its own::

    pip install --target EXTRA aimet-onnx      # or nncf openvino, brevitas, nvidia-modelopt[onnx]
    PYTHONPATH=EXTRA python tests/benchmarks/accuracy/peers.py run --data DIR --tools AIMET
    python tests/benchmarks/accuracy/peers.py report
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import experiments
import numpy as np
import onnxruntime as ort
import resnet20_cifar10 as resnet
import torch
from prettytable import PrettyTable
from ptq import IMAGES, Task, load
from torch import Tensor
from tqdm import tqdm

import fxqat
from fxqat.tools import ptq
from fxqat.tools.post_training.reconstruct import METHODS

Predict = Callable[[Tensor], Tensor]
INPUT = "x"


@dataclass(frozen=True)
class Row:
    """One recipe of one tool on one model, at W8A8 or W4A8."""

    model: str
    tool: str
    recipe: str
    weight_bits: int


def in_onnx_runtime(path: Path) -> Predict:
    """An ONNX file in ONNX Runtime with its default options."""
    session = ort.InferenceSession(path)
    return lambda x: torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


def float_file(task: Task, folder: Path, batch: int | None = None) -> Path:
    """The float model as an ONNX file, of a free batch or of the given one."""
    path = folder / "float.onnx"
    shapes = None if batch else ({0: torch.export.Dim("batch")},)
    example = (task.batches[0][: batch or 2],)
    torch.onnx.export(task.model, example, path, input_names=[INPUT], dynamic_shapes=shapes, dynamo=True, verbose=False)
    return path


class Reader:
    """The calibration batches in the form that ONNX Runtime reads them."""

    def __init__(self, batches: list[Tensor]) -> None:
        self.feeds = iter([{INPUT: batch.numpy()} for batch in batches])

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch, None at the end."""
        return next(self.feeds, None)


def with_fxqat(task: Task, bits: int, recipe: str, folder: Path) -> Predict:
    """The file for ONNX Runtime."""
    config: dict[str, Any] = {}
    if bits < 8:
        config = {"extra_qconfig_dict": {"w_qscheme": {"bit": bits, "narrow_range": False}, "w_observer": "MSE"}}
    elif "float32 scales" in recipe:
        config = {"extra_qconfig_dict": {"w_qscheme": {"scale_bits": 24}, "a_qscheme": {"scale_bits": 24}}}
    better = {"reconstruct": METHODS["GPTQ"], "correct_bias": True} if "GPTQ" in recipe else {}
    gm = ptq(task.model, task.batches, resnet.without_limits("ONNXRuntime"), config, **better).eval()
    report = fxqat.convert_export(gm, (task.batches[0],), folder / "q.onnx", dynamic_batch=True)
    return in_onnx_runtime(report.onnx_path)


def with_onnxruntime(task: Task, bits: int, recipe: str, folder: Path) -> Predict:
    """``quantize_static`` after ``quant_pre_process``, with a scale for each channel."""
    from onnxruntime import quantization as q  # noqa: PLC0415
    from onnxruntime.quantization.shape_inference import quant_pre_process  # noqa: PLC0415

    quant_pre_process(float_file(task, folder), folder / "ready.onnx")
    q.quantize_static(
        folder / "ready.onnx",
        folder / "q.onnx",
        Reader(task.batches),
        per_channel=True,
        activation_type=q.QuantType.QUInt8,
        weight_type=q.QuantType.QInt8 if bits == 8 else q.QuantType.QInt4,
        calibrate_method=getattr(q.CalibrationMethod, recipe),
    )
    return in_onnx_runtime(folder / "q.onnx")


def with_nncf(task: Task, bits: int, recipe: str, folder: Path) -> Predict:
    """``nncf.quantize``, run by OpenVINO."""
    import nncf  # noqa: PLC0415
    import openvino  # noqa: PLC0415

    best = recipe != "default"
    core = openvino.Core()
    model = nncf.quantize(
        core.read_model(float_file(task, folder)),
        nncf.Dataset([{INPUT: batch.numpy()} for batch in task.batches]),
        preset=nncf.QuantizationPreset.MIXED if best else None,
        fast_bias_correction=not best,
    )
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return lambda x: torch.from_numpy(compiled({INPUT: x.numpy()})[0])


def with_aimet(task: Task, bits: int, recipe: str, folder: Path) -> Predict:
    """``QuantizationSimModel`` with a scale for each channel: its simulation of the target."""
    import aimet_onnx  # noqa: PLC0415
    import onnx  # noqa: PLC0415
    from aimet_onnx.common.quantsim_config.utils import get_path_for_per_channel_config  # noqa: PLC0415
    from aimet_onnx.cross_layer_equalization import equalize_model  # noqa: PLC0415

    model = onnx.load(float_file(task, folder))
    if "CLE" in recipe:
        equalize_model(model)
    feeds = [{INPUT: batch.numpy()} for batch in task.batches]
    sim = aimet_onnx.QuantizationSimModel(
        model,
        param_type=f"int{bits}",
        activation_type="int8",
        quant_scheme="tf_enhanced" if "SQNR" in recipe else "min_max",
        config_file=get_path_for_per_channel_config(),
        providers=["CPUExecutionProvider"],
    )
    if "SeqMSE" in recipe:
        aimet_onnx.apply_seq_mse(sim, feeds)
    sim.compute_encodings(feeds)
    return lambda x: torch.from_numpy(sim.session.run(None, {INPUT: x.numpy()})[0])


def with_brevitas(task: Task, bits: int, recipe: str, folder: Path) -> Predict:
    """The steps of its example ``imagenet_classification/ptq``: its fake-quant model; sums stay float."""
    from brevitas.graph.quantize import preprocess_for_quantize  # noqa: PLC0415
    from brevitas_examples.imagenet_classification.ptq import ptq_common as steps  # noqa: PLC0415

    def pairs() -> Iterator[tuple[Tensor, None]]:
        return ((batch, None) for batch in task.batches)

    loader: Any = type("Loader", (), {"__iter__": lambda _: pairs(), "__len__": lambda _: len(task.batches)})()
    equalized = "equalization" in recipe
    options = {"equalize_iters": 20 * equalized, "relu6_to_relu": equalized}  # equalization needs ReLU
    model = preprocess_for_quantize(copy.deepcopy(task.model), **options)
    model = steps.quantize_model(
        model,
        backend="layerwise",  # with "fx" it cannot run the slices in ResNet20's shortcuts
        weight_bit_width=bits,
        act_bit_width=8,
        bias_bit_width=32,
        weight_quant_granularity="per_channel",
        act_quant_percentile=99.999,
        act_quant_type="asym",
        scale_factor_type="float_scale",
        quant_format="int",
        layerwise_first_last_bit_width=bits,
        weight_param_method="mse" if bits < 8 else "stats",
    )
    with torch.no_grad():
        model(task.batches[0])  # its weight quantizers start here
    steps.calibrate(loader, model)
    if "GPTQ" in recipe:
        steps.apply_gptq(loader, model)
    if "bias" in recipe:
        steps.apply_bias_correction(loader, model)
    return model  # type: ignore[no-any-return]


def with_torch_ao(task: Task, bits: int, recipe: str, folder: Path) -> Predict:
    """``prepare_fx`` and ``convert_fx`` with the default of x86, run by torch's integer kernels."""
    from torch.ao.quantization import get_default_qconfig_mapping  # noqa: PLC0415
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx  # noqa: PLC0415

    torch.backends.quantized.engine = "x86"
    prepared = prepare_fx(copy.deepcopy(task.model), get_default_qconfig_mapping("x86"), (task.batches[0],))
    for batch in task.batches:
        prepared(batch)
    return convert_fx(prepared)  # type: ignore[no-any-return]


def with_modelopt(task: Task, bits: int, recipe: str, folder: Path) -> Predict:
    """``modelopt.onnx.quantization``: the file in ONNX Runtime."""
    from modelopt.onnx.quantization import quantize  # noqa: PLC0415

    quantize(
        str(float_file(task, folder, len(task.batches[0]))),
        calibration_data={INPUT: torch.cat(task.batches).numpy()},
        calibration_method=recipe,
        calibration_eps=["cpu"],
        high_precision_dtype="fp32",
        output_path=str(folder / "q.onnx"),
    )
    run = in_onnx_runtime(folder / "q.onnx")
    count = len(task.batches[0])

    def padded(x: Tensor) -> Tensor:  # the file has a fixed batch
        parts = [torch.cat([part, part[:1].expand(count - len(part), *part.shape[1:])]) for part in x.split(count)]
        return torch.cat([run(part) for part in parts])[: len(x)]

    return padded


TOOLS: dict[str, tuple[str, Callable[[Task, int, str, Path], Predict]]] = {
    "fxqat": ("fxqat", with_fxqat),
    "ONNX Runtime": ("onnxruntime", with_onnxruntime),
    "NNCF": ("nncf", with_nncf),
    "AIMET": ("aimet-onnx", with_aimet),
    "Brevitas": ("brevitas", with_brevitas),
    "torch.ao FX": ("torch", with_torch_ao),
    "ModelOpt": ("nvidia-modelopt", with_modelopt),
}
"""Name of each tool: its package on PyPI, and what quantizes with it."""

RECIPES = {
    8: (
        ("fxqat", "calibration"),
        ("fxqat", "float32 scales"),
        ("fxqat", "GPTQ, bias correction"),
        ("ONNX Runtime", "MinMax"),
        ("ONNX Runtime", "Percentile"),
        ("NNCF", "default"),
        ("NNCF", "mixed preset, accurate bias correction"),
        ("AIMET", "MinMax"),
        ("AIMET", "SQNR"),
        ("AIMET", "CLE, SQNR"),
        ("Brevitas", "calibration"),
        ("Brevitas", "equalization, bias correction"),
        ("torch.ao FX", "default of x86"),
        ("ModelOpt", "entropy"),
        ("ModelOpt", "max"),
    ),
    4: (
        ("fxqat", "calibration"),
        ("fxqat", "GPTQ, bias correction"),
        ("ONNX Runtime", "MinMax"),
        ("AIMET", "SQNR"),
        ("AIMET", "MinMax, SeqMSE"),
        ("Brevitas", "calibration"),
        ("Brevitas", "GPTQ, bias correction"),
        ("Brevitas", "equalization, GPTQ, bias correction"),
    ),
}
ROWS = [Row(model, *recipe, bits) for model in IMAGES for bits in RECIPES for recipe in RECIPES[bits]]


def row_of(result: dict[str, Any]) -> Row:
    """The row of a result."""
    return Row(**result["row"])


@torch.no_grad()
def outputs(predict: Predict, task: Task) -> Tensor:
    """Of all images that are tested."""
    return torch.cat([predict(x) for x in tqdm(task.images.split(50), leave=False)])


def compared(found: Tensor, expected: Tensor, labels: Tensor) -> dict[str, float]:
    """Top-1, share of images with the class of the float model, in percent, and the signal-to-noise ratio in dB."""
    noise = (found - expected).square().sum() / expected.square().sum()
    return {
        "top1": 100 * float((found.argmax(1) == labels).float().mean()),
        "same": 100 * float((found.argmax(1) == expected.argmax(1)).float().mean()),
        "sqnr": -10 * float(noise.log10()),
    }


def measure(row: Row, task: Task, expected: Tensor) -> dict[str, Any]:
    """Quantize and test; what fails is a result, too."""
    package, quantize = TOOLS[row.tool]
    start = time.perf_counter()
    result: dict[str, Any] = {"row": asdict(row), "version": version(package)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            predict = quantize(task, row.weight_bits, row.recipe, Path(folder))
            result["seconds"] = time.perf_counter() - start
            return result | compared(outputs(predict, task), expected, task.labels)
        except Exception as error:  # noqa: BLE001  a tool that fails has a row that says so
            return result | {"error": f"{type(error).__name__}: {error}".partition("\n")[0][:200]}


def installed(tool: str) -> bool:
    """Whether a tool's package is there."""
    try:
        return bool(version(TOOLS[tool][0]))
    except PackageNotFoundError:
        return False


def run(arguments: argparse.Namespace) -> None:
    """Measure the rows that have no result yet."""
    torch.set_num_threads(arguments.threads)
    known = [row_of(result) for result in experiments.read(arguments.results)]
    for name in arguments.models:
        rows = [row for row in ROWS if row.model == name and row.tool in arguments.tools and row not in known]
        rows = [row for row in rows if installed(row.tool)]
        if not rows:
            continue
        task = load(name, IMAGES[name], arguments.data)
        expected = outputs(task.model, task)
        correct = compared(expected, expected, task.labels)["top1"]
        for row in rows:
            torch.manual_seed(0)
            experiments.add(arguments.results, measure(row, task, expected) | {"float": correct})


def report(arguments: argparse.Namespace) -> None:
    """Write the documentation page."""
    results = sorted(experiments.read(arguments.results), key=lambda result: ROWS.index(row_of(result)))
    table = PrettyTable(["model", "bits", "tool", "recipe", "float", "top-1", "same", "SQNR", "s"], align="l", hrules=1)
    for result in results:
        row = row_of(result)
        if "error" in result:
            figures = [result["error"], "", "", ""]
        else:
            figures = [f"{result['top1']:.2f}", f"{result['same']:.2f}", f"{result['sqnr']:.1f}"]
            figures.append(f"{result['seconds']:.0f}")
        table.add_row([row.model, f"W{row.weight_bits}A8", row.tool, row.recipe, f"{result['float']:.2f}", *figures])
    versions = ", ".join(sorted({f"{row_of(result).tool} {result['version']}" for result in results}))
    text = f"""Accuracy beside other tools
===========================

The same float weights and the same images for calibration, quantized without training by each tool, and tested on the
same other images. *Recipe*: steps that the tool's documentation offers for this job.

* ResNet20 (akamaster/pytorch_resnet_cifar10): 256 images of CIFAR-10, tested on 1017 others.
* MobileNetV2 (google-coral/test_data): 64 ImageNet photos (EliSchwartz/imagenet-sample-images), tested on 936 others.
  Its weights lie on a grid of 8 bits, which float32 scales hit, so that 8-bit weights cost nothing. fxqat's scales have
  few significant bits (:doc:`/concepts/scales`) and miss it; the row *float32 scales* has scales of 24.
* *same*: images with the class of the float model, in percent. *SQNR*: of the logits, in dB, the float model being the
  signal. *top-1*, in percent, says less: the standard error of 87 on 936 photos is 1.1, so that most differences are
  chance. *s*: seconds to quantize, on one or two cores that did other work: the order of magnitude.
* Weights have a scale for each channel, activations one scale, and the first and the last layer are quantized, too.
* Tested is, for fxqat, ONNX Runtime and ModelOpt, the file in ONNX Runtime with its default options, for NNCF the model
  in OpenVINO, for torch.ao its converted model. AIMET and Brevitas simulate the target in float; their simulation is
  tested. Brevitas quantizes the layers only (``layerwise``; ``fx`` failed at the slices of ResNet20's shortcuts);
  its equalization replaces ReLU6 by ReLU.
* NNCF, torch.ao and ModelOpt have no row at W4A8: what was run of them has 8-bit weights only. AIMET's AdaRound is
  missing: 2,000 of the 15,000 iterations that it recommends below 8 bits took 30 s for a layer of ResNet20.

Versions: {versions}.

Written by ``tests/benchmarks/accuracy/peers.py`` with torch {experiments.torch_versions(results)}; do not edit.

{table.get_string()}
"""
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    CHOICES = {"models": list(IMAGES), "tools": list(TOOLS)}
    experiments.command_line(__file__, str(__doc__), "accuracy_peers.rst", run, report, CHOICES)
