"""Golden files: text that a change of behaviour shows up in as a diff to review."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other

GOLDEN = Path(__file__).parent / "golden"
collect_ignore = ["benchmarks"]  # scripts: importing them is enough to disturb other tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--regenerate-golden",
        action="store_true",
        help="write tests/golden/*.txt from what the library does now; review the diff before you commit it",
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], str]:
    """``golden(name, text)`` gives the text of the golden file, after writing ``text`` to it if asked to."""

    def expected(name: str, text: str) -> str:
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--regenerate-golden"):
            GOLDEN.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        if not path.exists():
            pytest.fail(f"{path.name} is missing: review this, then run pytest --regenerate-golden\n{text}")
        return path.read_text(encoding="utf-8")

    return expected
