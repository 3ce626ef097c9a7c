"""``fxqat profile``: which tensors lose accuracy."""

from __future__ import annotations

from pathlib import Path

import click

from fxqat.cli.load_data import load_batches
from fxqat.cli.load_model import load_model
from fxqat.cli.options import (
    backend_option,
    calib_option,
    check_batch_size,
    data_options,
    model_options,
    preprocessing_of,
)
from fxqat.errors import ConfigError
from fxqat.tools.post_training.ptq import ptq
from fxqat.tools.profile import profile as profile_model
from fxqat.utils.files import check_writable


@click.command()
@model_options
@backend_option
@calib_option
@data_options
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="HTML page to write.")
@click.option("--rows", default=20, show_default=True, type=click.IntRange(1), help="Tensors to print.")
def profile(
    model: str, weights: Path | None, config: Path | None, backend: str, calib: str,
    samples: int, batch_size: int | None, resize: int | None, crop: int | None, mean: str | None, std: str | None,
    output: Path | None, rows: int,
) -> None:  # fmt: skip
    r"""Compare every quantized tensor of MODEL with float: where accuracy is lost, the worst first.

    \b
    fxqat profile timm:resnet18 --weights resnet18.safetensors -b TSQAT --calib photos/ -o page.html
    """
    check_batch_size(batch_size, [calib])
    if output is not None:
        check_writable(output, ConfigError)
    source = load_model(model, weights)
    prepare = preprocessing_of(source.preprocessing, [calib], resize, crop, mean, std)
    batches = load_batches(calib, prepare, source.batches_of(batch_size), samples)
    source.check(batches[0])
    gm = ptq(source.model, batches, backend, config, progress=True)
    found = profile_model(gm, batches[:1])
    click.echo(f"{found.verdict}\n{found.table(rows)}")
    if output is not None:
        found.write_html(output, f"{model} on {backend}")
        click.echo(f"wrote {output}")
