"""MODEL on the command line."""

import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fxqat
from fxqat.cli import read_exported
from fxqat.cli.load_model import example_inputs, load_model
from fxqat.errors import ConfigError
from tests.cli.programs import Net
from tests.cli.test_main import PROGRAMS, call


def test_libraries_know_their_inputs() -> None:
    source = load_model("timm:resnet10t")
    assert source.input_shape == (3, 176, 176)
    assert source.preprocessing is not None
    assert source.preprocessing.crop == 176
    source = load_model("torchvision:squeezenet1_1")
    assert source.input_shape == (3, 224, 224)
    assert source.preprocessing is not None
    assert (source.preprocessing.resize, source.preprocessing.mean) == (256, (0.485, 0.456, 0.406))
    assert example_inputs([], source)[0].shape == (1, 3, 224, 224)


class Mixed(nn.Module):
    """Operators whose arguments have another order than the functions of torch, or that have none."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.words = Net(), nn.Embedding(7, 8)
        self.norm, self.conv = nn.LayerNorm(8), nn.ConvTranspose2d(4, 4, 2, 2, groups=2)

    def forward(self, x: torch.Tensor, words: torch.Tensor) -> dict[str, torch.Tensor]:
        y = nn.functional.interpolate(self.net.body[:3](x), scale_factor=2, mode="bilinear", align_corners=False)
        y = nn.functional.interpolate(y, size=(8, 8))
        found = self.norm(y.mean((2, 3)) + self.words(words)).softmax(-1)
        return {"a": self.conv(y[:, 1:5, ::2])[:, :, 1:-1], "b": found.clone().unsqueeze(0).expand(2, -1, -1)}


def test_an_exported_program_is_a_model(tmp_path: Path) -> None:
    net, inputs = Mixed().eval(), (torch.randn(2, 3, 8, 8), torch.tensor([1, 5]))
    batch = {0: torch.export.Dim("batch")}
    torch.export.save(torch.export.export(net, inputs, dynamic_shapes=(batch, batch)), tmp_path / "net.pt2")
    model = load_model(str(tmp_path / "net.pt2")).model
    assert model.state_dict().keys() == net.state_dict().keys()
    more = (torch.randn(5, 3, 8, 8), torch.tensor([1, 5, 0, 0, 6]))
    for found, exact in zip(model(*more).values(), net(*more).values(), strict=True):
        assert torch.equal(found, exact)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=more, check="quick")
    ops = {row.op: row.status for row in gm.quant_report}
    assert (ops["conv2d"], ops["conv_transpose2d"]) == ("quantized", "shares")
    assert "batch_norm" not in ops  # part of the convolution


def test_a_table_of_an_exported_program_keeps_its_padding(tmp_path: Path) -> None:
    """The row of the padding gets no gradient."""
    table = nn.Embedding(5, 3, padding_idx=1)
    torch.export.save(torch.export.export(table, (torch.tensor([1, 2]),)), tmp_path / "table.pt2")
    model = load_model(str(tmp_path / "table.pt2")).model
    model(torch.tensor([1, 2])).sum().backward()
    assert model.weight.grad.abs().sum(1).tolist() == [0, 0, 3, 0, 0]


def test_a_program_without_example_inputs_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = torch.export.export(nn.Softmax(-1), (torch.randn(2, 3),))
    program.example_inputs = None
    torch.export.save(program, tmp_path / "net.pt2")
    load_model(str(tmp_path / "net.pt2"))
    assert "net.pt2 holds no example inputs: the model read from it is not compared with the program" in caplog.text


def test_a_program_that_is_read_wrongly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions are found by name: one that takes other arguments must not pass unseen."""
    torch.export.save(torch.export.export(nn.Softmax(-1), (torch.randn(2, 3),)), tmp_path / "net.pt2")
    monkeypatch.setitem(read_exported.OTHERS, "softmax", lambda x, dim, *_: x.softmax(0))
    with pytest.raises(ConfigError, match="net.pt2: fxqat cannot read this program: .* computes something else"):
        load_model(str(tmp_path / "net.pt2"))


@pytest.mark.parametrize("form", ["safetensors", "state_dict", "module.", "checkpoint"])
def test_weights_are_read_in_every_form(form: str, tmp_path: Path) -> None:
    net = Net()
    with torch.no_grad():
        net.head.bias.fill_(7.0)
    path = tmp_path / ("w.safetensors" if form == "safetensors" else "w.pth")
    if form == "safetensors":
        save_file(net.state_dict(), path)
    elif form == "checkpoint":
        fxqat.save_checkpoint(fxqat.prepare_by_platform(net), path)
    else:
        prefix = "module." if form == "module." else ""
        torch.save({"state_dict": {f"{prefix}{name}": value for name, value in net.state_dict().items()}}, path)
    model = load_model(f"{PROGRAMS}:net", path).model
    assert torch.equal(model.head.bias, net.head.bias)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "w.pth")
    with pytest.raises(ConfigError, match=r"does not fit Net: .* missing \(body.0.bias.*2 unknown \(bias, weight"):
        load_model(f"{PROGRAMS}:net", tmp_path / "w.pth")


@pytest.mark.parametrize("model", ["net.py:make", "net:make"])
def test_a_factory_and_its_model_import_when_they_are_called(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bundle takes along what they import, but no installed package, also if its environment is in the folder."""
    factory = (
        "import sys\n\ndef make():\n    sys.path.append('.venv/site-packages')\n    import library\n"
        "    from lazy.body import Body\n    return Body()\n"
    )
    body = (
        "import importlib\nfrom torch import nn\n\nclass Body(nn.Module):\n    def forward(self, x):\n"
        "        return x * importlib.import_module('lazy.' + 'factor').FACTOR\n"
    )
    files = {"net.py": factory, "lazy/body.py": body, "lazy/factor.py": "FACTOR = 3\n"}
    for name, text in (files | {".venv/site-packages/library.py": ""}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert call(f"check {model} --input 1x3", monkeypatch) == 0
    assert "TSQAT: " in capsys.readouterr().out
    assert call(f"bundle {model} --input 1x3 -o b.zip", monkeypatch) == 0
    assert capsys.readouterr().out.endswith("b.zip: prepared, calibrated and exported\n")
    with zipfile.ZipFile(tmp_path / "b.zip") as archive:
        assert {name for name in archive.namelist() if name.endswith(".py")} == {*files, "reproduce.py"}


def test_inputs_have_names_and_types() -> None:
    source = load_model(f"{PROGRAMS}:net")
    found = example_inputs(["tokens=2x5:int64", "mask=2x5:bool"], source)
    assert isinstance(found, dict)
    assert {name: (x.dtype, tuple(x.shape)) for name, x in found.items()} == {
        "tokens": (torch.int64, (2, 5)),
        "mask": (torch.bool, (2, 5)),
    }
