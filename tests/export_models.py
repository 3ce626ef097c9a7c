"""Toy models for the export tests, and ONNX Runtime at hand to look into what was exported.

The comparison here is written against the ONNX file alone and shares no code with ``fxqat.onnx.verify``.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxqat import enable_all, enable_calibration, enable_quantization, prepare_by_platform
from fxqat.custom_symbolic_opset import run_exporter
from fxqat.fake_quantize.base import FakeQuantizeBase
from fxqat.nn.deployed import DeployedPart
from fxqat.onnx.ort_runs import sums_saturate
from fxqat.quantization.graph_module import QuantGraphModule
from fxqat.utils.tensors import map_tensors
from tests.models import EVERY_LAYER

BACKENDS = ("TSQAT", "Experimental", "ONNXRuntime", "TensorRT")
WEIGHTED_NODES = {"Conv", "ConvTranspose", "Gemm", "MatMul"}


class Residual(nn.Module):
    """Conv + BN + ReLU, a shortcut, max and average pooling, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 2)
        x = F.relu(self.bn(self.conv(x)) + x)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Mobile(nn.Module):
    """Depthwise convolution, ReLU6, hard swish and a squeeze-excite gate."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6())
        self.depthwise = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1, groups=8, bias=False), nn.BatchNorm2d(8))
        self.act = nn.Hardswish()
        self.squeeze = nn.Conv2d(8, 4, 1)
        self.excite = nn.Conv2d(4, 8, 1)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.depthwise(self.expand(x)))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        return self.head(self.drop((x * gate).mean((2, 3))))


class Attention(nn.Module):
    """One transformer block with a position parameter."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.position = nn.Parameter(torch.randn(1, 6, width) * 0.1)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        q, k, v = self.qkv(self.norm(x)).reshape(-1, 6, 3, self.heads, 8).permute(2, 0, 3, 1, 4).unbind(0)
        attention = torch.softmax(q @ k.transpose(-2, -1) * 8**-0.5, dim=-1)
        x = x + self.project((attention @ v).transpose(1, 2).flatten(2))
        return (x + self.mlp(x))[:, 0]


class Branches(nn.Module):
    """Concatenation, splitting, padding, resizing, keyword operands and a functional weight."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Conv2d(3, 4, 1)
        self.right = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
        self.weight = nn.Parameter(torch.randn(6, 4, 3, 3) * 0.2)
        self.bias = nn.Parameter(torch.randn(6) * 0.2)
        self.unread = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.left(x), F.relu(self.right(x))], dim=1)
        a, b = joined.chunk(2, 1)
        summed = torch.add(input=a, other=b)
        y = F.conv2d(F.pad(summed, (1, 1, 1, 1)), weight=self.weight, bias=self.bias, stride=2)
        y = F.interpolate(y, scale_factor=2.0, mode="nearest")
        return torch.cat([F.avg_pool2d(y, 2), F.max_pool2d(y, 2)], dim=1).flatten(2)


class Upscale(nn.Module):
    """Transposed convolutions, one grouped and followed by a BatchNorm, and a convolution over one dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(3, 8, 3, padding=1)
        self.grouped = nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1, groups=2)
        self.bn = nn.BatchNorm1d(4)
        self.up = nn.ConvTranspose2d(4, 2, 3, stride=2, output_padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn(self.grouped(F.leaky_relu(self.down(x), 0.1))))
        return torch.sigmoid(self.up(y.unsqueeze(2)))


class Several(nn.Module):
    """Two inputs; a layer called twice, two layers that are one parameter; a dict with a tuple in it as the output."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 8, 3)
        self.shared = nn.Linear(8, 8)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.auxiliary = nn.Linear(8, 3)  # read by nothing

    def forward(self, image: Tensor, table: Tensor) -> dict[str, Any]:
        a = F.relu(self.image(image)).mean((2, 3))
        b = self.shared(torch.tanh(self.shared(table) * 3.0))
        return {"product": self.second(F.relu(self.first(a * b))), "parts": (a, b)}


Inputs = tuple[Tensor, ...]
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs]]] = {
    "residual": (Residual, lambda n: (torch.randn(n, 3, 12, 12),)),
    "mobile": (Mobile, lambda n: (torch.randn(n, 3, 12, 12),)),
    "attention": (Attention, lambda n: (torch.randn(n, 6, 16),)),
    "branches": (Branches, lambda n: (torch.randn(n, 3, 8, 8),)),
    "upscale": (Upscale, lambda n: (torch.randn(n, 3, 10),)),
    "several": (Several, lambda n: (torch.randn(n, 3, 8, 8), torch.randn(n, 8))),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """A toy model in eval mode, with BatchNorm statistics that are not the initial ones."""
    torch.manual_seed(seed)
    model = MODELS[name][0]().eval()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.3)
    return model


def inputs_of(name: str, batch: int = 4, seed: int = 1) -> Inputs:
    """Random inputs of a toy model."""
    torch.manual_seed(seed)
    return MODELS[name][1](batch)


def calibrate(gm: QuantGraphModule, *batches: Sequence[Any]) -> QuantGraphModule:
    """Calibrate on batches, switch quantization on, and return the same model in eval mode."""
    gm.eval()
    enable_calibration(gm)
    with torch.no_grad():
        for batch in batches:
            gm(*batch)
    enable_quantization(gm)
    return gm


def prepared(name: str, backend: str = "TSQAT", config: Mapping[str, Any] = EVERY_LAYER) -> QuantGraphModule:
    """A toy model, prepared and calibrated."""
    return calibrate(prepare_by_platform(build(name), backend, config), inputs_of(name))


@cache
def newest_opset() -> int:
    """The newest opset in which the installed ONNX Runtime has kernels for Q and DQ."""
    make = onnx.helper.make_tensor_value_info
    values = [make("x", onnx.TensorProto.FLOAT, [1]), make("scale", onnx.TensorProto.FLOAT, [])]
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "scale"], ["q"]),
        onnx.helper.make_node("DequantizeLinear", ["q", "scale"], ["y"]),
    ]
    graph = onnx.helper.make_graph(nodes, "g", values, [make("y", onnx.TensorProto.FLOAT, [1])])
    for opset in range(onnx.defs.onnx_opset_version(), 18, -1):
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=10)
        try:
            ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        except Exception:  # onnxruntime's errors have no common base
            continue
        return opset
    raise AssertionError("ONNX Runtime has Q and DQ of no opset newer than 18")


CONSTANTS = ("scale", "zero_point", "integers")
PROGRAMS: dict[str, ir.Model] = {}
"""What torch's exporter made of each lowered graph, see :func:`run_exporter_once`."""


def run_exporter_once(module: fx.GraphModule, inputs: Any, *options: Any) -> ir.Model:
    """``run_exporter``, which takes most of an export's time, but only once for the same graph, shapes and options.

    For tests of what is before and after it; a failure is not kept.
    """
    settings = [
        (path, type(part).__name__, {key: value for key, value in vars(part).items() if not key.startswith("_")})
        for path, part in module.named_modules()
        if path
    ]
    parts = [(path, part) for path, part in module.named_modules() if isinstance(part, DeployedPart)]
    of_parts = [(f"{path}.{name}", getattr(part, name)) for path, part in parts for name in CONSTANTS]
    tensors = [*module.named_parameters(), *module.named_buffers(), *(of for of in of_parts if of[1] is not None)]
    held = [(name, tensor.dtype, tensor.shape, tensor.detach().numpy().tobytes()) for name, tensor in tensors]
    shapes = map_tensors(inputs, lambda tensor: (tuple(tensor.shape), tensor.dtype))
    key = repr((module.code, settings, held, shapes, options))
    if key not in PROGRAMS:
        PROGRAMS[key] = run_exporter(module, inputs, *options)
    return PROGRAMS[key].clone()


def session(
    model: Path | onnx.ModelProto, optimized_to: Path | None = None, keep_int8: bool = False
) -> ort.InferenceSession:
    """A session with graph optimizations disabled, or with all of them and the result saved.

    ``keep_int8`` keeps ONNX Runtime from turning int8 activations into uint8 ones while it optimizes.
    """
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if optimized_to is not None:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        options.optimized_model_filepath = str(optimized_to)
    if keep_int8:
        options.add_session_config_entry("session.qdqisint8allowed", "1")
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def needs_exact_sums(runtime: str | None = None) -> None:
    """Skip the test on processors where sums of integer products saturate, in ONNX Runtime and in OpenVINO.

    Those of files for ``"onnxruntime_avx2"`` do not.
    """
    if runtime != "onnxruntime_avx2" and sums_saturate():
        pytest.skip("sums of products of uint8 and int8 saturate on this processor")


def run_session(running: ort.InferenceSession, inputs: Sequence[Tensor]) -> list[np.ndarray]:
    """All outputs, with inputs given in the file's order."""
    names = [value.name for value in running.get_inputs()]
    return running.run(None, dict(zip(names, [t.numpy() for t in inputs], strict=True)))


def run_file(path: Path, inputs: Sequence[Tensor]) -> list[np.ndarray]:
    """All outputs of a file, optimizations disabled."""
    return run_session(session(path), inputs)


def flat(outputs: Any) -> list[np.ndarray]:
    """The tensors of a nested output, in order."""
    if isinstance(outputs, Tensor):
        return [outputs.detach().numpy()]
    items = outputs.values() if isinstance(outputs, dict) else outputs
    return [array for item in items for array in flat(item)]


def deployed_outputs(gm: QuantGraphModule, inputs: Sequence[Tensor]) -> list[np.ndarray]:
    """What the model computes in eval mode with every fake-quant on."""
    return rounded_values(gm, inputs)[1]


@torch.no_grad()
def rounded_values(gm: QuantGraphModule, inputs: Sequence[Tensor]) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Every rounded value of the fake-quant model by its name, and the outputs."""
    work = copy.deepcopy(gm).eval()
    enable_all(work)
    values: dict[str, np.ndarray] = {}

    def keep(module: nn.Module, args: Any, kwargs: dict[str, Any], result: Tensor) -> None:
        values[kwargs["tensor_name"]] = result.numpy().copy()

    for module in work.modules():
        if isinstance(module, FakeQuantizeBase):
            module.observer_enabled = False
            module.register_forward_hook(keep, with_kwargs=True)
    return values, flat(work(*inputs))


def quantized_values(model: onnx.ModelProto, inputs: Sequence[Tensor]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """For every QuantizeLinear node, by the name of the value it reads: the dequantized value and the scale."""
    work = onnx.ModelProto()
    work.CopyFrom(model)
    scales = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    readers = {node.input[0]: node for node in work.graph.node if node.op_type in ("DequantizeLinear", "Clip")}
    wanted = {n.input[0]: readers[n.output[0]] for n in work.graph.node if n.op_type == "QuantizeLinear"}
    wanted = {name: readers[n.output[0]] if n.op_type == "Clip" else n for name, n in wanted.items()}  # of a runtime
    known = {value.name for value in work.graph.output}
    for node in wanted.values():
        if node.output[0] not in known:
            work.graph.output.append(onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None))
    running = session(work)
    found = dict(zip([value.name for value in running.get_outputs()], run_session(running, inputs), strict=True))
    return {name: (found[node.output[0]], scales[node.input[1]]) for name, node in wanted.items()}


def steps_apart(a: np.ndarray, b: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    """How many quantization steps two rounded values are apart."""
    return np.abs(np.rint((a.astype(np.float64) - b) / scale)).astype(np.int64)


def after(model: onnx.ModelProto, *passes: ir.passes.PassBase) -> onnx.ModelProto:
    """A model after passes; the one given is not changed."""
    work = ir.from_proto(model)
    for each in passes:
        work = each(work).model
    return ir.to_proto(work)


def constants(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The initializers of a model."""
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def node_types(model: onnx.ModelProto) -> list[str]:
    """The operators of a model in order."""
    return [node.op_type for node in model.graph.node]
