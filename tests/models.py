"""Toy models that the tests share: each small, each with one thing in it that a quantizer can get wrong.

``TOYS`` names them; ``build(name)`` gives a model with random BatchNorm statistics in eval mode, ``inputs(name)`` its
inputs, and ``calibrated`` a prepared model that is ready to train or export. All of it is the same in every run.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.ops import StochasticDepth

from fxqat import enable_calibration, enable_quantization, prepare_by_platform
from fxqat.custom_quantizer.backend_type import backend_spec
from fxqat.custom_quantizer.spec import BackendSpec

BACKENDS = ("TSQAT", "Experimental", "ONNXRuntime", "TensorRT")
FURTHER_BACKENDS = ("OpenVINO", "QNN", "Vitis", "ArmCPU", "X86", "LiteRT")
VARIANTS = {"ONNXRuntime_AVX2": "ONNXRuntime", "OpenVINO_AVX2": "OpenVINO", "QNN_A16": "QNN"}
"""Backends that differ from another one in a scheme only."""
EVERY_LAYER = MappingProxyType({"extra_quantizer_dict": {"least_work": 0}})
"""No layer of a toy is so large that it would be worth converting values for it."""


class ConvBnRelu(nn.Module):
    """The plain way: conv-bn-relu, conv-bn-relu6, average pool, linear."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = F.relu6(self.bn2(self.conv2(x)))
        return self.fc(torch.flatten(self.pool(x), 1))


class BasicBlock(nn.Module):
    """Two convolutions and a shortcut, which is a convolution where the shapes differ."""

    def __init__(self, width_in, width, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x):
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Residual(nn.Module):
    """A stem and two residual blocks: one on the identity, one on a projection. The ReLU modules are shared."""

    note = "an attribute that is no tensor"

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(4, 4), BasicBlock(4, 8, stride=2))
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(self.layer1(self.stem(x).relu()).mean((2, 3)))


class Concat(nn.Module):
    """Branches of an Inception block put together."""

    def __init__(self):
        super().__init__()
        self.point = nn.Conv2d(3, 2, 1)
        self.wide = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())
        self.pool = nn.MaxPool2d(3, stride=1, padding=1)
        self.project = nn.Conv2d(3, 2, 1)
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        branches = [F.relu(self.point(x)), self.wide(x), F.relu(self.project(self.pool(x)))]
        return self.last(torch.cat(branches, 1))


class SqueezeExcite(nn.Module):
    """Depthwise convolution, hardswish, and the gate of MobileNetV3."""

    def __init__(self):
        super().__init__()
        self.expand = nn.Conv2d(3, 8, 1, bias=False)
        self.expand_bn = nn.BatchNorm2d(8)
        self.act = nn.Hardswish(inplace=True)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.depthwise_bn = nn.BatchNorm2d(8)
        self.squeeze = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(8, 4, 1)
        self.fc2 = nn.Conv2d(4, 8, 1)
        self.gate = nn.Hardsigmoid()
        self.project = nn.Conv2d(8, 3, 1, bias=False)
        self.project_bn = nn.BatchNorm2d(3)

    def forward(self, x):
        y = self.act(self.expand_bn(self.expand(x)))
        y = self.act(self.depthwise_bn(self.depthwise(y)))
        y = self.gate(self.fc2(F.relu(self.fc1(self.squeeze(y))))) * y
        return x + self.project_bn(self.project(y))


class FunctionalWeights(nn.Module):
    """Parameters read by functional layers; the two linear calls share one."""

    def __init__(self):
        super().__init__()
        self.conv_weight = nn.Parameter(torch.randn(4, 3, 3, 3) / 4)
        self.conv_bias = nn.Parameter(torch.randn(4))
        self.linear_weight = nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, x):
        x = F.relu(F.conv2d(x, self.conv_weight, bias=self.conv_bias, stride=2, padding=1))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        x = F.relu(F.linear(x, weight=self.linear_weight))
        return F.linear(x, self.linear_weight)


class KeywordArguments(nn.Module):
    """Tensors passed by keyword, and not first among them."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.act = nn.Hardswish()
        self.conv2 = nn.Conv2d(3, 4, 3, padding=1)
        self.conv3 = nn.Conv2d(8, 8, 1)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        a = self.act(input=self.conv1(input=x))
        b = F.relu(input=self.conv2(input=x))
        y = self.conv3(input=torch.cat(dim=1, tensors=[a, b]))
        y = torch.add(y, alpha=2, other=torch.cat(tensors=[b, a], dim=1))
        return self.fc(input=torch.mean(input=y, dim=(2, 3)))


class SharedModule(nn.Module):
    """One head called on two scales: three calls of one convolution, BatchNorm and ReLU."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.head = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.relu(self.stem(x))
        small = F.max_pool2d(x, 2)
        a, b = self.relu(self.bn(self.head(x))), self.relu(self.bn(self.head(small)))
        return a.mean((2, 3)) + b.mean((2, 3)), self.head(a)


class TiedWeights(nn.Module):
    """An encoder and a decoder that are one parameter."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(6, 6, bias=False)
        self.decoder = nn.Linear(6, 6)
        self.decoder.weight = self.encoder.weight

    def forward(self, x):
        return self.decoder(F.relu(self.encoder(x)))


class MultiInput(nn.Module):
    """An image, a vector, and an input that only one function reads."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(6, 4)

    def forward(self, image, vector, bias):
        return F.relu(self.conv(image).mean((2, 3)) + self.fc(vector)) + bias


class DictOutput(nn.Module):
    """A detector's answer: named tensors, one of them raw."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.boxes = nn.Conv2d(4, 4, 1)
        self.scores = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        features = F.relu(self.stem(x))
        return {"boxes": self.boxes(features), "scores": torch.sigmoid(self.scores(features)), "features": features}


class TupleOutput(nn.Module):
    """Nested tuples of outputs, one of them an input of the model."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.out = nn.Conv2d(4, 3, 1)

    def forward(self, x):
        y = self.conv(x)
        return y, (self.out(F.leaky_relu(y, 0.1)), x)


class TransposeConvs(nn.Module):
    """Transposed convolutions of every kind, with groups, BatchNorm and ReLU."""

    def __init__(self):
        super().__init__()
        self.up2 = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, bias=False)
        self.bn2 = nn.BatchNorm2d(6)
        self.dense2 = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.up1 = nn.ConvTranspose1d(4, 4, 2, stride=2, groups=4)
        self.bn1 = nn.BatchNorm1d(4)
        self.up3 = nn.ConvTranspose3d(4, 2, 2, stride=2)
        self.bn3 = nn.BatchNorm3d(2)
        self.last = nn.Conv3d(2, 2, 1)

    def forward(self, x):
        x = F.relu(self.bn2(self.up2(x)))
        x = F.relu6(self.dense2(x))
        x = F.relu(self.bn1(self.up1(x.flatten(2))))
        return self.last(self.bn3(self.up3(x.reshape(-1, 4, 4, 4, 4))))


class Conv1d(nn.Module):
    """Sequences."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm1d(4)
        self.pool = nn.MaxPool1d(2)
        self.last = nn.Conv1d(4, 2, 1)

    def forward(self, x):
        return self.last(self.pool(F.relu(self.bn(self.conv(x)))))


class Conv3d(nn.Module):
    """Volumes."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(2, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm3d(4)
        self.pool = nn.AvgPool3d(2)
        self.last = nn.Conv3d(4, 2, 1)

    def forward(self, x):
        return self.last(self.pool(F.relu(self.bn(self.conv(x)))))


class LinearBatchNorm(nn.Module):
    """A multi-layer perceptron with BatchNorm."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 8, bias=False)
        self.bn = nn.BatchNorm1d(8)
        self.fc2 = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc2(F.relu(self.bn(self.fc1(x))))


class PreActivation(nn.Module):
    """BatchNorm and ReLU before the convolution, where nothing can be folded."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        x = self.stem(x)
        y = self.conv1(F.relu(self.bn1(x)))
        return x + self.conv2(F.relu(self.bn2(y)))


class Attention(nn.Module):
    """LayerNorm, one packed projection, matmul, softmax, matmul, and a position embedding."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.position
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.reshape(x.shape[0], 5, 2, 4).permute(0, 2, 1, 3) for t in (q, k, v))
        weights = F.softmax(q @ k.transpose(-2, -1) * 0.5, dim=-1)
        y = torch.matmul(weights, v).permute(0, 2, 1, 3).reshape(x.shape[0], 5, 8)
        return x + F.gelu(self.project(y))


class Dropouts(nn.Module):
    """Dropout as a module, as a function, and of whole branches."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.drop = nn.Dropout2d(0.3)
        self.conv2 = nn.Conv2d(4, 4, 1)
        self.depth = StochasticDepth(0.5, "row")
        self.fc = nn.Linear(4, 2)

    def forward(self, x):
        x = self.drop(F.relu(self.conv1(x)))
        x = x + self.depth(self.conv2(x))
        return self.fc(F.dropout(x.mean((2, 3)), 0.4, training=self.training))


class Slices(nn.Module):
    """Values that are cut up, put together again, and moved."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(4, 4, 1)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        left, right = torch.split(x, 4, dim=1)
        first, second = self.conv2(left).chunk(2, dim=1)
        y = torch.cat([first, second, right[:, :4]], 1)
        y = torch.stack([y, x], dim=2)[:, :, 0]
        return self.fc(y.flatten(2).transpose(1, 2)[:, ::2])


class PaddingModes(nn.Module):
    """Padding inside convolutions and on its own, with zeros, with values of the input, with a constant."""

    def __init__(self):
        super().__init__()
        self.reflect = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
        self.circular = nn.Conv2d(4, 4, (3, 5), padding=(1, 2), padding_mode="circular")
        self.same = nn.Conv2d(4, 4, 4, padding="same", padding_mode="replicate")
        self.zeros = nn.Conv2d(4, 4, 3, padding="same")
        self.valid = nn.Conv2d(4, 4, 3, padding="valid")
        self.last = nn.Conv2d(4, 2, 3)

    def forward(self, x):
        x = self.zeros(self.same(self.circular(self.reflect(x))))
        x = self.valid(F.pad(x, (1, 1, 1, 1)))
        return self.last(F.pad(x, (1, 1, 1, 1), value=0.5))


class TwoReaders(nn.Module):
    """A convolution whose value a ReLU reads, and something else as well: it cannot be fused."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.a = nn.Conv2d(4, 4, 1)
        self.b = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        y = self.bn(self.conv(x))
        return self.a(F.relu(y)) * torch.tanh(self.b(y))


class InplaceActivations(nn.Module):
    """In-place activations behind values that are rounded first."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.swish = nn.SiLU(inplace=True)
        self.pool = nn.AvgPool2d(2)
        self.relu = nn.ReLU(inplace=True)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.last(self.relu(self.pool(self.swish(self.conv(x)))))


class AuxiliaryHead(nn.Module):
    """A second head that only training reads."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.fc = nn.Linear(4, 3)
        self.auxiliary = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.conv(x)).mean((2, 3))
        if self.training:
            return self.fc(x), self.auxiliary(x)
        return self.fc(x)


class UnusedParameters(nn.Module):
    """Parameters, a buffer and a layer that forward never reads."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.spare = nn.Linear(7, 7)
        self.temperature = nn.Parameter(torch.tensor(0.07))
        self.register_buffer("centre", torch.arange(3.0))

    def forward(self, x):
        return F.relu(self.conv(x))


@dataclass(frozen=True)
class Toy:
    """A model, and the shapes of its inputs."""

    model: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]


IMAGE = ((4, 3, 8, 8),)
TOYS: "OrderedDict[str, Toy]" = OrderedDict(
    conv_bn_relu=Toy(ConvBnRelu, IMAGE),
    residual=Toy(Residual, IMAGE),
    concat=Toy(Concat, IMAGE),
    squeeze_excite=Toy(SqueezeExcite, IMAGE),
    functional_weights=Toy(FunctionalWeights, IMAGE),
    keyword_arguments=Toy(KeywordArguments, IMAGE),
    shared_module=Toy(SharedModule, IMAGE),
    tied_weights=Toy(TiedWeights, ((4, 6),)),
    multi_input=Toy(MultiInput, ((4, 3, 8, 8), (4, 6), (4, 4))),
    dict_output=Toy(DictOutput, IMAGE),
    tuple_output=Toy(TupleOutput, IMAGE),
    transpose_convs=Toy(TransposeConvs, ((2, 4, 4, 2),)),
    conv1d=Toy(Conv1d, ((4, 3, 16),)),
    conv3d=Toy(Conv3d, ((2, 2, 4, 4, 4),)),
    linear_bn=Toy(LinearBatchNorm, ((8, 6),)),
    pre_activation=Toy(PreActivation, IMAGE),
    attention=Toy(Attention, ((2, 5, 8),)),
    dropouts=Toy(Dropouts, IMAGE),
    slices=Toy(Slices, IMAGE),
    padding_modes=Toy(PaddingModes, IMAGE),
    two_readers=Toy(TwoReaders, IMAGE),
    inplace_activations=Toy(InplaceActivations, IMAGE),
    auxiliary_head=Toy(AuxiliaryHead, IMAGE),
    unused_parameters=Toy(UnusedParameters, IMAGE),
)


def build(name: str, *, seed: int = 0) -> nn.Module:
    """A toy model in eval mode, its BatchNorms with statistics and affine parameters that are not trivial."""
    torch.manual_seed(seed)
    model = TOYS[name].model()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
    return model.eval()


def inputs(name: str, *, seed: int = 0) -> tuple[Tensor, ...]:
    """Inputs of a toy model."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator) for shape in TOYS[name].shapes)


def prepared(name: str, backend: Any = "TSQAT", config: Any = EVERY_LAYER, **options: Any) -> nn.Module:
    """A toy model after ``prepare_by_platform``."""
    return prepare_by_platform(build(name), backend, config, **options)


def unlimited(backend: str) -> BackendSpec:
    """The placement of a backend without the limits of its schemes, to see what a configuration does there."""
    return replace(backend_spec(backend), legal_weights=(), legal_activations=())


def calibrate(gm: nn.Module, *batches: tuple[Tensor, ...]) -> nn.Module:
    """Watch batches of inputs, then switch quantization on; the mode stays as it is."""
    training = {module: module.training for module in gm.modules()}
    gm.eval()
    enable_calibration(gm)
    with torch.no_grad():
        for batch in batches:
            gm(*batch)
    for module, mode in training.items():
        module.training = mode
    enable_quantization(gm)
    return gm


def calibrated(name: str, backend: Any = "TSQAT", config: Any = EVERY_LAYER, **options: Any) -> nn.Module:
    """A toy model prepared, calibrated on two batches, in eval mode with quantization on."""
    return calibrate(prepared(name, backend, config, **options), inputs(name, seed=1), inputs(name, seed=2))


class Counting(nn.Module):
    """Counts its calls in two ways, and remembers its last output."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.linear.weight
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("again", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.again = self.again + 1
        self.last = self.tied(self.linear(x))
        return self.last
