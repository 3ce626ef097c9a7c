"""Weights rounded once for all micro-batches of a step: the same gradients, and less work."""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import fxqat
from fxqat.errors import ConfigError
from fxqat.fake_quantize.base import WEIGHT, FakeQuantizeBase
from fxqat.tools import round_weights_once

MICRO_BATCHES = 3


class Everything(nn.Module):
    """Layers of all kinds: with BatchNorm, grouped, transposed, recurrent, a table; a layer called on two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 6)
        self.recurrent = nn.LSTM(6, 8, batch_first=True)
        self.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.grouped = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(4, 2, 2, stride=2)
        self.twice = nn.Linear(8, 8)
        self.last = nn.Linear(2, 3)

    def forward(self, indices: Tensor) -> Tensor:
        y, _ = self.recurrent(self.table(indices))
        y = self.twice(self.twice(y).relu())
        y = self.grouped(self.norm(self.conv(y.unsqueeze(1))).relu())
        return self.last(self.up(y).mean((2, 3)))


def prepared(bn_mode: str = "freeze", method: str = "Learnable", seed: int = 0) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(seed)
    batches = [torch.randint(10, (4, 5)) for _ in range(MICRO_BATCHES)]
    config = {
        "extra_quantizer_dict": {"additional_module_type": [nn.Embedding]},
        "bn_mode": bn_mode,
        "extra_qconfig_dict": {"w_fakequantize": method, "w_qscheme": {"bit": 4}},
    }
    gm = fxqat.prepare_by_platform(Everything(), "Experimental", config, example_inputs=(batches[0],))
    fxqat.calibrate(gm, batches, progress=False)
    fxqat.enable_quantization(gm)
    return gm.train(), batches


def gradients(gm: nn.Module, batches: list[Tensor], once: bool) -> dict[str, Tensor]:
    gm.zero_grad()
    with round_weights_once(gm) if once else nullcontext():
        for batch in batches:
            gm(batch).square().sum().backward()
    return {name: p.grad.clone() for name, p in gm.named_parameters() if p.grad is not None}


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-4, atol=1e-5 * float(theirs[name].abs().max()), msg=name)


def weights_rounded() -> Iterator[list[FakeQuantizeBase]]:
    """The fake-quants of weights, as often as they round."""
    found: list[FakeQuantizeBase] = []
    quantize = FakeQuantizeBase.quantize

    def counted(self: FakeQuantizeBase, *args: object, **kwargs: object) -> Tensor:
        found.extend([self] * (self.kind == WEIGHT))
        return quantize(self, *args, **kwargs)

    with patch.object(FakeQuantizeBase, "quantize", counted):
        yield found


rounded = pytest.fixture(weights_rounded, name="rounded")


@pytest.mark.parametrize("bn_mode", ["freeze", "train"])
@pytest.mark.parametrize("method", ["Fixed", "Learnable", "DSQ", "DoReFa", "Oscillation"])
def test_the_gradients_are_the_same(method, bn_mode):
    gm, batches = prepared(bn_mode, method)
    twin = copy.deepcopy(gm)
    assert_close(gradients(gm, batches, once=True), gradients(twin, batches, once=False))
    for name, buffer in gm.named_buffers():  # running statistics; Oscillation counts steps
        if method != "Oscillation":
            torch.testing.assert_close(buffer, twin.get_buffer(name))


@pytest.mark.parametrize("method", ["EWGS", "Learnable"])
def test_the_gradients_are_those_of_one_large_batch(method):
    gm, batches = prepared(method=method)
    twin = copy.deepcopy(gm)
    found = gradients(gm, batches, once=True), gradients(twin, [torch.cat(batches)], once=False)
    # LSQ divides the gradient of an activation's scale by the root of the number of values, which is larger
    assert_close(*({name: grad for name, grad in of.items() if "act_fake_quant" not in name} for of in found))


def test_weights_are_rounded_once(rounded):
    gm, batches = prepared()
    rounded.clear()
    gradients(gm, batches, once=False)
    each_time = len(rounded)
    rounded.clear()
    gradients(gm, batches, once=True)
    assert len(rounded) == each_time / MICRO_BATCHES
    rounded.clear()
    gradients(gm, batches, once=True)  # the next step rounds anew
    assert len(rounded) == each_time / MICRO_BATCHES


def test_a_layer_whose_batch_norm_trains_rounds_in_each_pass(rounded):
    gm, batches = prepared("train")
    rounded.clear()
    gradients(gm, batches, once=True)
    counts = {quant: rounded.count(quant) for quant in rounded}
    assert counts.pop(gm.conv.weight_fake_quant) == MICRO_BATCHES
    assert set(counts.values()) <= {1, 2}  # a layer called on two inputs


def test_steps_are_those_without_it():
    gm, batches = prepared()
    twin = copy.deepcopy(gm)
    for model, once in ((gm, True), (twin, False)):
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        for _ in range(5):
            gradients(model, batches, once)
            optimizer.step()
    for ours, theirs in zip(gm.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_in_half_precision_with_scaled_losses():
    try:
        with torch.autocast("cpu", torch.bfloat16):
            torch.nn.LSTM(2, 2)(torch.zeros(1, 1, 2))
    except RuntimeError as cause:
        pytest.skip(f"torch has no LSTM in bfloat16 on this processor: {cause}")
    gm, batches = prepared()
    twin = copy.deepcopy(gm)
    found = []
    for model, once in ((gm, True), (twin, False)):
        with round_weights_once(model) if once else nullcontext():
            for batch in batches:
                with torch.autocast("cpu", torch.bfloat16):
                    loss = model(batch).float().square().sum()
                (64 * loss).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys()
    for name, grad in found[0].items():
        torch.testing.assert_close(grad, found[1][name], rtol=0.05, atol=0.05 * float(grad.abs().max()), msg=name)


def test_frozen_weights_and_evaluation_inside():
    gm, batches = prepared()
    gm.twice.requires_grad_(False)
    twin = copy.deepcopy(gm)
    theirs = gradients(twin, batches, once=False)
    with round_weights_once(gm):
        for batch in batches:
            with torch.no_grad():
                before = gm(batch)
            output = gm(batch)
            assert torch.equal(output, before)
            output.square().sum().backward()
    assert_close({name: p.grad for name, p in gm.named_parameters() if p.grad is not None}, theirs)


def test_statistics_that_change_between_passes_in_eval_mode():
    gm, batches = prepared("train")
    twin = copy.deepcopy(gm)
    for model, once in ((gm, True), (twin, False)):
        with round_weights_once(model) if once else nullcontext():
            for batch in batches:
                model.eval()(batch).square().sum().backward()
                model.train()(batch).square().sum().backward()
    found = ({name: p.grad for name, p in model.named_parameters() if p.grad is not None} for model in (gm, twin))
    assert_close(*found)


def test_compiled_code_takes_them_too():
    gm, batches = prepared()
    theirs = gradients(copy.deepcopy(gm), batches, once=False)
    compiled = torch.compile(gm, backend="eager")
    for _ in range(2):
        gm.zero_grad()
        with round_weights_once(compiled):
            for batch in batches:
                compiled(batch).square().sum().backward()
        assert_close({name: p.grad for name, p in gm.named_parameters() if p.grad is not None}, theirs)
    gm.zero_grad()
    for batch in batches:
        compiled(batch).square().sum().backward()
    assert_close({name: p.grad for name, p in gm.named_parameters() if p.grad is not None}, theirs)


def test_an_error_inside_leaves_no_kept_weights():
    gm, batches = prepared()
    with pytest.raises(ZeroDivisionError):
        run_inside(gm, lambda: gm(batches[0]).sum().backward(), lambda: 1 / 0)
    assert gm.last.weight.grad is None
    assert_close(gradients(gm, batches, once=True), gradients(copy.deepcopy(gm), batches, once=False))


def run_inside(gm: nn.Module, *actions: Callable[[], object]) -> None:
    with round_weights_once(gm):
        for action in actions:
            action()


def test_what_would_lose_gradients_is_an_error():
    gm, batches = prepared()
    optimizer = torch.optim.SGD(gm.parameters(), 1e-3)

    def train() -> None:
        gm(batches[0]).sum().backward()

    with pytest.raises(ConfigError, match=r"parameters were changed inside .* optimizer\.step\(\) after it"):
        run_inside(gm, train, optimizer.step)
    with round_weights_once(gm):
        train()
        late = gm(batches[1]).sum()
    with pytest.raises(ConfigError, match="a backward pass ran after the context"):
        late.backward()
    with pytest.raises(ConfigError, match="in such a context already"):
        run_inside(gm, train, lambda: run_inside(gm, train))


def test_a_context_without_effect_is_an_error():
    gm, batches = prepared()
    with pytest.raises(ConfigError, match="no weight was rounded"):
        run_inside(gm, lambda: torch.no_grad()(gm)(batches[0]))
    with pytest.raises(ConfigError, match="expected a model that prepare_by_platform returned"):
        run_inside(nn.Linear(2, 2))
    fxqat.enable_calibration(gm)
    with pytest.raises(ConfigError, match=r"\d+ observers are on, first .*: scales change"):
        run_inside(gm)
