"""The ``fxqat`` command: its subcommands, and what they do with errors."""

from __future__ import annotations

import logging
import sys

import click

from fxqat.cli.bundle_command import bundle
from fxqat.cli.check_command import check
from fxqat.cli.interrupt import EXIT_INTERRUPT, ignore_interrupts, leave_at_interrupt
from fxqat.cli.profile_command import profile
from fxqat.cli.quantize_command import quantize
from fxqat.cli.verify_command import verify
from fxqat.errors import ConfigError, FxqatError
from fxqat.fake_quantize import kernels
from fxqat.version import __version__

EXIT_ERROR = 2

VERSIONS = f"%(prog)s, version %(version)s\nkernels of fake-quant on CPU: {kernels.STATE.replace('%', '%%')}"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="fxqat", message=VERSIONS)
@click.option("-q", "--quiet", is_flag=True, help="Errors and results only.")
@click.option("-v", "--verbose", is_flag=True, help="Also what is decided on the way.")
def fxqat(quiet: bool, verbose: bool) -> None:
    r"""Quantize a PyTorch model for a chip, and prove that the file computes what the model does.

    \b
    MODEL is one of
      torchvision:NAME          timm:NAME           transformers:CONFIG_FOLDER
      FILE.py:FACTORY           package.module:FACTORY
      FILE.pt2 (torch.export)   FILE.onnx (needs onnx2torch)
    """
    level = logging.ERROR if quiet else logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("fxqat").setLevel(level)


for subcommand in (check, quantize, verify, profile, bundle):
    fxqat.add_command(subcommand)
for each in (fxqat, *fxqat.commands.values()):  # raw docstrings: click wants the character before lines that it keeps
    each.help = str(each.help).replace("\\b\n", "\b\n")


def command() -> None:
    """The process ``fxqat``."""
    leave_at_interrupt()
    try:
        run()
    finally:
        ignore_interrupts()


def run() -> None:
    """Run the command; an error is one line on stderr and exit code 2, Ctrl-C is exit code 130."""
    try:
        sys.exit(fxqat.main(prog_name="fxqat", standalone_mode=False))  # the code of Context.exit, or None
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_ERROR)
    except FxqatError as error:
        print(f"fxqat: {error}", file=sys.stderr)
        if not isinstance(error, ConfigError):
            print("To show it to somebody else: fxqat bundle MODEL -o bundle.zip", file=sys.stderr)
        sys.exit(EXIT_ERROR)
    except (click.Abort, KeyboardInterrupt):
        print("fxqat: interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPT)
