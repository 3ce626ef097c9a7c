"""Wrong and contradictory configurations: each is refused, with the key, the value, and what to write instead."""

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.config.config import parse_config
from fxqat.errors import ConfigError
from tests.models import prepared


def qconfig(**entries):
    return {"extra_qconfig_dict": entries}


def rule(match, **changes):
    return {"overrides": [{"match": match, **changes}]}


def listed(**entries):
    return {"extra_quantizer_dict": entries}


FC = {"module": "fc"}
POT = {"pot_scale": True}
WRONG = {
    # name: (configuration, the key, the value, the nearest valid choice or the remedy)
    "unknown key": ({"overides": []}, "prepare_custom_config_dict", "'overides'", "did you mean 'overrides'?"),
    "unknown scheme key": (qconfig(w_qscheme={"bits": 4}), "w_qscheme", "'bits'", "did you mean 'bit'?"),
    "unknown observer": (qconfig(w_observer="MSEE"), "observer", "'MSEE'", "did you mean 'MSE'?"),
    "unknown fake-quant": (qconfig(a_fakequantize="Learnble"), "fakequantize", "'Learnble'", "'Learnable'?"),
    "unknown observer of a rule": (rule(FC, weight={"observer": "KLL"}), "overrides[0].weight", "'KLL'", "'KL'?"),
    "fake-quant as observer": (qconfig(a_observer="Learnable"), "observer", "'Learnable'", "Known: MinMax"),
    "observer as number": (qconfig(w_observer=3), "observer", "got 3", "a name or a class"),
    "observer as None": (rule(FC, weight={"observer": None}), "overrides[0].weight: observer", "None", "names: MinMax"),
    "unknown observer argument": (
        qconfig(w_observer="MSE", w_observer_extra_args={"num_candidate": 3}),
        *("w_observer_extra_args", "'num_candidate' (given: 3)", "did you mean 'num_candidates'?"),
    ),
    "argument of another observer": (
        rule(FC, weight={"observer_args": {"p": 2.0}}),
        *("overrides[0]", "'p' (given: 2.0)", "MinMaxObserver has no argument"),
    ),
    "unknown fake-quant argument": (
        qconfig(a_fakeq_params={"grad_facter": 2.0}),
        *("a_fakeq_params", "'grad_facter' (given: 2.0)", "did you mean 'grad_factor'?"),
    ),
    "argument of the wrong type": (qconfig(w_fakeq_params={"grad_factor": "x"}), "grad_factor", "'x'", "Check the"),
    "argument out of range": (qconfig(w_fakeq_params={"grad_factor": -1.0}), "grad_factor", "-1.0", "be positive"),
    "1 bit": (qconfig(w_qscheme={"bit": 1}), "w_*", "got 1", "bit_width must be an integer from 2 to 16"),
    "17 bits": (rule(FC, output={"bit": 17}), "overrides[0].output", "got 17", "2 to 16"),
    "25 scale bits": (qconfig(a_qscheme={"scale_bits": 25}), "scale_bits", "got 25", "1 to 24"),
    "width as text": (qconfig(w_qscheme={"bit": "8"}), "bit", "'8'", "must be int"),
    "one thing twice": (qconfig(w_qscheme={"bit": 4, "bit_width": 8}), "'bit': 4", "'bit_width': 8", "one of them"),
    "contradicting scales": (
        qconfig(w_qscheme={"pot_scale": True, "scale_bits": 8}),
        *("'pot_scale': True", "'scale_bits': 8", "give one of them"),
    ),
    "PoT observer": (qconfig(a_observer="PoTMode"), "observer 'PoTMode'", "scale_bits=4", "pot_scale: true"),
    "TQT": (qconfig(a_fakequantize="TQT"), "fake_quantize 'TQT'", "scale_bits=4", "pot_scale: true"),
    "per-channel activation": (qconfig(a_qscheme={"per_channel": True}), "a_*", "per_channel: True", "leave it out"),
    "per-channel output": (rule(FC, output={"per_channel": True}), "overrides[0].output", "True", "leave it out"),
    "DoReFa activation": (qconfig(a_fakequantize="DoReFa"), "a_*", "'DoReFa'", "take one of Fixed, Learnable"),
    "Oscillation output": (rule(FC, output={"fake_quantize": "Oscillation"}), "output", "'Oscillation'", "take one of"),
    "matches nothing": (rule({"module": "fd"}, weight={"bit": 4}), "overrides[0]", "'fd'", "The nearest is 'fc'"),
    "match by None": (rule({"module": None}, weight={"bit": 4}), "overrides[0].match: module", "None", "a module path"),
    "match by number": (rule({"type": 3}, weight={"bit": 4}), "overrides[0].match: type", "got 3", "its class name"),
    "bad regular expression": (rule({"module": "re:("}, weight={"bit": 4}), "overrides[0]", "'re:('", "regular expr"),
    "no effect": (rule({"node": "mean"}, weight={"bit": 4}), "overrides[0]", "weight", "drop 'weight' from the rule"),
    "half without effect": (
        rule({"node": "mean"}, weight={"bit": 4}, output={"bit": 4}),
        *("overrides[0]", "weight has no effect", "drop 'weight' from the rule"),
    ),
    "rule for what is excluded": (
        listed(exclude_module_name=["fc"]) | rule(FC, weight={"bit": 4}),
        *("overrides[0]", "weight has no effect", "drop 'weight' from the rule"),
    ),
    "value None": (rule(FC, value=None), "overrides[0].value", "None", "write output: None"),
    "fixed range without 0": (rule(FC, output={"fixed_range": [1, 2]}), "fixed_range", "[1, 2]", "hold 0"),
    "fixed range upside down": (rule(FC, output={"fixed_range": [2, -2]}), "fixed_range", "[2, -2]", "low < high"),
    "fixed range as number": (rule(FC, output={"fixed_range": 6}), "fixed_range", "got 6", "[low, high] or null"),
    "fixed range of a weight": (rule(FC, weight={"fixed_range": [-1, 1]}), "weight", "fixed_range", "'output' and 'va"),
    "fixed range, observed": (
        rule(FC, output={"fixed_range": [-1, 1], "observer": "MSE"}),
        *("overrides[0].output", "observer 'MSE'", "drop one of the two"),
    ),
    "fixed range, learned": (
        rule(FC, output={"fixed_range": [-1, 1], "fake_quantize": "PACT"}),
        *("overrides[0].output", "fake_quantize 'PACT'", "drop one of the two"),
    ),
    "bn_mode": ({"bn_mode": "frozen"}, "bn_mode", "'frozen'", "'freeze'"),
    "unfused pattern": (
        {"extra_fuse_dict": {"exclude_fusion_pattern": [["conv2d", "relu7"]]}},
        *("exclude_fusion_pattern", "'relu7'", "did you mean 'conv2d relu'?"),
    ),
    "unfused pattern that the model has not": (
        {"extra_fuse_dict": {"exclude_fusion_pattern": [["linear", "batch_norm1d"]]}},
        *("exclude_fusion_pattern", "['linear', 'batch_norm1d']", "Drop it"),
    ),
    "leaf module": ({"leaf_module": ["layer2"]}, "leaf_module", "'layer2'", "did you mean 'layer1'?"),
    "concrete argument": ({"concrete_args": {"xs": 1}}, "concrete_args", "'xs'", "did you mean 'x'?"),
    "exclusion of nothing": (listed(exclude_module_name=["fd"]), "exclude_module_name", "'fd'", "nearest is 'fc'"),
    "exclusion as number": (listed(exclude_node_name=[3]), "exclude_node_name", "got 3", "a node name or pattern"),
    "exclusion of an input": (listed(exclude_node_name=["x"]), "exclude_node_name", "'x'", "output: null"),
    "addition of an input": (listed(additional_node_name=["x"]), "additional_node_name", "'x'", "Drop it"),
    "preserve_attr": ({"preserve_attr": ["notes"]}, "preserve_attr", "'notes'", "has no attribute"),
    "shorthand": ({"first_last": {"wieght": {"bit": 8}}}, "first_last", "'wieght'", "did you mean 'weight'?"),
    "activations of a model with weights only": (
        {"activation": "float", **qconfig(a_qscheme={"bit": 4})},
        *("extra_qconfig_dict: the a_* entries", "activation is 'float'", "Drop them"),
    ),
    "weights of a model without quantized weights": (
        {**rule({"module": "*"}, weight=None), **qconfig(w_observer="MSE")},
        *("extra_qconfig_dict: the w_* entries", "no weight of the model", "Drop them"),
    ),
    "shorthand, empty": ({"first": {}}, "first", "says nothing", "at least one of weight"),
}


@pytest.mark.parametrize("case", WRONG)
def test_it_is_refused_with_key_value_and_remedy(case):
    config, *words = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        prepared("residual", config=config)
    assert [word for word in words if word not in str(caught.value)] == []
    assert len(words) == 3


@pytest.mark.parametrize(
    "config",
    [
        qconfig(a_fakequantize="Learnable"),
        rule(FC, weight={"fake_quantize": "LSQ"}),
        rule(FC, output=POT | {"fake_quantize": "TQT"}),
    ],
    ids=["everywhere", "a weight", "an output"],
)
def test_a_learned_fake_quant_contradicts_calibration_only(config):
    with pytest.raises(ConfigError, match="is_qat=False prepares for calibration only") as caught:
        prepared("residual", config=config, is_qat=False)
    assert "Take 'Fixed', leave it out, or prepare with is_qat=True" in str(caught.value)
    assert prepared("residual", config=config).quant_report


def test_a_size_cannot_be_added():
    class Sized(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            return self.fc(x).reshape(x.size(0), -1)

    assert prepare_by_platform(Sized()).quant_report.row("size").status == "float"
    with pytest.raises(ConfigError, match="additional_node_name: 'size' cannot be quantized: gives sizes"):
        prepare_by_platform(Sized(), "TSQAT", listed(additional_node_name=["size"]))


@pytest.mark.parametrize("answer", [{"wieght": None}, {"weight": {"bit": 99}}, "int8", {"weight": {}}])
def test_a_function_is_checked_like_a_dict(answer):
    with pytest.raises(ConfigError) as caught:
        prepared("residual", config={"overrides": [lambda path, current: answer]})
    assert "overrides[0]('stem')" in str(caught.value)


def test_a_function_without_an_answer_has_no_effect():
    with pytest.raises(ConfigError, match=r"overrides\[0\]: the function changes nothing"):
        prepared("residual", config={"overrides": [lambda path, current: None]})
    assert parse_config({"overrides": [torch.relu]}).overrides[0].function is not None


YAML = {
    "syntax": ("overrides: [1, 2", "is not YAML"),
    "a key twice": (
        "bn_mode: freeze\noverrides: []\nbn_mode: train\n",
        "line 3: key 'bn_mode' already stands in line 1",
    ),
    "a key twice, deep": (
        "overrides:\n- match: {node: x}\n  weight: {bit: 4,\n    bit: 8}\n",
        "line 4: key 'bit' already stands in line 3",
    ),
    "a function": ("overrides:\n- my_function\n", "expected a mapping, or (not in YAML) a function"),
    "not text": (b"\xff\xfe\xfa", "cannot read"),
    "a Python object": ("bn_mode: !!python/name:os.system\n", "is not YAML"),
}


@pytest.mark.parametrize("case", YAML)
def test_a_wrong_file_is_refused(case, tmp_path):
    text, message = YAML[case]
    path = tmp_path / "wrong.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        parse_config(path)
    assert message in str(caught.value)
    assert "wrong.yaml" in str(caught.value) or case == "a function"
