"""The models of the FAQ: each is prepared, calibrated and exported as it is written."""

import tempfile
from pathlib import Path

import torch
from torch import nn

from fxqat import convert_export, enable_calibration, enable_quantization, prepare_by_platform
from fxqat.tracing.leaf_tracer import LeafTracer


# [dynamic]
class Normalize(nn.Module):
    """Scales its input down until it is small enough; the number of steps depends on the data."""

    def forward(self, x):
        while x.abs().max() > 4:
            x = x / 2
        return x


class Dynamic(nn.Module):
    """A network with such a step in the middle."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.normalize = Normalize()
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(self.normalize(self.first(x).relu()))


def dynamic(x):
    gm = prepare_by_platform(Dynamic(), "TSQAT", example_inputs=(x,))
    for leaf in gm.quant_report.leaves:
        print(leaf.path, leaf.reason, leaf.source)
    return gm


# [static]
class Static(nn.Module):
    """Branches on flags, sizes and lengths, which are known while tracing."""

    def __init__(self, deep=True, depth=3):
        super().__init__()
        self.deep = deep
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(depth)])
        self.small = nn.Conv2d(8, 4, 1)
        self.large = nn.Conv2d(8, 4, 3)

    def forward(self, x, mask=None):
        y = self.stem(x)
        if self.deep:
            for block in self.blocks:
                y = y + block(y).relu()
        if mask is not None:
            y = y * mask
        if y.shape[-1] > 32:
            return self.large(y)
        return self.small(y)


def static(x):
    gm = prepare_by_platform(Static(), "TSQAT", example_inputs=(x,))
    for number in gm.quant_report.forced:
        print(number.expression, number.value, number.source)
    return gm


# [constructors]
class Noise(nn.Module):
    """Adds random numbers, in training only; it follows the mode of the prepared model."""

    def forward(self, x):
        if self.training:
            return x + 0.1 * torch.randn(x.shape)
        return x


class Constructors(nn.Module):
    """Creates tensors, and checks its input."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.noise = Noise()

    def forward(self, x):
        assert x.dim() == 4, f"expected images, got {x.dim()} dimensions"
        assert isinstance(x, torch.Tensor)
        y = self.noise(self.conv(x))
        b, _, h, w = y.shape
        rows = torch.arange(h, dtype=y.dtype).view(1, 1, h, 1) / h
        padding = torch.zeros(b, 2, h, w)
        return torch.cat([y * rows, padding, torch.ones((b, 1, h, w))], dim=1)


def constructors(x):
    return prepare_by_platform(Constructors(), "TSQAT", example_inputs=(x,))


# [detection]
class Head(nn.Module):
    """A YOLO head: one convolution for each level; returns the boxes of all levels, in pixels."""

    def __init__(self, classes=2, widths=(8, 16), anchors=((4, 8), (16, 32))):
        super().__init__()
        self.outputs = 5 + classes
        self.strides = (4, 8)
        self.grids = [torch.empty(0) for _ in widths]
        self.register_buffer("anchors", torch.tensor(anchors).float())
        self.convs = nn.ModuleList([nn.Conv2d(width, len(anchors[0]) * self.outputs, 1) for width in widths])

    def forward(self, features):
        found = []
        for i, conv in enumerate(self.convs):
            y = conv(features[i])
            b, _, h, w = y.shape
            y = y.view(b, 2, self.outputs, h, w).permute(0, 1, 3, 4, 2).contiguous()
            if self.grids[i].shape[2:4] != y.shape[2:4]:
                self.grids[i] = self.make_grid(h, w)
            xy, wh, scores = y.sigmoid().split((2, 2, self.outputs - 4), 4)
            xy = (xy * 2 + self.grids[i]) * self.strides[i]
            wh = (wh * 2) ** 2 * self.anchors[i].view(1, 2, 1, 1, 1)
            found.append(torch.cat((xy, wh, scores), 4).view(b, -1, self.outputs))
        return torch.cat(found, 1)

    @staticmethod
    def make_grid(h, w):
        rows, columns = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
        return torch.stack((columns, rows), 2).view(1, 1, h, w, 2).float() - 0.5


class Suppress(nn.Module):
    """Post-processing: the best boxes of each image. Their number depends on the data."""

    def forward(self, boxes):
        kept = []
        for image in boxes:
            image = image[image[:, 4] > 0.4]
            if len(image) == 0:
                kept.append(image)
                continue
            order = image[:, 4].argsort(descending=True)
            kept.append(image[order[:10]])
        return kept


class Detector(nn.Module):
    """Pre-processing, network and post-processing in one model."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU())
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.SiLU())
        self.head = Head()
        self.suppress = Suppress()

    def forward(self, images):
        x = torch.stack([image / 255 for image in images])
        first = self.stem(x)
        return self.suppress(self.head([first, self.down(first)]))


def detection(images):
    return prepare_by_platform(Detector(), "TSQAT", example_inputs=(images,))


# [network]
class Network(nn.Module):
    """The deployed part of the detector: a batch of images in, one tensor of boxes out."""

    def __init__(self, detector):
        super().__init__()
        self.stem, self.down, self.head = detector.stem, detector.down, detector.head

    def forward(self, x):
        first = self.stem(x)
        return self.head([first, self.down(first)])


def network(x):
    return prepare_by_platform(Network(Detector()), "TSQAT", example_inputs=(x,))


# [leaves]
class Block(nn.Module):
    """A block to keep whole."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x).relu()


class WithBlocks(nn.Module):
    """A network of such blocks."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        return self.last(self.blocks(self.stem(x)))


def leaf_by_type(x):
    return prepare_by_platform(WithBlocks(), "TSQAT", {"leaf_module": [Block]}, example_inputs=(x,))


def leaf_by_path(x):
    return prepare_by_platform(WithBlocks(), "TSQAT", {"leaf_module": ["blocks.1"]}, example_inputs=(x,))


# [tracer]
class MyTracer(LeafTracer):
    """Keeps blocks whole, in addition to the leaves of LeafTracer."""

    def is_leaf_module(self, m, module_qualified_name):
        return isinstance(m, Block) or super().is_leaf_module(m, module_qualified_name)


def own_tracer(x):
    return prepare_by_platform(WithBlocks(), "TSQAT", custom_tracer=MyTracer(), example_inputs=(x,))


# [end]
def calibrate_and_export(gm, x, folder):
    """The remaining steps, which are the same for each example."""
    gm.eval()
    enable_calibration(gm)
    with torch.no_grad():
        gm(x)
    enable_quantization(gm)
    return convert_export(gm, (x,), Path(folder) / "model.onnx")


if __name__ == "__main__":
    torch.manual_seed(0)
    image = torch.randn(2, 3, 32, 32)
    with tempfile.TemporaryDirectory() as directory:
        for example in (static, constructors, network, leaf_by_type, leaf_by_path, own_tracer):
            print(example.__name__, calibrate_and_export(example(image), image, directory))
    print(dynamic(image)(image).shape)
    pictures = [torch.rand(3, 32, 32) * 255 for _ in range(2)]
    print([len(boxes) for boxes in detection(pictures).eval()(pictures)])
