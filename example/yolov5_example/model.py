"""A new implementation of YOLOv5's published architecture (github.com/ultralytics/yolov5, releases v3.0 and v6.0).

All layers are in one list, so that each has the same number as in the published weights.
"""

import math
from dataclasses import dataclass

import torch
from blocks import C3, SPP, SPPF, BottleneckCSP, Conv, Detect, Focus, upsample
from torch import Tensor, nn

SIZES = {"n": (0.33, 0.25), "s": (0.33, 0.50), "m": (0.67, 0.75), "l": (1.0, 1.0), "x": (1.33, 1.25)}
"""Depth and width multiples of each size."""
STRIDES = (8, 16, 32)
ANCHORS = (
    ((10, 13), (16, 30), (33, 23)),
    ((30, 61), (62, 45), (59, 119)),
    ((116, 90), (156, 198), (373, 326)),
)
"""Width and height in px, three for each stride, fitted to COCO at 640 px."""


@dataclass(frozen=True)
class Generation:
    """The differences between the releases.

    Args:
        stem: type of the first layer.
        stage: type of the blocks between the layers that halve the map.
        activation: type of the activation.
        pool: type of the pooling block.
        depths: repetitions inside the four stages of the backbone, before the depth multiple.
        pool_first: whether the pooling block is before the last stage.
    """

    stem: type[nn.Module]
    stage: type[nn.Module]
    activation: type[nn.Module]
    pool: type[nn.Module]
    depths: tuple[int, int, int, int]
    pool_first: bool


GENERATIONS = {
    "v3.0": Generation(Focus, BottleneckCSP, nn.Hardswish, SPP, (3, 9, 9, 3), pool_first=True),
    "v6.0": Generation(Conv, C3, nn.SiLU, SPPF, (3, 6, 9, 3), pool_first=False),
}


class Yolo(nn.Module):
    """A YOLOv5 detector.

    Takes images (batch, 3, height, width), 0 to 1, with height and width multiples of 32. Returns what :class:`Detect`
    returns.

    Args:
        size: n, s, m, l or x.
        num_classes: number of classes.
        generation: v6.0 or v3.0.
    """

    def __init__(self, size: str = "s", num_classes: int = 80, generation: str = "v6.0") -> None:
        super().__init__()
        release, (deep, wide) = GENERATIONS[generation], SIZES[size]

        def width(channels: int) -> int:
            return math.ceil(channels * wide / 8) * 8

        def stage(c_in: int, c_out: int, depth: int, shortcut: bool = True) -> nn.Module:
            return release.stage(c_in, c_out, max(round(depth * deep), 1), shortcut, release.activation)

        def conv(c_in: int, c_out: int, kernel: int, stride: int = 1) -> nn.Module:
            return Conv(c_in, c_out, kernel, stride, release.activation)

        c1, c2, c3, c4, c5 = (width(channels) for channels in (64, 128, 256, 512, 1024))
        d2, d3, d4, d5 = release.depths
        stem = conv(3, c1, 6, 2) if release.stem is Conv else release.stem(3, c1, 3, release.activation)
        pool, last = release.pool(c5, c5, release.activation), stage(c5, c5, d5, shortcut=not release.pool_first)
        joint = nn.Identity()  # upsampling and concatenation have a number but no parameters
        anchors = torch.tensor(ANCHORS, dtype=torch.float32)
        self.model = nn.ModuleList(
            [
                *(stem, conv(c1, c2, 3, 2), stage(c2, c2, d2), conv(c2, c3, 3, 2), stage(c3, c3, d3)),
                *(conv(c3, c4, 3, 2), stage(c4, c4, d4), conv(c4, c5, 3, 2)),
                *((pool, last) if release.pool_first else (last, pool)),
                *(conv(c5, c4, 1), joint, joint, stage(2 * c4, c4, 3, False)),
                *(conv(c4, c3, 1), joint, joint, stage(2 * c3, c3, 3, False)),
                *(conv(c3, c3, 3, 2), joint, stage(2 * c3, c4, 3, False)),
                *(conv(c4, c4, 3, 2), joint, stage(2 * c4, c5, 3, False)),
                Detect(num_classes, [c3, c4, c5], anchors, STRIDES),
            ]
        )
        self.size, self.num_classes, self.generation = size, num_classes, generation
        self.initialize_head()

    def initialize_head(self, objects: float = 8.0) -> None:
        """Set biases so that few objects are predicted at first (Lin et al. 2017, arXiv:1708.02002, section 3.3)."""
        head = self.model[-1]
        for conv, stride in zip(head.m, head.strides, strict=True):
            bias = conv.bias.detach().view(-1, head.outputs)
            bias[:, 4] = math.log(objects / (640 / stride) ** 2)
            bias[:, 5:] = math.log(0.6 / (self.num_classes - 0.99))

    def forward(self, x: Tensor) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        layers = self.model
        for layer in layers[:5]:
            x = layer(x)
        at_8 = x
        at_16 = layers[6](layers[5](at_8))
        at_32 = layers[10](layers[9](layers[8](layers[7](at_16))))
        middle = layers[14](layers[13](torch.cat((upsample(at_32), at_16), 1)))
        fine = layers[17](torch.cat((upsample(middle), at_8), 1))
        medium = layers[20](torch.cat((layers[18](fine), middle), 1))
        coarse = layers[23](torch.cat((layers[21](medium), at_32), 1))
        return layers[24]([fine, medium, coarse])
