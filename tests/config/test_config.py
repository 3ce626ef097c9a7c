"""``prepare_custom_config_dict``: every key has its effect, and no other key is taken."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
import yaml
from easydict import EasyDict
from torch import nn

from fxqat import prepare_by_platform
from fxqat.config.config import LISTS, QCONFIG_KEYS, TOP_KEYS, PrepareConfig, parse_config
from fxqat.config.overrides import Match, TensorChange
from fxqat.errors import ConfigError
from fxqat.fake_quantize.fixed import FixedFakeQuantize
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.nn.fused import FusedLayer
from fxqat.nn.qat import QATLayer
from fxqat.observer.ema_min_max import EMAMinMaxObserver
from fxqat.observer.mse import MSEObserver
from fxqat.tools.to_float import to_float
from tests.builders import spelling
from tests.models import BasicBlock, ConvBnRelu, Residual, build, calibrate, calibrated, inputs, prepared

EVERYTHING = {
    "extra_qconfig_dict": {
        "w_observer": "MSEObserver",
        "a_observer": "MinMax",
        "w_fakequantize": "FixedFakeQuantize",
        "a_fakequantize": "Learnable",
        "w_fakeq_params": {},
        "a_fakeq_params": {"grad_factor": 0.5},
        "w_observer_extra_args": {"num_candidates": 8},
        "a_observer_extra_args": {},
        "w_qscheme": {"bit": 6, "symmetry": True, "per_channel": True, "pot_scale": True},
        "a_qscheme": {"bit": 7, "symmetry": False, "signed": False},
    },
    "extra_quantizer_dict": {"exclude_module_name": ["layer1.0.conv1"], "exclude_node_name": ["mean"]},
    "extra_fuse_dict": {"exclude_fusion_pattern": [["conv2d", "relu"]]},
    "preserve_attr": ["note"],
    "leaf_module": ["layer1.1"],
    "bn_mode": 5,
    "optimize_for": "size",
    "activation": "static",
    "first_last": {"activation": {"bit": 8}},
    "first": {"weight": {"bit": 7}},
    "last": {"output": {"bit": 10}},
    "overrides": [
        {"match": {"module": "layer1.0.conv2"}, "weight": {"bit": 3}},
        {"match": {"module": "fc"}, "weight": None, "output": {"bit": 9}},
    ],
}


def quants(gm, kind):
    return [quant for _, quant in named_fake_quants(gm) if quant.kind == f"{kind}_fake_quant"]


def qconfig(**entries):
    return {"extra_qconfig_dict": entries}


def quantizer(**entries):
    return {"extra_quantizer_dict": entries}


def rows(gm):
    return [(row.node, row.status, row.output, row.weight, row.group) for row in gm.quant_report]


# extra_qconfig_dict


EFFECTS = {
    "w_observer": ({"w_observer": "MSE"}, "weight", lambda q: type(q.observer) is MSEObserver),
    "w_observer as a class": ({"w_observer": MSEObserver}, "weight", lambda q: type(q.observer) is MSEObserver),
    "a_observer": ({"a_observer": "MSEObserver"}, "act", lambda q: type(q.observer) is MSEObserver),
    "w_fakequantize": ({"w_fakequantize": "Fixed"}, "weight", lambda q: type(q) is FixedFakeQuantize),
    "a_fakequantize": ({"a_fakequantize": "FixedFakeQuantize"}, "act", lambda q: type(q) is FixedFakeQuantize),
    "w_fakeq_params": ({"w_fakeq_params": {"grad_factor": 2.0}}, "weight", lambda q: q.grad_factor == 2.0),
    "a_fakeq_params": ({"a_fakeq_params": {"grad_factor": 2.0}}, "act", lambda q: q.grad_factor == 2.0),
    "w_observer_extra_args": (
        {"w_observer": "MSE", "w_observer_extra_args": {"num_candidates": 9}},
        "weight",
        lambda q: getattr(q.observer, "num_candidates", 0) == 9,
    ),
    "a_observer_extra_args": (
        {"a_observer": "EMAMinMax", "a_observer_extra_args": {"ema_ratio": 0.25}},
        "act",
        lambda q: type(q.observer) is EMAMinMaxObserver and q.observer.ema_ratio == 0.25,
    ),
    "w_qscheme bit": ({"w_qscheme": {"bit": 4}}, "weight", lambda q: q.scheme.quant_max == 7),
    "a_qscheme bit": ({"a_qscheme": {"bit": 4}}, "act", lambda q: q.scheme.quant_max == 7),
    "w_qscheme symmetry": ({"w_qscheme": {"symmetry": False}}, "weight", lambda q: q.has_zero_point),
    "a_qscheme symmetry": ({"a_qscheme": {"symmetry": False}}, "act", lambda q: q.has_zero_point),
    "w_qscheme per_channel": ({"w_qscheme": {"per_channel": False}}, "weight", lambda q: q.scale.shape == ()),
    "a_qscheme signed": ({"a_qscheme": {"signed": False}}, "act", lambda q: q.scheme.quant_min == 0),
    "w_qscheme narrow_range": ({"w_qscheme": {"narrow_range": False}}, "weight", lambda q: q.scheme.quant_min == -128),
    "a_qscheme narrow_range": ({"a_qscheme": {"narrow_range": True}}, "act", lambda q: q.scheme.quant_min == -127),
    "w_qscheme pot_scale": (
        {"w_fakequantize": "Fixed", "w_qscheme": {"pot_scale": True}},
        "weight",
        lambda q: q.scheme.scale_bits == 1,
    ),
}


def learned(gm, kind):
    """The fake-quants of a kind but for that of the model's input, whose scale is not learned."""
    return [quant for quant in quants(gm, kind) if quant is not gm.x_act_fake_quant]


@pytest.mark.parametrize("case", EFFECTS)
def test_extra_qconfig_dict_sets_one_side_and_not_the_other(case):
    entries, kind, holds = EFFECTS[case]
    gm = prepared("residual", config=qconfig(**entries))
    assert all(holds(q) for q in learned(gm, kind))
    assert not any(holds(q) for q in learned(prepared("residual"), kind))
    other = "act" if kind == "weight" else "weight"
    assert [repr(q) for q in quants(gm, other)] == [repr(q) for q in quants(prepared("residual"), other)]


@pytest.mark.parametrize("side", ["w", "a"])
def test_power_of_two_scales_are_powers_of_two(side):
    config = qconfig(**{f"{side}_fakequantize": "Fixed", f"{side}_qscheme": {"pot_scale": True}})
    gm = calibrated("residual", "TSQAT", config)
    kind = {"w": "weight", "a": "act"}
    exponents = torch.cat([q.qparams()[0].log2().flatten() for q in quants(gm, kind[side])])
    assert torch.equal(exponents, exponents.round())
    assert exponents.unique().numel() > 1


@pytest.mark.parametrize("bit", [2, 3, 4, 6, 10, 16])
def test_any_width_rounds_to_its_grid(bit):
    gm = calibrated("conv_bn_relu", "TSQAT", qconfig(w_qscheme={"bit": bit}, a_qscheme={"bit": bit}))
    (x,) = inputs("conv_bn_relu")
    quant = gm.x_act_fake_quant
    steps = (quant(x) / quant.qparams()[0]).unique()
    torch.testing.assert_close(steps, steps.round(), rtol=0, atol=2e-3)
    assert steps.min() >= -(2 ** (bit - 1))
    assert steps.max() <= 2 ** (bit - 1) - 1
    assert steps.numel() > 2


# extra_quantizer_dict


@pytest.mark.parametrize(
    ("entries", "left"),
    [
        ({"exclude_module_name": ["layer1.0.conv1"]}, ["layer1_0_conv1"]),
        ({"exclude_module_name": ["layer1.0.conv*", "fc"]}, ["layer1_0_conv1", "layer1_0_conv2", "fc"]),
        ({"exclude_module_name": ["re:layer1\\.1\\..*[12]"]}, ["layer1_1_conv1", "layer1_1_conv2"]),
        ({"exclude_node_name": ["layer1_0_conv1"]}, ["layer1_0_conv1"]),
        ({"exclude_node_name": ["mean", "fc"]}, ["mean", "fc"]),
        ({"exclude_function_type": ["mean"]}, ["mean"]),
        ({"exclude_function_type": ["add"], "exclude_module_name": ["stem"]}, ["stem", "add", "add_1"]),
    ],
    ids=spelling,
)
def test_exclusions_leave_exactly_these_float(entries, left):
    gm = prepared("residual", config=quantizer(**entries))
    key = next(iter(entries))
    before, after = prepared("residual").quant_report, gm.quant_report
    excluded = [row.node for row in after if "left float by exclude" in row.reason]
    assert sorted(excluded) == sorted(left)
    assert all(not after.row(node).weight for node in left)
    assert [r.node for r in after if r.weight] == [r.node for r in before if r.weight and r.node not in left]
    assert any(key in after.row(node).reason for node in left)
    layers = [n for n in left if n.startswith(("layer", "fc", "stem"))]
    paths = [after.row(node).target for node in layers]
    assert not any(isinstance(gm.get_submodule(path), QATLayer) for path in paths)


def test_the_readers_of_an_excluded_layer_still_read_quantized():
    gm = prepared("residual", config=quantizer(exclude_module_name=["layer1.0.conv1"]))
    assert gm.quant_report.row("layer1_0_conv1").output == "int8 sym per-tensor"
    assert gm.quant_report.row("layer1_0_conv1").reason.endswith("read quantized by layer1_0_conv2")
    assert isinstance(gm.get_submodule("layer1.0.conv1"), FusedLayer)


@pytest.mark.parametrize(
    "entries",
    [
        {"additional_function_type": [F.softmax]},
        {"additional_function_type": ["softmax"]},
        {"additional_node_name": ["softmax"]},
        {"additional_node_name": ["re:soft.*"]},
    ],
    ids=spelling,
)
def test_additions_are_quantized_although_the_table_does_not(entries):
    gm = prepared("attention", "TensorRT", quantizer(**entries))
    before = prepared("attention", "TensorRT").quant_report
    row = gm.quant_report.row("softmax")
    assert "asked for by extra_quantizer_dict" in row.reason
    assert gm.quant_report.row("mul").output == "int8 sym per-tensor"
    assert before.row("mul").output == ""
    assert {r.node for r in gm.quant_report if r.output} == {r.node for r in before if r.output} | {"mul"}


@pytest.mark.parametrize("kind", [nn.Hardsigmoid, "Hardsigmoid"])
def test_additional_module_types(kind):
    gm = prepared("squeeze_excite", "TensorRT", quantizer(additional_module_type=[kind]))
    assert gm.quant_report.row("gate").output == "int8 sym per-tensor"
    assert gm.quant_report.row("fc2").output == "int8 sym per-tensor"
    assert prepared("squeeze_excite", "TensorRT").quant_report.row("gate").output == ""


def test_an_exclusion_stands_above_an_addition():
    config = quantizer(additional_module_type=["Hardsigmoid"], exclude_module_name=["gate"])
    row = prepared("squeeze_excite", "TensorRT", config).quant_report.row("gate")
    assert row.status == "float"
    assert "exclude_module_name" in row.reason


@pytest.mark.parametrize("key", LISTS)
def test_a_name_that_matches_nothing_is_an_error(key):
    with pytest.raises(ConfigError, match=f"{key}: 'nothing.like.this' matches no node") as caught:
        prepared("residual", config=quantizer(**{key: ["nothing.like.this"]}))
    assert "of the model" in str(caught.value)


def test_the_nearest_module_is_named():
    with pytest.raises(ConfigError, match="exclude_module_name") as caught:
        prepared("residual", config=quantizer(exclude_module_name=["layer1.0.conv11"]))
    assert "The nearest is 'layer1.0.conv1'" in str(caught.value)


# the other keys


def test_extra_fuse_dict_leaves_a_fusion_out():
    pattern = ["conv2d", "batch_norm2d", "relu"]
    gm = prepared("conv_bn_relu", config={"extra_fuse_dict": {"exclude_fusion_pattern": [pattern]}})
    assert [type(gm.conv1.bn), gm.conv1.activation] == [nn.BatchNorm2d, None]
    assert type(gm.conv2.activation) is nn.ReLU6
    assert "relu" in [row.node for row in gm.quant_report]
    torch.testing.assert_close(gm(*inputs("conv_bn_relu")), build("conv_bn_relu")(*inputs("conv_bn_relu")))


@pytest.mark.parametrize("value", [["classes", "note"], {"": ["classes", "note"]}])
def test_preserve_attr_carries_attributes_over(value):
    model = build("conv_bn_relu")
    model.classes, model.note = ["cat", "dog"], "trained in March"
    gm = prepare_by_platform(model, "TSQAT", {"preserve_attr": value})
    assert (gm.classes, gm.note) == (["cat", "dog"], "trained in March")
    assert gm.classes is not model.classes
    assert not hasattr(prepare_by_platform(model), "classes")


@pytest.mark.parametrize(
    ("value", "message"),
    [(["clases"], "no attribute 'clases'"), ({"fc": ["x"]}, "fc has no attribute 'x'"), ("note", "expected a list")],
)
def test_preserve_attr_of_what_is_not_there_is_an_error(value, message):
    model = build("conv_bn_relu")
    model.classes = ["cat"]
    with pytest.raises(ConfigError, match=message) as caught:
        prepare_by_platform(model, "TSQAT", {"preserve_attr": value})
    assert "preserve_attr" in str(caught.value)


def test_preserve_attr_of_modules_inside():
    """MQBench's form; a module whose only content is its attribute is not called in the graph."""
    model = build("residual")
    model.layer1.strides, model.layer1[0].note, model.version = [1, 2], "first", 3
    names = {"": ["version"], "layer1": ["strides"], "layer1.0": ["note"]}
    gm = prepare_by_platform(model, "TSQAT", {"preserve_attr": names})
    for made in (gm, copy.deepcopy(gm), pickle.loads(pickle.dumps(gm)), to_float(gm)):
        assert (made.version, made.layer1.strides, made.get_submodule("layer1.0").note) == (3, [1, 2], "first")
    assert gm.layer1.strides is not model.layer1.strides
    with pytest.raises(ConfigError, match=r"preserve_attr: layer1.0.conv1 has no attribute 'x'"):
        prepare_by_platform(model, "TSQAT", {"preserve_attr": {"layer1.0.conv1": ["x"]}})
    with pytest.raises(ConfigError, match="preserve_attr: 'layer1.0.conv1.weight' is already part"):
        prepare_by_platform(model, "TSQAT", {"preserve_attr": {"layer1.0.conv1": ["weight"]}})


@pytest.mark.parametrize("name", ["conv1", "fc"])
def test_preserve_attr_does_not_put_a_float_layer_over_a_quantized_one(name):
    model = build("conv_bn_relu")
    with pytest.raises(ConfigError, match=f"preserve_attr.*{name}"):
        prepare_by_platform(model, "TSQAT", {"preserve_attr": [name]})
    assert isinstance(getattr(prepare_by_platform(model), name), QATLayer)


@pytest.mark.parametrize("leaf", ["layer1.0", "layer1"])
def test_leaf_module_keeps_a_module_whole_and_float(leaf):
    gm = prepared("residual", config={"leaf_module": [leaf]})
    row = gm.quant_report.row(leaf)
    assert row.weight == ""
    assert "not an op of fxqat's table" in row.reason
    assert not any(isinstance(module, QATLayer) for module in gm.get_submodule(leaf).modules())
    assert isinstance(gm.stem, QATLayer)
    torch.testing.assert_close(gm(*inputs("residual")), build("residual")(*inputs("residual")))


@pytest.mark.parametrize("leaf", [BasicBlock, "BasicBlock"])
def test_leaf_module_by_type(leaf):
    gm = prepared("residual", config={"leaf_module": [leaf]})
    assert [row.node for row in gm.quant_report if row.weight] == ["stem", "fc"]
    assert type(gm.get_submodule("layer1.0")) is BasicBlock


def test_concrete_args_fix_the_way():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x, first):
            return self.a(x) if first else self.b(x)

    model = Either()
    x = torch.randn(2, 4)
    for first, path in ((True, "a"), (False, "b")):
        gm = prepare_by_platform(model, "TSQAT", {"concrete_args": {"first": first}})
        assert [row.node for row in gm.quant_report if row.weight] == [path]
        torch.testing.assert_close(gm(x), model(x, first))


def batch_norm_steps(bn_mode, steps=4):
    """A model, its float twin, and the running means of the first BatchNorm after each training step."""
    model = build("conv_bn_relu").train()
    gm = prepare_by_platform(model, "TSQAT", None if bn_mode is None else {"bn_mode": bn_mode})
    means = []
    for step in range(steps):
        gm(*inputs("conv_bn_relu", seed=step))
        means.append(gm.conv1.bn.running_mean.clone())
        model(*inputs("conv_bn_relu", seed=step))
    return model, gm, means


@pytest.mark.parametrize("bn_mode", [None, "train"])
def test_bn_mode_train_goes_on_as_the_float_model(bn_mode):
    model, gm, _ = batch_norm_steps(bn_mode)
    torch.testing.assert_close(gm.conv1.bn.running_mean, model.bn1.running_mean)
    torch.testing.assert_close(gm.conv1.bn.running_var, model.bn1.running_var)
    assert gm.conv1.bn.num_batches_tracked == model.bn1.num_batches_tracked == 4


def test_bn_mode_freeze_keeps_the_statistics():
    _, gm, means = batch_norm_steps("freeze")
    start = build("conv_bn_relu")
    assert all(torch.equal(mean, start.bn1.running_mean) for mean in means)
    torch.testing.assert_close(gm(*inputs("conv_bn_relu")), start(*inputs("conv_bn_relu")))


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_bn_mode_count_freezes_after_that_many_steps(steps):
    _, gm, means = batch_norm_steps(steps)
    _, _, live = batch_norm_steps("train")
    start = build("conv_bn_relu").bn1.running_mean
    history = [start, *means]
    for step, (before, after) in enumerate(zip(history, history[1:], strict=False)):
        assert torch.equal(before, after) == (step >= steps)
    for step in range(steps):
        torch.testing.assert_close(means[step], live[step])
    assert gm.conv1.bn_mode == steps


def test_bn_mode_count_counts_batches_as_the_float_model_does():
    model, gm, _ = batch_norm_steps(10)
    assert model.bn1.num_batches_tracked == 4
    assert gm.conv1.bn.num_batches_tracked == 4


@pytest.mark.parametrize("bn_mode", ["train", 3])
def test_a_batch_norm_frozen_by_the_user_stays_frozen(bn_mode):
    model = build("conv_bn_relu").train()
    model.bn1.eval()
    gm = prepare_by_platform(model, "TSQAT", {"bn_mode": bn_mode})
    torch.testing.assert_close(gm(*inputs("conv_bn_relu")), model(*inputs("conv_bn_relu")))
    assert not gm.conv1.bn.training
    assert torch.equal(gm.conv1.bn.running_mean, build("conv_bn_relu").bn1.running_mean)


# what is accepted


UNKNOWN = {
    "top": ({"bn_mod": "train"}, "bn_mod", "bn_mode"),
    "qconfig": (qconfig(w_observr="MSE"), "w_observr", "w_observer"),
    "w_qscheme": (qconfig(w_qscheme={"bits": 4}), "bits", "bit"),
    "a_qscheme": (qconfig(a_qscheme={"symetry": True}), "symetry", "symmetry"),
    "quantizer": (quantizer(exclude_module_names=["a"]), "exclude_module_names", "exclude_module_name"),
    "fuse": ({"extra_fuse_dict": {"exclude_fusion_patern": []}}, "exclude_fusion_patern", "exclude_fusion_pattern"),
    "override": ({"overrides": [{"match": {"node": "x"}, "wieght": None}]}, "wieght", "weight"),
    "match": ({"overrides": [{"match": {"modul": "x"}, "weight": None}]}, "modul", "module"),
    "change": ({"overrides": [{"match": {"node": "x"}, "weight": {"obsever": "MSE"}}]}, "obsever", "observer"),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_an_unknown_key_names_the_nearest(case):
    config, wrong, nearest = UNKNOWN[case]
    with pytest.raises(ConfigError, match=f"unknown key '{wrong}'") as caught:
        parse_config(config)
    assert f"did you mean '{nearest}'?" in str(caught.value)
    assert "Known: " in str(caught.value)


WRONG = {
    "not a mapping": ([1], "expected a mapping"),
    "a number": (3, "expected a mapping"),
    "qconfig": ({"extra_qconfig_dict": "MSE"}, "extra_qconfig_dict: expected a mapping"),
    "scheme": (qconfig(w_qscheme=4), "w_qscheme: expected a mapping"),
    "bit as text": (qconfig(w_qscheme={"bit": "8"}), "bit must be int, got '8'"),
    "bit as bool": (qconfig(w_qscheme={"bit": True}), "bit must be int"),
    "symmetry as number": (qconfig(a_qscheme={"symmetry": 1}), "symmetry must be bool, got 1"),
    "arguments": (qconfig(w_fakeq_params=[1]), "fake_quantize_args: expected a mapping"),
    "exclusion as text": (quantizer(exclude_module_name="fc"), "exclude_module_name: expected a list"),
    "overrides as mapping": ({"overrides": {"match": {"node": "x"}}}, "overrides: expected a list"),
    "override as text": ({"overrides": ["fc"]}, r"overrides\[0\]: expected a mapping"),
    "no match": ({"overrides": [{"weight": None}]}, r"overrides\[0\]: needs a 'match'"),
    "empty match": ({"overrides": [{"match": {}, "weight": None}]}, r"overrides\[0\]: needs a 'match'"),
    "no change": ({"overrides": [{"match": {"node": "x"}}]}, r"overrides\[0\]: says nothing"),
    "a change as text": ({"overrides": [{"match": {"node": "x"}, "weight": "int8"}]}, "expected a mapping"),
    "leaf as text": ({"leaf_module": "layer1"}, "leaf_module: expected a list"),
    "concrete_args": ({"concrete_args": [1]}, "concrete_args: expected a mapping"),
    "bn_mode": ({"bn_mode": "frozen"}, "bn_mode must be 'train', 'freeze' or a number"),
    "bn_mode below 0": ({"bn_mode": -1}, "bn_mode"),
    "bn_mode as bool": ({"bn_mode": True}, "bn_mode"),
    "optimize_for": ({"optimize_for": "small"}, "optimize_for must be 'latency' or 'size', got 'small'"),
    "optimize_for as list": ({"optimize_for": ["size"]}, "optimize_for must be"),
    "fusion": ({"extra_fuse_dict": {"exclude_fusion_pattern": [["conv2d", "silu"]]}}, "no fusion.*silu"),
    "fusion as text": ({"extra_fuse_dict": {"exclude_fusion_pattern": ["conv2d"]}}, "expected a list of op names"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_value_of_the_wrong_form_is_an_error(case):
    config, message = WRONG[case]
    before = copy.deepcopy(config)
    with pytest.raises(ConfigError, match=message):
        parse_config(config)
    assert config == before


@pytest.mark.parametrize("bit", [1, 17, 0, -8])
def test_a_width_out_of_range_is_an_error(bit):
    with pytest.raises(ConfigError, match=f"bit_width must be an integer from 2 to 16, got {bit}"):
        prepared("conv_bn_relu", config=qconfig(w_qscheme={"bit": bit}))
    with pytest.raises(ConfigError, match=f"got {bit}"):
        prepared("conv_bn_relu", config={"overrides": [{"match": {"node": "x"}, "output": {"bit": bit}}]})


def test_keys_are_those_of_the_design():
    assert set(EVERYTHING) | {"concrete_args"} == set(TOP_KEYS)
    assert set(EVERYTHING["extra_qconfig_dict"]) == set(QCONFIG_KEYS)
    assert len(LISTS) == 6


# how it is given


@pytest.mark.parametrize("how", ["str", "Path", "EasyDict"])
def test_yaml_and_easydict_say_the_same_as_a_dict(how, tmp_path):
    path = tmp_path / "quantization.yaml"
    path.write_text(yaml.safe_dump(EVERYTHING), encoding="utf-8")
    given = {"str": str(path), "Path": path, "EasyDict": EasyDict(copy.deepcopy(EVERYTHING))}[how]
    assert parse_config(given) == parse_config(EVERYTHING)
    ours, theirs = prepared("residual", config=given), prepared("residual", config=EVERYTHING)
    assert rows(ours) == rows(theirs)
    assert [repr(q) for _, q in named_fake_quants(ours)] == [repr(q) for _, q in named_fake_quants(theirs)]
    assert ours.note == Residual.note
    assert ours.get_submodule("layer1.0.conv2").bn_mode == 5


def test_nothing_given_is_the_backends_own_choice(tmp_path):
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing\n", encoding="utf-8")
    assert parse_config(None) == parse_config({}) == parse_config(empty) == PrepareConfig()
    assert rows(prepared("residual", config={})) == rows(prepared("residual"))
    assert parse_config({key: None for key in TOP_KEYS if key != "bn_mode"}) == PrepareConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read"),
        ("a: [1, 2", "is not YAML"),
        ("- 1\n- 2\n", "expected a mapping"),
        ("bn: 1\n", "unknown key"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(text, message, tmp_path):
    path = tmp_path / "bad.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        parse_config(str(path))
    assert "bad.yaml" in str(caught.value)


def test_the_users_dict_is_not_changed():
    config, before = copy.deepcopy(EVERYTHING), copy.deepcopy(EVERYTHING)
    gm = prepared("residual", config=config)
    assert config == before
    config["extra_qconfig_dict"]["a_fakeq_params"]["grad_factor"] = 100.0
    config["overrides"].clear()
    assert all(q.grad_factor == 0.5 for q in learned(gm, "act"))


def test_older_spellings_mean_the_same_as_newer_ones():
    older = {"bit": 4, "symmetry": False, "observer": "MSEObserver", "fakequantize": "LearnableFakeQuantize"}
    newer = {"bit_width": 4, "symmetric": False, "observer": "MSE", "fake_quantize": "Learnable"}
    one, two = (parse_config({"overrides": [{"match": {"node": "x"}, "weight": entry}]}) for entry in (older, newer))
    assert one == two
    assert one.overrides[0].match == Match(node="x", where="overrides[0]")
    assert one.overrides[0].changes["weight"] == TensorChange(
        {"bit_width": 4, "symmetric": False, "narrow_range": False}, {"observer": "MSE", "fake_quantize": "Learnable"}
    )


@pytest.mark.parametrize("model", [ConvBnRelu, Residual])
def test_a_configured_model_calibrates_and_trains(model):
    torch.manual_seed(0)
    config = qconfig(w_qscheme={"bit": 4}, a_qscheme={"bit": 4, "symmetry": False, "signed": False}, w_observer="MSE")
    gm = calibrate(prepare_by_platform(model(), "Experimental", config), inputs("residual")).train()
    loss = gm(*inputs("residual")).square().mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in gm.parameters())
