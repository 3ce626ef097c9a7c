"""Indices are judged by the values that they select."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from fxqat.errors import ParityError
from fxqat.onnx.selections import SIZE, add_sizes, compare_selection, indices_of, match_selections
from fxqat.onnx.verify import require_parity, verify

DATA = np.array([[3.0, 1.0, 3.0, 2.0], [5.0, 5.0, 5.0, 0.0]], np.float32)


def picks(*, gather: bool = False, index: str = "TopK") -> onnx.ModelProto:
    """The two largest of each row, or the row's largest; with ``gather``, rows of a table at these places."""
    held = {"k": np.array([2])}
    if index == "TopK":
        nodes = [helper.make_node("TopK", ["x", "k"], ["values", "places"])]
    else:
        nodes = [helper.make_node(index, ["x"], ["places"], axis=1, keepdims=0)]
    outputs = [helper.make_tensor_value_info("places", TensorProto.INT64, None)]
    if gather:
        held["table"] = np.arange(8, dtype=np.float32).reshape(4, 2) ** 2
        nodes.append(helper.make_node("Gather", ["table", "places"], ["rows"]))
        outputs = [helper.make_tensor_value_info("rows", TensorProto.FLOAT, None)]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, DATA.shape)
    initializers = [numpy_helper.from_array(array, name) for name, array in held.items()]
    graph = helper.make_graph(nodes, "graph", [x], outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


@pytest.mark.parametrize("gather", [False, True])
def test_ties_in_another_order_are_no_failure(gather: bool) -> None:
    model, places = picks(gather=gather), np.array([[2, 0], [1, 2]])
    table = np.arange(8, dtype=np.float32).reshape(4, 2) ** 2
    expected = table[places] if gather else places
    certificate = verify(model, [DATA], {}, [expected], {"TopK": [places]})
    (selection,) = certificate.selections
    assert (selection.name, selection.size, selection.wrong) == ("places", 4, 0)
    assert selection.ties >= 2
    assert certificate.passed
    assert certificate.outputs[0].step_mismatches == 0
    assert "select an equal value instead, 0 another one" in str(certificate)
    assert not verify(model, [DATA], {}, [expected]).passed  # nothing is known of the indices: compared as they are


def test_an_index_of_another_value_fails() -> None:
    places = np.array([[2, 0], [1, 3]])
    with pytest.raises(ParityError, match="1 another one"):
        require_parity(picks(), [DATA], {}, [places], {"TopK": [places]})


def test_a_maximum_may_be_any_of_the_equal_ones() -> None:
    right, wrong = np.array([2, 1]), np.array([2, 3])
    assert verify(picks(index="ArgMax"), [DATA], {}, [right], {"ArgMax": [right]}).passed
    assert not verify(picks(index="ArgMax"), [DATA], {}, [wrong], {"ArgMax": [wrong]}).passed


@pytest.mark.parametrize("given", [{}, {"TopK": []}, {"ArgMax": [np.zeros(2, np.int64)]}])
def test_calls_that_the_file_does_not_have_are_left_out(given: dict[str, list[np.ndarray]]) -> None:
    assert match_selections(picks(), given) == {}
    places = np.array([[0, 2], [0, 1]])
    certificate = verify(picks(), [DATA], {}, [places], given)
    assert certificate.passed
    assert certificate.selections == ()


def test_values_that_differ_by_rounding_are_equal_and_infinities_too() -> None:
    node = picks().graph.node[0]
    assert indices_of(node) == "places"
    data = np.array([[1.0, 1.0 + 1e-6, 0.5, np.inf, np.inf]], np.float32)
    found, expected = np.array([[3, 1]]), np.array([[4, 0]])
    assert compare_selection(node, data, found, expected).passed
    assert compare_selection(node, data, found, np.array([[4, 2]])).wrong == 1


def nearest() -> onnx.ModelProto:
    """The two points nearest to each of (1, 3, 8), the distances as ``x * x - 2 * x * y + y * y``."""
    square = helper.make_node("Mul", ["x", "x"], ["squares"])
    sums = helper.make_node("ReduceSum", ["squares", "last"], ["rows"], keepdims=1)
    turn = helper.make_node("Transpose", ["x"], ["x_t"], perm=[0, 2, 1])
    product = helper.make_node("MatMul", ["x", "x_t"], ["product"])
    twice = helper.make_node("Mul", ["product", "two"], ["twice"])
    columns = helper.make_node("Transpose", ["rows"], ["columns"], "turn", perm=[0, 2, 1])
    less = helper.make_node("Sub", ["rows", "twice"], ["less"])
    distance = helper.make_node("Add", ["less", "columns"], ["distance"])
    turned = helper.make_node("Neg", ["distance"], ["near"])
    select = helper.make_node("TopK", ["near", "k"], ["values", "places"])
    nodes = [square, sums, turn, product, twice, columns, less, distance, turned, select]
    held = {"last": np.array([2]), "k": np.array([2]), "two": np.array(2.0, np.float32)}
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8])
    outputs = [helper.make_tensor_value_info("places", TensorProto.INT64, None)]
    initializers = [numpy_helper.from_array(array, name) for name, array in held.items()]
    graph = helper.make_graph(nodes, "graph", [x], outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def test_small_differences_of_large_values_are_equal_up_to_what_rounds_there() -> None:
    """Points 1 and 2 are as far from point 0 but for the last digits of its square."""
    rng = np.random.default_rng(0)
    x = np.repeat(rng.uniform(1.0, 2.0, (1, 1, 8)), 3, axis=1)
    x[0, 1, 0] += 1e-2
    x[0, 2, 1] -= 1e-2
    model, points = nearest(), x.astype(np.float32)
    for second in (1, 2):
        places = np.array([[[0, second], [1, 0], [2, 0]]])
        (selection,) = verify(model, [points], {}, [places], {"TopK": [places]}).selections
        assert selection.wrong == 0
    far = np.array([[[0, 1], [1, 2], [2, 0]]])  # twice as far as point 0
    (selection,) = verify(
        model, [(points + [[[0], [0.1], [-0.1]]]).astype(np.float32)], {}, [far], {"TopK": [far]}
    ).selections
    assert selection.wrong == 1


def test_the_size_of_a_sum_is_that_of_its_addends() -> None:
    model, x = nearest(), np.random.default_rng(0).normal(size=(1, 3, 8)).astype(np.float32)
    add_sizes(model, ["near", "near", "product"])
    assert [value.name for value in model.graph.output] == ["places", f"near{SIZE}"]
    (size,) = onnxruntime.InferenceSession(model.SerializeToString()).run([f"near{SIZE}"], {"x": x})
    squares = (x * x).sum(-1, keepdims=True)
    np.testing.assert_allclose(size, squares + np.abs(2 * x @ x.swapaxes(1, 2)) + squares.swapaxes(1, 2), rtol=1e-5)


def test_a_masked_value_makes_no_other_value_equal() -> None:
    """A mask adds a huge number to one value: the others are compared as without it."""
    node = picks().graph.node[0]
    data, sizes = np.array([[1.0, 1.1, 0.5, 0.2]]), np.array([[1.0, 1.1, 0.5, 1e9]])
    assert compare_selection(node, data, np.array([[1, 0]]), np.array([[0, 1]]), sizes).wrong == 2
    assert compare_selection(node, data, np.array([[1, 2]]), np.array([[1, 3]]), sizes).wrong == 0
