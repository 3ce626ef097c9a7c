"""Steps with NaN or infinity are skipped, and the place is named."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat.fake_quantize.fake_quantizes import FAKE_QUANTIZES
from fxqat.numerics import SCALE_MAX, SCALE_MIN
from fxqat.tools import NaNGuard, first_not_finite
from tests.models import BasicBlock

STEPS = 35


class Net(nn.Module):
    """A stem, a block and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.block = BasicBlock(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.stem(x)).mean((2, 3)))


def prepared(config=None):
    torch.manual_seed(0)
    gm = fxqat.prepare_by_platform(Net().eval(), "Experimental", config)
    fxqat.enable_calibration(gm)
    gm(torch.randn(8, 3, 8, 8))
    fxqat.enable_quantization(gm)
    return gm.train()


def in_float(model):
    """Prepared, fake-quants off: they would clamp infinity."""
    return fxqat.prepare_by_platform(model.eval(), "TSQAT")


def step(gm, optimizer, guard, x, scale=1.0, **options):
    optimizer.zero_grad()
    loss = (F.cross_entropy(gm(x), torch.arange(len(x)) % 3) * scale).sum()
    loss.backward()
    accepted = guard.accepts(loss, x, **options)
    if accepted:
        optimizer.step()
    return accepted


@pytest.mark.filterwarnings("ignore:Training step skipped")
@pytest.mark.parametrize("name", sorted(FAKE_QUANTIZES))
def test_no_training_breaks_a_scale(name):
    """Learning rate 10, zero gradients, batches of NaN."""
    scheme = {"bit": 4, "pot_scale": name == "TQT"}
    weights_only = FAKE_QUANTIZES[name].weights_only
    qconfig = {"w_fakequantize": name, "a_fakequantize": "Learnable" if weights_only else name}
    gm = prepared({"extra_qconfig_dict": qconfig | {"w_qscheme": scheme, "a_qscheme": scheme}})
    optimizer = torch.optim.SGD(gm.parameters(), lr=10.0, momentum=0.9)
    guard = NaNGuard(gm)
    quants = [module for module in gm.modules() if hasattr(module, "qparams")]
    assert len(quants) > 8
    accepted = 0
    for i in range(STEPS):
        x = torch.randn(4, 3, 8, 8)
        if i % 7 == 3:
            x[1, 2, 3, 3] = math.nan
            with pytest.warns(RuntimeWarning, match="first appears in the model's input x"):
                assert not step(gm, optimizer, guard, x)
        else:  # weights grow until they overflow
            accepted += step(gm, optimizer, guard, x, scale=float(i % 3 > 0))
        for quant in quants:
            scale, zero_point = quant.qparams()
            assert bool(((scale >= SCALE_MIN) & (scale <= SCALE_MAX)).all())
            assert bool(zero_point.isfinite().all())
    assert accepted + guard.skipped == STEPS
    assert accepted > 2
    assert not any(bool(tensor.isnan().any()) for tensor in (*gm.parameters(), *_statistics(gm)))


def _statistics(gm):
    return [tensor for name, tensor in gm.named_buffers() if "running" in name]


def test_a_skipped_step_changes_nothing():
    gm = prepared()
    assert _statistics(gm)
    twin = copy.deepcopy(gm)
    good = [torch.randn(4, 3, 8, 8) for _ in range(3)]
    bad = torch.full((4, 3, 8, 8), math.nan)
    for model, batches in ((gm, [good[0], bad, good[1], bad, bad, good[2]]), (twin, good)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        guard = NaNGuard(model)
        for x in batches:
            if x is bad:
                with pytest.warns(RuntimeWarning, match=f"skipped \\({guard.skipped + 1} so far\\)"):
                    assert not step(model, optimizer, guard, x)
                assert all(parameter.grad is None for parameter in model.parameters())
            else:
                assert step(model, optimizer, guard, x)
    for (name, tensor), other in zip(gm.state_dict().items(), twin.state_dict().values(), strict=True):
        assert not isinstance(tensor, torch.Tensor) or torch.equal(tensor.nan_to_num(7), other.nan_to_num(7)), name


def test_a_weight_with_nan_is_named():
    gm = prepared()
    guard = NaNGuard(gm)
    optimizer = torch.optim.SGD(gm.parameters(), lr=0.1)
    with torch.no_grad():
        gm.get_submodule("block.conv2").weight[1, 2] = math.nan
    with pytest.warns(RuntimeWarning, match=r"first appears in block.conv2, whose weight is not finite\. Check"):
        assert not step(gm, optimizer, guard, torch.randn(4, 3, 8, 8))


class Divides(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        big = torch.exp(y * 1e4)
        return big / big.sum(1, keepdim=True)


def test_the_infinity_that_causes_nan_is_named():
    torch.manual_seed(0)
    assert first_not_finite(in_float(Divides()), torch.randn(4, 3, 8, 8)) == "truediv, computed from infinity in exp"


class Masks(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return torch.softmax(y.masked_fill(y < 0, -math.inf), 1)


class Infinite(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.log(super().forward(x) * 0)


def test_infinity_counts_where_it_reaches_the_output():
    x = torch.randn(4, 3, 8, 8)
    assert first_not_finite(in_float(Masks()), x) == ""
    assert first_not_finite(in_float(Infinite()), x) == "log"


def test_a_gradient_or_the_loss_is_named():
    gm = prepared()
    optimizer = torch.optim.SGD(gm.parameters(), lr=0.1)
    guard = NaNGuard(gm)
    x = torch.randn(4, 3, 8, 8)
    loss = gm(x).sum() * 0 + math.inf
    loss.backward()
    with pytest.warns(RuntimeWarning, match="first appears in the loss: the model's output is finite"):
        assert not guard.accepts(loss, x)
    handle = gm.get_parameter("head.weight").register_hook(lambda grad: grad / 0)
    with pytest.warns(RuntimeWarning, match="the gradient of head.weight"):
        assert not step(gm, optimizer, guard, x)
    assert step(gm, optimizer, guard, x, gradients=False)
    handle.remove()


def test_all_ranks_skip_a_step_that_one_skips(monkeypatch):
    gm = prepared()
    guard, x, loss = NaNGuard(gm), torch.randn(4, 3, 8, 8), torch.tensor(2.0)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.add_(math.nan))
    with pytest.warns(RuntimeWarning, match="\\(each is finite\\), or on another rank"):
        assert not guard.accepts(loss, x, gradients=False)
    assert float(loss) == 2.0


def test_wrapped_models():
    gm = prepared()
    guard = NaNGuard(torch.compile(gm, backend="eager"))
    assert guard.gm is gm
    assert guard.accepts(torch.zeros(()), torch.randn(4, 3, 8, 8))
