"""NameInterface: inputs and outputs get their names to the letter."""

import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from fxqat.errors import ExportError
from fxqat.onnx.name_interface import NameInterface, UniqueNames


def model_of(*outputs: str) -> ir.Model:
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in ("x", "a", "b")}
    nodes = [helper.make_node("Relu", ["x"], ["a"]), helper.make_node("Exp", ["a"], ["b"])]
    graph = helper.make_graph(nodes, "graph", [values["x"]], [values[name] for name in outputs])
    return ir.from_proto(helper.make_model(graph))


def test_outputs_get_their_names_in_order() -> None:
    model = model_of("b", "a")
    assert NameInterface(["x"], ["last", "first"])(model).modified
    assert [value.name for value in model.graph.outputs] == ["last", "first"]
    assert [node.outputs[0].name for node in model.graph] == ["first", "last"]


def test_names_may_change_places_with_each_other_and_with_values_inside() -> None:
    model = model_of("b")
    NameInterface(["b"], ["a"])(model)
    assert [model.graph.inputs[0].name, model.graph.outputs[0].name] == ["b", "a"]
    assert [node.outputs[0].name for node in model.graph] == ["a_1", "a"]


@pytest.mark.parametrize("outputs", [("b", "x"), ("x", "b"), ("b", "b")])
def test_an_output_that_is_an_input_or_another_output_gets_a_name_of_its_own(outputs: tuple[str, ...]) -> None:
    model = model_of(*outputs)
    NameInterface(["picture"], ["y", "z"])(model)
    assert [value.name for value in model.graph.inputs] == ["picture"]
    assert [value.name for value in model.graph.outputs] == ["y", "z"]
    assert [node.op_type for node in model.graph] == ["Relu", "Exp", "Identity"]


@pytest.mark.parametrize(
    ("inputs", "outputs", "what"),
    [(["x"], ["y", "z"], "has 1 outputs, the model 2: y, z"), ([], ["y"], "has 1 inputs, the model 0")],
)
def test_another_number_of_names_is_refused(inputs: list[str], outputs: list[str], what: str) -> None:
    """A name would be that of another tensor."""
    model = model_of("b")
    with pytest.raises(ExportError, match=what):
        NameInterface(inputs, outputs)(model)
    assert [value.name for value in model.graph.outputs] == ["b"]


def test_values_with_the_name_of_a_parameter_are_renamed() -> None:
    model = model_of("b")
    stored = ir.Value(name="stored", const_value=ir.tensor([1.0, 2.0], name="stored"))
    model.graph.register_initializer(stored)
    product = ir.node("Mul", [model.graph.outputs[0], stored])
    product.outputs[0].name, model.graph.inputs[0].name = "stored", "stored"
    model.graph.append(product)
    assert UniqueNames()(model).modified
    assert list(model.graph.initializers) == ["stored"]
    assert [model.graph.inputs[0].name, product.outputs[0].name] == ["stored_1", "stored_2"]
    assert not UniqueNames()(model).modified
