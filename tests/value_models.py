"""Models whose Python code looks at sizes, lengths, types and structure; each does so differently.

``CASES`` names them, with their inputs for a batch and the sizes that tracing has to fix.
"""

import dataclasses
import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    """An output as some models return it."""

    logits: Tensor
    features: Tensor | None = None


class Base(nn.Module):
    """One convolution, so that there is something to quantize."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)


class NonEmpty(Base):
    def forward(self, x):
        y = self.conv(x)
        if x.shape[1]:
            return y.relu()
        return y


class ByRank(Base):
    def forward(self, x):
        y = self.conv(x)
        assert x.dim() == 4, f"expected 4 dimensions, got {x.dim()}"
        assert y.shape[0] == x.shape[0]
        assert isinstance(y, torch.Tensor)
        assert y.dtype == torch.float32
        if y.ndim == 4 and torch.is_tensor(y):
            y = y.flatten(2)
        return y


class LengthOfWeights(Base):
    def forward(self, x):
        return self.conv(x) * len(self.conv.weight)


class LoopOverChannels(Base):
    def forward(self, x):
        y = self.conv(x)
        return torch.stack([y[:, i] * i for i in range(y.size(1))], 1)


class LoopOverLength(Base):
    def forward(self, x):
        y = self.conv(x).transpose(0, 1)
        return torch.stack([y[i] for i in range(len(y))], 1)


class IterateOverTensor(Base):
    def forward(self, x):
        return sum(channel * (i + 1) for i, channel in enumerate(self.conv(x).unbind(1)))


class Positions(Base):
    def forward(self, x):
        y = self.conv(x)
        return y + torch.arange(y.size(3), device=y.device) + torch.arange(0, y.size(2), dtype=y.dtype)[:, None]


class ZerosOfBatch(Base):
    def forward(self, x):
        y = self.conv(x)
        b, _, h, w = y.shape
        return torch.cat([y, torch.zeros(b, 3, h, w), torch.ones((b, 1, h, w), dtype=y.dtype)], 1)


class ZerosOfShape(Base):
    def forward(self, x):
        y = self.conv(x)
        return torch.maximum(y, torch.zeros(y.shape)) + torch.full(y.size(), 0.5) + torch.zeros_like(y)


class TensorOfSizes(Base):
    def forward(self, x):
        y = self.conv(x)
        h, w = y.shape[-2:]
        return y / torch.tensor([h, w]).view(1, 2, 1, 1).repeat(1, 2, 1, 1)


class NewTensors(Base):
    def forward(self, x):
        y = self.conv(x)
        return y + y.new_zeros(y.shape) + y.new_full((y.size(0), 1, 1, 1), 2.0) + y.new_tensor([1.0, 2.0]).sum()


class TableBySize(Base):
    def __init__(self):
        super().__init__()
        self.scales = {8: 2.0, 16: 3.0}

    def forward(self, x):
        return self.conv(x) * self.scales[x.shape[-1]]


class MathOnSizes(Base):
    def forward(self, x):
        y = self.conv(x).flatten(2)
        pad = math.ceil(y.shape[-1] / 10) * 10 - y.shape[-1]
        return F.pad(y, (0, pad)) / math.sqrt(y.size(1))


class PowerOfSize(Base):
    def forward(self, x):
        y = self.conv(x).flatten(2)
        return y * y.size(-1) ** -0.5 + (y.size(1) // 2) * (y.shape[2] % 7) - max(y.size(1), 2) + min(3, y.size(1))


class NameBySize(Base):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleDict({"width8": nn.Conv2d(4, 2, 1), "width16": nn.Conv2d(4, 3, 1)})

    def forward(self, x):
        return self.heads[f"width{x.shape[-1]}"](self.conv(x))


class SliceBySize(Base):
    def forward(self, x):
        y = self.conv(x)
        h = y.shape[2] // 2
        return y[:, :, :h, y.shape[3] - 3 :] + y[..., -h:, :3]


class Unpack(Base):
    def forward(self, x):
        y = self.conv(x)
        b, c, *rest = y.shape
        area = 1
        for side in rest:
            area = area * side
        return y.view(b, c, area).transpose(1, 2).reshape(b, -1)


class SameShape(Base):
    def forward(self, x):
        y = self.conv(x)
        z = self.conv(x).relu()
        if y.shape == z.shape and y.shape[1:] == (4, 8, 8) and y.size() != x.size():
            return y + z
        return y


class NumberOfElements(Base):
    def forward(self, x):
        y = self.conv(x)
        return y.view(-1).reshape(y.shape) * (1.0 / y[0].numel()) + y[:, 0].numel() / y.numel()


class SetItem(Base):
    def forward(self, x):
        y = self.conv(x)
        out = torch.zeros_like(y)
        out[:, 1:3] = y[:, :2]
        out[:, 0] += 1.5
        return out


class InPlace(Base):
    def forward(self, x):
        y = self.conv(x)
        y += 1
        y.mul_(2.0).sub_(0.5)
        y.clamp_(min=-1.0)
        return y


class AssignedAttribute(Base):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, x):
        self.last = self.conv(x)
        return self.second()

    def second(self):
        return self.last.relu() + self.last.shape[1]


class ListOfTensors(Base):
    def forward(self, images):
        return [self.conv(image).mean((2, 3)) for image in images]


class TupleOfTensors(Base):
    def forward(self, pair):
        left, right = pair
        return self.conv(left) - self.conv(right)


class DictOfTensors(Base):
    def forward(self, batch):
        y = self.conv(batch["image"])
        if "mask" in batch:
            y = y * batch["mask"]
        if batch.get("other") is not None:
            y = y + 100
        return y + len(batch)


class OptionalInput(Base):
    def forward(self, x, mask=None, scale=2.0):
        y = self.conv(x) * scale
        return y if mask is None else y * mask


class KeywordOnly(Base):
    def forward(self, x, *, double=True, bias=None):
        y = self.conv(x)
        return y * 2 if double else y


class VariableArguments(Base):
    def forward(self, x, *others, **options):
        y = self.conv(x)
        for other in others:
            y = y + other
        return y if options else y.relu()


class DictOut(Base):
    def forward(self, x):
        y = self.conv(x)
        return {"a": y, "nested": {"b": [y.relu(), y.mean((2, 3))]}}


class NamedTupleOut(Base):
    def forward(self, x):
        pair = Pair(self.conv(x), x)
        return Pair(left=pair.left.relu(), right=pair.right + 1)


class DataclassOut(Base):
    def forward(self, x):
        y = self.conv(x)
        return Output(logits=y.mean((2, 3)), features=y)


class DataclassInside(Base):
    def forward(self, x):
        y = Output(self.conv(x))
        y = dataclasses.replace(y, features=y.logits.relu())
        return y.features + y.logits


class SplitBySizes(Base):
    def forward(self, x):
        y = self.conv(x)
        parts = torch.split(y, [1, y.size(1) - 1], dim=1)
        assert len(parts) == 2
        first, second = parts
        return torch.cat([second, first], 1)


class SlicesOfLists(Base):
    def forward(self, x):
        y = self.conv(x)
        parts = y.chunk(y.size(1), 1)
        return torch.cat(parts[::-1][1:] + parts[:-2], 1)


class AssignedItems(Base):
    def forward(self, x):
        y = self.conv(x)
        y[:, :1] = y[:, 1:2] * 0.5
        z = y.relu()
        z[:, :, 0] = 0
        return y + z


class PaddedForMaximum(Base):
    def forward(self, x):
        y = F.pad(self.conv(x), (1, 1, 1, 1), value=float("-inf"))
        return F.max_pool2d(y, 2).relu()


class AttentionOfRank5(Base):
    def forward(self, x):
        y = self.conv(x).flatten(2).transpose(1, 2).unflatten(1, (2, -1)).unsqueeze(1)
        return F.scaled_dot_product_attention(y, y, y, None, 0.0)


class Interpolated(Base):
    def forward(self, x):
        y = self.conv(x)
        small = F.avg_pool2d(y, 2)
        return F.interpolate(small, size=y.shape[-2:], mode="nearest") + y


class Windows(Base):
    def forward(self, x):
        y = self.conv(x).permute(0, 2, 3, 1)
        b, h, w, c = y.shape
        right = (4 - w % 4) % 4
        if right > 0:
            y = F.pad(y, (0, 0, 0, right))
        y = y.view(b, h // 4, 4, w // 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        return y.view(b, -1, 16 * c)


class Grid(Base):
    def forward(self, x):
        y = self.conv(x)
        rows, columns = torch.meshgrid(torch.arange(y.size(2)), torch.arange(y.size(3)), indexing="ij")
        return y + torch.stack((rows, columns)).sum(0).to(y.dtype)


class LinspaceAndEye(Base):
    def forward(self, x):
        y = self.conv(x)
        n = y.shape[-1]
        return y @ torch.eye(n) + torch.linspace(0, 1, n)


class NoGrad(Base):
    def forward(self, x):
        with torch.no_grad():
            scale = x.abs().amax((1, 2, 3), keepdim=True)
        return self.conv(x / scale)


class WhereMasked(Base):
    def forward(self, x):
        y = self.conv(x)
        return torch.where(y > 0, y, y.exp() - 1).masked_fill(y < -1, -1.0)


@dataclass(frozen=True)
class Case:
    """A model, its inputs for a batch, and the sizes that are fixed in the graph."""

    model: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]] = lambda n: (torch.randn(n, 3, 8, 8),)
    forced: tuple[Any, ...] = field(default=())


def _image(n: int) -> Tensor:
    return torch.randn(n, 3, 8, 8)


CASES: dict[str, Case] = {
    "non_empty": Case(NonEmpty, forced=(3,)),
    "by_rank": Case(ByRank, forced=(True,)),
    "length_of_weights": Case(LengthOfWeights),
    "loop_over_channels": Case(LoopOverChannels, forced=(4,)),
    "loop_over_length": Case(LoopOverLength, forced=(4,)),
    "iterate_over_tensor": Case(IterateOverTensor),
    "positions": Case(Positions),
    "zeros_of_batch": Case(ZerosOfBatch),
    "zeros_of_shape": Case(ZerosOfShape),
    "tensor_of_sizes": Case(TensorOfSizes),
    "new_tensors": Case(NewTensors),
    "table_by_size": Case(TableBySize, forced=(8,)),
    "math_on_sizes": Case(MathOnSizes),
    "power_of_size": Case(PowerOfSize, forced=(False,)),
    "name_by_size": Case(NameBySize, forced=(8,)),
    "slice_by_size": Case(SliceBySize),
    "unpack": Case(Unpack),
    "same_shape": Case(SameShape, forced=(True,)),
    "number_of_elements": Case(NumberOfElements),
    "set_item": Case(SetItem),
    "in_place": Case(InPlace),
    "assigned_attribute": Case(AssignedAttribute),
    "list_of_tensors": Case(ListOfTensors, lambda n: ([_image(n), _image(n)],), forced=("2 items",)),
    "tuple_of_tensors": Case(TupleOfTensors, lambda n: ((_image(n), _image(n)),), forced=("2 items",)),
    "dict_of_tensors": Case(
        DictOfTensors,
        lambda n: ({"image": _image(n), "mask": torch.rand(n, 1, 8, 8)},),
        forced=(["image", "mask"],) * 3,
    ),
    "optional_left_out": Case(OptionalInput),
    "optional_none": Case(OptionalInput, lambda n: (_image(n), None)),
    "optional_given": Case(OptionalInput, lambda n: (_image(n), torch.rand(n, 4, 8, 8))),
    "keyword_only": Case(KeywordOnly),
    "variable_arguments": Case(
        VariableArguments, lambda n: (_image(n), torch.randn(n, 4, 8, 8), torch.ones(n, 1, 1, 1))
    ),
    "dict_out": Case(DictOut),
    "named_tuple_out": Case(NamedTupleOut),
    "dataclass_out": Case(DataclassOut),
    "dataclass_inside": Case(DataclassInside),
    "split_by_sizes": Case(SplitBySizes),
    "slices_of_lists": Case(SlicesOfLists),
    "assigned_items": Case(AssignedItems),
    "padded_for_maximum": Case(PaddedForMaximum),
    "attention_of_rank_5": Case(AttentionOfRank5),
    "interpolated": Case(Interpolated),
    "windows": Case(Windows, forced=(False,)),
    "grid": Case(Grid),
    "linspace_and_eye": Case(LinspaceAndEye),
    "no_grad": Case(NoGrad),
    "where_masked": Case(WhereMasked),
}


def build(name: str) -> nn.Module:
    """A model in eval mode, the same in every run."""
    torch.manual_seed(0)
    return CASES[name].model().eval()


def inputs_of(name: str, batch: int = 2) -> tuple[Any, ...]:
    """Its inputs."""
    torch.manual_seed(batch)
    return CASES[name].inputs(batch)


def plain(output: Any) -> Any:
    """An output with dataclasses as dicts."""
    return dataclasses.asdict(output) if dataclasses.is_dataclass(output) else output
