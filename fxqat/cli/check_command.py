"""``fxqat check``: what of a model computes in integers, without data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from fxqat.cli.load_model import example_inputs, load_model
from fxqat.cli.options import backend_option, input_option, model_options
from fxqat.custom_quantizer.backend_type import BackendType
from fxqat.errors import ConfigError
from fxqat.prepare_by_platform import prepare_by_platform
from fxqat.tools.coverage import Coverage, coverage, side_by_side


@click.command()
@model_options
@input_option
@backend_option
@click.option("--all-backends", is_flag=True, help="All backends side by side.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--min-integer", type=click.FloatRange(0, 100), metavar="PERCENT",
    help="Exit with code 1 if less of the multiply-accumulates are integer ones.",
)  # fmt: skip
@click.pass_context
def check(
    context: click.Context, model: str, weights: Path | None, inputs: tuple[str, ...], config: Path | None,
    backend: str, all_backends: bool, as_json: bool, min_integer: float | None,
) -> None:  # fmt: skip
    r"""What of MODEL will compute in integers on a backend, and why the rest stays float.

    \b
    fxqat check torchvision:mobilenet_v3_small --all-backends
    fxqat check net.py:make --input image=1x3x224x224 --input tokens=1x16:int64 -b QNN --min-integer 95
    """
    if all_backends and context.get_parameter_source("backend") is ParameterSource.COMMANDLINE:
        raise click.UsageError("give --backend or --all-backends")
    source = load_model(model, weights)
    example = example_inputs(inputs, source)
    names = [each.name for each in BackendType] if all_backends else [backend]
    found: dict[str, Coverage | str] = {}
    for name in names:
        try:
            prepared = prepare_by_platform(source.model, name, config, example_inputs=example, check="quick")
        except ConfigError as error:
            if not all_backends:
                raise
            found[name] = str(error).splitlines()[0]
        else:
            found[name] = coverage(prepared, example)
    if as_json:
        click.echo(json.dumps({name: _plain(each) for name, each in found.items()}, indent=1))
    elif all_backends:
        click.echo(side_by_side(found))
    else:
        click.echo(str(found[backend]))
    shares = [each.integer_share if isinstance(each, Coverage) else 0.0 for each in found.values()]
    if min_integer is not None and min(shares) < min_integer / 100:
        context.exit(1)


def _plain(each: Coverage | str) -> dict[str, Any]:
    return {"error": each} if isinstance(each, str) else each.as_json()
