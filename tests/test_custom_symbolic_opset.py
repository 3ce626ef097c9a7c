"""The translations of an export: what ONNX Runtime computes of an operator is what it computes in torch."""

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import onnxscript
import pytest
import torch
import torchvision
from onnxscript import opset18
from torch import Tensor, fx, nn

from fxqat import convert_export, prepare_by_platform
from fxqat.config.overrides import Match
from fxqat.custom_symbolic_opset import exporter_warnings, run_exporter, translation_table
from fxqat.errors import ExportError
from fxqat.nn.deployed import QuantizeDequantize, StoredTensor
from fxqat.onnx.convert_opset import ConvertOpset
from fxqat.onnx.opset import opset_of
from fxqat.onnx.run_passes import run_passes
from fxqat.quantization.dynamic_sizes import OpenSizes, open_sizes
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.scheme import QuantizeScheme
from fxqat.utils.torch_compat import ADAPTIVE_AVG_POOL2D, ADAPTIVE_AVG_POOL3D, CDIST
from tests.export_models import calibrate, constants, deployed_outputs, node_types, run_file


class Pairs(nn.Module):
    """Q/DQ pairs of the same input, one output each."""

    def __init__(self, parameters: list[tuple[Tensor, Tensor, int]]) -> None:
        super().__init__()
        schemes = [QuantizeScheme(8, signed=zero_point.dtype == torch.int8) for _, zero_point, _ in parameters]
        pairs = [QuantizeDequantize(scheme, *of[:2], 18, of[2]) for scheme, of in zip(schemes, parameters, strict=True)]
        self.pairs = nn.ModuleList(pairs)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(pair(x) for pair in self.pairs)


def pair(scale: float, zero_point: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    return torch.tensor(scale), torch.tensor(zero_point, dtype=dtype), 0


class Stored(nn.Module):
    """Stored tensors, each added to the input."""

    def __init__(self, tensors: list[tuple[Tensor, Tensor, Tensor, int]]) -> None:
        super().__init__()
        self.tensors = nn.ModuleList(StoredTensor(*parts) for parts in tensors)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(x + stored() for stored in self.tensors)


def exported(module: nn.Module, x: Tensor, path: Path) -> onnx.ModelProto:
    onnx_ir.save(run_exporter(module.eval(), (x,)), path)
    return onnx.load(path)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def ties(scale: float) -> Tensor:
    """Values at, just below and just above every half step, the ends of the range and random ones."""
    halves = torch.arange(-300.5, 300.5, 0.5) * scale
    around = [
        halves,
        torch.nextafter(halves, torch.tensor(torch.inf)),
        torch.nextafter(halves, -torch.tensor(torch.inf)),
    ]
    random = torch.randn(2000, generator=seeded()) * 100 * scale
    return torch.cat([*around, random, torch.tensor([0.0, -0.0, 1e30, -1e30])])


def test_a_pair_is_bit_equal_per_tensor(tmp_path: Path) -> None:
    scales = [0.5, 0.1, 0.017, 3.3e-5]
    zero_points = [(torch.int8, 0), (torch.int8, -3), (torch.uint8, 0), (torch.uint8, 131)]
    module = Pairs([pair(scale, zero_point, dtype) for scale in scales for dtype, zero_point in zero_points])
    x = torch.cat([ties(scale) for scale in scales])
    model = exported(module, x, tmp_path / "pairs.onnx")
    assert node_types(model) == ["QuantizeLinear", "DequantizeLinear"] * 16
    for found, expected in zip(run_file(tmp_path / "pairs.onnx", [x]), module(x), strict=True):
        assert np.array_equal(found, expected.numpy())
        assert len(np.unique(found)) == 256


def test_a_pair_is_bit_equal_per_channel(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 6, 7) * 30
    shapes = [(dtype, axis, n) for dtype in (torch.int8, torch.uint8) for axis, n in enumerate(x.shape)]
    module = Pairs([(torch.rand(n) + 0.01, torch.randint(0, 100, (n,)).to(dtype), axis) for dtype, axis, n in shapes])
    model = exported(module, x, tmp_path / "pairs.onnx")
    for found, expected in zip(run_file(tmp_path / "pairs.onnx", [x]), module(x), strict=True):
        assert np.array_equal(found, expected.numpy())
    axes = [attribute.i for node in model.graph.node for attribute in node.attribute if attribute.name == "axis"]
    assert axes == [0, 0, 1, 1, 2, 2] * 2


def test_stored_tensors_keep_their_types_and_values(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = []
    for dtype, shape, axis in ((torch.int8, (4, 3), 0), (torch.int8, (4, 3), 1), (torch.uint8, (4, 3), 0)):
        limits = torch.iinfo(dtype)
        integers = torch.randint(limits.min, limits.max, shape, dtype=torch.int64).to(dtype)
        tensors.append((integers, torch.rand(shape[axis]) + 0.01, torch.zeros(shape[axis], dtype=dtype), axis))
    bias = torch.randint(-(2**30), 2**30, (3,), dtype=torch.int32)
    tensors.append((bias, torch.rand(3) + 0.01, torch.zeros(3, dtype=torch.int32), 0))
    module, x = Stored(tensors), torch.zeros(4, 3)
    model = exported(module, x, tmp_path / "stored.onnx")
    assert node_types(model) == ["DequantizeLinear", "Add"] * 4
    for i, (integers, *_) in enumerate(tensors):
        stored = constants(model)[f"tensors.{i}.integers"]
        assert np.array_equal(stored, integers.numpy())
        assert stored.dtype == integers.numpy().dtype
    for found, expected in zip(run_file(tmp_path / "stored.onnx", [x]), module(x), strict=True):
        assert np.array_equal(found, expected.numpy())


@pytest.mark.parametrize("opset", [19, 21])
def test_the_pair_reaches_newer_opsets(opset: int, tmp_path: Path) -> None:
    module, x = Pairs([pair(0.1, 3, torch.int8)]), ties(0.1)
    onnx_ir.save(run_passes(run_exporter(module.eval(), (x,)), [ConvertOpset(opset)]), tmp_path / "pair.onnx")
    model = onnx.load(tmp_path / "pair.onnx")
    assert opset_of(model) == opset
    onnx.checker.check_model(model, full_check=True)
    assert np.array_equal(run_file(tmp_path / "pair.onnx", [x])[0], module(x)[0].numpy())


def test_the_table_is_made_anew_and_registers_nothing(tmp_path: Path) -> None:
    first, second = translation_table(), translation_table()
    assert first is not second
    assert set(first) == {
        torch.ops.fxqat.dynamic_quantize_dequantize.default,
        torch.ops.fxqat.recurrent.default,
        torch.ops.fxqat.up_to_longest.default,
        torch.ops.torchvision.roi_pool.default,
        torch.ops.aten.amax.default,
        torch.ops.aten.amin.default,
        torch.ops.aten.aminmax.default,
        torch.ops.aten.mean.dim,
        torch.ops.aten.scaled_dot_product_attention.default,
        torch.ops.aten.scatter.src,
        torch.ops.aten.scatter.reduce,
        torch.ops.aten.scatter.value_reduce,
        torch.ops.aten.scatter_reduce.two,
        torch.ops.aten.index_reduce.default,
        *(getattr(torch.ops.aten, name).default for name in ("kthvalue", "median", "cummax", "cummin")),
        torch.ops.aten.median.dim,
        torch.ops.aten.masked_select.default,
        torch.ops.prims.fmax.default,
        torch.ops.prims.fmin.default,
        *(getattr(torch.ops.aten, name).default for name in ("chunk", "im2col", "col2im")),
        torch.ops.aten.hypot.default,
        torch.ops.aten.rrelu_with_noise_functional.default,
        torch.ops.aten.sort.stable,
        torch.ops.prims.prod.default,
        CDIST,
        ADAPTIVE_AVG_POOL2D,
        ADAPTIVE_AVG_POOL3D,
        torch.ops.aten.adaptive_max_pool2d.default,
        torch.ops.aten.adaptive_max_pool3d.default,
        torch.ops.aten.conv1d.default,
        torch.ops.aten.conv2d.default,
        torch.ops.aten.conv3d.default,
        torch.ops.aten.conv_transpose1d.default,
        torch.ops.aten.conv_transpose2d.input,
        torch.ops.aten.conv_transpose3d.input,
        torch.ops.aten.batch_norm.default,
        torch.ops.aten.to.dtype,
        *(getattr(torch.ops.aten, name).default for name in ("concat", "concatenate", "stack", "hstack", "vstack")),
        *(getattr(torch.ops.aten, name).default for name in ("row_stack", "dstack", "column_stack")),
    }
    first.clear()
    assert set(translation_table()) == set(second)
    module, x = Pairs([pair(0.1, 3, torch.int8)]), ties(0.1)
    exported(module, x, tmp_path / "with.onnx")
    with pytest.raises(torch.onnx.errors.OnnxExporterError, match="fxqat"):  # an export without the table knows nothing
        torch.onnx.export(module, (x,), tmp_path / "without.onnx", dynamo=True, verbose=False)
    assert not (tmp_path / "without.onnx").exists()


class Functions(nn.Module):
    """The results of several functions as one module."""

    def __init__(self, functions: Sequence[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.functions = functions

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(function(x) for function in self.functions)


def scattered(x: Tensor, dim: int, *shape: int) -> Tensor:
    index = torch.arange(shape[dim]).flip(0).view([-1 if d == dim % 3 else 1 for d in range(3)]).expand(shape)
    return torch.zeros_like(x).scatter(dim, index, x)


def normalized(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    mean, variance = torch.tensor([0.5, 0.0, -1.0]), torch.tensor([1.0, 0.5, 2.0])
    return torch.nn.functional.batch_norm(x, mean, variance, weight, bias)


FALLING = torch.tensor([0, 2, 0]).view(1, 3, 1).expand(2, 3, 4)
"""Places along the second dimension: two values fall together, one place gets none."""

FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x.amax(),
    lambda x: x.amin(keepdim=True),
    lambda x: x.amax((0, 2)),
    lambda x: x.amin(-1, keepdim=True),
    lambda x: x.long().amax(1),
    lambda x: torch.stack(torch.aminmax(x)),
    lambda x: torch.stack(torch.aminmax(x, dim=1, keepdim=True)),
    lambda x: torch.mean(x + 9, dim=None),
    lambda x: torch.mean(x + 9, None, keepdim=True),
    lambda x: torch.mean(x.long(), (0, -1), dtype=torch.float32),
    lambda x: scattered(x, 1, 2, 3, 4),
    lambda x: scattered(x, 2, 1, 2, 3),
    lambda x: scattered(x, -1, 2, 1, 2),
    *(
        lambda x, how=how, own=own: x.scatter_reduce(1, FALLING, x * 3 + 1, how, include_self=own) + 9
        for how in ("mean", "sum", "amax")
        for own in (True, False)
    ),
    *(lambda x, how=how: x.scatter(1, FALLING, x * 3 + 1, reduce=how) for how in ("add", "multiply")),
    *(lambda x, how=how: x.scatter(1, FALLING[:, :, :2], 3.0, reduce=how) for how in ("add", "multiply")),
    lambda x: x.long().scatter(1, FALLING, 2, reduce="add"),
    lambda x: x[0, 0].index_reduce(0, torch.tensor([0, 1, 1, 3]), x[1, 2], "amax"),
    *(
        lambda x, how=how, own=own: x.index_reduce(-1, torch.tensor([0, 1, 1, 3]), x + 9, how, include_self=own)
        for how in ("mean", "prod", "amax", "amin")
        for own in (True, False)
    ),
    lambda x: torch.sort(x.round(), dim=1, stable=True)[0],
    lambda x: torch.argsort((x / 4).round(), stable=True, descending=True),
    lambda x: torch.argsort((x / 4).long(), dim=0, stable=True),
    lambda x: torch.sort(x[0, 0, 0], stable=True)[1],
    lambda x: torch.hypot(x, x + 1),
    lambda x: torch.cumprod(x / 4, -1),
    lambda x: torch.cat([torch.ones(2, 1, 4), x / 4], 1).cumprod(1)[:, :-1],
    lambda x: torch.conv3d(x[None, None], torch.arange(16.0).view(2, 1, 2, 2, 2), None, 1, (0, 1, 0)),
    lambda x: torch.conv3d(x[None], torch.arange(8.0).view(1, 1, 2, 2, 2), torch.ones(1), (1, 2, 1), 0, (1, 1, 2)),
    lambda x: torch.conv3d(x[None].repeat(2, 1, 1, 1), torch.arange(8.0).view(2, 1, 1, 2, 2), groups=2),
    lambda x: torch.nn.functional.rrelu(x, 0.1, 0.5),
    *(lambda x, p=p: torch.cdist(x, x[:, 1:] * 2, p=p) for p in (0.0, 1.0, 2.0, 3.0, float("inf"))),
    lambda x: torch.nn.functional.adaptive_avg_pool3d(x[None].repeat(1, 1, 2, 2), (2, 3, 1)),
    lambda x: torch.nn.functional.adaptive_avg_pool3d(x[None, None].repeat(1, 1, 1, 2, 2), (1, 2, 4)),
    lambda x: torch.conv_transpose1d(x, torch.arange(12.0).view(3, 2, 2), torch.ones(2), stride=3, output_padding=2),
    lambda x: torch.conv_transpose2d(x[None], torch.arange(8.0).view(2, 1, 2, 2), None, (2, 1), (1, 0), (1, 0), 2),
    lambda x: torch.conv_transpose2d(x, torch.arange(12.0).view(2, 1, 3, 2), torch.ones(1), 1, 1, dilation=(1, 2)),
    lambda x: torch.conv_transpose3d(x[:, None], torch.arange(8.0).view(2, 1, 1, 2, 2), groups=2),
    lambda x: normalized(x, torch.arange(3.0), torch.ones(3)),
    lambda x: normalized(x[:, :, 0]),
    lambda x: torch.nn.functional.batch_norm(x, None, None, torch.arange(3.0), training=True) + 9,
    lambda x: torch.nn.functional.batch_norm(x[None], None, None, training=True, eps=0.1) + 9,  # a sum may be near 0
    lambda x: x.to(torch.int32).to(torch.float32) + x.to(torch.float32),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[np.ndarray, np.ndarray]]:
    """What ONNX Runtime and torch compute for each function, from one export of all of them."""
    path, x = tmp_path_factory.mktemp("functions") / "functions.onnx", torch.randn(2, 3, 4, generator=seeded()) * 5
    exported(Functions(FUNCTIONS), x, path)
    return list(zip(run_file(path, [x]), (function(x).numpy() for function in FUNCTIONS), strict=True))


@pytest.mark.xdist_group("functions that torch does not translate")
@pytest.mark.parametrize("place", range(len(FUNCTIONS)))
def test_what_torch_does_not_translate_computes_the_same(
    place: int, results: list[tuple[np.ndarray, np.ndarray]]
) -> None:
    found, expected = results[place]
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


class Common(nn.Module):
    """Layers of many networks for which torch's exporter has no translation, without and with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.bn = nn.ConvTranspose2d(3, 4, 2, bias=False), nn.BatchNorm2d(4)
        self.down, self.last = nn.ConvTranspose2d(4, 2, 2), nn.BatchNorm2d(2, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.down(self.bn(self.up(x)).to(torch.float64).to(torch.float32)))


def test_common_layers_need_no_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("decomposed")

    monkeypatch.setattr("torch.onnx._internal.exporter._fx_passes.decompose_with_registry", refuse)
    model = run_exporter(Common().eval(), (torch.randn(2, 3, 5, 5),))
    found = [node for node in model.graph if node.op_type in ("ConvTranspose", "BatchNormalization")]
    assert [node.op_type for node in found] == ["ConvTranspose", "BatchNormalization"] * 2
    assert [len(node.inputs) for node in found[::2]] == [2, 3]


class Regions(nn.Module):
    """Pooled regions, and where their maxima were if asked."""

    def __init__(self, with_places: bool) -> None:
        super().__init__()
        self.register_buffer("boxes", torch.tensor([[0.0, 0.0, 0.0, 9.0, 9.0], [1.0, 3.0, 1.0, 12.4, 7.6]]))
        self.with_places = with_places

    def forward(self, x: Tensor) -> Tensor:
        pooled, places = torch.ops.torchvision.roi_pool(x, self.boxes, 0.5, 3, 2)
        return pooled + places if self.with_places else pooled


def test_roi_pool_is_max_roi_pool(tmp_path: Path) -> None:
    module, x = Regions(with_places=False), torch.randn(2, 4, 8, 8)
    model = exported(module, x, tmp_path / "regions.onnx")
    assert "MaxRoiPool" in node_types(model)
    assert np.array_equal(run_file(tmp_path / "regions.onnx", [x])[0], module(x).numpy())


def test_the_places_of_roi_pool_have_no_value(tmp_path: Path) -> None:
    x = torch.randn(2, 4, 8, 8)
    exported(Regions(with_places=True), x, tmp_path / "places.onnx")
    with pytest.raises(Exception, match="SequenceAt"):
        run_file(tmp_path / "places.onnx", [x])


class Masked(nn.Module):
    """A batch, a mask of another size, and a scalar."""

    def forward(self, x: Tensor, mask: Tensor, factor: Tensor) -> Tensor:
        return (x[:, None] * mask).sum(2) * factor


def with_open_batch(inputs: tuple[Tensor, ...]) -> OpenSizes | None:
    return open_sizes(inputs, ["x", "mask", "factor"][: len(inputs)], dynamic_batch=True)


@pytest.mark.parametrize("batch", [1, 2])
def test_only_inputs_with_a_batch_get_an_open_dimension(batch: int) -> None:
    inputs = (torch.randn(batch, 5), torch.ones(5, 5), torch.tensor(2.0))
    model = run_exporter(Masked().eval(), inputs, with_open_batch(inputs))
    shapes = [[dim if isinstance(dim, int) else str(dim) for dim in value.shape] for value in model.graph.inputs]
    assert shapes == [["batch", 5], [5, 5], []]


def test_warnings_of_the_exporter_are_kept_and_its_noise_is_not() -> None:
    class Warns(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("this branch is for squares only", stacklevel=1)
            warnings.warn("torch's own code is old", DeprecationWarning, stacklevel=1)
            warnings.warn(
                "The tensor attributes self.a._flat_weights[0], self.b were assigned during export.", stacklevel=1
            )
            return x * 2

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, more = torch.randn(2, 2), (torch.randn(2, 5), torch.ones(5, 5), torch.tensor(2.0))
        model = run_exporter(Warns().eval(), (x,), with_open_batch((x,)))
        quiet = run_exporter(Masked().eval(), more, with_open_batch(more))
        recurrent = run_exporter(nn.Sequential(nn.LSTM(2, 3)).eval(), (torch.randn(2, 4, 2),), None)
    assert exporter_warnings(model) == (
        "this branch is for squares only",
        "The tensor attributes self.a._flat_weights[0], self.b were assigned during export.",
    )
    assert exporter_warnings(quiet) == exporter_warnings(recurrent) == ()


# Operators of the user's own


@torch.library.custom_op("fxqat_test::wavy", mutates_args=())
def wavy(x: Tensor, frequency: float) -> Tensor:
    """An operator of a user."""
    return torch.sin(x * frequency) + x


wavy.register_fake(lambda x, frequency: torch.empty_like(x))


class Wavy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(wavy(self.before(x), 2.0))


def wavy_in_onnx(x: Any, frequency: float) -> Any:
    return opset18.Add(opset18.Sin(opset18.Mul(x, frequency)), x)


OPERATOR = torch.ops.fxqat_test.wavy
QDQ = torch.ops.fxqat.quantize_dequantize.default
IN_CHIP = onnxscript.values.Op(
    onnxscript.values.Opset("my.chip", 1),
    "Wavy",
    op_schema=onnx.defs.OpSchema(
        "Wavy",
        "my.chip",
        1,
        inputs=[onnx.defs.OpSchema.FormalParameter("x", "T")],
        outputs=[onnx.defs.OpSchema.FormalParameter("y", "T")],
        type_constraints=[("T", ["tensor(float)"], "")],
        attributes=[onnx.defs.OpSchema.Attribute("frequency", onnx.defs.OpSchema.AttrType.FLOAT)],
    ),
)


@pytest.fixture(scope="module")
def with_own_operator() -> tuple[QuantGraphModule, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(8, 4)
    config = {"extra_quantizer_dict": {"additional_function_type": [wavy]}}
    gm = prepare_by_platform(Wavy().eval(), "TSQAT", config, example_inputs=x, check="off")
    return calibrate(gm, (x,)), x


def test_an_own_operator_is_quantized_by_any_of_its_names(with_own_operator: tuple[QuantGraphModule, Tensor]) -> None:
    gm, _ = with_own_operator
    (row,) = [row for row in gm.quant_report if row.node.startswith("wavy")]
    assert (row.status, row.reason) == ("quantized", "asked for by extra_quantizer_dict")
    nodes = list(fx.symbolic_trace(Wavy()).graph.nodes)
    for name in (wavy, OPERATOR, OPERATOR.default, "wavy", "fxqat_test::wavy"):
        assert [node.name for node in nodes if Match(function=name)(node)] == [row.node]
    assert not any(Match(function="other::wavy")(node) for node in nodes)


@pytest.mark.parametrize("key", [wavy, OPERATOR, OPERATOR.default], ids=["function", "packet", "overload"])
def test_an_own_operator_is_exported_by_the_users_translation(
    key: Any, with_own_operator: tuple[QuantGraphModule, Tensor], tmp_path: Path
) -> None:
    gm, x = with_own_operator
    report = convert_export(gm, x, tmp_path / "m.onnx", custom_translation_table={key: wavy_in_onnx})
    assert report.certificate is not None
    assert "Sin" in node_types(onnx.load(tmp_path / "m.onnx"))
    (found,), (expected,) = run_file(tmp_path / "m.onnx", (x,)), deployed_outputs(gm, (x,))
    assert np.abs(found - expected).max() <= np.abs(expected).max() / 100


def test_an_operator_that_onnx_runtime_lacks_is_told_and_written_without_verification(
    with_own_operator: tuple[QuantGraphModule, Tensor], tmp_path: Path
) -> None:
    gm, x = with_own_operator
    table = {wavy: lambda x, frequency: IN_CHIP(x, frequency=frequency)}
    with pytest.raises(ExportError, match=r"my\.chip.*has this operator, export with verify=False"):
        convert_export(gm, x, tmp_path / "m.onnx", custom_translation_table=table)
    assert not list(tmp_path.iterdir())
    report = convert_export(gm, x, tmp_path / "m.onnx", custom_translation_table=table, verify=False)
    assert report.certificate is None
    model = onnx.load(tmp_path / "m.onnx")
    assert [node.domain for node in model.graph.node if node.op_type == "Wavy"] == ["my.chip"]


@pytest.mark.parametrize("table", [{torch.sin: wavy_in_onnx}, {wavy: "Sin"}, [wavy], {QDQ: wavy_in_onnx}])
def test_a_wrong_translation_table_is_refused(
    table: Any, with_own_operator: tuple[QuantGraphModule, Tensor], tmp_path: Path
) -> None:
    gm, x = with_own_operator
    with pytest.raises(ExportError, match="custom_translation_table"):
        convert_export(gm, x, tmp_path / "m.onnx", custom_translation_table=table)


class Untranslated(nn.Module):
    """Calls an operator that torch's exporter does not translate."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.special.bessel_j0(x)


def test_a_failure_of_the_exporter_begins_with_the_reason() -> None:
    with pytest.raises(ExportError, match="^torch.onnx.export failed: No ONNX function .*bessel_j0") as failure:
        run_exporter(Untranslated(), (torch.randn(2),))
    assert "Next steps" not in str(failure.value)


class WithSizes(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x.sin(), 3


class Experts(nn.Module):
    """Rows of each expert times its matrix, as in transformers' mixtures of experts."""

    def forward(self, x: Tensor) -> Tensor:
        weights, ends = torch.ones(2, 3, 8), torch.tensor([1, 2], dtype=torch.int32)
        return nn.functional.grouped_mm(x, weights, offs=ends)


FAILURES = [(Untranslated(), "{torch.ops.prims.bessel"), (WithSizes(), "type int")]
if hasattr(nn.functional, "grouped_mm"):
    FAILURES.append((Experts(), "set_experts_implementation('batched_mm')"))


@pytest.mark.parametrize("with_open_batch", [False, True])
@pytest.mark.parametrize(("model", "remedy"), FAILURES)
def test_a_failure_of_the_exporter_ends_with_the_remedy(model: nn.Module, remedy: str, with_open_batch: bool) -> None:
    with pytest.raises(ExportError, match=f"{re.escape(remedy)}.*$") as failure:
        run_exporter(model, (torch.randn(2, 3),), open_sizes((torch.randn(2, 3),), ["x"], None, with_open_batch))
    assert "x.shape[0]" not in str(failure.value)


class Deformable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset, self.last = nn.Conv2d(3, 27, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.deform = torchvision.ops.DeformConv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first, second, mask = self.offset(x).chunk(3, 1)
        return self.last(self.deform(x, torch.cat([first, second], 1), mask.sigmoid()).relu())


def test_a_deformable_convolution_gets_the_opset_that_has_it(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8, generator=seeded())
    gm = calibrate(prepare_by_platform(Deformable().eval(), example_inputs=(x,)), [x])
    report = convert_export(gm, (x,), tmp_path / "deform.onnx")
    assert report.opset_version == 19
    assert report.certificate is not None
    assert report.certificate.passed
    assert convert_export(gm, (x,), tmp_path / "deform.onnx", opset_version=21).opset_version == 21
    with pytest.raises(ExportError, match="DeformConv, which ONNX has since opset 19; opset_version is 18"):
        convert_export(gm, (x,), tmp_path / "older.onnx", opset_version=18)
