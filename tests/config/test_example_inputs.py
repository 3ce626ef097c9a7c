"""Example inputs by name: the same prepared model and the same file as with a tuple; wrong ones are clear errors."""

from collections import UserDict

import pytest
import torch
from torch import nn

from fxqat import calibrate, convert_export, enable_quantization, prepare_by_platform
from fxqat.config.example_inputs import inputs_in_order
from fxqat.errors import ConfigError, ExportError


class Net(nn.Module):
    """Takes two inputs, one of them optional, and a switch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, bias=None, mask=None, double=False):
        y = self.a(x) if bias is None else self.a(x) + bias
        y = y if mask is None else y * mask
        return self.b(y) * 2 if double else self.b(y)


X, MASK = torch.ones(2, 4), torch.tensor([1.0, 0.0, 1.0, 0.5])


@pytest.mark.parametrize(
    ("given", "fixed", "expected"),
    [
        (None, None, None),
        (X, None, (X,)),
        ([X, MASK], None, (X, MASK)),
        ({"x": X}, None, (X,)),
        ({"mask": MASK, "x": X}, None, (X, None, MASK)),
        (UserDict(x=X, mask=MASK), {"bias": None}, (X, MASK)),
        ({"double": True, "x": X}, {"mask": None}, (X, None, True)),
    ],
)
def test_inputs_are_put_in_order(given, fixed, expected):
    found = inputs_in_order(Net(), given, fixed)
    assert (found is None) == (expected is None)
    assert [id(value) for value in found or ()] == [id(value) for value in expected or ()]


@pytest.mark.parametrize(
    ("given", "fixed", "message"),
    [
        ({"x": X, "maks": MASK}, None, "no positional argument 'maks'; did you mean 'mask'"),
        ({"mask": MASK}, None, "x is missing"),
        ({"x": X, "double": True}, {"double": True}, "'double' has a value in concrete_args already"),
    ],
)
def test_names_that_do_not_fit_are_errors(given, fixed, message):
    with pytest.raises(ConfigError, match=message) as caught:
        inputs_in_order(Net(), given, fixed)
    assert "of Net" in str(caught.value)


class OnlyByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, *, factor):
        return self.layer(x) * factor


def test_a_keyword_only_argument_is_refused_with_what_to_do():
    x = torch.randn(2, 4)
    with pytest.raises(ConfigError, match="'factor' is a keyword-only argument.*or fix its value with concrete_args"):
        inputs_in_order(OnlyByName(), {"x": x, "factor": torch.ones(4)}, None)
    gm = prepare_by_platform(OnlyByName(), "TSQAT", {"concrete_args": {"factor": 2.0}}, example_inputs=x)
    assert gm(x).shape == x.shape


def test_a_dict_prepares_calibrates_and_exports_what_a_tuple_does(tmp_path):
    models = []
    for number, inputs in enumerate(((X, None, MASK), UserDict(mask=MASK, x=X))):
        gm = prepare_by_platform(Net(), example_inputs=inputs)
        named = inputs if number else tuple(value for value in inputs if value is not None)
        calibrate(gm, [named], progress=False)
        enable_quantization(gm)
        convert_export(gm.eval(), named, tmp_path / f"{number}.onnx")
        models.append(gm)
    assert torch.equal(models[0](X, MASK), models[1](x=X, mask=MASK))
    assert (tmp_path / "0.onnx").read_bytes() == (tmp_path / "1.onnx").read_bytes()
    with pytest.raises(ExportError, match="does not fit forward"):
        convert_export(models[0], {"x": X, "bias": MASK}, tmp_path / "2.onnx")
