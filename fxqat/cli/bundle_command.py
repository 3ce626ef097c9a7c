"""``fxqat bundle``: everything that somebody else needs to see a failure."""

from __future__ import annotations

from pathlib import Path

import click

from fxqat.cli.options import backend_option, input_option, model_options
from fxqat.cli.write_bundle import Setup, write_bundle


@click.command()
@model_options
@input_option
@backend_option
@click.option(
    "-o", "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="Zip file to write."
)
@click.option("--with-weights", is_flag=True, help="Put the weights in as well; else they are random.")
def bundle(
    model: str, weights: Path | None, inputs: tuple[str, ...], config: Path | None, backend: str, output: Path,
    with_weights: bool,
) -> None:  # fmt: skip
    r"""Write a zip file that reproduces what happens when MODEL is loaded, prepared and exported.

    It holds the model's structure, its Python files with those of yours that they import, shapes of inputs,
    configuration, report, versions, traceback, and a script that runs it. It holds no data, and no weights unless
    --with-weights is given.

    \b
    fxqat bundle net.py:make --input 1x3x224x224 -b TSQAT -o bundle.zip
    """
    setup = Setup(
        model, None if weights is None else str(weights), inputs, backend, None if config is None else str(config)
    )
    outcome = write_bundle(output, setup, with_weights)
    click.echo(f"wrote {output}: {outcome}")
    if weights is not None and not with_weights:
        click.echo("The weights are not in it. If the failure depends on them, give --with-weights.")
