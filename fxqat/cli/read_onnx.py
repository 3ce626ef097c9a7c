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
6. it has no recurrent operators (:mod:`fxqat.cli.onnx_recurrent`), and takes an output of the file that is one of
   several of a node for all of them: an Identity stands between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer
from torch import Tensor, fx, nn

from fxqat.cli.onnx_recurrent import register_recurrent
from fxqat.cli.onnx_sizes import sizes_as_numbers
from fxqat.errors import ConfigError
from fxqat.onnx.older_opset import AsOpset17
from fxqat.utils.unused_names import unused_name


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


def _as_it_knows(proto: onnx.ModelProto) -> onnx.ModelProto:
    model = ir.from_proto(proto)
    ir.passes.Sequential(common.InlinePass(), common.RemoveInitializersFromInputsPass())(model)
    optimizer.fold_constants(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)  # case 1
    common.RemoveUnusedNodesPass()(model)
    AsOpset17().call(model)  # case 2
    taken = {value.name for node in model.graph for value in (*node.inputs, *node.outputs) if value is not None}
    for i, output in enumerate(model.graph.outputs):  # case 6
        producer = output.producer()
        if producer is not None and len(producer.outputs) > 1:
            copy = ir.node("Identity", [output])
            copy.outputs[0].name = unused_name(f"{output.name}_copy", taken)
            copy.outputs[0].type, copy.outputs[0].shape = output.type, output.shape
            model.graph.append(copy)
            model.graph.outputs[i] = copy.outputs[0]
    for node in model.graph:
        if node.op_type in ("Conv", "ConvTranspose") and node.outputs[0].shape is None:  # case 3
            weight = node.inputs[1]
            assert weight is not None
            if weight.const_value is not None:
                node.outputs[0].shape = ir.Shape([None] * len(weight.const_value.shape))
                node.outputs[0].dtype = weight.const_value.dtype
    return ir.to_proto(model)


class Constants(nn.Module):
    """A module with some of its arguments, in place of buffers.

    Args:
        module: the module.
        arguments: its arguments, None for those that are given.
        keywords: its constant keyword arguments.
    """

    def __init__(self, module: nn.Module, arguments: tuple[Tensor | None, ...], keywords: dict[str, Tensor]) -> None:
        super().__init__()
        self.module, self.arguments, self.keywords = module, arguments, keywords

    def forward(self, *values: Tensor, **keywords: Tensor) -> Any:
        """Call the module with all arguments."""
        given = iter(values)
        arguments = (next(given) if constant is None else constant for constant in self.arguments)
        return self.module(*arguments, **keywords, **self.keywords)


def _keep_constants(gm: fx.GraphModule) -> None:
    """Turn the constants of modules that are no weights into attributes."""
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
        keywords = {key: value for key, x in node.kwargs.items() if (value := constant(x)) is not None}
        if keywords or any(value is not None for value in arguments):
            if isinstance(module, OnnxSqueezeDynamicAxes):
                fixed = OnnxSqueezeStaticAxes(
                    [axis for axes in arguments if axes is not None for axis in axes.tolist()]
                )
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
