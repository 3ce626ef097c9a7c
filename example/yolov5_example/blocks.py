"""The building blocks of both generations of YOLOv5; parameters have the names of the published weights."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Activation = Callable[[], nn.Module]


class Conv(nn.Module):
    """Convolution, BatchNorm, activation. All blocks take and return (batch, channels, height, width)."""

    def __init__(self, c_in: int, c_out: int, kernel: int = 1, stride: int = 1, act: Activation = nn.SiLU) -> None:
        super().__init__()
        padding = 2 if kernel == 6 else kernel // 2
        self.conv = nn.Conv2d(c_in, c_out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(c_out, eps=1e-3, momentum=0.03)
        self.act = act()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(x)))


class Bottleneck(nn.Module):
    """A 1x1 and a 3x3 convolution; with `shortcut` the input is added."""

    def __init__(self, channels: int, shortcut: bool, act: Activation) -> None:
        super().__init__()
        self.cv1 = Conv(channels, channels, 1, act=act)
        self.cv2 = Conv(channels, channels, 3, act=act)
        self.shortcut = shortcut

    def forward(self, x: Tensor) -> Tensor:
        y = self.cv2(self.cv1(x))
        return x + y if self.shortcut else y


class C3(nn.Module):
    """Bottlenecks and a parallel 1x1 convolution, each with half of the channels, joined by a 1x1 (since v4.0)."""

    def __init__(self, c_in: int, c_out: int, depth: int, shortcut: bool, act: Activation) -> None:
        super().__init__()
        half = c_out // 2
        self.cv1 = Conv(c_in, half, act=act)
        self.cv2 = Conv(c_in, half, act=act)
        self.cv3 = Conv(2 * half, c_out, act=act)
        self.m = nn.Sequential(*(Bottleneck(half, shortcut, act) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class BottleneckCSP(nn.Module):
    """The predecessor of C3 (until v3.1): plain convolutions before the join, BatchNorm and LeakyReLU after it."""

    def __init__(self, c_in: int, c_out: int, depth: int, shortcut: bool, act: Activation) -> None:
        super().__init__()
        half = c_out // 2
        self.cv1 = Conv(c_in, half, act=act)
        self.cv2 = nn.Conv2d(c_in, half, 1, bias=False)
        self.cv3 = nn.Conv2d(half, half, 1, bias=False)
        self.cv4 = Conv(2 * half, c_out, act=act)
        self.bn = nn.BatchNorm2d(2 * half, eps=1e-3, momentum=0.03)
        self.act = nn.LeakyReLU(0.1)
        self.m = nn.Sequential(*(Bottleneck(half, shortcut, act) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat((self.cv3(self.m(self.cv1(x))), self.cv2(x)), 1)
        return self.cv4(self.act(self.bn(joined)))


class SPP(nn.Module):
    """Three parallel max pools of different sizes (until v5.0)."""

    def __init__(self, c_in: int, c_out: int, act: Activation) -> None:
        super().__init__()
        self.cv1 = Conv(c_in, c_in // 2, act=act)
        self.cv2 = Conv(c_in // 2 * 4, c_out, act=act)
        self.m = nn.ModuleList(nn.MaxPool2d(size, 1, size // 2) for size in (5, 9, 13))

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        return self.cv2(torch.cat([x, *(pool(x) for pool in self.m)], 1))


class SPPF(nn.Module):
    """The same result with one pool, applied three times in sequence (since v6.0)."""

    def __init__(self, c_in: int, c_out: int, act: Activation) -> None:
        super().__init__()
        self.cv1 = Conv(c_in, c_in // 2, act=act)
        self.cv2 = Conv(c_in // 2 * 4, c_out, act=act)
        self.m = nn.MaxPool2d(5, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cv1(x)
        once = self.m(x)
        twice = self.m(once)
        return self.cv2(torch.cat((x, once, twice, self.m(twice)), 1))


class Focus(nn.Module):
    """Each 2x2 group of pixels becomes channels; then a convolution (until v5.0)."""

    def __init__(self, c_in: int, c_out: int, kernel: int, act: Activation) -> None:
        super().__init__()
        self.conv = Conv(4 * c_in, c_out, kernel, act=act)

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[..., row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.conv(torch.cat(corners, 1))


class Detect(nn.Module):
    """The head: a box, its objectness and its classes for each cell and anchor.

    In training it returns the maps (batch, anchors, height, width, 5 + classes), before the sigmoid. In eval mode it
    returns (boxes, maps); boxes are (batch, boxes, 5 + classes): center x, y, width and height in px, objectness,
    probability of each class.

    Args:
        num_classes: number of classes.
        channels: channels of each feature map.
        anchors: (maps, anchors per map, 2): width and height in px.
        strides: px per cell of each map.
    """

    def __init__(self, num_classes: int, channels: list[int], anchors: Tensor, strides: tuple[int, ...]) -> None:
        super().__init__()
        self.outputs, self.strides = num_classes + 5, strides
        self.m = nn.ModuleList(nn.Conv2d(c, anchors.shape[1] * self.outputs, 1) for c in channels)
        self.register_buffer("anchors", anchors / torch.tensor(strides).view(-1, 1, 1))  # in cells, as published

    def forward(self, features: list[Tensor]) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        maps = []
        for conv, x in zip(self.m, features, strict=True):
            y = conv(x)
            batch, _, height, width = y.shape
            maps.append(y.view(batch, -1, self.outputs, height, width).permute(0, 1, 3, 4, 2))
        return maps if self.training else (self.decode(maps), maps)

    def decode(self, maps: list[Tensor]) -> Tensor:
        """Boxes (batch, boxes, 5 + classes) from maps."""
        boxes = []
        for i, (y, stride) in enumerate(zip(maps, self.strides, strict=True)):
            batch, _, height, width, _ = y.shape
            rows, columns = torch.arange(height, device=y.device), torch.arange(width, device=y.device)
            grid = torch.stack((columns.expand(height, width), rows.unsqueeze(1).expand(height, width)), 2)
            anchors = (self.anchors[i] * stride).view(-1, 1, 1, 2)
            y = y.sigmoid()
            xy = (y[..., :2] * 2 - 0.5 + grid) * stride
            wh = (y[..., 2:4] * 2) ** 2 * anchors
            boxes.append(torch.cat((xy, wh, y[..., 4:]), -1).reshape(batch, -1, self.outputs))
        return torch.cat(boxes, 1)


def upsample(x: Tensor) -> Tensor:
    """Double height and width by repeating pixels."""
    return F.interpolate(x, scale_factor=2.0, mode="nearest")
