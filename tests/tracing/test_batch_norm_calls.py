"""BatchNorms with a forward of their own: folded and live like any other."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat import prepare_by_platform
from fxqat.nn.qat import QATLayer
from fxqat.tracing.trace import trace


class NormAct(nn.BatchNorm2d):
    """BatchNorm and ReLU in one, with the forward of BatchNorm and its check written out, as in timm."""

    def __init__(self, features, **options):
        super().__init__(features, **options)
        self.drop = nn.Identity()
        self.act = nn.ReLU()

    def forward(self, x):
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        if self.training and self.track_running_stats:
            self.num_batches_tracked.add_(1)
        bn_training = bool(self.training) or (self.running_mean is None and self.running_var is None)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, bn_training, self.momentum, self.eps
        )
        return self.act(self.drop(x))


class Passing(nn.BatchNorm2d):
    """The mode is passed on."""

    def forward(self, input):
        return F.batch_norm(
            input=input,
            running_mean=self.running_mean,
            running_var=self.running_var,
            weight=self.weight,
            bias=self.bias,
            training=self.training,
            momentum=self.momentum,
            eps=self.eps,
        ).relu()


class Net(nn.Module):
    def __init__(self, norm=NormAct, **options):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 6, 3, bias=False)
        self.bn = norm(6, **options)
        self.last = nn.Conv2d(6, 4, 1)
        for buffer in (self.bn.running_mean, self.bn.running_var):
            if buffer is not None:
                nn.init.uniform_(buffer, 0.5, 1.5)

    def forward(self, x):
        return self.last(self.bn(self.conv(x)))


def image(batch=4):
    torch.manual_seed(1)
    return torch.randn(batch, 3, 8, 8)


@pytest.mark.parametrize("with_inputs", [True, False])
@pytest.mark.parametrize(("norm", "options"), [(NormAct, {}), (NormAct, {"affine": False}), (Passing, {"eps": 0.1})])
def test_it_is_fused_and_computes_the_same_in_both_modes(norm, options, with_inputs):
    model = Net(norm, **options)
    reference = copy.deepcopy(model)
    gm = prepare_by_platform(model, example_inputs=(image(),) if with_inputs else None)
    assert isinstance(gm.conv, QATLayer)
    assert type(gm.conv.bn) is nn.BatchNorm2d
    assert isinstance(gm.conv.activation, nn.ReLU)
    assert gm.quant_report.eval_only == ()
    for mode in ("train", "train", "eval"):
        expected, actual = getattr(reference, mode)()(image()), getattr(gm, mode)()(image())
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(gm.conv.bn.running_mean, reference.bn.running_mean)
        torch.testing.assert_close(gm.conv.bn.running_var, reference.bn.running_var)


def test_every_tensor_of_the_model_is_in_the_result_once(tmp_path):
    model = Net()
    gm = prepare_by_platform(model, example_inputs=(image(),))
    assert gm.quant_report.unread == ()
    assert set(gm.provenance.tensor_names) == set(model.state_dict())
    gm.train()(image())
    fxqat.save_checkpoint(gm, tmp_path / "checkpoint.pth")
    saved = torch.load(tmp_path / "checkpoint.pth", weights_only=True)
    assert any(set(model.state_dict()) == set(part) for part in saved.values() if isinstance(part, dict))


class Borrowing(nn.Module):
    """Calls batch_norm with another module's tensors, and with batch statistics."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x):
        x = self.conv(x)
        a = F.batch_norm(x, self.bn.running_mean, self.bn.running_var, self.scale, self.bn.bias)
        b = F.batch_norm(x, None, None, self.bn.weight, self.bn.bias, True)
        c = F.batch_norm(x, self.bn.running_mean, self.bn.running_var, None, None, False, 0.1, 1e-3)
        return a + b + c


def test_a_call_with_other_tensors_stays_a_call():
    model = Borrowing().eval()
    traced = trace(model, example_inputs=(image(),))
    assert [node.target for node in traced.gm.graph.nodes].count(F.batch_norm) == 3
    torch.testing.assert_close(traced.gm(image()), model(image()))


def test_identity_leaves_the_graph_unless_it_is_watched():
    model = nn.Sequential(nn.Identity(), nn.Conv2d(3, 4, 1), nn.Identity(), nn.ReLU(), nn.Identity())
    gm = prepare_by_platform(model, example_inputs=(image(),))
    assert [row.target for row in gm.quant_report] == ["input", "1"]
    torch.testing.assert_close(gm(image()), model(image()))
    seen = []
    model[2].register_forward_hook(lambda *_: seen.append(1))
    gm = prepare_by_platform(model, check="off")
    seen.clear()  # a hook also runs while the model is traced
    gm(image())
    assert seen == [1]
