"""The interpreter of backend tables: where it quantizes, which scales are one, and which modules that becomes."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxqat import prepare_by_platform
from fxqat.custom_quantizer.backend_type import BACKENDS
from fxqat.custom_quantizer.backends.onnxruntime import ONNXRUNTIME
from fxqat.custom_quantizer.backends.tensorrt import TENSORRT
from fxqat.custom_quantizer.backends.tsqat import TSQAT
from fxqat.custom_quantizer.quantizer import BackendQuantizer
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.fake_quantize.learnable import LearnableFakeQuantize
from fxqat.nn.qat import QATLayer
from fxqat.utils.fx_graph import called_module
from tests.models import BACKENDS as NAMES
from tests.models import TOYS, build, calibrate, calibrated, inputs, prepared


def quantizer_after(gm, name):
    """The fake-quant call on the value of a node, None if there is none."""
    node = next(node for node in gm.graph.nodes if node.name == name)
    return next((user for user in node.users if isinstance(called_module(user), FakeQuantizeBase)), None)


def read_quantized(gm, name):
    """For every tensor a node reads, whether it comes out of a fake-quant."""
    node = next(node for node in gm.graph.nodes if node.name == name)
    sources = [n for n in node.all_input_nodes if n.op != "get_attr"]
    return [isinstance(called_module(source), FakeQuantizeBase) for source in sources]


class Recorder:
    """Which fake-quant objects are called, in order: name, object, input, output, and whether these are one."""

    def __init__(self, gm):
        self.calls = []
        for module in gm.modules():
            if isinstance(module, FakeQuantizeBase):
                module.register_forward_hook(self._record, with_kwargs=True)

    def _record(self, module, args, kwargs, output):
        # copies: what reads the output may write into it
        self.calls.append((kwargs["tensor_name"], module, args[0].clone(), output.clone(), output is args[0]))

    def modules(self, *names):
        return [module for name, module, *_ in self.calls if name in names]


def model_of(function, **modules):
    """A model from its modules and a function of (modules, x)."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            for name, module in modules.items():
                setattr(self, name, module)

        def forward(self, x):
            return function(self, x)

    torch.manual_seed(0)
    return Model().eval()


# sharing


@pytest.mark.parametrize("backend", ["TSQAT", "Experimental", "ONNXRuntime"])
def test_the_branches_of_a_concatenation_are_rounded_by_one_object(backend):
    gm = calibrated("concat", backend)
    recorder = Recorder(gm)
    gm(*inputs("concat"))
    branches = recorder.modules("point", "wide.2", "project")
    assert len(branches) == 3
    assert len({id(module) for module in branches}) == 1
    assert recorder.modules("cat") == branches[:1]
    low, high = branches[0].observer.min_val, branches[0].observer.max_val
    assert low < high
    assert len({id(m) for m in recorder.modules("wide.0", "x", "last")}) == 3


def test_a_concatenation_of_rounded_values_is_not_rounded_again():
    gm = calibrated("concat")
    recorder = Recorder(gm)
    gm(*inputs("concat"))
    (cat,) = [call for call in recorder.calls if call[0] == "cat"]
    assert cat[4]
    assert quantizer_after(gm, "cat").kwargs["on_grid"]
    assert not any("on_grid" in quantizer_after(gm, name).kwargs for name in ("point", "wide_2", "project"))
    scale, _ = cat[1].qparams()
    torch.testing.assert_close(cat[3] / scale, (cat[3] / scale).round(), rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime", "TensorRT"])
@pytest.mark.parametrize("name", TOYS)
def test_what_is_said_to_lie_on_the_grid_does(name, backend):
    """A value that is not rounded again is a rounded one: checked on numbers, for every toy model."""
    gm = calibrated(name, backend)
    recorder = Recorder(gm)
    gm(*inputs(name))
    kept = {n.kwargs["tensor_name"] for n in gm.graph.nodes if n.kwargs.get("on_grid")}
    for tensor_name, module, before, after, same in recorder.calls:
        scale, zero_point = module.qparams()
        scheme = module.scheme
        rounded = (torch.round(before / scale) + zero_point).clamp(scheme.quant_min, scheme.quant_max)
        expected = (rounded - zero_point) * scale
        if tensor_name in kept:
            assert same
            torch.testing.assert_close(before, expected, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(after, expected)


def test_pass_through_ops_carry_the_quantizer_along():
    gm = prepared("slices")
    cut = ["split", "getitem", "getitem_1", "chunk", "getitem_2", "getitem_3", "cat", "stack", "getitem_5", "flatten"]
    groups = {gm.quant_report.row(name).group for name in cut}
    assert groups == {gm.quant_report.row("conv1").group} == {gm.quant_report.row("conv2").group}
    assert quantizer_after(gm, "split") is None
    assert quantizer_after(gm, "getitem").kwargs["on_grid"]
    assert quantizer_after(gm, "flatten").target == quantizer_after(gm, "conv1").target


def test_padding_with_zero_shares_and_padding_with_another_value_does_not():
    report = prepared("padding_modes").quant_report
    assert report.row("pad").group == report.row("zeros").group
    assert report.row("pad_1").group not in {report.row("valid").group, report.row("pad").group}
    assert report.row("pad_1").output == "int8 sym per-tensor"


@pytest.mark.parametrize("backend", ["ONNXRuntime", "TensorRT", "TSQAT"])
def test_a_pass_through_op_of_a_quantized_value_shares_its_scale(backend):
    """DESIGN: pass-through ops share one scale between inputs and output, also where the input is the model's."""
    report = prepared("concat", backend).quant_report
    assert report.row("x").output
    assert report.row("pool").output == report.row("x").output
    assert report.row("pool").group == report.row("x").group


def test_a_fixed_range_is_kept_alone_and_given_up_in_a_group():
    def gates(self, x):
        y = self.conv(x)
        return torch.cat([torch.sigmoid(y), y], 1), torch.sigmoid(self.other(x))

    model = model_of(gates, conv=nn.Conv2d(3, 4, 1), other=nn.Conv2d(3, 4, 1))
    report = prepare_by_platform(model).quant_report
    assert report.row("sigmoid").output == report.row("conv").output == "int8 sym per-tensor"
    assert report.row("sigmoid").group == report.row("cat").group == report.row("conv").group
    assert report.row("sigmoid_1").output == "int8 sym per-tensor fixed[0,1]"


# fixed ranges


@pytest.mark.parametrize(
    ("function", "name", "low", "high"),
    [
        (torch.sigmoid, "sigmoid", 0.0, 1.0),
        (F.hardsigmoid, "hardsigmoid", 0.0, 1.0),
        (torch.tanh, "tanh", -1.0, 1.0),
        (lambda x: F.softmax(x, dim=1), "softmax", 0.0, 1.0),
    ],
)
def test_a_known_range_is_not_calibrated(function, name, low, high):
    model = model_of(lambda self, x: function(self.conv(x)), conv=nn.Conv2d(3, 4, 1))
    gm = prepare_by_platform(model, "Experimental")
    quant = called_module(quantizer_after(gm, name))
    before = [value.clone() for value in quant.qparams()]
    calibrate(gm, (100 * torch.randn(2, 3, 4, 4),))
    assert isinstance(quant, FixedFakeQuantize)
    assert all(torch.equal(a, b) for a, b in zip(before, quant.qparams(), strict=True))
    assert quant.scheme.fixed_range == (low, high)
    assert before[0].item() == (high - low) / 256  # (high - low) / 255 to four bits


# activations inside the layer before


@pytest.mark.parametrize(
    ("activation", "fused"),
    [(F.relu, True), (F.relu6, True), (F.hardswish, False), (F.gelu, False), (torch.tanh, False)],
)
def test_a_value_is_rounded_after_the_activation_that_runs_inside_the_op(activation, fused):
    model = model_of(lambda self, x: activation(self.a(x) + self.b(x)), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1))
    gm = prepare_by_platform(model, "TSQAT")
    reader = list(gm.graph.nodes)[-3].name
    assert (quantizer_after(gm, "add") is None) == fused
    assert quantizer_after(gm, reader) is not None
    assert ("quantized after" in gm.quant_report.row("add").reason) == fused


def test_an_activation_is_no_part_of_an_op_with_a_second_reader():
    gm = prepared("two_readers")
    assert quantizer_after(gm, "conv") is not None
    assert quantizer_after(gm, "relu") is not None
    assert quantizer_after(gm, "conv").target != quantizer_after(gm, "relu").target


@pytest.mark.parametrize("backend", ["TSQAT", "Experimental", "ONNXRuntime"])
@pytest.mark.parametrize("name", ["residual", "shared_module", "pre_activation"])
def test_the_output_of_an_op_is_rounded_somewhere(name, backend):
    """A rule with a quantized output has it, if not at the op then after the activation inside it."""
    gm = prepared(name, backend)
    spec = BACKENDS[next(kind for kind in BACKENDS if kind.value == backend)]
    for row in gm.quant_report:
        rule = spec.rule(row.op, {"conv2d": "weighted", "linear": "weighted", "add": "binary"}.get(row.op, ""))
        if rule is not None and rule.output and row.op in ("conv2d", "linear", "add"):
            node = next(node for node in gm.graph.nodes if node.name == row.node)
            reader = next(iter(node.users)).name
            assert quantizer_after(gm, row.node) is not None or quantizer_after(gm, reader) is not None, row
    assert any(row.op == "add" for row in gm.quant_report)


# keyword arguments and functional weights


@pytest.mark.parametrize("backend", NAMES)
def test_tensors_passed_by_keyword_are_read_quantized(backend):
    gm = prepared("keyword_arguments", backend)
    for name in ("conv1", "conv2", "conv3", "fc"):
        assert read_quantized(gm, name) == [True]
    expected = {"add": [True, True], "mean": [True]} if backend in ("TSQAT", "Experimental") else {}
    if backend != "TensorRT":
        expected |= {"cat": [True, True], "cat_1": [True, True], "add": [True, True]}
    assert {name: read_quantized(gm, name) for name in expected} == expected


@pytest.mark.parametrize(
    "call",
    [
        lambda a, b: torch.add(a, b),
        lambda a, b: torch.add(a, other=b),
        lambda a, b: torch.add(input=a, other=b),
        lambda a, b: torch.add(a, alpha=2, other=b),
        lambda a, b: torch.add(alpha=2, other=b, input=a),
    ],
)
def test_the_order_of_keywords_does_not_matter(call):
    model = model_of(
        lambda self, x: call(F.hardswish(self.a(x)), F.hardswish(self.b(x))), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1)
    )
    gm = prepare_by_platform(model, "QNN")
    assert read_quantized(gm, "add") == [True, True]
    x = torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(gm(x), model(x))


@pytest.mark.parametrize("backend", NAMES)
def test_functional_weights_are_weights(backend):
    gm = prepared("functional_weights", backend)
    layers = [module for module in gm.modules() if isinstance(module, QATLayer)]
    assert [layer.layer_type for layer in layers] == ["Conv2d", "Linear"]
    assert not [node for node in gm.graph.nodes if node.op == "get_attr" and "weight" in str(node.target)]
    assert {row.weight for row in gm.quant_report if row.op in ("conv2d", "linear")} == {"int8 sym per-channel narrow"}
    assert sum(row.op == "linear" for row in gm.quant_report) == 2


def test_a_computed_weight_is_a_quantized_value():
    model = model_of(lambda self, x: F.linear(self.fc(x), self.fc(x)), fc=nn.Linear(4, 4))
    gm = prepare_by_platform(model)
    assert gm.quant_report.row("linear").status == "quantized"
    assert read_quantized(gm, "linear") == [True, True]


@pytest.mark.parametrize("spelling", ["T", "mT"])
def test_a_transposed_operand_is_quantized(spelling):
    model = model_of(lambda self, x: self.a(x) @ getattr(self.b(x), spelling), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    gm = prepare_by_platform(model)
    assert read_quantized(gm, "matmul") == [True, True]
    names = [row.node for row in gm.quant_report]
    assert gm.quant_report.row("b").group == gm.quant_report.row(names[names.index("matmul") - 1]).group


# TensorRT


def block(function, **modules):
    return model_of(function, conv=nn.Conv2d(3, 3, 1), stem=nn.Conv2d(3, 3, 1), **modules)


ONE_BRANCH = {
    "identity": lambda self, x: (lambda y: y + self.conv(y))(F.hardswish(self.stem(x))),
    "identity, other order": lambda self, x: (lambda y: self.conv(y) + y)(F.hardswish(self.stem(x))),
    "with an activation behind": lambda self, x: (lambda y: F.relu(self.conv(y) + y))(F.hardswish(self.stem(x))),
    "dropout": lambda self, x: (lambda y: y + F.dropout(self.conv(y), training=self.training))(
        F.hardswish(self.stem(x))
    ),
    "identity module": lambda self, x: (lambda y: y + self.nothing(self.conv(y)))(F.hardswish(self.stem(x))),
}


@pytest.mark.parametrize("case", ONE_BRANCH)
def test_tensorrt_quantizes_the_shortcut_and_not_the_branch_of_the_layer(case):
    gm = prepare_by_platform(block(ONE_BRANCH[case], nothing=nn.Identity()), "TensorRT")
    assert quantizer_after(gm, "conv") is None
    assert sorted(read_quantized(gm, "add")) == [False, True]
    assert quantizer_after(gm, "hardswish") is not None
    x = torch.randn(1, 3, 4, 4)
    assert gm(x).shape == x.shape


def test_tensorrt_with_a_projection_quantizes_exactly_one_branch():
    gm = prepared("residual", "TensorRT")
    assert sorted(read_quantized(gm, "add")) == [False, True]
    assert sorted(read_quantized(gm, "add_1")) == [False, True]
    assert quantizer_after(gm, "layer1_1_downsample_0") is not None
    assert quantizer_after(gm, "layer1_1_conv2") is None


def test_tensorrt_quantizes_no_output_of_the_model():
    for name in ("conv_bn_relu", "dict_output", "attention", "two_readers", "unused_parameters"):
        gm = prepared(name, "TensorRT")
        output = next(node for node in gm.graph.nodes if node.op == "output")
        results = [n for n in output.all_input_nodes if not isinstance(called_module(n), FakeQuantizeBase)]
        assert results == output.all_input_nodes, name
    assert TENSORRT.rules["weighted"].output is False


# readers


@pytest.mark.parametrize("backend", ["X86", "TensorRT"])
def test_a_float_reader_reads_what_the_op_computed(backend):
    gm = calibrated("two_readers", backend)
    assert read_quantized(gm, "mul") == [quantizer_after(gm, "a") is not None, False]
    assert read_quantized(gm, "a") == [True]
    assert gm.quant_report.row("tanh").status == "float"


def test_a_value_is_quantized_once_at_its_producer():
    gm = prepared("concat")
    calls = [node for node in gm.graph.nodes if isinstance(called_module(node), FakeQuantizeBase)]
    sources = [node.args[0].name for node in calls]
    assert len(sources) == len(set(sources))
    assert {user.name for user in quantizer_after(gm, "x").users} == {"point", "wide_0", "pool"}


# what training does not move


@pytest.mark.parametrize("backend", NAMES)
def test_the_scale_of_the_input_is_that_of_the_data(backend):
    gm = calibrated("residual", backend)
    (source,) = inputs("residual")
    quants = [module for module in gm.modules() if isinstance(module, FakeQuantizeBase)]
    assert {type(quant) for quant in quants} == {FixedFakeQuantize, LearnableFakeQuantize}
    assert isinstance(gm.x_act_fake_quant, FixedFakeQuantize)
    gm.train()
    gm(source.requires_grad_()).square().mean().backward()
    assert source.grad.abs().sum() > 0  # a model before this one can still be trained


def test_an_input_that_shares_its_scale_with_a_trained_value_is_learned():
    model = model_of(
        lambda self, x: self.last(torch.cat([self.conv(x), x], 1)), conv=nn.Conv2d(3, 3, 1), last=nn.Conv2d(6, 3, 1)
    )
    assert isinstance(prepare_by_platform(model).x_act_fake_quant, LearnableFakeQuantize)


def test_an_override_has_the_scale_of_the_input_learned():
    rule = {"match": {"node": "x"}, "output": {"fake_quantize": "Learnable"}}
    gm = prepare_by_platform(build("residual"), "TSQAT", {"overrides": [rule]})
    assert isinstance(gm.x_act_fake_quant, LearnableFakeQuantize)


# poles


def attention_without_softmax(self, x):
    """Numerators and denominators come out of one product, as in linear attention (EfficientViT)."""
    y = self.conv(x).relu()
    joined = torch.cat([y, torch.ones_like(y[:, :1])], 1) @ y
    return self.last(joined[:, :-1] / (joined[:, -1:] + 1e-15))


@pytest.mark.parametrize(
    ("function", "reads"),
    [
        (lambda self, x: self.last(self.conv(x) / self.other(x)), {"truediv": [True, False]}),
        (lambda self, x: self.last(1 / (self.conv(x) + 2)), {"add": [False], "truediv": [False]}),
        (lambda self, x: self.last(torch.div(other=self.conv(x), input=x)), {"div": [False, True]}),
        (lambda self, x: self.last(torch.sqrt(self.conv(x))), {"sqrt": [False]}),
        (lambda self, x: self.last(self.conv(x).reciprocal()), {"reciprocal": [False]}),
        (lambda self, x: self.last(torch.log(self.conv(x).reshape(2, 3, 4, 4))), {"reshape": [False], "log": [False]}),
        (lambda self, x: self.last(self.conv(x) ** -0.5), {"pow_1": [False]}),
        (lambda self, x: self.last(self.conv(x) ** 2), {"pow_1": [True]}),
        (lambda self, x: self.last((y := self.conv(x)) * y.log()), {"log": [False], "mul": [True, True]}),
        (lambda self, x: self.last(x / self.conv(x).abs().clamp_min(1e-6)), {"abs_1": [False], "clamp_min": [False]}),
        (lambda self, x: self.last(x / self.conv(x).clamp(min=x)), {"clamp": [False, False], "truediv": [True, False]}),
        (lambda self, x: self.last(x / -self.conv(x)), {"neg": [False], "truediv": [True, False]}),
        (lambda self, x: self.last((self.conv(x) * self.other(x)).sqrt()), {"mul": [False, False], "sqrt": [False]}),
        (attention_without_softmax, {"getitem_1": [True], "getitem_2": [False], "truediv": [True, False]}),
    ],
)
def test_what_is_near_a_pole_is_read_float(function, reads):
    modules = {name: nn.Conv2d(3, 3, 1) for name in ("conv", "other", "last")}
    gm = prepare_by_platform(model_of(function, **modules))
    assert {name: read_quantized(gm, name) for name in reads} == reads
    assert read_quantized(gm, "last") == [True]


def test_a_small_divisor_is_not_rounded_to_zero():
    """Half a step of the quantizer is 0.004 of the largest divisor: the others would be divided by zero."""
    model = model_of(lambda self, x: self.last(x / (x.abs() + 1e-6)), last=nn.Conv2d(3, 3, 1))
    x = torch.cat([torch.full((2, 3, 4, 1), 1e-3), 10 * torch.rand(2, 3, 4, 3)], 3)
    gm = calibrate(prepare_by_platform(model), (x,)).train()
    output = gm(x)
    output.square().mean().backward()
    assert output.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in gm.parameters())
    row = gm.quant_report.row("add")
    assert (row.status, "singularity at zero" in row.reason) == ("float", True)


def test_no_coordinate_of_an_angle_is_rounded_to_zero():
    """The gradients of ``atan2(0, 0)`` are NaN."""
    model = model_of(lambda self, x: self.last(torch.atan2(x[:, :3] * 0.5, x[:, 3:] * 0.5)), last=nn.Conv2d(3, 3, 1))
    x = torch.cat([torch.full((2, 6, 4, 1), 1e-3), 10 * torch.rand(2, 6, 4, 3)], 3).requires_grad_()
    gm = calibrate(prepare_by_platform(model), (x,)).train()
    gm(x).square().mean().backward()
    assert x.grad.isfinite().all()
    reasons = {row.node: row.reason for row in gm.quant_report}
    assert "singular" in reasons["mul"]
    assert "singular" in reasons["mul_1"]


def test_an_override_has_a_divisor_rounded():
    model = model_of(lambda self, x: self.last(x / self.conv(x)), conv=nn.Conv2d(3, 3, 1), last=nn.Conv2d(3, 3, 1))
    by_reader = {"match": {"node": "truediv"}, "activation": {"bit": 16}}
    by_producer = {"match": {"node": "conv"}, "output": {"bit": 16}}
    for rule in (by_reader, by_producer):
        gm = prepare_by_platform(model, "TSQAT", {"overrides": [rule]})
        assert read_quantized(gm, "truediv") == [True, True]


# independence


@pytest.mark.parametrize("name", ["residual", "concat", "attention"])
def test_backends_do_not_influence_each_other(name):
    alone = {backend: prepared(name, backend).quant_report.to_text() for backend in NAMES}
    interleaved = {}
    for backend in (*NAMES, *reversed(NAMES)):
        config = {"extra_qconfig_dict": {"w_qscheme": {"narrow_range": False}, "a_observer": "MSE"}}
        prepared(name, backend, config)
        interleaved[backend] = prepared(name, backend).quant_report.to_text()
    assert interleaved == alone
    assert len(set(alone.values())) == 4


def test_preparing_changes_no_table():
    before = {kind: (spec, repr(spec)) for kind, spec in BACKENDS.items()}
    for backend in NAMES:
        calibrated("residual", backend, {"extra_qconfig_dict": {"w_qscheme": {"narrow_range": False}}})
    assert {kind: (spec, repr(spec)) for kind, spec in BACKENDS.items()} == before
    assert TSQAT.weight.scheme.narrow_range is ONNXRUNTIME.weight.scheme.narrow_range is True


def test_two_models_of_one_backend_share_no_quantizer():
    first, second = prepared("residual"), prepared("residual")
    calibrate(first, inputs("residual"))
    assert not {id(m) for m in first.modules()} & {id(m) for m in second.modules()}
    assert all(torch.isinf(m.observer.min_val).all() for m in second.modules() if isinstance(m, FakeQuantizeBase))


def test_the_quantizer_leaves_the_spec_it_was_given_alone():
    mine = dataclasses.replace(TSQAT, name="Mine")
    before = copy.copy(mine)
    quantizer = BackendQuantizer(mine)
    assert quantizer.spec == before
    assert mine == before


# what stays float


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.LSTM(4, 6, proj_size=4), "has projections"),
        (nn.Embedding(10, 4, max_norm=1.0), "max_norm rescales the rows of the table in each run"),
        (nn.Embedding(10, 4, sparse=True), "its gradient has the rows that were read only"),
        (nn.CosineSimilarity(), "not an op of fxqat's table"),
    ],
    ids=repr,
)
def test_the_report_says_why_an_op_stays_float(module, reason):
    def run(self, x):
        y = self.module(x.argmax(1)) if isinstance(module, nn.Embedding) else self.module(x)
        return self.fc(y[0] if isinstance(module, nn.LSTM) else y)

    gm = prepare_by_platform(model_of(run, module=module, fc=nn.Linear(4, 4)))
    row = gm.quant_report.row("module")
    assert reason in row.reason
    assert row.weight == ""
    assert gm.quant_report.row("fc").weight == "int8 sym per-channel narrow"


def test_an_output_size_keeps_a_transposed_convolution_float():
    model = model_of(
        lambda self, x: self.conv(self.up(x, output_size=[9, 9])),
        up=nn.ConvTranspose2d(3, 4, 2, 2),
        conv=nn.Conv2d(4, 4, 1),
    )
    gm = prepare_by_platform(model)
    assert "output_size" in gm.quant_report.row("up").reason
    assert gm.quant_report.row("conv").weight
    x = torch.randn(1, 3, 4, 4)
    torch.testing.assert_close(gm(x), model(x))


def test_arguments_that_are_no_tensors_are_not_quantized():
    """A default that is a number is a setting of the model and not a value to watch."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, scale=2.0):
            return self.fc(x) * scale

    model = Scaled().eval()
    gm = prepare_by_platform(model)
    x = torch.randn(8, 4)
    torch.testing.assert_close(gm(x), model(x))
    calibrate(gm, (x,))
    assert (gm(x) - model(x)).abs().max() < 0.1
    assert (gm(x, 1.0) - model(x, 1.0)).abs().max() < 0.1


# weights of single ops, and the schemes of further backends


def weights_of(gm):
    """The scheme of every weight, by the kind of its layer."""
    layers = [module for module in gm.modules() if isinstance(module, QATLayer)]
    return {layer.layer_type: str(layer.weight_fake_quant.scheme) for layer in layers}


def test_the_weight_of_a_linear_layer_has_one_scale_on_qnn():
    assert weights_of(prepared("residual", "QNN")) == {
        "Conv2d": "int8 sym per-channel narrow",
        "Linear": "int8 sym per-tensor narrow",
    }


@pytest.mark.parametrize(
    ("config", "conv", "linear"),
    [
        ({"extra_qconfig_dict": {"w_qscheme": {"bit": 4}}}, "int4 sym per-channel", "int4 sym per-tensor"),
        ({"extra_qconfig_dict": {"w_qscheme": {"per_channel": True}}}, "int8 sym per-channel", "int8 sym per-channel"),
        (
            {"overrides": [{"match": {"type": "Linear"}, "weight": {"bit": 4}}]},
            "int8 sym per-channel",
            "int4 sym per-tensor",
        ),
    ],
    ids=["bit", "per_channel", "override"],
)
def test_the_configuration_reaches_a_weight_with_a_scheme_of_its_own(config, conv, linear):
    expected = {"Conv2d": f"{conv} narrow", "Linear": f"{linear} narrow"}
    assert weights_of(prepared("residual", "QNN", config)) == expected


def test_no_weight_is_learned_without_training():
    gm = prepare_by_platform(build("residual"), "QNN", is_qat=False)
    layers = [module for module in gm.modules() if isinstance(module, QATLayer)]
    assert {layer.layer_type for layer in layers} == {"Conv2d", "Linear"}
    assert {type(layer.weight_fake_quant).__name__ for layer in layers} == {"FixedFakeQuantize"}


@pytest.mark.parametrize(("backend", "bits"), [("QNN", 8), ("QNN_A16", 16)])
def test_sigmoid_and_tanh_are_on_the_scales_that_qnn_requires(backend, bits):
    """Sigmoid 2**-bits from 0, tanh 2**(1 - bits) from the middle, as ONNX Runtime's quant_config.py sets them."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sigmoid(), nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 2, 1)).eval()
    gm = prepare_by_platform(model, backend)
    found = {}
    for kind, node in (("sigmoid", "_1"), ("tanh", "_3")):
        quant = gm.get_submodule(str(quantizer_after(gm, node).target))
        found[kind] = tuple(parameter.item() for parameter in quant.qparams())
    assert found == {"sigmoid": (2.0**-bits, 0.0), "tanh": (2.0 ** (1 - bits), 2.0 ** (bits - 1))}


def test_a_scale_of_sixteen_bit_activations_keeps_their_range():
    gm = prepare_by_platform(build("residual"), "QNN_A16")
    calibrate(gm, inputs("residual"))
    (x,) = inputs("residual")
    scale, zero_point = gm.x_act_fake_quant.qparams()
    low, high = (-zero_point * scale).item(), ((65535 - zero_point) * scale).item()
    assert abs(low - x.min().item()) < 2**-11 * (high - low)
    assert abs(high - x.max().item()) < 2**-11 * (high - low)


class BeforeRecurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.first, self.rnn, self.last = nn.Linear(8, 8), kind(8, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, x):
        y, _ = self.rnn(self.first(x))
        return self.last(y)


@pytest.mark.parametrize("with_inputs", [True, False])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_the_value_before_a_recurrent_layer_is_quantized(kind, with_inputs):
    inputs = (torch.randn(2, 5, 8),) if with_inputs else None
    gm = prepare_by_platform(BeforeRecurrent(kind).eval(), "LiteRT", example_inputs=inputs)
    rows = {row.target: row for row in gm.quant_report}
    assert rows["first"].output == rows["last"].output == "int8 asym per-tensor"
    assert rows["rnn"].status == "float"
    assert "index" not in rows["first"].reason
