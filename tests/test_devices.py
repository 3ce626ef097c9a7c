"""The whole way, with the model on the CPU and on a GPU: example inputs, batches and exports find its device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import fxqat
from fxqat.fake_quantize.state import named_fake_quants

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


class Reader(nn.Module):
    """Convolutions, dropout in place, and an LSTM over the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(inplace=True)),
            *(nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU(), nn.Dropout(0.2, inplace=True)),
        )
        self.lstm = nn.LSTM(16, 12, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.features(x).mean(2).transpose(1, 2))[0][:, -1])


def images(seed: int) -> torch.Tensor:
    return torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
def test_from_the_float_model_to_the_file(backend: str, device: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Reader().to(device).eval()
    gm = fxqat.prepare_by_platform(model, backend, example_inputs=(images(0),))
    fxqat.calibrate(gm, [images(seed) for seed in range(3)], progress=False)
    fxqat.enable_quantization(gm)
    assert {tensor.device.type for tensor in (*gm.parameters(), *gm.buffers())} == {device}

    gm.train()
    before = {name: quant.scale.detach().clone() for name, quant in named_fake_quants(gm)}
    optimizer = torch.optim.SGD(gm.parameters(), lr=0.01)
    for seed in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(gm(images(seed).to(device)), torch.arange(8, device=device) % 5).backward()
        optimizer.step()
    assert any(not torch.equal(quant.scale, before[name]) for name, quant in named_fake_quants(gm))

    gm.eval()
    report = fxqat.convert_export(gm, (images(5),), tmp_path / "model.onnx")
    assert report.certificate is not None
    assert next(gm.parameters()).device.type == device
    on_cpu = copy.deepcopy(gm).cpu()(images(5)).detach()
    torch.testing.assert_close(
        gm(images(5).to(device)).detach().cpu(), on_cpu, rtol=0.0, atol=0.1 * float(on_cpu.abs().max())
    )

    fxqat.save_checkpoint(gm, tmp_path / "model.pth")
    other = fxqat.prepare_by_platform(Reader().eval(), backend, example_inputs=(images(0),))
    fxqat.load_checkpoint(other, tmp_path / "model.pth")
    fxqat.enable_quantization(other)
    assert torch.equal(other(images(5)), on_cpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_trains_as_the_step_itself() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).cuda()
    gm = fxqat.prepare_by_platform(model.eval(), "TSQAT")
    fxqat.calibrate(gm, [images(0)], progress=False)
    fxqat.enable_quantization(gm)
    x, target = images(1).cuda(), torch.arange(8, device="cuda") % 5
    found = []
    for capture in (False, True):
        trained = copy.deepcopy(gm).train()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.01, momentum=0.9, fused=True)

        def step(trained: nn.Module = trained, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(trained(x), target).backward()
            optimizer.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        if capture:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            for _ in range(4):
                graph.replay()
        else:
            for _ in range(4):
                step()
        found.append(trained.state_dict())
    assert all(torch.allclose(a, found[1][name], rtol=1e-4, atol=1e-6) for name, a in found[0].items())
    assert not torch.equal(found[0]["0.weight"], gm.state_dict()["0.weight"])
