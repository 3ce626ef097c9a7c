"""``fxqat quantize``: from the float model to the files, within an accuracy budget."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import click
import jinja2
import torch

from fxqat.checkpoint import save_checkpoint
from fxqat.cli.check_export_options import check_with_model, check_without_model, one_sample
from fxqat.cli.interrupt import ignore_interrupts
from fxqat.cli.load_data import is_named, load_batches, load_evaluation
from fxqat.cli.load_model import load_model, parse_dynamic_shapes
from fxqat.cli.options import (
    backend_option,
    calib_option,
    check_batch_size,
    data_options,
    dynamic_shapes_option,
    model_options,
    preprocessing_of,
)
from fxqat.config.effective import effective_config
from fxqat.convert_export import ExportReport, convert_export
from fxqat.errors import ConfigError, ExportError
from fxqat.export_tflite import export_tflite
from fxqat.litert_conversion import litert_versions
from fxqat.onnx.runtimes import RUNTIMES
from fxqat.tools.coverage import coverage
from fxqat.tools.ladder import Result
from fxqat.tools.ladder import quantize as climb
from fxqat.utils.batches import read_batch
from fxqat.utils.temporary import deleted_after, temporary_folder
from fxqat.utils.tensors import flatten_tensors

CONTINUE = '''"""Continue by training: this model has the quantization of {config}. Give it your data and your loss."""

import torch

import fxqat
from fxqat.cli.load_model import load_model

model = load_model({model!r}, {weights!r}).model
example = ({example})
gm = fxqat.prepare_by_platform(model, {backend!r}, {config!r}, example_inputs=example)
fxqat.load_checkpoint(gm, {checkpoint!r})
fxqat.enable_quantization(gm.train())
optimizer = torch.optim.SGD(gm.parameters(), lr=1e-3, momentum=0.9)  # about 1/100 of the float training's rate
for inputs, labels in ...:  # your training data; a few epochs
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(gm(inputs), labels).backward()
    optimizer.step()
fxqat.convert_export(gm.eval(), inputs[:1], "model.onnx", "model.json")
'''


@click.command()
@model_options
@backend_option
@calib_option
@data_options
@click.option(
    "-o", "--output", required=True, type=click.Path(file_okay=False, path_type=Path), help="Folder to write."
)
@click.option(
    "--eval", "evaluation", metavar="DATA",
    help="Data with labels (top-1 in percent), or FILE.py:FUNCTION of a model that returns the score of each sample, "
    "or one number; larger is better.",
)  # fmt: skip
@click.option("--eval-samples", type=click.IntRange(1), help="Samples to evaluate on; all by default.")
@click.option("--max-drop", type=click.FloatRange(0), help="The largest acceptable loss of --eval, in its unit.")
@click.option(
    "--confidence", type=click.FloatRange(0, 1, max_open=True),
    help="How sure it must be that the loss is within --max-drop on other data too: 0.95 by default, 0 for no margin. "
    "A margin for the size of the sample is added to the measured loss.",
)  # fmt: skip
@click.option("--dynamic-batch", is_flag=True, help="Leave the batch size of the file open.")
@dynamic_shapes_option
@click.option("--input-names", metavar="A,B", help="Names of the inputs in the file.")
@click.option("--output-names", metavar="A,B", help="Names of its outputs.")
@click.option("--opset", type=int, help="Opset of the file; 18 or 21 by default.")
@click.option(
    "--runtime", type=click.Choice(list(RUNTIMES)),
    help="Write the file in the form that this runtime executes fast; by default that of the backend, or of its chips.",
)  # fmt: skip
def quantize(
    model: str, weights: Path | None, config: Path | None, backend: str, calib: str,
    samples: int, batch_size: int | None, resize: int | None, crop: int | None, mean: str | None, std: str | None,
    output: Path, evaluation: str | None, eval_samples: int | None, max_drop: float | None,
    confidence: float | None, dynamic_batch: bool,
    dynamic_shapes: tuple[str, ...], input_names: str | None, output_names: str | None, opset: int | None,
    runtime: str | None,
) -> None:  # fmt: skip
    r"""Quantize MODEL: calibrate, try better recipes until --max-drop is met, export, and prove the file.

    Writes model.onnx, model.json (scales), model.parity.json (the proof), model.pth (checkpoint), config.yaml,
    index.html, and continue_training.py; for LiteRT also model.tflite, for inputs of one sample, if its converter is
    installed (pip install "fxqat[litert]"). Exit code 1 if --max-drop is not met; the files are written nevertheless.

    \b
    fxqat quantize torchvision:mobilenet_v2 --weights w.pth -b QNN --calib photos/ -o out/
    fxqat quantize net.py:make --calib net.py:batches --eval net.py:top1 --max-drop 0.5 -o out/
    """
    if max_drop is not None and evaluation is None:
        raise click.UsageError("--max-drop needs --eval: what the loss is measured with")
    if confidence is not None and max_drop is None:
        raise click.UsageError("--confidence needs --max-drop: the budget that it is for")
    if eval_samples is not None and (evaluation is None or is_named(evaluation)):
        raise click.UsageError("--eval-samples is for data with labels in --eval")
    if output.exists() and not output.is_dir():
        raise ConfigError(f"-o {output} is a file; give a folder")
    with _work_folder(output):
        pass  # a place that cannot be written is told before the ladder is climbed, which can take hours
    export = {
        "dynamic_batch": dynamic_batch, "dynamic_shapes": parse_dynamic_shapes(dynamic_shapes), "opset_version": opset,
        "runtime": runtime,
        "input_names": None if input_names is None else input_names.split(","),
        "output_names": None if output_names is None else output_names.split(","),
    }  # fmt: skip
    check_without_model(export)
    source = load_model(model, weights)
    size = source.batches_of(batch_size)
    data = [calib] if evaluation is None else [calib, evaluation]
    check_batch_size(batch_size, data)
    prepare = preprocessing_of(source.preprocessing, data, resize, crop, mean, std)
    evaluate = None if evaluation is None else load_evaluation(evaluation, prepare, size, eval_samples)
    batches = load_batches(calib, prepare, size, samples)
    source.check(batches[0])
    export["input_names"] = export["input_names"] or source.input_names
    export["output_names"] = export["output_names"] or source.output_names
    check_with_model(source.model, batches[0], config, export)
    logger = logging.getLogger("fxqat")
    if logger.level == logging.WARNING:  # neither --quiet nor --verbose: the steps of the ladder are shown
        logger.setLevel(logging.INFO)
    result = climb(
        source.model, batches, backend, evaluate, max_drop,
        confidence=0.95 if confidence is None else confidence, prepare_custom_config_dict=config,
    )  # fmt: skip
    example = one_sample(read_batch(result.model, batches[0], "quantize"))
    where, _, factory = model.rpartition(":")
    path = Path(where or model)
    absolute = f"{path.resolve()}{f':{factory}' if where else ''}" if path.is_file() else model
    named = {"model": absolute, "weights": None if weights is None else str(weights.resolve()), "backend": backend}
    _write(output, result, example, named, export)
    if not result.reached:
        sys.exit(1)


def _write(
    output: Path,
    result: Result,
    example: tuple[Any, ...],
    named: dict[str, Any],
    export: dict[str, Any],
) -> None:
    """Write all files into a folder beside, and put it in place when they are complete."""
    with _work_folder(output) as work:
        report = convert_export(result.model, example, work / "model.onnx", work / "model.json", **export)
        told = _tflite(result, example, work / "model.tflite") if named["backend"] == "LiteRT" else None
        save_checkpoint(result.model, work / "model.pth")
        effective_config(result.model, work / "config.yaml")
        (work / "index.html").write_text(_page(result, report, example, named), encoding="utf-8")
        zeros = "".join(f"torch.zeros({tuple(x.shape)}, dtype={x.dtype}), " for x in flatten_tensors(example))
        script = CONTINUE.format(**named, config="config.yaml", checkpoint="model.pth", example=zeros)
        (work / "continue_training.py").write_text(script, encoding="utf-8")
        names = sorted(path.name for path in work.iterdir())
        ignore_interrupts()
        _put_in_place(work, output)
    click.echo(str(result))
    if report.certificate is not None:
        click.echo(report.certificate.summary())
    if told is not None:
        click.echo(told)
    click.echo(f"wrote {output}: {', '.join(names)}")
    if not result.reached:
        click.echo(f"The budget is not met. Train on: {output / 'continue_training.py'} begins where this ended.")


def _tflite(result: Result, example: tuple[Any, ...], path: Path) -> str:
    """Write the file of LiteRT, with the shapes of the example inputs, if its converter is installed."""
    try:
        litert_versions()
    except ExportError as error:
        return f"no .tflite file: {error}"
    certificate = export_tflite(result.model, example, path).certificate
    return str(certificate).splitlines()[0]


@contextmanager
def _work_folder(output: Path) -> Iterator[Path]:
    """A folder beside ``output``; what is left of it after the block is deleted, with the folders made for it."""
    missing = [parent for parent in output.resolve().parents if not parent.exists()]
    with ExitStack() as stack:
        for parent in reversed(missing):
            stack.enter_context(deleted_after(parent.rmdir))  # not if it is not empty: the output is there
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            work = stack.enter_context(temporary_folder(output.parent, f".{output.name}")) / output.name
            work.mkdir()
            yield work
        except OSError as error:
            raise ConfigError(f"cannot write -o {output}: {error}") from error


def _put_in_place(work: Path, output: Path) -> None:
    """A new folder appears whole; in one that exists, files of the same names are replaced."""
    if not output.exists():
        work.rename(output)
    else:
        for path in work.iterdir():
            path.replace(output / path.name)


def _page(result: Result, report: ExportReport, example: tuple[Any, ...], named: dict[str, Any]) -> str:
    sections = {
        "Result": str(result),
        "What computes in integers": str(coverage(result.model, example)),
        "Proof: the file against the model": "\n".join([str(report.certificate), *report.warnings]),
        "Quantized against float, on calibration data": result.against_float,
        "Every node": str(result.model.quant_report),
        "Versions": f"torch {torch.__version__}",
    }
    template = resources.files("fxqat.cli").joinpath("page.html.jinja").read_text(encoding="utf-8")
    title = f"{named['model']} on {named['backend']}"
    environment = jinja2.Environment(autoescape=True)
    return environment.from_string(template).render(title=title, sections=sections)
