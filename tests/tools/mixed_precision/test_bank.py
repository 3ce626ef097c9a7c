"""The bank: any mix of widths is the model that is prepared and calibrated with them."""

import json

import pytest
import torch
from torch import nn

import fxqat
from fxqat.config.effective import effective_config
from fxqat.errors import ConfigError
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.tools.mixed_precision.bank import WidthBank


def mixed(bank):
    return {name: choice[i % len(choice)] for i, (name, choice) in enumerate(bank.widths.items())}


def test_units_are_weights_and_values_of_one_scale(bank):
    weights = {name for name, unit in bank.units.items() if unit.is_weight}
    assert weights == {"a.weight", "b.weight", "c.weight", "head.weight"}
    assert bank.widths["b.weight"] == (2, 4, 8)
    assert bank.widths["x"] == (4, 8)
    shared = next(unit for unit in bank.units.values() if len(unit.tensors) > 1)
    assert {"a", "relu_1"} & set(shared.tensors)
    assert len({unit.paths for unit in bank.units.values()}) == len(bank.units)


def test_a_mix_equals_the_model_of_its_overrides(bank, net, batches):
    widths = mixed(bank)
    gm = bank.mix(widths)
    overrides = [rule for name, bits in widths.items() for rule in bank.units[name].rules(bits)]
    expected = fxqat.prepare_by_platform(net, "TSQAT", {"overrides": overrides}, example_inputs=(batches[0],)).eval()
    fxqat.enable_calibration(expected)
    with torch.no_grad():
        for batch in batches:
            expected(batch)
        fxqat.enable_quantization(expected)
        assert torch.equal(gm(batches[0]), expected(batches[0]))
    assert gm.quant_report.to_text() == expected.quant_report.to_text()
    again = fxqat.prepare_by_platform(net, "TSQAT", effective_config(gm), example_inputs=(batches[0],))
    found = {path: quant.scheme for path, quant in named_fake_quants(again)}
    assert found == {path: quant.scheme for path, quant in named_fake_quants(gm)}


def test_the_model_of_a_bank_is_the_float_model(bank, net, batches):
    with torch.no_grad():
        torch.testing.assert_close(bank.model(batches[0]), net(batches[0]))
        bank.mix({})
        torch.testing.assert_close(bank.model(batches[0]), net(batches[0]))


def test_a_finetuned_model_keeps_the_fake_quants_that_have_their_width(bank, batches):
    gm = bank.mix({})
    with torch.no_grad():
        gm.b.weight.mul_(2.0)
        gm.c.weight_fake_quant.relative_scale.mul_(1.5)
    scale = gm.c.weight_fake_quant.scale.clone()
    before = {path: quant for path, quant in named_fake_quants(gm)}
    bank.install(gm, {"b.weight": 4})
    after = dict(named_fake_quants(gm))
    assert [path for path in before if after[path] is not before[path]] == ["b.weight_fake_quant"]
    assert torch.equal(gm.c.weight_fake_quant.scale, scale)
    fresh = bank.quants("b.weight", 4)[0]
    torch.testing.assert_close(after["b.weight_fake_quant"].scale, 2 * fresh.scale)  # calibrated on the current weight
    assert after["b.weight_fake_quant"].scheme.bit_width == 4


def test_a_mix_is_exported_with_its_widths(bank, batches, tmp_path):
    gm = bank.mix({"a.weight": 4, "b.weight": 4, "c.weight": 8, "head.weight": 4})
    report = fxqat.convert_export(gm, (batches[0],), tmp_path / "mixed.onnx", tmp_path / "mixed.json")
    assert report.certificate.passed
    tensors = json.loads((tmp_path / "mixed.json").read_text())["tensors"]
    found = {name: tensor["dtype"] for name, tensor in tensors.items() if tensor["kind"] == "weight"}
    assert sorted(found.values()) == ["int4", "int4", "int4", "int8"]


def test_kept_units_have_their_configured_width(net, batches):
    config = {"overrides": [{"match": {"module": "a"}, "weight": {"bit": 6}}]}
    bank = WidthBank(net, batches, (4,), (8,), "ONNXRuntime", config, keep=["a.weight"])
    assert bank.widths["a.weight"] == (6,)
    assert bank.mix({}).a.weight_fake_quant.scheme.bit_width == 6
    assert bank.mix({}).b.weight_fake_quant.scheme.bit_width == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batches": []}, "at least one batch"),
        ({"weight_widths": ()}, "one weight width"),
        ({"weight_widths": (1,)}, "bit_width must be an integer from 2 to 16, got 1"),
        ({"keep": ["a"] + ["d.weight"]}, "unknown unit 'd.weight'"),
        ({"backend": "TensorRT"}, r"WidthBank: weight_widths: TensorRT cannot run int2 .* \(of 'a.weight'\)"),
        ({"backend": "QNN", "weight_widths": (4, 8), "value_widths": (4,)}, "WidthBank: value_widths: QNN cannot run"),
    ],
)
def test_wrong_arguments(net, batches, arguments, message):
    with pytest.raises(ConfigError, match=message):
        WidthBank(net, **{"batches": batches, **arguments})


def test_wrong_widths(bank):
    with pytest.raises(ConfigError, match="unknown unit 'd'"):
        bank.mix({"d": 4})
    with pytest.raises(ConfigError, match="b.weight can have 2, 4, 8 bits, not 3"):
        bank.mix({"b.weight": 3})
    other = fxqat.prepare_by_platform(nn.Sequential(nn.Conv2d(3, 4, 1)), "TSQAT")
    with pytest.raises(ConfigError, match="not prepared as the model of the bank"):
        bank.install(other, {})
