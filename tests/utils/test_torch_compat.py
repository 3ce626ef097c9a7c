"""Names of torch that are private or change between versions."""

import inspect
import typing
from typing import Any

import onnxruntime
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fxqat.custom_symbolic_opset import translation_table
from fxqat.utils.torch_compat import named_as_in_schema, shorter_export, tensor_version, unwrap


def _keeps_order(x: Any, descending: int, dim: int = -1) -> tuple[Any, int, int]:
    return x, descending, dim


def test_a_translation_gets_the_names_of_the_schema_and_is_called_as_before() -> None:
    operator = torch.ops.aten.sort.stable  # (self, *, stable, dim, descending)
    named = named_as_in_schema(operator, _keeps_order)
    assert str(inspect.signature(named)).startswith("(self: ")
    assert list(inspect.signature(named).parameters) == ["self", "descending", "dim"]
    assert typing.get_type_hints(named) == {
        "self": Any,
        "descending": int,
        "dim": int,
        "return": tuple[Any, int, int],
    }
    assert named("x", dim=2, descending=1) == ("x", 1, 2)
    assert list(inspect.signature(_keeps_order).parameters) == ["x", "descending", "dim"]
    nameless = named_as_in_schema(torch.ops.aten.relu.default, lambda x, y, z=3: (x, y, z))
    assert list(inspect.signature(nameless).parameters) == ["self", "y", "z"]  # the operator has one argument
    assert nameless(1, 2) == (1, 2, 3)


def test_a_translation_that_has_the_names_or_takes_any_arguments_stays_what_it_is() -> None:
    def of_any(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def of_self(self: Any) -> Any:
        return self

    for function in (of_any, of_self):
        assert named_as_in_schema(torch.ops.aten.relu.default, function) is function


def test_every_translation_can_be_named_as_in_its_schema() -> None:
    for operator, function in translation_table().items():
        wanted = {argument.name for argument in operator._schema.arguments}  # type: ignore[attr-defined]
        assert set(inspect.signature(named_as_in_schema(operator, function)).parameters) <= wanted, operator


def test_version_changes_with_every_write_and_only_then() -> None:
    weight = nn.Parameter(torch.ones(3))
    first = tensor_version(weight)
    assert weight.sum() == 3
    assert tensor_version(weight) == first
    with torch.no_grad():
        weight.add_(1)
    assert tensor_version(weight) != first
    assert tensor_version(nn.Parameter(torch.ones(3))) != tensor_version(weight)


def test_an_optimizer_step_is_a_write() -> None:
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    before = tensor_version(weight)
    torch.optim.Adam([weight], foreach=True).step()
    assert tensor_version(weight) != before
    assert not torch.equal(weight, torch.ones(3))


@pytest.mark.parametrize(
    "wrap",
    [
        lambda model: model,
        nn.DataParallel,
        torch.compile,
        lambda model: nn.DataParallel(torch.compile(model)),
        lambda model: torch.compile(nn.DataParallel(model)),
    ],
    ids=["bare", "parallel", "compiled", "parallel_compiled", "compiled_parallel"],
)
def test_wrappers_are_taken_off(wrap: object) -> None:
    model = nn.Linear(2, 2)
    assert unwrap(wrap(model)) is model
    assert unwrap(model) is model


def test_the_copy_in_an_averaged_model_is_found() -> None:
    averaged = AveragedModel(nn.Linear(2, 2))
    assert unwrap(averaged) is averaged.module
    assert unwrap(torch.compile(averaged)) is averaged.module


def test_a_model_with_a_part_called_module_is_no_wrapper() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert unwrap(model) is model
    assert unwrap(nn.DataParallel(model)) is model


def test_the_exporter_copies_its_table_of_translations() -> None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    before = ONNXRegistry.from_torchlib
    expected = before()
    with shorter_export():
        first, second = ONNXRegistry().from_torchlib(), ONNXRegistry.from_torchlib()
    assert ONNXRegistry.from_torchlib == before
    assert {name: len(found) for name, found in first.functions.items()} == {
        name: len(found) for name, found in expected.functions.items()
    }
    first.functions["aten::relu"].clear()
    assert second.functions["aten::relu"]
    with pytest.raises(ValueError, match="inside"), shorter_export():
        raise ValueError("inside")
    assert ONNXRegistry.from_torchlib == before


def test_no_stacks_are_noted_during_an_export_and_again_after_it() -> None:
    def traces() -> list[bool]:
        program = torch.export.export(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.ones(1, 2),))
        return [bool(node.meta.get("stack_trace")) for node in program.graph.nodes if node.op == "call_function"]

    with shorter_export():
        inside = traces()
    assert inside == [False, False]
    assert traces() == [True, True]


class Flattened(nn.Module):
    """Operators that torch's exporter translates, and one that it has to decompose first, or that writes to memory."""

    def __init__(self, last):
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 4, 3), last

    def forward(self, x):
        return self.last(self.conv(x).flatten(1))


@pytest.mark.parametrize(
    ("last", "times"), [(nn.ReLU(), 0), (nn.ReLU(inplace=True), 1), (torch.square, 1), (lambda x: x.add_(1), 1)]
)
def test_a_graph_is_decomposed_only_if_it_must_be(last, times, monkeypatch, tmp_path):
    from torch.onnx._internal.exporter import _fx_passes

    calls, decompose = [], _fx_passes.decompose_with_registry
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", lambda *given: calls.append(1) or decompose(*given))
    model, x = Flattened(last).eval(), torch.randn(2, 3, 5, 5)
    with shorter_export():
        torch.onnx.export(model, (x,), tmp_path / "m.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x).detach(), rtol=1e-5, atol=1e-5)
    assert len(calls) == times


@pytest.mark.parametrize(
    ("last", "times"),
    [
        (nn.ReLU(), 0),
        (lambda x: x * 0.5 + x.abs().sqrt().mean(1, keepdim=True), 0),
        (lambda x: (x.flatten(1) / 3).softmax(-1), 1),
        (lambda x: x + 1, 1),
        (lambda x: x.round().long() * x, 1),
        (lambda x: x.round().long() / 2, 1),
        (lambda x: (x > 0.1) + x, 1),
        (lambda x: torch.where(x > 0, x.round().int(), x), 1),
    ],
)
def test_types_are_made_equal_only_where_they_differ(last, times, monkeypatch, tmp_path):
    from torch.onnx._internal.exporter import _fx_passes

    calls, promote = [], _fx_passes.insert_type_promotion_nodes
    monkeypatch.setattr(_fx_passes, "insert_type_promotion_nodes", lambda module: calls.append(1) or promote(module))
    model, x = Flattened(last).eval(), torch.randn(2, 3, 5, 5)
    with shorter_export():
        torch.onnx.export(model, (x,), tmp_path / "m.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = model(x).detach()
    assert torch.from_numpy(found).dtype == expected.dtype
    torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == times
