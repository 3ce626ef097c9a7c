"""``fxqat bundle``: what fails here fails there."""

import zipfile
from pathlib import Path

import pytest

import fxqat
from tests.cli.test_main import call
from tests.fresh_process import run_fresh

FILES = {
    "reproduce.py", "setup.json", "versions.json", "structure.txt", "inputs.txt", "report.txt", "outcome.txt",
}  # fmt: skip
HELPERS = {
    "net.py": "import os, torch\nfrom blocks.body import Body\nimport flat\n\ndef make():\n    return Body()\n",
    "flat.py": "WIDTH = 7\n",
    "other.py": "nobody imports it",
    "blocks/__init__.py": "",
    "blocks/body.py": "import torch\nfrom . import sizes\nfrom plain.where import THERE\n\n"
    "class Body(torch.nn.Module):\n    def forward(self, x):\n"
    "        return x if x.sum().item() > THERE else x.reshape(sizes.SIDE)\n",
    "blocks/sizes.py": "from flat import WIDTH as SIDE\n",
    "plain/where.py": "THERE = 0\n",
}  # `plain` is a package without __init__.py
PATH = {"PYTHONPATH": str(Path(fxqat.__file__).parents[1])}
IMPORTED = {"net.py", "flat.py", "blocks/__init__.py", "blocks/body.py", "blocks/sizes.py", "plain/where.py"}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def reproduced(bundle: Path, there: Path) -> tuple[set[str], str]:
    """The files of a bundle beside the usual ones, and the outcome in a folder and a process that know only fxqat."""
    with zipfile.ZipFile(bundle) as archive:
        names = set(archive.namelist())
        archive.extractall(there)
    assert names >= FILES
    done = run_fresh(["reproduce.py"], there, PATH)
    assert done.returncode == 0, done.stderr
    return names - FILES, done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("model", "changed", "taken", "message"),
    [
        ("net.py:make", {}, IMPORTED, "TraceError: "),  # tracing fails
        (
            "net:make",
            {"flat.py": "WIDTH = missing\n"},
            IMPORTED,
            "NameError: name 'missing' is not defined",
        ),  # an import fails
        ("net.py:make", {"flat.py": "WIDTH = = 7\n"}, IMPORTED, "SyntaxError: invalid syntax"),
        ("net:make", {"net.py": "def make():\n    raise OSError('no weights')\n"}, {"net.py"}, "OSError: no weights"),
    ],
)
def test_the_bundle_reproduces_the_failure(
    model: str, changed: dict[str, str], taken: set[str], message: str, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    write(home, HELPERS | changed)
    words = ["-m", "fxqat", "bundle", model, "--input", "2x3", "-o", "../bundle.zip"]
    done = run_fresh(words, home, PATH)
    assert done.returncode == 0, done.stderr
    outcome = done.stdout.strip().rpartition("bundle.zip: ")[2]
    assert message in outcome
    assert reproduced(tmp_path / "bundle.zip", tmp_path / "there") == (taken, outcome)


def test_the_configuration_of_transformers_is_taken_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    text = '{"architectures": ["BertModel"], "model_type": "bert", "hidden_size": 7, "num_attention_heads": 2}'
    write(tmp_path / "home", {"tiny/config.json": text, "tiny/vocab.json": "{}"})
    monkeypatch.chdir(tmp_path / "home")
    assert call("bundle transformers:tiny --input 1x4:int64 -o ../bundle.zip", monkeypatch) == 0
    outcome = capsys.readouterr().out.strip().rpartition("bundle.zip: ")[2]
    assert "hidden size (7) is not a multiple" in outcome
    assert reproduced(tmp_path / "bundle.zip", tmp_path / "there") == ({"tiny/config.json"}, outcome)


def test_weights_are_in_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bundle.zip"
    assert call(f"bundle @:net --input 1x3x8x8 --with-weights -o {path}", monkeypatch) == 0
    with zipfile.ZipFile(path) as archive:
        assert archive.read("outcome.txt").strip() == b"prepared, calibrated and exported"
        archive.extract("weights.pth", tmp_path)
    given = f"bundle @:light --input 1x3x8x8 --weights {tmp_path}/weights.pth"
    assert call(f"{given} -o {path}", monkeypatch) == 0
    assert "give --with-weights" in capsys.readouterr().out
    assert call(f"{given} --with-weights -o {path}", monkeypatch) == 0
    outcome = capsys.readouterr().out.strip().rpartition("bundle.zip: ")[2]
    names, again = reproduced(path, tmp_path / "there")
    assert names == {"programs.py", "weights.pth"}
    assert again.partition(".pth does not fit")[2] == outcome.partition(".pth does not fit")[2] != ""
