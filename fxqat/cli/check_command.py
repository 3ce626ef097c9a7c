"""``fxqat check``: what of a model computes in integers, without data."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fxqat.calibrate import calibrate
from fxqat.cli.load_model import example_inputs, load_model, parse_dynamic_shapes
from fxqat.cli.options import backend_option, dynamic_shapes_option, input_option, model_options
from fxqat.config.export_arguments import example_tuple
from fxqat.convert_export import convert_export
from fxqat.custom_quantizer.backend_type import BackendType
from fxqat.errors import ConfigError, ExportError, ParityError
from fxqat.prepare_by_platform import prepare_by_platform
from fxqat.quantization.dynamic_sizes import open_sizes
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.tools.coverage import Coverage, coverage, side_by_side
from fxqat.utils.temporary import temporary_folder


@click.command()
@model_options
@input_option
@backend_option
@dynamic_shapes_option
@click.option("--all-backends", is_flag=True, help="All backends side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--min-integer", type=click.FloatRange(0, 100), metavar="PERCENT",
    help="Exit with code 1 if less of the multiply-accumulates are integer ones.",
)  # fmt: skip
@click.pass_context
def check(
    context: click.Context, model: str, weights: Path | None, inputs: tuple[str, ...], config: Path | None,
    backend: str, dynamic_shapes: tuple[str, ...], all_backends: bool, as_json: bool, min_integer: float | None,
) -> None:  # fmt: skip
    r"""What of MODEL will compute in integers on a backend, and why the rest stays float.

    With --dynamic-shapes also whether those sizes can be left open: the model is exported with random data and compared
    with its file at two sizes. Exit code 1 if they cannot.

    \b
    fxqat check torchvision:mobilenet_v3_small --all-backends
    fxqat check net.py:make --input image=1x3x224x224 --input tokens=1x16:int64 -b QNN --min-integer 95
    """
    if all_backends and context.get_parameter_source("backend") is ParameterSource.COMMANDLINE:
        raise click.UsageError("give --backend or --all-backends")
    sizes = parse_dynamic_shapes(dynamic_shapes)
    source = load_model(model, weights)
    example = example_inputs(inputs, source)
    source.check(example)
    names = [each.name for each in BackendType] if all_backends else [backend]
    found: dict[str, Coverage | str] = {}
    fixed: dict[str, str] = {}
    for name in names:
        try:
            prepared = prepare_by_platform(source.model, name, config, example_inputs=example, check="quick")
        except ConfigError as error:
            if not all_backends:
                raise
            found[name] = str(error).splitlines()[0]
        else:
            found[name] = coverage(prepared, example)
            if sizes is not None:
                fixed[name] = _why_fixed(prepared, example, sizes)
    if as_json:
        plain = {name: _plain(each) for name, each in found.items()}
        click.echo(json.dumps({name: each | _sizes(fixed.get(name)) for name, each in plain.items()}, indent=1))
    else:
        click.echo(side_by_side(found) if all_backends else str(found[backend]))
        for name, why in fixed.items():
            click.echo(f"{name}: --dynamic-shapes: {f'NOT possible: {why}' if why else 'verified at two sizes'}")
    shares = [each.integer_share if isinstance(each, Coverage) else 0.0 for each in found.values()]
    if min_integer is not None and min(shares) < min_integer / 100:
        context.exit(1)
    if any(fixed.values()):
        context.exit(1)


def _why_fixed(gm: QuantGraphModule, example: Any, sizes: Any) -> str:
    """Why sizes cannot be left open in the file; empty if they can. An error says that they do not fit the inputs."""
    names = [str(node.target) for node in gm.graph.nodes if node.op == "placeholder"]
    open_sizes(example_tuple(gm, example), names, sizes, False)
    logger = logging.getLogger("fxqat")
    level = logger.level
    logger.setLevel(logging.ERROR)  # warnings of the export are not about the sizes
    try:
        calibrate(gm.eval(), [example], progress=False)
        with temporary_folder() as folder:
            convert_export(gm, example, folder / "model.onnx", dynamic_shapes=sizes)
    except (ExportError, ParityError) as error:
        return str(error).splitlines()[0]
    finally:
        logger.setLevel(level)
    return ""


def _sizes(why: str | None) -> dict[str, Any]:
    return {} if why is None else {"open_sizes": not why, "why_fixed": why}


def _plain(each: Coverage | str) -> dict[str, Any]:
    return {"error": each} if isinstance(each, str) else each.as_json()
