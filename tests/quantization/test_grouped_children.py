"""Groups of children: the same module afterwards, and the same file."""

from collections import OrderedDict
from pathlib import Path

import onnx
import pytest
import torch
from torch import fx, nn

import fxqat
from fxqat.quantization import grouped_children as groups
from fxqat.quantization.grouped_children import grouped_children, without_groups


def wide(layers: int) -> fx.GraphModule:
    """A traced chain with as many children as layers, one of which is there under two names."""
    torch.manual_seed(0)
    chain = nn.Sequential(OrderedDict((f"layer{number}", nn.Linear(3, 3)) for number in range(layers)))
    chain.again = chain.layer0
    chain.register_buffer("shift", torch.ones(3))
    gm = fx.symbolic_trace(chain)
    gm.register_buffer("shift", chain.shift)
    return gm


def test_a_wide_module_has_few_children_in_the_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GROUP", 4)
    gm, x = wide(10), torch.randn(2, 3)
    before, code, expected = dict(gm.named_parameters()), gm.code, gm(x)
    with grouped_children(gm):
        assert len(dict(gm.named_children())) == 3
        assert {without_groups(name) for name in dict(gm.named_parameters())} == set(before)
        assert torch.equal(gm(x), expected)
    assert gm.code == code
    after = dict(gm.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] for name in before)


def test_a_narrow_module_and_one_without_a_graph_are_left_alone() -> None:
    for module in (wide(groups.GROUP - 1), nn.Sequential(*(nn.ReLU() for _ in range(2 * groups.GROUP)))):
        names = [name for name, _ in module.named_modules()]
        with grouped_children(module):
            assert [name for name, _ in module.named_modules()] == names


def test_names_in_the_file_do_not_depend_on_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layers = [("conv", nn.Conv2d(3, 4, 3)), ("relu", nn.ReLU()), ("flat", nn.Flatten()), ("head", nn.Linear(144, 5))]
    gm = fxqat.prepare_by_platform(nn.Sequential(OrderedDict(layers)).eval(), "TSQAT")
    x = torch.randn(2, 3, 8, 8)
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    files = []
    for size in (64, 1):
        monkeypatch.setattr(groups, "GROUP", size)
        files.append(onnx.load(fxqat.convert_export(gm, x, tmp_path / "model.onnx").onnx_path))
    assert files[0] == files[1]
    assert "fxqat_group" not in str(files[1])
