"""Options for the file are checked before the ladder is climbed."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fxqat.cli.check_export_options import check_with_model
from fxqat.errors import ExportError
from tests.cli.test_main import call

NOTHING = {"dynamic_batch": False, "dynamic_shapes": None, "input_names": None, "output_names": None}


class Two(nn.Module):
    """Two inputs and two outputs; counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor, twice: bool = False) -> dict[str, Tensor]:
        self.calls += 1
        return {"sum": x + y, "difference": x - y} if not twice else {"sum": x + y}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--opset 12", "opset_version 12 is too low"),
        ("--opset 99", "opset_version 99 is newer"),
        ("--output-names a,a", "output_names must be different from each other"),
        ("--output-names a,", "output_names must be a sequence of non-empty strings"),
        ("--input-names a --output-names a", "in common"),
        ("--output-names a,b", "output_names must have one name for each output tensor, 1: output; got 2"),
        ("--input-names a,b", "input_names must have one name for each input tensor, 1: x; got 2"),
        ("--output-names x", "output_names: x names an input already"),
        ("--dynamic-shapes z=2:a", "the model has no input 'z'"),
        ("--dynamic-shapes x=7:a", "7"),
    ],
)
def test_what_the_export_would_refuse_is_told_before_the_ladder(
    options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    climbed: list[object] = []
    monkeypatch.setattr("fxqat.cli.quantize_command.climb", lambda *args, **_: climbed.append(args))
    assert call(f"quantize @:net --calib @:batches {options} -o {tmp_path / 'out'}", monkeypatch) == 2
    assert message in capsys.readouterr().err
    assert climbed == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_names": ["a"]}, "input_names must have one name for each input tensor, 2: x, y; got 1"),
        ({"output_names": ["a"]}, "one name for each output tensor, 2: sum, difference; got 1"),
        ({"output_names": ["y", "b"]}, "output_names: y names an input already"),
        ({"dynamic_shapes": {"twice": {0: "a"}}}, "twice"),
    ],
)
def test_names_are_counted_with_the_float_model(changes: dict[str, object], message: str) -> None:
    model = Two()
    with pytest.raises(ExportError, match=message):
        check_with_model(model, (torch.ones(1, 2), torch.ones(1, 2)), None, NOTHING | changes)
    assert float(model.calls) == 0


def test_arguments_that_the_configuration_fixes_are_no_inputs(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("concrete_args: {twice: true}")
    batch = (torch.ones(1, 2), torch.ones(1, 2))
    check_with_model(Two(), batch, config, NOTHING | {"input_names": ["a", "b"], "output_names": ["c"]})
    with pytest.raises(ExportError, match="one name for each output tensor, 1: sum; got 2"):
        check_with_model(Two(), batch, config, NOTHING | {"output_names": ["c", "d"]})
    with pytest.raises(ExportError, match="one name for each input tensor, 2: x, y; got 3"):
        check_with_model(Two(), batch, config, NOTHING | {"input_names": ["a", "b", "c"]})


def test_a_model_that_does_not_run_is_left_to_prepare() -> None:
    model = Two()
    check_with_model(model, (torch.ones(1, 2), torch.ones(1, 3)), None, NOTHING | {"output_names": ["a"]})
    assert float(model.calls) == 0
