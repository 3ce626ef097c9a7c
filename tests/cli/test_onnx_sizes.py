"""Sizes that ONNX files compute from shapes: the same function for other sizes, and a file that can be exported."""

from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import NodeProto, TensorProto, helper, numpy_helper, save

import fxqat
from fxqat.cli.load_model import load_model

pytest.importorskip("onnx2torch")


def constant(name: str, *values: int) -> NodeProto:
    """A constant of 64-bit integers."""
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.array(values, np.int64)))


def node(kind: str, inputs: str, output: str, **attributes: int) -> NodeProto:
    """A node by the names of its inputs."""
    return helper.make_node(kind, inputs.split(), [output], **attributes)


CAST = {"to": TensorProto.INT64}
PLACES = [constant(name, *values) for name, *values in [("0", 0), ("1", 1), ("2", 2), ("-1", -1), ("3", 3)]]
SCALAR = helper.make_node("Constant", [], ["second"], value=numpy_helper.from_array(np.array(1, np.int64)))
CASES = {
    "slice": [node("Slice", "shape 0 2 0 1", "begin"), node("Concat", "begin -1", "sizes", axis=0)],
    "zero": [
        node("Cast", "shape", "cast", **CAST), node("Slice", "cast 1 2 0", "channels"),
        node("Cast", "channels", "again", **CAST), node("Concat", "0 again -1", "sizes", axis=0),
    ],
    "part": [
        node("Shape", "y", "two", start=0, end=2),
        node("Slice", "shape 2 3 0", "rows"), node("Concat", "two rows -1", "sizes", axis=0),
    ],
    "gather": [
        SCALAR, node("Gather", "shape second", "number", axis=0), node("Unsqueeze", "number 0", "vector"),
        node("Concat", "-1 vector", "sizes", axis=0),
    ],
    "arithmetic": [
        node("Slice", "shape 0 2 0", "begin"), node("Slice", "begin 1 2 0", "channels"),
        node("Mul", "channels 2", "twice"), node("Div", "twice 2", "half"), node("Add", "half 1", "more"),
        node("Sub", "more 1", "less"), node("Concat", "-1 less", "sizes", axis=0),
    ],
}  # fmt: skip
"""Nodes that compute ``sizes`` from ``shape``, that of an image."""


@pytest.mark.parametrize("case", CASES)
def test_sizes_are_numbers(case: str, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).uniform(-1, 1, (6, 3, 1, 1)).astype(np.float32)
    nodes = [
        *PLACES, helper.make_node("Constant", [], ["w"], value=numpy_helper.from_array(weight)),
        node("Conv", "x w", "y"), node("Shape", "y", "shape"), *CASES[case], node("Reshape", "y sizes", "z"),
    ]  # fmt: skip
    values = [("x", ["n", 3, "h", "w_"]), ("z", None)]
    x, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in values)
    file = tmp_path / "model.onnx"
    graph = helper.make_graph(nodes, "g", [x], [z])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 15)], ir_version=8), file)
    source, session = load_model(str(file)), ort.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    for size in (4, 6):
        image = torch.randn(2, 3, size, 2)
        np.testing.assert_allclose(
            source.model(image).detach(), session.run(None, {"x": image.numpy()})[0], rtol=1e-5, atol=1e-6
        )
    gm = fxqat.prepare_by_platform(source.model, "TSQAT", example_inputs=(image,), check="off").eval()
    fxqat.calibrate(gm, [image], progress=False)
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm, image, tmp_path / "quantized.onnx", dynamic_batch=True)
    assert report.certificate is not None
    exported = ort.InferenceSession(str(tmp_path / "quantized.onnx"), providers=["CPUExecutionProvider"])
    (name,) = (value.name for value in exported.get_inputs())
    other = torch.randn(3, 3, 6, 2)
    np.testing.assert_allclose(gm(other).detach(), exported.run(None, {name: other.numpy()})[0], atol=1e-5)


def test_a_shape_of_unknown_rank_stays_a_tensor(tmp_path: Path) -> None:
    nodes = [
        *PLACES, node("Shape", "x", "shape"), node("Slice", "shape 1 -1 0", "middle"),
        node("Concat", "0 middle -1", "sizes", axis=0), node("Reshape", "x sizes", "z"),
    ]  # fmt: skip
    x, z = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in (("x", None), ("z", None)))
    save(
        helper.make_model(
            helper.make_graph(nodes, "g", [x], [z]), opset_imports=[helper.make_opsetid("", 13)], ir_version=8
        ),
        tmp_path / "model.onnx",
    )
    image = torch.randn(2, 3, 4)
    assert load_model(str(tmp_path / "model.onnx")).model(image).shape == (2, 3, 4)
