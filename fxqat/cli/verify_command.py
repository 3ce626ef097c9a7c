"""``fxqat verify``: whether an exported file computes what it should, here and on an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import torch
from onnx import helper

from fxqat.checkpoint import FORMAT, load_checkpoint
from fxqat.cli.check_file import FileChecks
from fxqat.cli.load_data import is_named, load_batches
from fxqat.cli.load_model import Source, example_inputs, load_model, parse_input, random_input
from fxqat.cli.options import FILE, image_options, preprocessing_of
from fxqat.cli.preprocessing import Preprocessing
from fxqat.errors import ConfigError, ExportError
from fxqat.export_tflite import certify_tflite
from fxqat.onnx.opset import opset_of
from fxqat.onnx.quant_params import read_params
from fxqat.prepare_by_platform import prepare_by_platform
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.engines.load import ENGINES, load_engine
from fxqat.utils.batches import read_batch
from fxqat.utils.tensors import flatten_tensors

SAMPLES = 8
"""Samples that are read of --data if the file leaves the batch size open."""


@click.command()
@click.argument("file", type=FILE)
@click.option("--model", help="The model that FILE was exported from: MODEL of the other commands.")
@click.option("--weights", type=FILE, help="Weights of --model: a state dict, or model.pth of fxqat quantize.")
@click.option("--config", type=FILE, help="config.yaml of fxqat quantize, to its model.pth.")
@click.option("--json", "document", type=FILE, help="JSON of scales that was written with FILE.")
@click.option("--engine", type=click.Choice([name for name in ENGINES if name != "litert"]), help="Engine to run on.")
@click.option("--threads", type=click.IntRange(1), help="Threads of the engine; 1 by default.")
@click.option(
    "--input", "inputs", multiple=True, metavar="NAME=SHAPE[:DTYPE]",
    help="Shape of a random input; by default that in FILE, with 1 for a size that is open.",
)  # fmt: skip
@click.option("--data", metavar="DATA", help="Real inputs in place of random ones, as for --calib; one batch is used.")
@image_options
@click.pass_context
def verify(
    context: click.Context, file: Path, model: str | None, weights: Path | None, config: Path | None,
    document: Path | None, engine: str | None, threads: int | None, inputs: tuple[str, ...], data: str | None,
    resize: int | None, crop: int | None, mean: str | None, std: str | None,
) -> None:  # fmt: skip
    r"""Check FILE, an exported ONNX or .tflite file, again: on another machine, in another version, on an engine.

    \b
    always        the ONNX checker; ONNX Runtime runs it, with and without its optimizations
    with --json   scale and zero point of every tensor are those of the JSON, bit for bit
    with --model  cosine and signal to noise of the outputs to those of the float model; and
                  every quantized tensor, step by step, if --weights is a checkpoint of fxqat
    with --engine every quantized tensor on this engine, step by step

    A .tflite file needs --model and --weights: every quantized tensor in LiteRT, step by step.

    \b
    fxqat verify out/model.onnx --json out/model.json --engine openvino
    fxqat verify out/model.onnx --model net.py:make --weights out/model.pth --config out/config.yaml

    Exit code 1 if something differs. Distances to the float model are only told.
    """
    _check_options(model, weights, config, engine, threads, inputs, data)
    if file.suffix == ".tflite":
        if document is not None or engine is not None or weights is None:
            raise click.UsageError(
                "a .tflite file is checked in LiteRT against the checkpoint of its model: --model, --weights and "
                "--config; --json and --engine are for ONNX files"
            )
        _verify_tflite(file, load_model(str(model), weights), weights, config, inputs, data, (resize, crop, mean, std))
        return
    proto = _read(file)
    made = None if engine is None else load_engine(engine, threads=threads or 1)
    params = None if document is None else read_params(document)
    source = None if model is None else load_model(model, weights)
    gm = None if source is None or weights is None else _prepared(source, weights, config)
    known = None if source is None else source.preprocessing
    prepare = preprocessing_of(known, [data or "random:"], resize, crop, mean, std)
    arrays = _random_inputs(proto, inputs) if data is None else _data_inputs(proto, data, prepare)
    checks = FileChecks(file, proto, arrays, {} if params is None else params.get("inputs", {}))

    click.echo(f"{file}: opset {opset_of(proto)}, on {'random inputs' if data is None else data}")
    done = [_told("ONNX Runtime", checks.onnxruntime)]
    if params is not None:
        done.append(_told(f"scales of {document}", checks.scales, params["tensors"]))
    if source is not None and done[0]:
        done.append(_told("float model", checks.float_model, source.model))
    if gm is not None:
        done.append(_told("certificate", checks.certificate, gm))
    if made is not None:
        done.append(_told("engine", checks.engine, made))
    click.echo("passed" if all(done) else "DIFFERS")
    context.exit(0 if all(done) else 1)


def _check_options(
    model: str | None,
    weights: Path | None,
    config: Path | None,
    engine: str | None,
    threads: int | None,
    inputs: tuple[str, ...],
    data: str | None,
) -> None:
    if weights is not None and model is None:
        raise click.UsageError("--weights needs --model")
    if config is not None and weights is None:
        raise click.UsageError("--config needs --weights: the checkpoint that it is the configuration of")
    if threads is not None and engine is None:
        raise click.UsageError("--threads needs --engine")
    if inputs and data is not None:
        raise click.UsageError("--input is for random inputs; --data gives real ones")


def _verify_tflite(
    file: Path, source: Source, weights: Path, config: Path | None, inputs: tuple[str, ...], data: str | None,
    image: tuple[int | None, int | None, str | None, str | None],
) -> None:  # fmt: skip
    """The certificate of a .tflite file again, on inputs of one sample."""
    gm = _prepared(source, weights, config)
    if gm is None:
        raise ConfigError(f"--weights {weights} holds only weights: a .tflite file needs the checkpoint of its model")
    prepare = preprocessing_of(source.preprocessing, [data or "random:"], *image)
    batch = example_inputs(inputs, source) if data is None else load_batches(data, prepare, 1, 1)[0]
    click.echo(f"{file}: on {'random inputs' if data is None else data}")
    content = file.read_bytes()
    passed = _told("certificate", lambda: str(certify_tflite(gm, read_batch(gm, batch, "verify"), content)))
    click.echo("passed" if passed else "DIFFERS")
    click.get_current_context().exit(0 if passed else 1)


def _told(what: str, check: Callable[..., str], *arguments: Any) -> bool:
    """Print what a check found, and return whether it passed."""
    try:
        click.echo(f"{what}: {check(*arguments)}")
    except ExportError as error:
        click.echo(f"{what}: FAILED: {error}")
        return False
    return True


def _read(file: Path) -> onnx.ModelProto:
    try:
        proto = onnx.load(str(file))
    except Exception as error:
        raise ConfigError(f"{file} is not an ONNX file: {error}") from error
    if not proto.graph.node:
        raise ConfigError(f"{file} is not an ONNX file: it has no nodes")
    return proto


def _prepared(source: Source, weights: Path, config: Path | None) -> QuantGraphModule | None:
    """The prepared model of a checkpoint; None if the weights are plain ones."""
    content = None if weights.suffix == ".safetensors" else torch.load(weights, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        if config is not None:
            raise ConfigError(f"--config is for a checkpoint of fxqat; --weights {weights} holds only weights")
        return None
    gm = prepare_by_platform(source.model, content["backend"], config, check="quick").eval()
    load_checkpoint(gm, weights)
    return gm


def _inputs(proto: onnx.ModelProto) -> dict[str, tuple[list[int], np.dtype[Any]]]:
    """Shape, with 0 for what is open, and type of each input."""
    kinds = {value.name: value.type.tensor_type for value in proto.graph.input}
    return {
        name: ([max(dim.dim_value, 0) for dim in kind.shape.dim], helper.tensor_dtype_to_np_dtype(kind.elem_type))
        for name, kind in kinds.items()
    }


def _random_inputs(proto: onnx.ModelProto, given: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Random inputs of the shapes that are given, else of those in the file."""
    known, chosen = _inputs(proto), dict(map(parse_input, given))
    if unknown := sorted(chosen.keys() - known.keys()):
        raise ConfigError(f"--input: the file has no input {unknown[0]!r}; it has {', '.join(known)}")
    for name, (sizes, dtype) in known.items():
        if name not in chosen:
            chosen[name] = random_input([size or 1 for size in sizes], torch.from_numpy(np.zeros(1, dtype)).dtype)
    return {name: chosen[name].numpy() for name in known}


def _data_inputs(proto: onnx.ModelProto, data: str, preprocessing: Preprocessing | None) -> dict[str, np.ndarray]:
    """One batch of real inputs, by the names of the file's inputs or in their order."""
    known = _inputs(proto)
    size = next((sizes[0] for sizes, _ in known.values() if sizes), 0)
    samples = 1 if is_named(data) else size or SAMPLES
    batch = load_batches(data, preprocessing, samples, samples)[0]
    values = flatten_tensors([batch.get(name) for name in known] if isinstance(batch, Mapping) else batch)
    arrays = dict(zip(known, (value[: size or None].numpy() for value in values), strict=False))
    for name, (sizes, dtype) in known.items():
        found = arrays[name].shape if name in arrays else ()
        if len(found) != len(sizes) or any(a != b for a, b in zip(found, sizes, strict=True) if b):
            shapes = ["x".join(str(n or "?") for n in shape) or "nothing" for shape in (found, sizes)]
            raise ConfigError(f"--data {data}: input {name} of the file is {shapes[1]}, the data gives {shapes[0]}")
        arrays[name] = arrays[name].astype(dtype)
    return arrays
