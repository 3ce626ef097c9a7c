"""Concatenation of tensors of several ranks and types: the file computes it, and has no sequences of tensors."""

import itertools

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import fxqat

VALUES = {
    "vectors": ([4], [4]),
    "matrices": ([3, 4], [3, 4]),
    "of three dimensions": ([2, 3, 4], [2, 3, 4]),
    "a vector and a matrix": ([4], [4, 4]),
}
FUNCTIONS = ["stack", "hstack", "vstack", "row_stack", "dstack", "column_stack", "concatenate", "concat", "cat"]


class Joined(nn.Module):
    """A layer's output and an integer input, joined; ``times`` makes floats of the integers."""

    def __init__(self, function, times):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.function, self.times = nn.Linear(4, 4), function, times

    def forward(self, x, numbers):
        return self.function([self.layer(x), numbers * self.times])


def exported(model, inputs, path):
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=inputs)
    fxqat.calibrate(gm, [inputs], progress=False)
    fxqat.enable_quantization(gm)
    certificate = fxqat.convert_export(gm, inputs, path).certificate
    assert certificate.passed
    file = onnx.load(path)
    assert [node.op_type for node in file.graph.node if "Sequence" in node.op_type] == []
    feeds = {put.name: value.numpy() for put, value in zip(file.graph.input, inputs, strict=True)}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    (found,) = onnxruntime.InferenceSession(str(path), options).run(None, feeds)
    with torch.no_grad():
        return torch.from_numpy(found), gm(*inputs)


@pytest.mark.parametrize("times", [1, 0.5], ids=["integers", "floats"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_joins_tensors_of_every_rank_and_type(function, times, tmp_path):
    call = getattr(torch, function)
    for name, (first, second) in VALUES.items():
        inputs = (torch.randn(first), torch.randint(0, 9, second))
        model = Joined(call, times)
        try:
            model(*inputs)
        except RuntimeError:
            continue  # torch does not join these
        found, expected = exported(model, inputs, tmp_path / "joined.onnx")
        torch.testing.assert_close(found, expected, msg=f"{function} of {name}")


def test_numbers_without_dimensions_and_other_dimensions_are_joined(tmp_path):
    def step(tensors):
        x, numbers = tensors
        least = [x.amin(), numbers.amin()]
        joined = [torch.stack([x, numbers], -1), torch.stack([x, x], 1), torch.concat([x, numbers], -1)]
        several = [torch.stack(least), torch.hstack(least), torch.vstack(least), torch.dstack(least)]
        return torch.cat([each.flatten() for each in (*joined, *several, torch.column_stack(least))])

    inputs = (torch.randn(3, 4), torch.randint(0, 9, (3, 4)))
    found, expected = exported(Joined(step, 1), inputs, tmp_path / "joined.onnx")
    torch.testing.assert_close(found, expected)
    assert found.numel() == 24 + 24 + 24 + 5 * 2


def test_two_types_become_the_one_that_torch_gives(tmp_path):
    types = [torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]

    def step(tensors):
        x, numbers = tensors
        given = [(numbers > 2) if dtype is torch.bool else numbers.to(dtype) for dtype in types]
        joined = [torch.stack([a, b]) for a, b in itertools.combinations(given, 2)]
        assert [each.dtype for each in joined] == [torch.promote_types(a, b) for a, b in pairs]
        return torch.cat([x.flatten(), *(each.float().flatten() for each in joined)])

    pairs = list(itertools.combinations(types, 2))
    inputs = (torch.randn(1, 4), torch.tensor([[0, 3, 7, 100]]))
    found, expected = exported(Joined(step, 1), inputs, tmp_path / "joined.onnx")
    torch.testing.assert_close(found, expected)
    assert found.numel() == 4 + len(pairs) * 8
