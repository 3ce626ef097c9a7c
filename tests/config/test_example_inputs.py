"""Example inputs by name: the same prepared model and the same file as with a tuple; wrong ones are clear errors."""

import inspect
from collections import UserDict

import pytest
import torch
from torch import nn

from fxqat import calibrate, convert_export, disable_all, enable_quantization, prepare_by_platform
from fxqat.config.example_inputs import inputs_in_order
from fxqat.errors import ConfigError, ExportError
from fxqat.tools import ptq
from fxqat.tools.mixed_precision.bank import WidthBank


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
    found, left_out = inputs_in_order(Net(), given, fixed)
    assert left_out == {}
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


class Defaults(nn.Module):
    """Arguments whose defaults are not None, before and after those that are given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, scale=2.0, mask=None, keep=0, names=("a",)):
        y = self.layer(x) * (100.0 if scale is None else scale)
        y = y if mask is None else y * mask
        return y[:, slice(keep, None) if isinstance(keep, int) else keep] * len(names)


@pytest.mark.parametrize("given", [{"x": X}, {"x": X, "mask": MASK}, {"mask": MASK, "x": X, "scale": None}])
@pytest.mark.parametrize("way", ["prepare", "ptq", "WidthBank"])
def test_what_a_dict_leaves_out_has_its_default(given, way):
    model = Defaults().eval()
    if way == "prepare":
        gm = prepare_by_platform(model, "TSQAT", example_inputs=given)
    elif way == "ptq":
        gm = ptq(model, [given | {"labels": torch.zeros(2)}], compare=False)
    else:
        bank = WidthBank(model, [given], weight_widths=(4, 8))
        gm = bank.mix({name: widths[-1] for name, widths in bank.widths.items()})
    disable_all(gm)
    tensors = {name: value for name, value in given.items() if value is not None}
    torch.testing.assert_close(gm(**tensors), model(**given))
    assert list(inspect.signature(gm.forward).parameters) == [name for name in ("x", "mask") if name in given]


def test_defaults_before_a_given_argument_are_told_apart_from_none():
    found, left_out = inputs_in_order(Defaults(), {"x": X, "mask": MASK})
    assert left_out == {"scale": 2.0}
    assert [id(value) for value in found] == [id(X), id(MASK)]
    found, left_out = inputs_in_order(Defaults(), {"x": X, "mask": MASK, "scale": None})
    assert (left_out, len(found), found[1]) == ({}, 3, None)


@pytest.mark.parametrize("name", ["scale", "keep"])
def test_an_argument_is_fixed_among_those_that_are_given(name):
    model, value = Defaults().eval(), {"scale": 3.0, "keep": 1}[name]
    given = (X, MASK) if name == "scale" else (X, None, MASK)
    gm = prepare_by_platform(model, "TSQAT", {"concrete_args": {name: value}}, example_inputs=given)
    assert any("equal to the model" in line for line in gm.quant_report.sameness)
    disable_all(gm)
    scale = {} if name == "scale" else {"scale": None}
    torch.testing.assert_close(gm(X, MASK), model(X, mask=MASK, **{name: value}, **scale))
