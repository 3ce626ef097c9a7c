"""``python -m fxqat``: the ``fxqat`` command."""

from fxqat.cli.main import command

if __name__ == "__main__":
    command()
