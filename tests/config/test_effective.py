"""The effective configuration: read back it says the same, and an edit changes exactly what it names."""

import copy

import pytest
import torch.nn.functional as F
import yaml
from torch import nn

from fxqat.config.effective import effective_config
from fxqat.errors import ConfigError
from fxqat.fake_quantize.pact import PACTFakeQuantize
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.observer.mse import MSEObserver
from tests.models import BACKENDS, TOYS, build, prepared, unlimited

USERS = {
    "extra_qconfig_dict": {"w_qscheme": {"bit": 4}, "a_observer": "MSE", "a_observer_extra_args": {"p": 3.0}},
    "extra_quantizer_dict": {"exclude_module_name": ["layer1.0.conv1"], "exclude_function_type": ["mean"]},
    "extra_fuse_dict": {"exclude_fusion_pattern": [["conv2d", "batch_norm2d", "relu"]]},
    "bn_mode": "freeze",
    "first_last": {"weight": {"bit": 8}},
    "overrides": [
        {"match": {"type": nn.Conv2d}, "weight": {"observer": MSEObserver}},
        {"match": {"module": "layer1.1.conv2"}, "activation": None, "weight": {"symmetry": False}},
        {"match": {"module": "fc"}, "output": {"bit": 12, "fake_quantize": PACTFakeQuantize}},
        {"match": {"function": "add"}, "output": None},
    ],
}


def decided(gm):
    """Placement and schemes, as a golden file has them, without the reasons."""
    return [(row.node, row.op, row.status, row.output, row.weight, row.group) for row in gm.quant_report]


def built(gm):
    """Every fake-quant and observer with everything that was configured of them."""
    return {name: (repr(quant), plain(quant), plain(quant.observer)) for name, quant in named_fake_quants(gm)}


def plain(module):
    return type(module).__name__, {k: str(v) for k, v in vars(module).items() if isinstance(v, (int, float, str))}


def calls(gm):
    return [(node.name, str(node.args), str(node.kwargs)) for node in gm.graph.nodes]


def assert_the_same(gm, again):
    assert decided(again) == decided(gm)
    assert built(again) == built(gm)
    assert calls(again) == calls(gm)


@pytest.mark.parametrize("backend", [BACKENDS[0], BACKENDS[3]])
@pytest.mark.parametrize("name", TOYS)
def test_reading_it_back_prepares_the_same(name, backend, tmp_path):
    gm = prepared(name, backend)
    config = effective_config(gm, tmp_path / "effective.yaml")
    again = prepared(name, backend, str(tmp_path / "effective.yaml"))
    assert_the_same(gm, again)
    assert effective_config(again) == config
    weights = [name for name, _ in gm.named_modules(remove_duplicate=False) if name.endswith("weight_fake_quant")]
    assert len(config["overrides"]) == len(weights) + sum("weight" not in name for name in built(gm))


@pytest.mark.parametrize("backend", ["Experimental", "TensorRT", "Vitis"])
def test_a_users_configuration_is_in_it(backend, tmp_path):
    users = copy.deepcopy(USERS)
    if backend == "Vitis":
        users["overrides"][2]["output"].pop("fake_quantize")
    spec = unlimited(backend)
    gm = prepared("residual", spec, users)
    config = effective_config(gm, tmp_path / "effective.yaml")
    assert_the_same(gm, prepared("residual", spec, config))
    assert_the_same(gm, prepared("residual", spec, str(tmp_path / "effective.yaml")))
    assert not any("weight" in rule and "bit_width" not in rule["weight"] for rule in config["overrides"])


def rule_of(config, **match):
    """The rule for one tensor; rules of the user come before it."""
    return [rule for rule in config["overrides"] if rule["match"] == match][-1]


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
def test_an_edited_width_changes_exactly_that_tensor(backend, tmp_path):
    spec = unlimited(backend)
    gm = prepared("residual", spec)
    path = tmp_path / "effective.yaml"
    count = len(effective_config(gm, path)["overrides"])
    for index in range(count):
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        rule = config["overrides"][index]
        (rule.get("weight") or rule["value"])["bit_width"] = 5
        again = prepared("residual", spec, config)
        changed = [
            (b[4], a[4]) if a[4] != b[4] else (b[3], a[3])
            for b, a in zip(decided(gm), decided(again), strict=True)
            if a != b
        ]
        groups = {
            row.group
            for row, other in zip(gm.quant_report, again.quant_report, strict=True)
            if row.output != other.output
        }
        differing = [name for name, quant in built(again).items() if quant != built(gm)[name]]
        assert len(differing) == 1
        assert all("int8" in before and "int5" in after for before, after in changed)
        assert len(groups) == int("value" in rule)


def test_everything_of_a_tensor_is_written():
    config = effective_config(prepared("residual", "TSQAT", USERS))
    assert rule_of(config, module="fc")["weight"] == {
        **{"bit_width": 8, "symmetric": True, "signed": True, "per_channel": True, "narrow_range": True},
        **{"scale_bits": 5, "even_zero_point": False, "observer": "MinMax", "fake_quantize": "Learnable"},
    }
    assert rule_of(config, module="stem")["weight"]["observer"] == "MSE"
    last = rule_of(config, node="fc")["value"]
    assert (last["bit_width"], last["fake_quantize"], last["observer_args"]) == (12, "PACT", {"p": 3.0})
    assert config["extra_quantizer_dict"] == USERS["extra_quantizer_dict"]
    assert config["bn_mode"] == "freeze"


def test_a_known_range_is_written_and_can_be_changed():
    config = effective_config(prepared("attention", "TSQAT"))
    found = rule_of(config, node="softmax")["value"]
    assert (found["fixed_range"], found["fake_quantize"], "observer" in found) == ([0.0, 1.0], "Fixed", False)
    found["fixed_range"] = [0.0, 0.5]
    assert prepared("attention", "TSQAT", config).softmax_act_fake_quant.scheme.fixed_range == (0.0, 0.5)
    found |= {"fixed_range": None, "observer": "MSE", "fake_quantize": "PACT"}
    quant = prepared("attention", "TSQAT", config).softmax_act_fake_quant
    assert (type(quant), type(quant.observer)) == (PACTFakeQuantize, MSEObserver)


def test_the_result_is_the_callers_own():
    gm = prepared("conv_bn_relu")
    config = effective_config(gm)
    config["overrides"].clear()
    assert effective_config(gm)["overrides"]
    assert effective_config(copy.deepcopy(gm)) == effective_config(gm)


def test_what_yaml_has_no_word_for_is_named(tmp_path):
    class Mine(MSEObserver):
        pass

    gm = prepared("residual", config={"extra_qconfig_dict": {"w_observer": Mine}})
    with pytest.raises(ConfigError, match="cannot be written as YAML") as caught:
        effective_config(gm, tmp_path / "effective.yaml")
    assert "Mine" in str(caught.value)
    assert not (tmp_path / "effective.yaml").exists()
    assert_the_same(gm, prepared("residual", config=effective_config(gm)))


def test_functions_and_types_are_written_by_name():
    config = {"extra_quantizer_dict": {"additional_function_type": [F.softmax]}}
    gm = prepared("attention", "TensorRT", config)
    found = effective_config(gm)
    assert found["extra_quantizer_dict"] == {"additional_function_type": ["softmax"]}
    assert_the_same(gm, prepared("attention", "TensorRT", found))


def test_only_prepared_models_have_one():
    with pytest.raises(ConfigError, match="needs a model of prepare_by_platform, got ConvBnRelu"):
        effective_config(build("conv_bn_relu"))
    assert effective_config(prepared("conv_bn_relu"))
