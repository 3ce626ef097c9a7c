"""A program that gives arguments which the prepared model does not have goes on working, if they are as before."""

import copy
import inspect
import io
import pickle

import pytest
import torch
from torch import nn

import fxqat
from fxqat.errors import ExportError

X, Y = torch.linspace(-1, 1, 24).view(3, 8), torch.linspace(0, 2, 24).view(3, 8)


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x, mask=None, other=None, *, scale=1.0, mode="sum"):
        y = self.layer(x) * scale
        y = y if mask is None else y + mask
        y = y if other is None else y * other
        return y.sum(-1) if mode == "sum" else y


def prepared(example_inputs=(X, None, Y), **config):
    return fxqat.prepare_by_platform(Optional().eval(), "TSQAT", config or None, example_inputs=example_inputs)


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((X, Y), {}),
        ((X, None, Y), {}),
        ((X,), {"other": Y}),
        ((X, None, Y), {"scale": 1.0, "mode": "sum"}),
        ((), {"x": X, "mask": None, "other": Y, "scale": 1}),
    ],
)
def test_a_call_may_give_them(args, kwargs):
    gm = prepared()
    torch.testing.assert_close(gm(*args, **kwargs), Optional()(X, None, Y))
    assert list(inspect.signature(gm.forward).parameters) == ["x", "other"]  # what trainers read


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((X, Y, Y), {}, r"mask=float32 tensor \(3, 8\), but the model was prepared with mask=None"),
        ((X, Y), {"mask": X}, "mask="),
        ((X, Y), {"scale": 2.0}, "scale=2.0, but the model was prepared with scale=1.0"),
        ((X, Y), {"mode": None}, "prepared with mode='sum'"),
    ],
)
def test_another_value_is_refused(args, kwargs, told):
    gm = prepared()
    with pytest.raises(TypeError, match=told):
        gm(*args, **kwargs)
    assert gm(X, Y).shape == (3,)


def test_what_forward_never_had_is_refused_by_python():
    gm = prepared()
    with pytest.raises(TypeError, match="takes 3 positional"):
        gm(X, None, Y, None)
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        gm(X, Y, size=1)


def test_arguments_that_the_user_fixed():
    gm = prepared((X,), concrete_args={"scale": 3.0})
    torch.testing.assert_close(gm(X, scale=3.0), Optional()(X, scale=3.0))
    with pytest.raises(TypeError, match="prepared with scale=3.0"):
        gm(X, scale=1.0)


def test_batches_and_exports_take_them(tmp_path):
    gm = prepared()
    fxqat.calibrate(gm, [(X, None, Y), (X, Y)], progress=False)
    fxqat.enable_quantization(gm)
    for inputs in ((X, None, Y), (X, Y)):
        assert fxqat.convert_export(gm, inputs, tmp_path / "file.onnx").certificate.passed
    with pytest.raises(ExportError, match="mask="):
        fxqat.convert_export(gm, (X, Y, Y), tmp_path / "other.onnx")
    assert not (tmp_path / "other.onnx").exists()


def test_copies_take_them():
    gm = prepared()
    saved = io.BytesIO()
    torch.save(gm, saved)
    saved.seek(0)
    copies = (copy.deepcopy(gm), pickle.loads(pickle.dumps(gm)), torch.load(saved, weights_only=False))
    for copied in copies:
        torch.testing.assert_close(copied(X, None, Y), gm(X, Y))


def test_compiled_code_takes_them():
    gm = prepared()
    fxqat.calibrate(gm, [(X, Y)], progress=False)
    fxqat.enable_quantization(gm)
    compiled = torch.compile(gm, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X, None, Y, scale=1.0), gm(X, Y))
    torch.testing.assert_close(compiled(X, Y), gm(X, Y))


def test_a_model_without_such_arguments_has_no_hook():
    gm = fxqat.prepare_by_platform(nn.Sequential(nn.Linear(8, 8)), "TSQAT", example_inputs=X)
    assert not gm._forward_pre_hooks
    assert prepared()._forward_pre_hooks
