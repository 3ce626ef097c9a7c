"""The deployed copy computes as the model will, and the model stays as it is."""

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.errors import ExportError
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.nn.deployed import Normalize
from fxqat.quantization.deployed_copy import deployed_copy, deployed_inputs, is_half_precision
from tests.export_models import calibrate
from tests.models import prepared


def test_the_deployed_copy_is_switched_on():
    gm = prepared("two_readers").train()
    work = deployed_copy(gm)
    assert not any(module.training for module in work.modules())
    assert all(quant.fake_quant_enabled and not quant.observer_enabled for _, quant in named_fake_quants(work))
    assert not {id(p) for p in work.parameters()} & {id(p) for p in gm.parameters()}
    assert gm.training
    assert not any(p.requires_grad for p in work.parameters())
    assert all(p.requires_grad for p in gm.parameters())


class ByMode(nn.Module):
    """Another function in training."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
        y = self.layer(x)
        return y * 5 if self.training else y + 5


def test_the_graph_has_what_runs_in_eval_mode():
    gm = calibrate(prepare_by_platform(ByMode().eval(), "TSQAT"), (torch.randn(4, 3),))
    work, x = deployed_copy(gm.train()), torch.randn(4, 3)
    targets = {getattr(node.target, "__name__", node.target) for node in work.graph.nodes}
    assert "mul" not in targets
    assert "add" in targets
    assert torch.equal(work(x), gm.eval()(x))


def test_raw_inputs_are_normalized_before_anything_reads_them():
    gm = calibrate(prepare_by_platform(nn.Conv2d(3, 4, 1).eval(), "TSQAT"), (torch.randn(2, 3, 4, 4),))
    normalize = Normalize(torch.tensor(128.0), torch.tensor(64.0))
    raw = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    work = deployed_copy(gm, [normalize])
    assert torch.equal(work(raw), gm(normalize(raw)))
    names = [node.kwargs["tensor_name"] for node in work.graph.nodes if "tensor_name" in node.kwargs]
    before = [node.kwargs["tensor_name"] for node in gm.graph.nodes if "tensor_name" in node.kwargs]
    assert names == [f"{before[0]}_normalized", *before[1:]]


class Casting(nn.Module):
    """Casts to the type of its own weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        y = torch.sin(self.a(x).float())
        return self.b(y.to(dtype=x.dtype)) if x.dtype != torch.float16 else self.b(y.half())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_deployed_in_float32(dtype):
    x = torch.randn(4, 3).to(dtype)
    gm = calibrate(prepare_by_platform(Casting().to(dtype).eval(), "TSQAT", example_inputs=x), (x,))
    assert is_half_precision(gm)
    assert deployed_inputs(gm, (x,))[0].dtype == torch.float32
    work = deployed_copy(gm)
    assert {tensor.dtype for tensor in (*work.parameters(), *work.buffers())} == {torch.float32}
    assert dtype not in {argument for node in work.graph.nodes for argument in (*node.args, *node.kwargs.values())}
    result = work(x.float())
    assert result.dtype == torch.float32
    torch.testing.assert_close(gm(x).float(), result, rtol=0.02, atol=0.02)
    assert gm(x).dtype == dtype


def test_inputs_of_a_float32_model_keep_their_type():
    gm = prepared("two_readers")
    assert not is_half_precision(gm)
    assert deployed_inputs(gm, (torch.ones(1).half(),))[0].dtype == torch.float16


def test_a_float64_model_is_refused_with_the_remedy():
    gm = prepared("two_readers").double()
    with pytest.raises(ExportError, match=r"float64.* call gm.float\(\)"):
        deployed_copy(gm)
    assert not any(module.training for module in deployed_copy(gm.float()).modules())


@pytest.mark.parametrize("place", ["conv2.bias", "conv1.bn.running_var", "conv1.weight_fake_quant.relative_scale"])
def test_a_model_that_diverged_is_refused_by_name(place):
    gm = prepared("conv_bn_relu")
    state = gm.state_dict(keep_vars=True)
    with torch.no_grad():
        state[place].view(-1)[0] = torch.nan
    with pytest.raises(ExportError, match=f"^{place} of the model: NaN, training has diverged"):
        deployed_copy(gm)
