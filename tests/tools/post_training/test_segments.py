"""Segments: run one after another they compute the model, and they end where residual blocks end."""

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.errors import ConfigError
from fxqat.nn.qat import QATLayer
from fxqat.tools.post_training.segments import MOST_IN_A_LOOP, named_inputs, split, values_read_later
from fxqat.utils.fx_graph import called_module
from fxqat.utils.tensors import flatten_tensors
from fxqat.utils.train_eval_graph import graph_of_mode
from tests.models import TOYS, BasicBlock, calibrate, calibrated, inputs


def chained(gm, segments, batch):
    """All outputs of the segments, run one after another."""
    values, written = [named_inputs(gm, batch)], {}
    for i, segment in enumerate(segments):
        results = segment.run(values, quantized=True)
        written |= results[0]
        values = values_read_later(segments[i:], values, results)
    assert values == [{}]
    return written


@pytest.mark.parametrize("max_layers", [1, 6])
@pytest.mark.parametrize("name", TOYS)
def test_the_segments_compute_the_model(name, max_layers):
    gm = calibrated(name).eval()
    segments = split(gm, max_layers)
    written = chained(gm, segments, inputs(name))
    graph = graph_of_mode(gm.graph, training=False)
    graph.owning_module = gm
    output = next(node for node in graph.nodes if node.op == "output")
    expected = flatten_tensors(gm(*inputs(name)))
    sources = [node for node in output.all_input_nodes if node.op not in ("placeholder", "get_attr")]
    assert sources
    for node in sources:
        assert any(torch.equal(value, other) for value in flatten_tensors(written[node.name]) for other in expected)
    assert max(len(segment.layers) for segment in segments) <= max_layers
    paths = [path for segment in segments for path in segment.layers]
    assert set(paths) == {str(node.target) for node in graph.nodes if isinstance(called_module(node), QATLayer)}


class UNet(nn.Module):
    """A long skip connection from the first layer to the last."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.middle = nn.Sequential(*[nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)])
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = self.first(x)
        return self.last(torch.cat([x, self.middle(x)], 1))


def test_blocks_are_segments():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), BasicBlock(4, 4), BasicBlock(4, 8, 2), nn.Conv2d(8, 2, 1)).eval()
    segments = split(prepare_by_platform(model))
    assert [list(segment.layers) for segment in segments] == [
        ["0"],
        ["1.conv1", "1.conv2"],
        ["2.conv1", "2.conv2", "2.downsample.0"],
        ["3"],
    ]
    assert all(len(segment.writes) == 1 for segment in segments[:-1])


def test_single_layers_are_grouped_by_three():
    layers = [nn.Conv2d(4, 4, 1) for _ in range(5)]
    model = nn.Sequential(*layers, BasicBlock(4, 4), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)).eval()
    gm = prepare_by_platform(model)
    counts = {size: [len(segment.layers) for segment in split(gm, size)] for size in (1, 2, 6)}
    assert counts == {1: [1] * 9, 2: [2, 2, 1, 2, 2], 6: [3, 2, 2, 2]}


def test_a_quantizer_is_in_the_segment_that_reads_the_rounded_value():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 1))
    segments = split(prepare_by_platform(model), max_layers=1)
    assert [len(segment.layers) for segment in segments] == [1, 1]
    assert segments[0].writes == ("_0",)
    assert len(segments[1].quantizers) == 2  # of the first layer's output, and of the model's output


def test_segments_that_pass_on_several_values():
    gm = calibrate(prepare_by_platform(UNet().eval()), (torch.randn(2, 3, 8, 8),))
    whole, parts = split(gm, max_layers=100), split(gm, max_layers=2)
    assert [len(segment.layers) for segment in whole] == [1, 5, 1]
    assert [len(segment.layers) for segment in parts] == [1, 2, 2, 1, 1]
    assert max(len(segment.reads) for segment in parts) == 2
    x = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(list(chained(gm, parts, (x,)).values())[-1], gm.eval()(x), rtol=0, atol=0)


class Loops(nn.Module):
    """A layer in a loop, a loop of that loop and another layer, and layers before, between and after."""

    def __init__(self, between=1):
        super().__init__()
        self.first, self.inner, self.outer, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.between = nn.Sequential(*(nn.Linear(4, 4) for _ in range(between)))

    def forward(self, x):
        x = self.first(x).tanh()
        for _ in range(2):
            for _ in range(3):
                x = self.inner(x).tanh()
            x = self.outer(self.between(x)).tanh()
        return self.last(x)


def paths_of(model):
    gm = prepare_by_platform(model.eval(), "TSQAT", example_inputs=(x := torch.randn(2, 4),))
    segments = split(calibrate(gm, (x,)).eval(), 1)
    assert torch.equal(list(chained(gm, segments, (x,)).values())[-1], gm(x))
    assert all(segment.repeated <= segment.layers.keys() for segment in segments)
    return [list(segment.layers) for segment in segments], [sorted(segment.repeated) for segment in segments]


def test_all_calls_of_a_layer_are_in_one_segment():
    loop = ["inner", "between.0", "outer"]
    assert paths_of(Loops()) == ([["first"], loop, ["last"]], [[], sorted(loop), []])


def test_segments_are_not_joined_to_one_of_too_many_layers():
    count = MOST_IN_A_LOOP - 1
    layers, repeated = paths_of(Loops(count))
    loop = [*["inner"] * 3, *(f"between.{i}" for i in range(count)), "outer"]
    assert layers == [[name] for name in ("first", *loop, *loop, "last")]
    assert not any(repeated)
    assert len(paths_of(Loops(count - 1))[0]) == 3


def test_wrong_sizes_are_errors():
    with pytest.raises(ConfigError, match="max_layers must be at least 1, got 0"):
        split(calibrated("residual"), 0)
