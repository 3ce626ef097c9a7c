"""The layers at the ends of a model: which they are, and that the user's own rules stand above the shorthand."""

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.config.effective import effective_config
from fxqat.errors import ConfigError
from tests.models import prepared

W4 = {"extra_qconfig_dict": {"w_qscheme": {"bit": 4}, "a_qscheme": {"bit": 4}}}


def at_eight(gm):
    return sorted(row.node for row in gm.quant_report if row.weight.startswith("int8"))


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("conv_bn_relu", {"conv1"}, {"fc"}),
        ("residual", {"stem"}, {"fc"}),
        ("tied_weights", {"encoder"}, {"decoder"}),
        ("shared_module", None, None),
        ("multi_input", None, None),
        ("dict_output", None, None),
    ],
)
def test_the_layers_are_found_by_the_graph(name, first, last):
    for key in ("first", "last"):
        gm = prepared(name, "Experimental", W4 | {key: {"weight": {"bit": 8}}})
        expected = {"first": first, "last": last}[key]
        found = set(at_eight(gm))
        assert found == (by_paths(gm, key) if expected is None else expected)
        assert all(key in gm.quant_report.row(node).reason for node in found)


def by_paths(gm, key):
    """Independently: by walking every path from each weighted layer outwards, one node at a time."""
    weighted = {row.node for row in gm.quant_report if row.weight}
    found = set()
    for node in gm.graph.nodes:
        if node.name not in weighted:
            continue
        ends, stack = {"first": "placeholder", "last": "output"}[key], [node]
        while stack:
            here = stack.pop()
            beside = here.all_input_nodes if key == "first" else list(here.users)
            if any(other.op == ends for other in beside):
                found.add(node.name)
            stack += [other for other in beside if other.name not in weighted and other.op != "get_attr"]
    return found


class TwoEnds(nn.Module):
    """Two inputs, of which one comes late; two heads, one of which another layer reads as well."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.middle, self.head, self.tail = (nn.Linear(4, 4) for _ in range(5))

    def forward(self, x, y):
        x = torch.relu(self.a(torch.flatten(x, 1)))
        both = torch.relu(self.middle(x) + self.b(y * 2))
        early = torch.sigmoid(self.head(both))
        return {"early": early, "late": [self.tail(early)]}


def test_several_inputs_and_outputs():
    gm = prepare_by_platform(TwoEnds(), "TSQAT", W4 | {"first": {"weight": {"bit": 8}}})
    assert at_eight(gm) == ["a", "b"]
    gm = prepare_by_platform(TwoEnds(), "TSQAT", W4 | {"last": {"weight": {"bit": 8}}})
    assert at_eight(gm) == ["head", "tail"]
    gm = prepare_by_platform(TwoEnds(), "TSQAT", W4 | {"first_last": {"weight": {"bit": 8}, "activation": {"bit": 8}}})
    assert at_eight(gm) == ["a", "b", "head", "tail"]
    assert gm.quant_report.row("middle").weight.startswith("int4")
    assert gm.quant_report.row("x").output.startswith("int8")


def test_overrides_stand_above_the_shorthand_and_the_parts_above_the_whole():
    config = W4 | {
        "first_last": {"weight": {"bit": 8, "observer": "MSE"}},
        "last": {"weight": {"bit": 6}},
        "overrides": [{"match": {"module": "stem"}, "weight": {"bit": 3}}],
    }
    gm = prepared("residual", config=config)
    quants = {path: gm.get_submodule(path).weight_fake_quant for path in ("stem", "fc", "layer1.0.conv1")}
    assert [quant.scheme.bit_width for quant in quants.values()] == [3, 6, 4]
    assert [type(quant.observer).__name__ for quant in quants.values()] == [
        "MSEObserver",
        "MSEObserver",
        "MinMaxObserver",
    ]


def test_none_leaves_the_ends_float():
    gm = prepared("residual", config={"first_last": {"weight": None, "activation": None}})
    assert [row.weight for row in gm.quant_report if row.node in ("stem", "fc")] == ["", ""]
    found = effective_config(gm)["overrides"][0]
    assert found == {"match": {"node": "re:stem|fc"}, "weight": None, "activation": None}


def test_a_model_without_weighted_layers_at_its_ends_is_refused():
    class Sum(nn.Module):
        def forward(self, x):
            return torch.relu(x + 1)

    with pytest.raises(ConfigError, match="first_last: the model has no convolution or linear layer") as caught:
        prepare_by_platform(Sum(), "TSQAT", {"first_last": {"weight": {"bit": 8}}})
    assert "drop the key" in str(caught.value)
