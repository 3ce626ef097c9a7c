"""Torch's default dtype, which trainers change for a model in bfloat16, changes nothing that fake-quant computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import fxqat
from fxqat.fake_quantize import kernels


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 33, 3), nn.BatchNorm2d(33), nn.Linear(33, 5)
        self.recurrent, self.table = nn.LSTM(36, 33, batch_first=True), nn.Embedding(2, 36)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn(self.conv(x)))
        rows = torch.cat([y.flatten(2), self.table((x[:, 0, 0] > 0).long())], 1)
        return self.head(y.mean((2, 3)) + self.recurrent(rows)[0].mean(1))


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trained(
    backend: str, dtype: torch.dtype, observer: str, method: str = "Learnable"
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Gradients of one step, and the state, of a float32 model that is calibrated and trained under a default dtype."""
    torch.manual_seed(0)
    model = Network()
    x = torch.randn(4, 3, 8, 8)
    config = {
        "extra_quantizer_dict": {"additional_module_type": [nn.Embedding]},
        "extra_qconfig_dict": {"a_observer": observer, "w_observer": observer, "w_fakequantize": method},
    }
    gm = fxqat.prepare_by_platform(model, backend, config, check="off")  # refuses another default dtype
    with default(dtype):
        fxqat.calibrate(gm, [x, 2 * x], progress=False)
        fxqat.enable_quantization(gm)
        gm.train()
        gm(x).square().mean().backward()
    return [parameter.grad for parameter in gm.parameters() if parameter.grad is not None], gm.state_dict()


@pytest.mark.parametrize("use_kernels", [True, False])
@pytest.mark.parametrize("backend", ["TSQAT", "Experimental"])
@pytest.mark.parametrize("method", ["Learnable", "Oscillation"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_no_gradient(
    dtype: torch.dtype, method: str, backend: str, use_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not use_kernels:
        monkeypatch.setattr(kernels, "LIBRARY", None)
    (found, state), (expected, before) = (trained(backend, kind, "MinMax", method) for kind in (dtype, torch.float32))
    assert len(found) == len(expected) > 8
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    for name, value in before.items():
        assert state[name].dtype == value.dtype, name
        assert torch.equal(state[name], value), name


@pytest.mark.parametrize(
    "observer", ["Average", "Percentile", "MSE", "EMAMSE", "KL", "HistogramL2", "ClipStd", "LSQ", "LSQPlus"]
)
def test_the_default_dtype_changes_no_range(observer: str) -> None:
    (_, found), (_, expected) = (trained("Experimental", kind, observer) for kind in (torch.bfloat16, torch.float32))
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
