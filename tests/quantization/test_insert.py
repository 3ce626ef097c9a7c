"""Insert: the graph holds exactly the fake-quants that were decided, and every reader reads the right value."""

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxqat import calibrate, enable_quantization, prepare_by_platform
from fxqat.custom_quantizer.backend_type import BackendType
from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import ACTIVATION, WEIGHT, FakeQuantizeBase
from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.fake_quantize.learnable import LearnableFakeQuantize
from fxqat.nn.fused import FusedLayer
from fxqat.nn.qat import QATLayer
from fxqat.observer.ema_min_max import EMAMinMaxObserver
from fxqat.observer.min_max import MinMaxObserver
from fxqat.observer.observers import OBSERVERS
from fxqat.quantization.insert import build_fake_quant
from fxqat.scheme import QuantizeScheme, TensorQConfig
from fxqat.utils.fx_graph import called_module
from tests.models import BACKENDS, TOYS, prepared

WEIGHT_SCHEME = QuantizeScheme(per_channel=True, narrow_range=True)


def quant_calls(gm):
    return [node for node in gm.graph.nodes if isinstance(called_module(node), FakeQuantizeBase)]


def layer_calls(gm):
    return [node for node in gm.graph.nodes if isinstance(called_module(node), QATLayer)]


def node_named(gm, name):
    return next(node for node in gm.graph.nodes if node.name == name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TOYS)
def test_the_graph_is_what_the_report_says(name, backend):
    gm = prepared(name, backend)
    groups = {}
    for node in quant_calls(gm):
        row = gm.quant_report.row(node.args[0].name)
        assert row.output == str(called_module(node).scheme)
        groups.setdefault(row.group, set()).add(str(node.target))
    assert all(len(paths) == 1 for paths in groups.values())
    assert len({path for paths in groups.values() for path in paths}) == len(groups)
    silent = ("split", "identity", "dropout", "dropout2d", "stochastic_depth", "contiguous", "to")
    carried = {row.node for row in gm.quant_report if row.op in silent and row.status == "shares"}
    expected = {row.node for row in gm.quant_report if row.output} - carried
    assert {node.args[0].name for node in quant_calls(gm)} == expected
    weights = {row.node: row.weight for row in gm.quant_report if row.weight}
    assert {n.name: str(called_module(n).weight_fake_quant.scheme) for n in layer_calls(gm)} == weights


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TOYS)
def test_each_value_has_a_name_of_its_own_and_each_layer_its_input_quantizer(name, backend):
    gm = prepared(name, backend)
    names = [node.kwargs["tensor_name"] for node in quant_calls(gm)]
    assert len(set(names)) == len(names)
    assert all(isinstance(called_module(n).training, bool) for n in layer_calls(gm))
    for node in layer_calls(gm):
        source = node.args[0]
        while called_module(source) is not None and not isinstance(called_module(source), FakeQuantizeBase):
            if not isinstance(called_module(source), (nn.Dropout, nn.Dropout2d)):
                break
            source = source.args[0]
        if isinstance(called_module(source), FakeQuantizeBase):
            assert node.kwargs["input_fake_quant"].target == source.target
        else:
            assert "input_fake_quant" not in node.kwargs


def test_readers_that_stay_float_read_the_float_value():
    gm = prepared("tuple_output", "ONNXRuntime")
    assert node_named(gm, "out").args[0].name == "leaky_relu_act_fake_quant"
    output = next(node for node in gm.graph.nodes if node.op == "output")
    assert output.args[0][1][1].name == "x"
    assert node_named(gm, "conv").args[0].name == "x_act_fake_quant"


def test_all_placeholders_stand_first():
    gm = prepared("multi_input")
    kinds = [node.op for node in gm.graph.nodes]
    last = max(i for i, kind in enumerate(kinds) if kind == "placeholder")
    assert kinds[: last + 1] == ["placeholder"] * 3
    assert [n.kwargs["tensor_name"] for n in quant_calls(gm)][:3] == ["image", "vector", "bias"]


def test_names_of_values_are_module_paths():
    gm = prepared("residual")
    names = [node.kwargs["tensor_name"] for node in quant_calls(gm)]
    assert {"x", "stem", "layer1.0.conv1", "layer1.1.downsample.0", "layer1.0.relu", "fc", "mean"} <= set(names)
    assert all(" " not in name for name in names)


def test_a_shared_layer_is_one_module_with_one_weight_quantizer():
    gm = prepared("shared_module")
    heads = [node for node in layer_calls(gm) if node.target == "head"]
    assert len(heads) == 3
    assert len({id(called_module(node)) for node in heads}) == 1
    sources = [node.kwargs["input_fake_quant"].target for node in heads]
    assert sources == ["stem_act_fake_quant", "stem_act_fake_quant", "relu_1_act_fake_quant"]


@pytest.mark.parametrize(
    ("path", "axis", "scales", "floor_groups"),
    [("up2", 1, 3, 2), ("dense2", 1, 4, 1), ("up1", 1, 1, 4), ("up3", 1, 2, 1), ("last", 0, 2, 1)],
)
def test_weight_scales_lie_on_the_output_channels(path, axis, scales, floor_groups):
    layer = prepared("transpose_convs").get_submodule(path)
    assert layer.weight_fake_quant.axis == axis
    assert layer.weight_fake_quant.scale.shape == (scales,)
    assert layer.weight.shape[axis] == scales
    assert layer.op.groups == floor_groups


def test_bias_has_no_scale_where_the_input_is_float():
    gm = prepared("conv_bn_relu", config={"overrides": [{"match": {"node": "x"}, "output": None}]})
    assert "input_fake_quant" not in node_named(gm, "conv1").kwargs
    assert node_named(gm, "conv1").args[0].name == "x"
    assert node_named(gm, "conv2").kwargs["input_fake_quant"].target == "conv1_act_fake_quant"


def test_a_layer_reads_its_quantizer_through_dropout():
    gm = prepared("dropouts")
    assert node_named(gm, "conv2").args[0].name == "drop"
    assert node_named(gm, "conv2").kwargs["input_fake_quant"].target == "conv1_act_fake_quant"
    assert node_named(gm, "fc").kwargs["input_fake_quant"].target == "mean_act_fake_quant"


def test_excluded_layers_are_left_as_fused_containers():
    gm = prepared("conv_bn_relu", config={"extra_quantizer_dict": {"exclude_module_name": ["conv1"]}})
    assert isinstance(gm.conv1, FusedLayer)
    assert isinstance(gm.conv2, QATLayer)
    assert not any(isinstance(module, FakeQuantizeBase) for module in gm.conv1.modules())


def test_the_quantizers_are_where_the_model_is(monkeypatch):
    """The meta device stands for another device; a model on it is refused otherwise."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, device="meta")

        def forward(self, x):
            return F.relu(self.conv(x))

    monkeypatch.setattr(sys.modules["fxqat.prepare_by_platform"], "check_model", lambda *_: None)
    gm = prepare_by_platform(Half())
    devices = {tensor.device.type for tensor in (*gm.parameters(), *gm.buffers())}
    assert devices == {"meta"}
    assert gm.conv.weight_fake_quant.scale.shape == (4,)


@pytest.mark.parametrize(
    ("scheme", "kind", "quant_type"),
    [
        (QuantizeScheme(), "Learnable", LearnableFakeQuantize),
        (QuantizeScheme(signed=False, symmetric=False), "Learnable", LearnableFakeQuantize),
        (QuantizeScheme(), "Fixed", FixedFakeQuantize),
        (QuantizeScheme(), FixedFakeQuantize, FixedFakeQuantize),
        (QuantizeScheme(fixed_range=(0.0, 1.0)), "Learnable", FixedFakeQuantize),
    ],
)
def test_build_fake_quant_takes_names_and_classes(scheme, kind, quant_type):
    built = build_fake_quant(TensorQConfig(scheme, "EMAMinMax", kind), ACTIVATION)
    assert type(built) is quant_type
    assert type(built.observer) is EMAMinMaxObserver
    assert (built.kind, built.axis, built.scheme) == (ACTIVATION, None, scheme)
    assert built.scale.shape == ()


def test_build_fake_quant_passes_arguments_on():
    config = TensorQConfig(
        WEIGHT_SCHEME,
        "EMAMinMax",
        "Learnable",
        observer_args={"ema_ratio": 0.5},
        fake_quantize_args={"grad_factor": 3.0},
    )
    built = build_fake_quant(config, WEIGHT, 1, 6)
    assert built.observer.ema_ratio == 0.5
    assert built.grad_factor == 3.0
    assert (built.axis, built.observer.axis, built.scale.shape) == (1, 1, (6,))
    per_tensor = build_fake_quant(TensorQConfig(QuantizeScheme()), WEIGHT, 1, 6)
    assert (per_tensor.axis, per_tensor.observer.axis, per_tensor.scale.shape) == (1, None, ())
    assert type(per_tensor.observer) is MinMaxObserver


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (TensorQConfig(QuantizeScheme(), observer="MaxMin"), "unknown observer 'MaxMin'.*MinMax"),
        (TensorQConfig(QuantizeScheme(), fake_quantize="Learned"), "unknown fake-quant 'Learned'.*Learnable"),
        (TensorQConfig(QuantizeScheme(), observer_args={"ratio": 1}), "observer_args.*ratio"),
        (TensorQConfig(QuantizeScheme(), "MSE", "Fixed", fake_quantize_args={"grad_factor": 1.0}), "grad_factor"),
        (TensorQConfig(QuantizeScheme(), observer=3), "3"),
        (TensorQConfig(QuantizeScheme(), observer="EMAMinMax", observer_args={"ema_ratio": 2}), "ema_ratio"),
    ],
)
def test_what_does_not_fit_is_an_error(config, message):
    with pytest.raises(ConfigError, match=message):
        build_fake_quant(config, ACTIVATION)
    assert build_fake_quant(TensorQConfig(QuantizeScheme()), ACTIVATION).scale.item() == 1.0


def test_a_per_channel_activation_is_an_error():
    """An activation has no channel axis here, so a scale for each channel cannot be had."""
    with pytest.raises(ConfigError, match="per_channel|per-channel"):
        prepared("conv_bn_relu", config={"extra_qconfig_dict": {"a_qscheme": {"per_channel": True}}})
    assert {row.output for row in prepared("conv_bn_relu").quant_report} <= {"", "int8 sym per-tensor"}


def test_counting_bn_needs_a_momentum():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None))
    with pytest.raises(ConfigError, match=r"0: bn_mode=3 needs a BatchNorm with a momentum"):
        prepare_by_platform(model, BackendType.TSQAT, {"bn_mode": 3})
    assert isinstance(prepare_by_platform(model, BackendType.TSQAT).get_submodule("0").bn, nn.BatchNorm2d)


def test_inserting_leaves_the_statistics_alone():
    gm = prepared("conv_bn_relu")
    assert gm.conv1.bn.num_batches_tracked.item() == 0
    assert torch.isinf(gm.conv1.weight_fake_quant.observer.min_val).all()


class Gains(nn.Module):
    """Parameters whose values are all at one end of their range, as they are or computed from."""

    def __init__(self, value):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
        self.gain = nn.Parameter(torch.tensor(value))
        self.gains = nn.Parameter(torch.full((1, 4, 1, 1), value))
        self.temperature = nn.Parameter(torch.tensor(value))

    def forward(self, x):
        return torch.tanh(self.layer(x)) * self.gain * self.gains * self.temperature.exp()


@pytest.mark.parametrize("fake_quantize", ["Learnable", "Fixed"])
@pytest.mark.parametrize("value", [0.53, 0.8, 1.0, 1.3, -1.3])  # some scales of few bits are smaller than the exact one
@pytest.mark.parametrize("backend", [BackendType.TSQAT, BackendType.QNN, BackendType.LiteRT, BackendType.ONNXRuntime])
def test_a_parameter_of_equal_values_has_a_gradient(backend, value, fake_quantize):
    torch.manual_seed(0)
    x = torch.randn(4, 3, 12, 12)
    config = {"extra_qconfig_dict": {"a_fakequantize": fake_quantize}}
    model = Gains(value)
    gm = prepare_by_platform(model, backend, config, example_inputs=x)
    calibrate(gm, [x], progress=False)
    enable_quantization(gm.train())
    for each in (gm, model.train()):
        each(x).square().mean().backward()
    for name in ("gain", "gains", "temperature"):
        found, wanted = gm.get_parameter(name), model.get_parameter(name)
        torch.testing.assert_close(found.grad, wanted.grad, rtol=0.3, atol=1e-3)
        assert found.grad.all()
    quant = gm.get_submodule("gain_act_fake_quant")
    assert quant.ends_occur
    assert not gm.get_submodule("x_act_fake_quant").ends_occur
    scale, zero_point = quant.qparams()
    assert (quant.scheme.quant_max - zero_point) * scale >= torch.tensor(value) * (1 - 1e-6)
    assert (quant.scheme.quant_min - zero_point) * scale <= torch.tensor(value) * (1 - 1e-6)


@pytest.mark.parametrize("observer", [name for name in OBSERVERS if not name.startswith("PoT")])
@pytest.mark.parametrize("value", [1e-6, 0.53, -1.3])
def test_whatever_the_observer_a_parameter_of_equal_values_is_not_clipped(observer, value):
    """The range of least error may leave out all of them."""
    x = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    config = {"extra_qconfig_dict": {"a_observer": observer}}
    gm = prepare_by_platform(Gains(value), BackendType.Experimental, config, example_inputs=x)
    calibrate(gm, [x], progress=False)
    quant = gm.get_submodule("gains_act_fake_quant")
    scale, zero_point = quant.qparams()
    covered = (quant.scheme.quant_max if value > 0 else quant.scheme.quant_min) - zero_point
    assert covered * scale / value >= 1 - 1e-6
    quant.fake_quant_enabled = True
    quant(gm.gains).sum().backward()
    assert gm.gains.grad.all()


class Gated(Gains):
    """And a parameter that shares its range, one that dropout changes in training, and a buffer."""

    def __init__(self):
        super().__init__(0.5)
        self.joined = nn.Parameter(torch.randn(2, 4, 5, 10))
        self.dropped = nn.Parameter(torch.ones(4, 1, 1))
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("fixed", torch.ones(4, 1, 1))

    def forward(self, x):
        y = torch.tanh(super().forward(x) * self.dropout(self.dropped) * self.fixed)
        return torch.cat([y, self.joined], 2)


@pytest.mark.parametrize("fake_quantize", ["Learnable", "Fixed", "PACT", "DSQ"])
def test_in_training_the_ranges_of_parameters_follow_them(fake_quantize):
    x = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    config = {"extra_qconfig_dict": {"a_fakequantize": fake_quantize}}
    gm = prepare_by_platform(Gated(), BackendType.TSQAT, config, example_inputs=x)
    followed = {name for name, quant in gm.named_modules() if isinstance(quant, FakeQuantizeBase) and quant.follows}
    names = {f"{name}_act_fake_quant" for name in ("gain", "gains", "exp")}
    assert followed == names | {"layer.weight_fake_quant"}
    calibrate(gm, [x], progress=False)
    enable_quantization(gm.train())
    gm(x)
    before = {name: gm.get_submodule(name).qparams()[0].clone() for name in names}
    with torch.no_grad():
        gm.gain.mul_(16.0)
        gm.gains[:, 0].mul_(-4.0)
        gm.temperature.add_(math.log(2.0))
    gm(x)
    for name, growth in zip(sorted(names), (2.0, 16.0, 4.0), strict=True):
        torch.testing.assert_close(gm.get_submodule(name).qparams()[0], growth * before[name], rtol=0.1, atol=0.0)
    (grad,) = torch.autograd.grad(gm.get_submodule("gains_act_fake_quant")(gm.gains).sum(), gm.gains)
    assert grad.all()
    moved = gm.get_submodule("gain_act_fake_quant").qparams()[0]
    with torch.no_grad():
        gm.gain.mul_(16.0)
    gm.eval()(x)
    assert torch.equal(gm.get_submodule("gain_act_fake_quant").qparams()[0], moved)


def blocks_of(size, **match):
    return {"overrides": [{"match": match, "weight": {"bit": 4, "block_size": size}}]}


@pytest.mark.parametrize(
    ("layer", "size", "found"),
    [
        (nn.Linear(10, 4), 4, r"10 inputs, shape \(4, 10\)"),
        (nn.Conv1d(8, 4, 1), 4, r"3 dimensions, shape \(4, 8, 1\)"),
        (nn.LSTM(6, 8), 4, r"6 inputs, shape \(32, 6\)"),
    ],
    ids=["Linear", "Conv1d", "LSTM"],
)
def test_blocks_that_a_weight_cannot_have_are_refused(layer, size, found):
    config = blocks_of(size, type=type(layer).__name__)
    with pytest.raises(ConfigError, match=f"block_size=4 is for weights of two dimensions .* this one has {found}"):
        prepare_by_platform(nn.Sequential(layer), "Experimental", config)


@pytest.mark.parametrize("backend", ["OpenVINO", "QNN", "TensorRT", "LiteRT"])
def test_blocks_are_refused_where_the_target_has_none(backend):
    config = {"overrides": [{"match": {"type": "Linear"}, "weight": {"block_size": 4}}]}
    with pytest.raises(ConfigError, match="in blocks of 4"):
        prepare_by_platform(nn.Sequential(nn.Linear(8, 4)), backend, config)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"output": {"block_size": 4}}, r"per_channel: True \(or block_size\) is for weights"),
        ({"weight": {"block_size": 4, "per_channel": False}}, "it needs per_channel=True"),
        ({"weight": {"block_size": 4, "group_size": 4}}, "mean the same"),
        ({"weight": {"block_size": "4"}}, "block_size must be int"),
    ],
)
def test_entries_of_blocks_that_make_no_sense_are_refused(entry, message):
    with pytest.raises(ConfigError, match=message):
        prepare_by_platform(
            nn.Sequential(nn.Linear(8, 4)), "Experimental", {"overrides": [{"match": {"type": "Linear"}} | entry]}
        )


def test_dynamic_layers_have_no_blocks():
    config = {"activation": "dynamic"} | blocks_of(4, type="Linear")
    config["overrides"][0]["weight"]["bit"] = 8
    with pytest.raises(ConfigError, match="needs a weight of 5 to 8 bits without blocks"):
        prepare_by_platform(nn.Sequential(nn.Linear(8, 4)), "ONNXRuntime", config)


class OwnQuantize(LearnableFakeQuantize):
    """A fake-quant of a user that rounds the whole weight."""

    def quantize(self, x, factor=None, used_scale=None, input_kept=True):
        return super().quantize(x, factor, used_scale, input_kept)


def test_a_fake_quant_that_knows_no_blocks_is_refused_with_them():
    config = {"extra_qconfig_dict": {"w_fakequantize": OwnQuantize, "w_qscheme": {"bit": 4}}}
    model = nn.Sequential(nn.Linear(8, 4))
    gm = prepare_by_platform(model, "Experimental", config)
    assert isinstance(gm.get_submodule("0").weight_fake_quant, OwnQuantize)
    config["extra_qconfig_dict"]["w_qscheme"]["block_size"] = 4
    with pytest.raises(ConfigError, match="OwnQuantize has a method 'quantize' of its own, which knows no blocks"):
        prepare_by_platform(model, "Experimental", config)
