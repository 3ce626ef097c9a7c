"""Recurrent operators of ONNX files: the same function as the file, and what torch has not is refused."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save

import fxqat
from fxqat.cli.load_model import load_model
from fxqat.errors import ConfigError

pytest.importorskip("onnx2torch")

INPUT, HIDDEN, STEPS, BATCH = 3, 4, 5, 2
GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


def write(path: Path, kind: str, inputs: tuple[str, ...], outputs: tuple[str, ...], **attributes: Any) -> None:
    """A file of one recurrent operator and, of its first output, the sum over directions."""
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    generator, rows = np.random.default_rng(0), GATES[kind] * HIDDEN
    shapes = {"w": (rows, INPUT), "r": (rows, HIDDEN), "b": (2 * rows,)}
    shapes |= {"p": (3 * HIDDEN,)}
    constants = [
        numpy_helper.from_array(generator.uniform(-1, 1, (directions, *shape)).astype(np.float32), name)
        for name, shape in shapes.items()
    ]
    constants += [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in (("1", [1]), ("0", [0]))]
    constants.append(numpy_helper.from_array(np.array([directions, BATCH, HIDDEN], np.int64), "state"))
    nodes = [
        helper.make_node("ConstantOfShape", ["state"], ["zero"]),
        helper.make_node(kind, ["x", *inputs], list(outputs), hidden_size=HIDDEN, **attributes),
        *([helper.make_node("ReduceSum", ["y", "1"], ["z"], keepdims=0)] if "y" in outputs else []),
    ]
    states = {"h": [directions, BATCH, HIDDEN], "c": [directions, BATCH, HIDDEN]}
    given = {"x": [STEPS, BATCH, INPUT], **{name: shape for name, shape in states.items() if name in inputs}}
    types = {name: TensorProto.FLOAT for name in given}
    if "lengths" in inputs:
        given["lengths"], types["lengths"] = [BATCH], TensorProto.INT32
    found = [*(["z"] if "y" in outputs else []), *(name for name in outputs if name not in ("y", ""))]
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info(name, types[name], shape) for name, shape in given.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in found],
        [constant for constant in constants if constant.name in (*inputs, "1", "state")],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 14)], ir_version=8), path)


CASES = {
    f"{kind}, {direction}, {' '.join(inputs)}": (kind, inputs, {"direction": direction})
    for kind, direction in product(GATES, ("forward", "reverse", "bidirectional"))
    for inputs in (("w", "r"), ("w", "r", "b", "", "h", *(["c"] if kind == "LSTM" else [])))
}
CASES |= {
    f"lengths, {kind}, {direction}, {' '.join(states)}": (
        kind,
        ("w", "r", "b", "lengths", *states[: 1 + (kind == "LSTM")]),
        {"direction": direction},
    )
    for kind, direction in product(GATES, ("forward", "bidirectional"))
    for states in ((), ("h", "c"))
}
CASES["zeros"] = ("LSTM", ("w", "r", "b", "", "zero", "zero"), {})
CASES["relu"] = ("RNN", ("w", "r", "b"), {"activations": ["Relu"]})


@pytest.mark.parametrize("outputs", [("y",), ("y", "last"), ("", "last")], ids=["all", "both", "last"])
@pytest.mark.parametrize("case", CASES)
def test_the_module_computes_what_the_file_does(case: str, outputs: tuple[str, ...], tmp_path: Path) -> None:
    kind, inputs, attributes = CASES[case]
    write(
        tmp_path / "m.onnx",
        kind,
        inputs,
        outputs,
        **attributes,
        **({"linear_before_reset": 1} if kind == "GRU" else {}),
    )
    session = ort.InferenceSession(str(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(1)
    values = {each.name: generator.normal(size=each.shape).astype(np.float32) for each in session.get_inputs()}
    if "lengths" in values:
        values["lengths"] = np.array([2, 4], np.int32)
    found = load_model(str(tmp_path / "m.onnx")).model(*map(torch.from_numpy, values.values()))
    found = found if isinstance(found, (tuple, list)) else (found,)
    assert len(found) == len([name for name in outputs if name])
    for ours, exact in zip(found, session.run(None, values), strict=True):
        np.testing.assert_allclose(ours.detach(), exact, atol=1e-5)


@pytest.mark.parametrize("lengths", [(), (torch.tensor([2, 5]),)], ids=["whole", "lengths"])
def test_the_layer_of_a_file_is_quantized(lengths: tuple[torch.Tensor, ...], tmp_path: Path) -> None:
    write(tmp_path / "m.onnx", "LSTM", ("w", "r", "b", *["lengths"] * len(lengths)), ("y",))
    source, inputs = load_model(str(tmp_path / "m.onnx")), (torch.randn(STEPS, BATCH, INPUT), *lengths)
    gm = fxqat.prepare_by_platform(source.model, "TSQAT", example_inputs=inputs, check="off").eval()
    fxqat.calibrate(gm, [inputs], progress=False)
    fxqat.enable_quantization(gm)
    report = fxqat.convert_export(gm, inputs, tmp_path / "q.onnx")
    assert report.certificate is not None
    file = ort.InferenceSession(str(tmp_path / "q.onnx"), providers=["CPUExecutionProvider"])
    inputs = (inputs[0], *(torch.tensor([4, 1]) for _ in lengths))
    values = {each.name: value.numpy() for each, value in zip(file.get_inputs(), inputs, strict=True)}
    np.testing.assert_allclose(gm(*inputs).detach(), file.run(None, values)[0], atol=1e-6)
    assert "weight" in {tensor.kind for tensor in report.tensors}


@pytest.mark.parametrize(
    ("kind", "inputs", "attributes", "message"),
    [
        ("GRU", ("w", "r"), {}, "GRU with linear_before_reset=0"),
        ("LSTM", ("w", "r"), {"clip": 3.0}, "LSTM with clip"),
        ("LSTM", ("w", "r"), {"layout": 1}, "LSTM with layout"),
        ("LSTM", ("w", "r"), {"activations": ["Sigmoid", "Relu", "Tanh"]}, "LSTM with activations"),
        ("RNN", ("w", "r", "b", "lengths"), {"direction": "reverse"}, "RNN with sequence_lens and direction"),
        ("LSTM", ("w", "r", "b", "", "h", "c", "p"), {}, "LSTM with peepholes"),
    ],
)
def test_what_torch_has_not_is_refused(
    kind: str, inputs: tuple[str, ...], attributes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path / "m.onnx", kind, inputs, ("y",), **attributes)
    with pytest.raises(ConfigError, match=message) as refused:
        load_model(str(tmp_path / "m.onnx"))
    assert "onnx2torch does not know an operator of it" in str(refused.value)
