"""Results of which only the size or type is read stay float: the exported file does not have them."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fxqat import calibrate, convert_export, enable_quantization, prepare_by_platform
from fxqat.custom_quantizer.unread_values import UNREAD

READS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "size": lambda t, z: torch.zeros(z.shape[0], 4),
    "to": lambda t, z: t.to(z),
    "device": lambda t, z: t.to(z.device),
    "type_as": lambda t, z: t.type_as(z),
    "zeros_like": lambda t, z: torch.zeros_like(z).sum(),
    "fill": lambda t, z: torch.fill(z, 2.0).sum(),
    "new_zeros": lambda t, z: z.new_zeros(4),
    "expand_as": lambda t, z: t[:, 1:].expand_as(z).sum(),
    "reshape_as": lambda t, z: t[:, 1:].reshape_as(z).sum(),
    "broadcast_tensors": lambda t, z: torch.broadcast_tensors(t[:, 1:], z)[0].sum(),
    "distribution": lambda t, z: torch.distributions.Normal(t[:, 1:], z * z + 1).mean.sum(),
}


class Net(nn.Module):
    def __init__(self, read: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.read = nn.Linear(4, 4), nn.Linear(4, 4), read
        self.register_buffer("table", torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.last(self.first(x).relu())
        return y * self.read(self.table, self.first(x)[:, 1:])


@pytest.mark.parametrize("name", READS)
def test_what_is_read_for_its_size_or_type_stays_float(name: str, tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    gm = prepare_by_platform(Net(READS[name]), "TSQAT", example_inputs=(x,))
    unread = [row.node for row in gm.quant_report if row.reason == UNREAD]
    assert {"first_1", "getitem"} <= set(unread) <= {"first_1", "getitem", "getitem_1", "mul", "add"}
    calibrate(gm, [(x,)], progress=False)
    enable_quantization(gm)
    assert convert_export(gm, (x,), tmp_path / "m.onnx").certificate is not None


def test_what_is_read_is_quantized() -> None:
    gm = prepare_by_platform(Net(lambda t, z: z.to(t).sum()), "TSQAT", example_inputs=(torch.randn(3, 4),))
    assert not [row for row in gm.quant_report if row.reason == UNREAD]
    assert {row.status for row in gm.quant_report if row.node in ("first_1", "getitem")} == {"shares"}


@pytest.mark.parametrize("index", [0, 1, -1])
def test_each_result_of_a_function_that_makes_sizes_equal_is_looked_at(index: int, tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    gm = prepare_by_platform(
        Net(lambda t, z: torch.meshgrid(z[0], z[1], indexing="ij")[index].sum()), "TSQAT", example_inputs=(x,)
    )
    (unread,) = [row.node for row in gm.quant_report if row.reason == UNREAD]
    assert unread == ("getitem_2" if index == 0 else "getitem_1")
    calibrate(gm, [(x,)], progress=False)
    enable_quantization(gm)
    assert convert_export(gm, (x,), tmp_path / "m.onnx").certificate is not None
