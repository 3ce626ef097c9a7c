"""Adaptive pools: ONNX Runtime computes every window as torch does, and open sizes are refused with a reason."""

from collections import Counter

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxqat
from fxqat.errors import ExportError
from fxqat.fake_quantize.state import named_fake_quants
from tests.export_models import run_file
from tests.test_custom_symbolic_opset import Functions, exported

X = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(0)) * 5
SIZES = [1, (1, 4), (3, 1), 2, (2, 3), (4, 4), (6, 8), (7, 9)]
VOLUMES = [1, (2, 1, 4), (1, 2, 4), (2, 4, 5)]
POOLS = [
    *(lambda x, n=n, pool=pool: pool(x, n) for n in SIZES for pool in (F.adaptive_max_pool2d, F.adaptive_avg_pool2d)),
    *(lambda x, n=n: F.adaptive_max_pool2d(x[1], n) for n in SIZES),
    *(lambda x, n=n: F.adaptive_avg_pool2d(x[1], n) for n in SIZES),
    *(lambda x, n=n: F.adaptive_max_pool3d(x, n) for n in VOLUMES),
    *(lambda x, n=n: F.adaptive_avg_pool3d(x[:, None], n) for n in VOLUMES),
    *(lambda x, n=n: F.adaptive_max_pool1d(x[:, 0], n) for n in (1, 4, 5)),
    *(lambda x, n=n: F.adaptive_avg_pool1d(x[:, 0], n) for n in (1, 4, 5)),
    # the places of the maxima
    *(lambda x, n=n: F.adaptive_max_pool2d(x, n, return_indices=True)[1] for n in (1, 2, (3, 2), (4, 3), (7, 9))),
    lambda x: F.adaptive_max_pool2d((x / 5).round(), (4, 3), return_indices=True)[1],  # with equal maxima
    lambda x: F.adaptive_max_pool2d(x[1], 2, return_indices=True)[1],
    lambda x: F.adaptive_max_pool1d(x[:, 0], 1, return_indices=True)[1],
    *(lambda x, n=n: F.adaptive_max_pool3d(x, n, return_indices=True)[1] for n in ((3, 2, 1), (2, 4, 5))),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What ONNX Runtime and torch compute for each pool, from one export of all of them."""
    path = tmp_path_factory.mktemp("pools") / "pools.onnx"
    exported(Functions(POOLS), X, path)
    return list(zip(run_file(path, [X]), (pool(X).numpy() for pool in POOLS), strict=True))


@pytest.mark.xdist_group("adaptive pools")
@pytest.mark.parametrize("place", range(len(POOLS)))
def test_every_window_is_that_of_torch(place, results):
    found, expected = results[place]
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


class Pooled(nn.Module):
    def __init__(self, pool):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.pool, self.last = nn.Conv2d(3, 4, 1), pool, nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.last(self.pool(self.conv(x)))


class Function(nn.Module):
    def forward(self, x):
        return F.adaptive_max_pool2d(x, (2, 3))


def prepared(pool, x, backend="TSQAT"):
    gm = fxqat.prepare_by_platform(Pooled(pool).eval(), backend, example_inputs=x)
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    return gm


@pytest.mark.parametrize(
    ("pool", "width", "operators"),
    [
        (nn.AdaptiveMaxPool2d((2, 3)), 9, {"MaxPool": 1}),
        (nn.AdaptiveMaxPool2d((2, 3)), 8, {"ReduceMax": 5, "Slice": 5, "Concat": 2}),
        (nn.AdaptiveMaxPool2d(1), 8, {"ReduceMax": 1}),
        (Function(), 8, {"ReduceMax": 5, "Slice": 5, "Concat": 2}),
        (nn.AdaptiveAvgPool2d((2, 3)), 9, {"AveragePool": 1}),
        (nn.AdaptiveAvgPool2d((2, 3)), 8, {"ReduceMean": 5, "Slice": 5, "Concat": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
def test_the_file_computes_what_the_quantized_model_does(pool, width, operators, backend, tmp_path):
    x = torch.randn(2, 3, 8, width, generator=torch.Generator().manual_seed(1))
    gm = prepared(pool, x, backend)
    report = fxqat.convert_export(gm, x, tmp_path / "m.onnx", dynamic_batch=True)
    assert report.certificate.passed
    found = Counter(node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node)
    assert {name: found[name] for name in operators} == operators
    step = max(
        float(quant.qparams()[0].max()) for name, quant in named_fake_quants(gm) if name.endswith("act_fake_quant")
    )
    (output,) = run_file(tmp_path / "m.onnx", [x.repeat(2, 1, 1, 1)])
    np.testing.assert_allclose(output, gm(x.repeat(2, 1, 1, 1)).detach(), atol=1.01 * step)


@pytest.mark.parametrize(
    ("pool", "name", "size"),
    [
        (nn.AdaptiveMaxPool2d((2, 3)), "pool", r"\(2, 3\)"),
        (nn.AdaptiveAvgPool2d((2, 3)), "pool", r"\(2, 3\)"),
        (nn.AdaptiveMaxPool2d((None, 3)), "pool", r"\(8, 3\)"),
        (Function(), "adaptive_max_pool2d", r"\(2, 3\)"),
    ],
    ids=str,
)
@pytest.mark.parametrize("width", [8, 9])
def test_open_sizes_are_refused_by_the_name_of_the_pool(pool, name, size, width, tmp_path):
    x = torch.randn(2, 3, 8, width, generator=torch.Generator().manual_seed(1))
    message = f"^{name}: the windows of an adaptive pool to {size} depend on the size .* Leave only the batch open"
    with pytest.raises(ExportError, match=message):
        fxqat.convert_export(prepared(pool, x), x, tmp_path / "m.onnx", dynamic_shapes={"x": {3: "width"}})
    assert list(tmp_path.iterdir()) == []


def test_a_pool_to_one_value_takes_open_sizes(tmp_path):
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    gm = prepared(nn.AdaptiveMaxPool2d(1), x)
    report = fxqat.convert_export(gm, x, tmp_path / "m.onnx", dynamic_shapes={"x": {2: "height", 3: "width"}})
    assert report.certificate.passed
    wide = torch.randn(2, 3, 5, 11, generator=torch.Generator().manual_seed(2))
    (output,) = run_file(tmp_path / "m.onnx", [wide])
    np.testing.assert_allclose(output, gm(wide).detach(), atol=0.1)
