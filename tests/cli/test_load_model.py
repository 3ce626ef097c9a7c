"""MODEL on the command line."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fxqat
from fxqat.cli.load_model import example_inputs, load_model
from fxqat.errors import ConfigError
from tests.cli.programs import Net
from tests.cli.test_main import PROGRAMS


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


def test_an_exported_program_is_a_model(tmp_path: Path) -> None:
    net, x = Net().eval(), torch.randn(2, 3, 8, 8)
    torch.export.save(torch.export.export(net, (x,)), tmp_path / "net.pt2")
    model = torch.export.load(tmp_path / "net.pt2").module()
    assert torch.equal(model(x), net(x))


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


def test_inputs_have_names_and_types() -> None:
    source = load_model(f"{PROGRAMS}:net")
    found = example_inputs(["tokens=2x5:int64", "mask=2x5:bool"], source)
    assert isinstance(found, dict)
    assert {name: (x.dtype, tuple(x.shape)) for name, x in found.items()} == {
        "tokens": (torch.int64, (2, 5)),
        "mask": (torch.bool, (2, 5)),
    }
