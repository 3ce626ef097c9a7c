"""``python -m fxqat``: the ``fxqat`` command."""

from fxqat.cli.main import run

if __name__ == "__main__":
    run()
