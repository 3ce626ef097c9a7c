"""A model with its own ``train()``: the prepared model puts its modules into the same modes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat.errors import ConfigError


class Frozen(nn.Module):
    """A BatchNorm that always is in eval mode, and a dropout that always is in training."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.drop, self.last = nn.Dropout(0.5), nn.Conv2d(4, 2, 1)
        nn.init.uniform_(self.bn.running_var, 0.5, 2.0)

    def forward(self, x):
        return self.last(self.drop(self.bn(self.conv(x)).relu()))

    def train(self, mode=True):
        super().train(mode)
        self.bn.eval()
        self.drop.train()
        return self


class ReturnsNothing(Frozen):
    """Its ``train()`` does not return it, as in the backbones of mmpretrain."""

    def train(self, mode=True):
        super().train(mode)


class FrozenInForward(Frozen):
    """The same, by its forward, as anomalib's FastFlow does it."""

    train = nn.Module.train

    def forward(self, x):
        self.freeze()
        return super().forward(x)

    def freeze(self):
        self.bn.eval()
        self.drop.train()


class WantsTargets(FrozenInForward):
    """Its forward cannot run in training without targets, after it has set the modes."""

    def forward(self, x, targets=None):
        y = super().forward(x)
        if self.training and targets is None:
            raise ValueError("no targets")
        return y


X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def same_numbers(model):
    torch.manual_seed(1)
    return model(X)


@pytest.mark.parametrize(
    ("given", "kind"),
    [((X,), Frozen), (None, Frozen), ((X,), FrozenInForward), ((X,), ReturnsNothing)],
    ids=["inputs", "no inputs", "by forward", "returns nothing"],
)
def test_modules_keep_the_modes_that_the_model_gives_them(given, kind):
    model = nn.Sequential(nn.Conv2d(3, 3, 1), kind()).train()
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=given, check="off")
    assert gm.quant_report.remarks == []
    for twin in (gm, copy.deepcopy(gm), pickle.loads(pickle.dumps(gm))):
        mean = twin.get_submodule("1.conv.bn").running_mean.clone()
        for mode in (True, False):
            model.train(mode)
            twin.train(not mode).train(mode)
            torch.testing.assert_close(same_numbers(twin), same_numbers(model))
            assert twin.training is mode
            assert not twin.get_submodule("1.conv.bn").training
            assert twin.get_submodule("1.drop").training
        assert torch.equal(twin.get_submodule("1.conv.bn").running_mean, mean)


def test_a_model_whose_train_returns_nothing_is_prepared_and_its_missing_result_is_refused():
    model = ReturnsNothing()
    model.eval()
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(X,))
    assert gm.train() is gm
    with pytest.raises(ConfigError, match="got NoneType: where train.. returns nothing"):
        fxqat.prepare_by_platform(model.eval(), "TSQAT", example_inputs=(X,))


def test_a_mode_that_a_traced_forward_reads_is_reported(caplog):
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 6)

        def forward(self, x):
            return F.dropout(self.fc(x), 0.5, self.training)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.noisy, self.last = Noisy(), nn.Linear(6, 6)

        def forward(self, x):
            return self.last(self.noisy(x))

        def train(self, mode=True):
            super().train(mode)
            self.noisy.eval()
            return self

    gm = fxqat.prepare_by_platform(Net(), "TSQAT", example_inputs=(X[0, 0],))
    line = "the model itself puts noisy into eval mode: the prepared model does that for layers only"
    assert gm.quant_report.state_changes == (line,)
    assert line in caplog.text


def test_a_forward_that_fails_in_training_has_set_its_modes():
    model = WantsTargets()
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=X, check="off")
    gm.train()
    assert not gm.get_submodule("conv.bn").training
    assert gm.get_submodule("drop").training
    assert model.bn.training  # the user's model is as before


def test_what_forward_freezes_is_compared_with_the_model():
    model = FrozenInForward()
    model.drop.p = 0.0
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=X)
    mean = gm.get_submodule("conv.bn").running_mean.clone()
    gm.train()(X)
    assert torch.equal(gm.get_submodule("conv.bn").running_mean, mean)
