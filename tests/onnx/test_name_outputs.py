"""NameOutputs: one name per output, or the exporter's names."""

import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from fxqat.onnx.name_outputs import NameOutputs


def model_of(*outputs: str) -> ir.Model:
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "a", "b")}
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Exp", ["a"], ["b"])]
    graph = helper.make_graph(nodes, "graph", [values["x"]], [values[name] for name in outputs])
    return ir.from_proto(helper.make_model(graph))


def test_outputs_get_their_names_in_order() -> None:
    model = model_of("b", "a")
    assert NameOutputs(["last", "first"])(model).modified
    assert [value.name for value in model.graph.outputs] == ["last", "first"]
    assert [node.outputs[0].name for node in model.graph] == ["first", "last"]


@pytest.mark.parametrize(("outputs", "names"), [(("a", "b"), ["y"]), (("a", "x"), ["y", "z"])])
def test_other_outputs_keep_their_names(outputs: tuple[str, ...], names: list[str]) -> None:
    """There is another number of names, or an output is the input."""
    model = model_of(*outputs)
    assert not NameOutputs(names)(model).modified
    assert [value.name for value in model.graph.outputs] == list(outputs)
