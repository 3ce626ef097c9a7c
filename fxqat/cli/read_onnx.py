"""An ONNX file as a module, by onnx2torch: what this converter lacks is done here, before it.

Its last release (1.5.15) knows operators up to opset 17, takes weights from initializers only, and no Gelu.

1. Constants are folded, and Constant nodes become initializers;
2. the operators are written as they were in opset 17 (:mod:`fxqat.onnx.older_opset`);
3. it needs the rank of a value that a BatchNorm reads. Where shape inference does not know it, it is that of the weight
   of the convolution that computes the value;
4. axes, sizes, pads and indices are buffers of the module, which its forward turns into Python numbers. They become
   plain attributes, which tracing takes as the constants that they are. So do the factors of a Resize. Squeeze, which
   reads each axis as a tensor, becomes the one of before opset 13;
5. sizes that a Reshape gets are tensors, computed from the shape of a value. They become Python numbers
   (:mod:`fxqat.cli.onnx_sizes`);
6. operators that it does not know are written with others (:mod:`fxqat.onnx.for_onnx2torch`); it learns the recurrent
   ones (:mod:`fxqat.cli.onnx_recurrent`), and Pad by mirrored or repeated values along any axis.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import torch
from onnx_ir.passes import common
from onnxscript import optimizer
from torch import Tensor, fx, nn

from fxqat.cli.onnx_modules import Constants, Pad, Slice
from fxqat.cli.onnx_recurrent import register_recurrent
from fxqat.cli.onnx_sizes import sizes_as_numbers
from fxqat.errors import ConfigError, ExportError
from fxqat.onnx.for_onnx2torch import ForConverter
from fxqat.onnx.older_opset import AsOpset17
from fxqat.onnx.ort_runs import explained
from fxqat.utils.tensors import flatten_tensors

LARGEST_CONSTANT = 2**26
"""Bytes up to which what is computed from constants becomes one: recurrent layers join their weights."""

TOLERANCE, SMALLEST = 1e-3, 1e-5
"""Of the largest value of an output, and in its unit: more than float32 in another order makes of deep networks."""


def read_onnx(path: Path) -> tuple[nn.Module, onnx.ModelProto]:
    """The module of an ONNX file, and the file.

    Raises:
        ConfigError: the file cannot be read, or has an operator that the converter does not know.
    """
    try:
        from onnx2torch import convert
    except ImportError as error:
        raise ConfigError(f"MODEL {path}: reading an ONNX file needs onnx2torch: pip install onnx2torch") from error
    register_recurrent()  # case 6
    try:
        proto = onnx.load(str(path))
    except Exception as error:
        raise ConfigError(f"MODEL {path} is not an ONNX file: {error}") from error
    try:
        module = convert(_as_it_knows(proto))
    except NotImplementedError as error:
        raise ConfigError(f"MODEL {path}: onnx2torch does not know an operator of it: {error}") from error
    except Exception as error:
        raise ConfigError(f"MODEL {path}: onnx2torch cannot convert it: {type(error).__name__}: {error}") from error
    sizes_as_numbers(module)  # case 5
    _keep_constants(module)  # case 4
    return module, proto


def compare_with_file(module: nn.Module, path: Path, inputs: tuple[Any, ...]) -> None:
    """Compare a module with the file that it was read from, in ONNX Runtime without optimizations.

    Raises:
        ConfigError: the file does not run on these inputs, or a float output differs by more than ``TOLERANCE`` of its
            largest value, or more than 1 % of the values of another output differ.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    arrays = [tensor.numpy(force=True) for tensor in flatten_tensors(inputs)]
    try:
        with explained():
            session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
            names = [value.name for value in session.get_inputs()]
            exact = session.run(None, dict(zip(names, arrays, strict=False)))
    except ExportError as error:
        raise ConfigError(f"MODEL {path} does not run on these inputs: {error}") from error
    with torch.no_grad():
        found = [tensor.numpy(force=True) for tensor in flatten_tensors(module(*inputs))]
    for value, ours, theirs in zip(session.get_outputs(), found, exact, strict=True):
        if ours.shape != theirs.shape:
            what = f"has the shape {ours.shape} instead of {theirs.shape}"
        elif np.issubdtype(theirs.dtype, np.floating):
            equal = (ours == theirs) | np.isnan(ours) & np.isnan(theirs)
            difference = np.abs(np.where(equal, 0.0, ours - theirs)).max(initial=0.0)
            largest = np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0)
            is_same = difference <= TOLERANCE * largest + SMALLEST
            what = "" if is_same else f"differs by {difference:.3g}, of at most {largest:.3g}"
        else:
            share = float((ours != theirs).mean()) if theirs.size else 0.0
            what = "" if share <= 0.01 else f"differs in {share:.1%} of its values"
        if what:
            raise ConfigError(
                f"MODEL {path}: the module that was read from it does not compute what the file does in ONNX Runtime: "
                f"output {value.name!r} {what}. onnx2torch or fxqat reads an operator wrongly: give the PyTorch model, "
                "or report it with the file"
            )


def _as_it_knows(proto: onnx.ModelProto) -> onnx.ModelProto:
    model = ir.from_proto(proto)
    ir.passes.Sequential(common.InlinePass(), common.RemoveInitializersFromInputsPass())(model)
    optimizer.fold_constants(
        model,
        input_size_limit=LARGEST_CONSTANT,
        output_size_limit=LARGEST_CONSTANT,
        should_fold=lambda node: True if node.op_type == "ConstantOfShape" else None,
    )
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)  # case 1
    common.RemoveUnusedNodesPass()(model)
    AsOpset17().call(model)  # case 2
    common.ShapeInferencePass()(model)
    ForConverter().call(model)  # case 6
    for node in model.graph:
        if node.op_type in ("Conv", "ConvTranspose") and node.outputs[0].shape is None:  # case 3
            weight = node.inputs[1]
            assert weight is not None
            if weight.const_value is not None:
                node.outputs[0].shape = ir.Shape([None] * len(weight.const_value.shape))
                node.outputs[0].dtype = weight.const_value.dtype
    return ir.to_proto(model)


def _keep_constants(gm: fx.GraphModule) -> None:
    """Turn the constants of modules that are no weights into attributes."""
    from onnx2torch.node_converters.pad import OnnxPadDynamic
    from onnx2torch.node_converters.slice import OnnxSlice
    from onnx2torch.node_converters.squeeze import OnnxSqueezeDynamicAxes, OnnxSqueezeStaticAxes

    for node in list(gm.graph.nodes):
        if node.op != "call_module":
            continue
        module = gm.get_submodule(node.target)

        def constant(argument: Any, is_resize: bool = "Resize" in type(module).__name__) -> Tensor | None:
            if not isinstance(argument, fx.Node) or argument.op != "get_attr":
                return None
            found: Tensor = gm.get_buffer(str(argument.target))
            return None if found.is_floating_point() and not is_resize else found

        arguments = tuple(map(constant, node.args))
        known = [value for value in arguments if value is not None]
        keywords = {key: value for key, x in node.kwargs.items() if (value := constant(x)) is not None}
        if keywords or known:
            if isinstance(module, OnnxSqueezeDynamicAxes):
                fixed = OnnxSqueezeStaticAxes([axis for axes in known for axis in axes.tolist()])
            elif isinstance(module, OnnxPadDynamic) and module.mode != "constant" and arguments[1] is not None:
                fixed, node.args, arguments = Pad(arguments[1].tolist(), module.mode), node.args[:1], (None,)
            elif isinstance(module, OnnxSlice) and len(known) == len(arguments) - 1:
                fixed = Slice(*known, **keywords)
            else:
                fixed = Constants(module, arguments, keywords)
            gm.set_submodule(node.target, fixed)
            node.args = tuple(x for x, value in zip(node.args, arguments, strict=True) if value is None)
            node.kwargs = {key: x for key, x in node.kwargs.items() if key not in keywords}
    gm.graph.eliminate_dead_code()
    used = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in gm.named_buffers() if name.startswith("initializers.") and name not in used]:
        delattr(gm.initializers, name.rpartition(".")[2])
    gm.recompile()
