"""The result of a comparison: its table, its worst nodes and its warning."""

import dataclasses
import logging

import pytest

from fxqat.quantization.quantization_noise import OPERATION, VALUE, WEIGHT, NodeNoise, OutputNoise, QuantizationNoise
from fxqat.utils.compare import Difference

CURE = {"match": {"node": "cos"}, "activation": None}


def noise(problems=0, cosine=1.0, failure=""):
    nodes = [NodeNoise(f"cos_{i}", OPERATION, 0.9, None, "is damaged", "model.py:7") for i in range(problems)]
    nodes += [NodeNoise("x", VALUE, 0.01, 42.0), NodeNoise("fc", WEIGHT, 0.004, 47.0)]
    outputs = (OutputNoise("y", Difference(cosine, 12.0, 0.5)), OutputNoise("n", None, 0.25))
    return QuantizationNoise(3, outputs, tuple(nodes), (CURE,) if problems else (), failure)


def test_it_prints_as_a_short_table():
    text = str(noise(30))
    assert text.startswith("fake-quant against float, 3 batches, 30 nodes with a problem")
    assert "y: cosine 1.0000, 12.0 dB, largest error 0.5\nn: 25.0% of the values differ" in text
    assert text.count("is damaged") == 10
    assert noise(30).table(None).count("is damaged") == 30
    assert "| x    | value  | 1.00% | 42.0 |" in noise().table()


def test_figures():
    found = noise(2, 0.8)
    assert [node.node for node in found.problems] == ["cos_0", "cos_1"]
    assert len(list(found)) == 4
    assert (found.cosine, noise().cosine) == (0.8, 1.0)
    assert [output.cosine for output in found.outputs] == [0.8, 1.0]
    assert QuantizationNoise(1, (), ()).cosine == 1


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (noise(1), ["calibrate: ", "cos_0: is damaged (model.py:7)", str([CURE])]),
        (noise(8), ["cos_4: is damaged", "and 3 more", str([CURE])]),
        (noise(0, 0.85), ["x: the value is off by 1.0% of its mean size", "cosine 0.8500", "No node stands out"]),
        (noise(0, 1.0, "it fails"), ["it fails"]),
    ],
    ids=["a node", "many nodes", "the outputs", "a failure"],
)
def test_one_warning_names_the_worst_nodes(found, named, caplog):
    found.warn("calibrate")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "fxqat"
    assert all(text in record.getMessage() for text in named)
    assert "cos_5" not in record.getMessage()


def test_without_a_problem_there_is_no_warning(caplog):
    noise(0, 0.951).warn("calibrate")
    assert caplog.records == []
    assert noise(0, 0.951).problems == ()


def test_an_output_below_the_limit_is_warned_about_with_the_worst_nodes(caplog):
    noise(0, 0.949).warn("calibrate")
    (record,) = caplog.records
    assert "The worst nodes:" in record.getMessage()
    assert "y: cosine 0.9490" in record.getMessage()


def test_a_warning_does_not_list_more_overrides_than_one_can_read():
    few, many = (dataclasses.replace(noise(8), overrides=(CURE,) * count) for count in (10, 11))
    assert str([CURE] * 10) in few.warning()
    assert '"overrides": gm.quantization_noise.overrides (11 entries)' in many.warning()
    assert "match" not in many.warning()


@pytest.mark.parametrize("shares", [True, False])
def test_where_the_worst_weights_have_one_scale_equalization_is_named(shares):
    found = noise(0, 0.5)
    weight = NodeNoise("fc", WEIGHT, 0.9, 1.0, shares_scale=shares)
    found = dataclasses.replace(found, nodes=(weight, *found.nodes))
    assert ("equalize=True" in found.warning()) is shares
    assert "equalize=True" not in dataclasses.replace(noise(2, 0.5), nodes=(*noise(2).nodes, weight)).warning()
