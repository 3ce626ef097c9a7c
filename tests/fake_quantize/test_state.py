"""The state functions: the table of switches, wrappers, and what is refused."""

import copy
import gc
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from fxqat import calibrate, convert_export, prepare_by_platform, save_checkpoint
from fxqat.errors import CalibrationError, ConfigError
from fxqat.fake_quantize.base import ACTIVATION, WEIGHT
from fxqat.fake_quantize.state import (
    disable_all,
    enable_all,
    enable_calibration,
    enable_calibration_quantization,
    enable_calibration_woquantization,
    enable_quantization,
    named_fake_quants,
    require_calibrated,
)
from fxqat.observer.observers import OBSERVERS
from fxqat.scheme import QuantizeScheme
from fxqat.tools import to_float
from tests.builders import INT8, UINT8, make_fake_quant

Switches = tuple[bool, bool]
OFF, WATCH, ROUND, BOTH = (False, False), (True, False), (False, True), (True, True)
TABLE: list[tuple[Callable[[nn.Module], None], Switches, Switches]] = [
    (enable_calibration, WATCH, WATCH),
    (enable_calibration_woquantization, WATCH, WATCH),
    (lambda model: enable_calibration_woquantization(model, WEIGHT), WATCH, OFF),
    (lambda model: enable_calibration_woquantization(model, ACTIVATION), OFF, WATCH),
    (enable_calibration_quantization, BOTH, BOTH),
    (lambda model: enable_calibration_quantization(model, WEIGHT), BOTH, OFF),
    (lambda model: enable_calibration_quantization(model, quantizer_type=ACTIVATION), OFF, BOTH),
    (enable_quantization, ROUND, ROUND),
    (lambda model: enable_quantization(model, weight_cali_on=True), BOTH, ROUND),
    (lambda model: enable_quantization(model, act_cali_on=True), ROUND, BOTH),
    (disable_all, OFF, OFF),
    (enable_all, BOTH, BOTH),
]


class Toy(nn.Module):
    """A weight quantizer, an activation quantizer that is used under two names, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_quant = make_fake_quant(INT8, WEIGHT)
        self.act_quant = make_fake_quant(UINT8, ACTIVATION)
        self.same_quant = self.act_quant
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act_quant(nn.functional.linear(x, self.weight_quant(self.layer.weight), self.layer.bias))


def calibrated() -> Toy:
    """A toy that has seen a batch."""
    toy = Toy()
    enable_calibration(toy)
    toy(torch.randn(8, 4))
    return toy


def switches(quant: nn.Module) -> Switches:
    """``(observer, fake-quant)`` of a quantizer."""
    return quant.observer_enabled, quant.fake_quant_enabled


@pytest.mark.parametrize(("function", "weight", "activation"), TABLE)
@pytest.mark.parametrize("before", [disable_all, enable_all])
def test_the_table_of_switches(
    function: Callable[[nn.Module], None], weight: Switches, activation: Switches, before: Callable[[nn.Module], None]
) -> None:
    toy = calibrated()
    before(toy)
    function(toy)
    assert switches(toy.weight_quant) == weight
    assert switches(toy.act_quant) == activation


@pytest.mark.parametrize(("function", "weight", "activation"), TABLE)
def test_calling_twice_is_calling_once(
    function: Callable[[nn.Module], None], weight: Switches, activation: Switches
) -> None:
    toy = calibrated()
    function(toy)
    once = copy.deepcopy(toy.state_dict())
    function(toy)
    assert (switches(toy.weight_quant), switches(toy.act_quant)) == (weight, activation)
    for name, value in toy.state_dict().items():
        assert torch.equal(value, once[name]) if isinstance(value, torch.Tensor) else value == once[name]


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile, lambda toy: torch.compile(nn.DataParallel(toy))])
def test_wrapped_models_are_switched_too(wrap: Callable[[nn.Module], nn.Module]) -> None:
    toy = calibrated()
    enable_quantization(wrap(toy))
    assert switches(toy.weight_quant) == ROUND
    assert switches(toy.act_quant) == ROUND


def test_calibration_watches_and_does_not_round() -> None:
    toy = Toy()
    x = torch.randn(8, 4)
    exact = toy(x)
    enable_calibration(toy)
    assert torch.equal(toy(x), exact)
    enable_quantization(toy)
    rounded = toy(x)
    assert not torch.equal(rounded, exact)
    assert (rounded - exact).abs().max() < 0.1
    disable_all(toy)
    assert torch.equal(toy(x), exact)


def test_states_that_come_back_are_not_compiled_again() -> None:
    toy, graphs = calibrated().train(), []

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(gm)
        return gm.forward

    compiled, x = torch.compile(toy, backend=backend, fullgraph=True), torch.randn(8, 4)
    for _ in range(4):
        for state in (enable_quantization, disable_all, enable_calibration):
            state(toy)
            assert torch.equal(compiled(x), toy(x))
    assert len(graphs) == 3  # one for each state


CALIBRATIONS = pytest.mark.parametrize(
    "function", [enable_calibration, enable_calibration_woquantization, enable_calibration_quantization]
)


def ranges(toy: nn.Module) -> list[torch.Tensor]:
    """The range and the scale of both quantizers."""
    quants = (toy.weight_quant, toy.act_quant)
    return [t.clone() for q in quants for t in (q.observer.min_val, q.observer.max_val, q.scale, q.zero_point)]


@CALIBRATIONS
def test_calibrating_again_starts_anew(function: Callable[..., None]) -> None:
    first, second = torch.randn(8, 4) * 50.0, torch.randn(8, 4)
    toy, fresh = Toy(), Toy()
    fresh.load_state_dict(toy.state_dict())
    for x in (first, second):
        function(toy)
        toy(x)
        function(toy)  # observers that are on go on
        toy(x)
        enable_quantization(toy)
    function(fresh)
    fresh(second)
    fresh(second)
    enable_quantization(fresh)
    assert all(torch.equal(a, b) for a, b in zip(ranges(toy), ranges(fresh), strict=True))
    assert toy.act_quant.observer.max_val < 10


@CALIBRATIONS
def test_calibrating_again_keeps_the_ranges_on_request(function: Callable[..., None]) -> None:
    first, second = torch.randn(8, 4) * 50.0, torch.randn(8, 4)
    toy, fresh = Toy(), Toy()
    fresh.load_state_dict(toy.state_dict())
    function(fresh)
    for x in (first, second):
        function(toy, keep=True)
        toy(x)
        enable_quantization(toy)
        fresh(x)
    assert all(torch.equal(a, b) for a, b in zip(ranges(toy), ranges(fresh), strict=True))
    assert toy.act_quant.observer.max_val > 20


@pytest.mark.parametrize(
    "function",
    [enable_all, enable_quantization, lambda toy: enable_quantization(toy, weight_cali_on=True, act_cali_on=True)],
)
def test_other_functions_keep_the_ranges(function: Callable[[nn.Module], None]) -> None:
    toy = calibrated()
    enable_quantization(toy)
    before = ranges(toy)
    function(toy)
    assert all(torch.equal(a, b) for a, b in zip(ranges(toy), before, strict=True))
    assert toy.act_quant.observer.has_seen_data()


def test_one_kind_calibrated_after_the_other_keeps_its_range() -> None:
    toy, x = calibrated(), torch.randn(8, 4)
    enable_quantization(toy)
    before = ranges(toy)
    enable_calibration_woquantization(toy, ACTIVATION)
    assert not toy.act_quant.observer.has_seen_data()
    toy(x * 9)
    enable_quantization(toy)
    assert all(torch.equal(a, b) for a, b in zip(ranges(toy)[:4], before[:4], strict=True))
    assert toy.act_quant.observer.max_val > before[5] * 2


def test_a_fixed_range_stays_when_calibration_starts_anew() -> None:
    scheme = QuantizeScheme(signed=False, symmetric=False, fixed_range=(0.0, 1.0))
    model = nn.ModuleList([make_fake_quant(scheme)])
    enable_calibration(model)
    model[0](torch.randn(5))
    assert (model[0].observer.min_val.item(), model[0].observer.max_val.item()) == (0.0, 1.0)
    enable_quantization(model)
    assert model[0].scale.item() == pytest.approx(1 / 255)


def test_a_range_with_nan_is_forgotten_by_calibrating_again() -> None:
    toy, x = Toy(), torch.randn(8, 4)
    enable_calibration(toy)
    toy(x * float("nan"))
    with pytest.raises(CalibrationError, match="calibrate again"):
        enable_quantization(toy)
    enable_calibration(toy)
    toy(x)
    enable_quantization(toy)
    assert toy.act_quant.observer.is_finite()
    assert toy.act_quant.scale < 1


@pytest.mark.parametrize("observer", OBSERVERS)
def test_zeros_are_told_by_every_observer(observer: str, caplog: pytest.LogCaptureFixture) -> None:
    scheme = replace(UINT8, scale_bits=1) if observer.startswith("PoT") else UINT8
    model = nn.ModuleDict(
        {
            "zeros": make_fake_quant(scheme, observer=OBSERVERS[observer]),
            "small": make_fake_quant(scheme, observer=OBSERVERS[observer]),
            "huge": make_fake_quant(scheme, observer=OBSERVERS[observer]),
            "weight": make_fake_quant(scheme, WEIGHT, observer=OBSERVERS[observer]),
        }
    )
    enable_calibration(model)
    x = torch.randn(50)
    for name, values in {"zeros": x * 0, "small": x * 1e-6, "huge": x * 1e30, "weight": x * 0}.items():
        model[name](values)
    enable_quantization(model, act_cali_on=True)
    assert caplog.messages == []
    enable_quantization(model)
    enable_quantization(model)
    zeros, huge = caplog.messages
    assert "1 of 3 fake-quants saw only zeros: zeros." in zeros
    assert "enable_quantization(model, act_cali_on=True)" in zeros
    assert "values beyond 1e+10 reached 1 of 3 fake-quants: huge." in huge


def prepared_linear() -> nn.Module:
    """A prepared linear layer that is not calibrated."""
    torch.manual_seed(0)
    return prepare_by_platform(nn.Sequential(nn.Linear(4, 3)), "TSQAT")


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What fxqat logged."""
    return [record.message for record in caplog.records if record.name == "fxqat"]


def calibrate_and_quantize(gm: nn.Module) -> None:
    calibrate(gm, [torch.ones(2, 4)], progress=False)
    enable_quantization(gm)


@pytest.mark.parametrize("wrap", [lambda gm: gm, nn.DataParallel, lambda gm: torch.compile(gm, backend="eager")])
def test_an_averaged_model_that_stays_float_is_told_once(
    wrap: Callable[[nn.Module], nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    gm, x = prepared_linear(), torch.randn(3, 4)
    averaged = AveragedModel(gm)
    calibrate_and_quantize(wrap(gm))
    (message,) = told(caplog)
    assert "a copy of the model" in message
    assert "0.weight_fake_quant" in message
    assert "copy.load_state_dict(model.state_dict())" in message
    enable_quantization(wrap(gm))
    assert len(told(caplog)) == 1
    averaged.module.load_state_dict(gm.state_dict())  # as the message says
    assert torch.equal(averaged(x), gm(x))


@pytest.mark.parametrize("function", [enable_all, enable_calibration_quantization, enable_quantization])
def test_every_function_that_quantizes_tells_of_a_copy(
    function: Callable[[nn.Module], None], caplog: pytest.LogCaptureFixture
) -> None:
    gm = prepared_linear()
    calibrate(gm, [torch.ones(2, 4)], progress=False)
    copies = [copy.deepcopy(gm), copy.deepcopy(gm)]
    function(gm)
    assert len(told(caplog)) == len(copies)
    assert switches(copies[0].get_submodule("0").weight_fake_quant) == OFF


def test_no_false_alarm_about_copies(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    gm = prepared_linear()
    teacher = copy.deepcopy(gm)
    disable_all(teacher)  # meant to be float
    copy.deepcopy(gm)  # nobody uses it
    calibrate_and_quantize(gm)
    averaged = AveragedModel(gm)  # as it should be
    disable_all(gm)
    enable_quantization(gm)
    save_checkpoint(gm, tmp_path / "c.pth", tmp_path / "c.json")
    convert_export(gm, (torch.ones(2, 4),), tmp_path / "c.onnx")
    to_float(gm)
    assert told(caplog) == []
    assert len({id(model) for model in (gm, teacher, averaged.module)}) == 3


@pytest.mark.parametrize(("size", "messages"), [(1.5, 0), (10.0, 1), (0.1, 1)])
def test_a_copy_that_a_new_calibration_left_behind_is_told(
    size: float, messages: int, caplog: pytest.LogCaptureFixture
) -> None:
    gm = prepared_linear()
    calibrate_and_quantize(gm)
    averaged = AveragedModel(gm)
    calibrate(gm, [torch.full((2, 4), size)], progress=False)
    enable_quantization(gm)
    assert len(told(caplog)) == messages
    assert all("fake_quant" in message and "ranges" in message for message in told(caplog))
    averaged.module.load_state_dict(gm.state_dict())  # as the message says
    x = torch.full((2, 4), size)
    assert torch.equal(averaged(x), gm(x))


def test_copies_are_not_kept_alive_copied_or_pickled() -> None:
    gm = prepared_linear()
    copy.deepcopy(gm)
    gc.collect()
    kept = copy.deepcopy(gm)
    assert list(gm.living_copies.found) == [kept]
    assert list(kept.living_copies.found) == []
    again = pickle.loads(pickle.dumps(gm))
    assert list(again.living_copies.found) == []
    assert list(copy.deepcopy(again).living_copies.found) == []


def test_quantization_freezes_the_ranges() -> None:
    toy = calibrated()
    enable_quantization(toy)
    before = toy.act_quant.observer.max_val.clone()
    toy(torch.randn(8, 4) * 100)
    assert torch.equal(toy.act_quant.observer.max_val, before)
    enable_quantization(toy, act_cali_on=True)
    toy(torch.randn(8, 4) * 100)
    assert toy.act_quant.observer.max_val > before * 2


@pytest.mark.parametrize("function", [row[0] for row in TABLE])
def test_a_model_without_quantizers_is_refused(function: Callable[[nn.Module], None]) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(CalibrationError, match="prepare_by_platform") as caught:
        function(model)
    assert "Sequential" in str(caught.value)


@pytest.mark.parametrize("function", [enable_calibration_woquantization, enable_calibration_quantization])
def test_an_unknown_kind_is_refused_and_nothing_is_switched(function: Callable[..., None]) -> None:
    toy = Toy()
    with pytest.raises(ConfigError, match="weights") as caught:
        function(toy, "weights")
    assert WEIGHT in str(caught.value)
    assert switches(toy.weight_quant) == OFF


def test_quantizing_before_calibration_names_the_quantizers() -> None:
    toy = Toy()
    with pytest.raises(CalibrationError, match="2 of 2") as caught:
        enable_quantization(toy)
    assert "weight_quant" in str(caught.value)
    assert "act_quant" in str(caught.value)
    assert switches(toy.act_quant) == OFF


def test_many_names_are_counted_not_listed() -> None:
    quants = nn.ModuleDict({f"q{i:02}": make_fake_quant() for i in range(20)})
    with pytest.raises(CalibrationError) as caught:
        require_calibrated(quants)
    assert "q07" in str(caught.value)
    assert "q08" not in str(caught.value)
    assert "and 12 more" in str(caught.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_broken_range_is_named(bad: float) -> None:
    toy = calibrated()
    toy.act_quant(torch.tensor([1.0, bad]))
    with pytest.raises(CalibrationError, match="1 of 2") as caught:
        enable_quantization(toy)
    assert "act_quant" in str(caught.value)
    assert "weight_quant" not in str(caught.value)
    assert not toy.weight_quant.fake_quant_enabled


def test_a_fixed_range_needs_no_data() -> None:
    scheme = QuantizeScheme(signed=False, symmetric=False, fixed_range=(0.0, 1.0))
    model = nn.ModuleList([make_fake_quant(scheme)])
    for step in (enable_calibration, lambda model: enable_quantization(model, act_cali_on=True)):
        step(model)
    assert switches(model[0]) == ROUND
    assert model[0].scale.item() == pytest.approx(1 / 255)
    assert model[0](torch.tensor([0.3, 2.0])).tolist() == pytest.approx([76 / 255, 1.0])


def test_each_quantizer_is_named_once() -> None:
    names = [name for name, _ in named_fake_quants(Toy())]
    assert names == ["weight_quant", "act_quant"]
    assert list(named_fake_quants(nn.Linear(1, 1))) == []


def test_switches_are_part_of_the_state_dict() -> None:
    toy, twin = calibrated(), Toy()
    enable_quantization(toy, weight_cali_on=True)
    twin.load_state_dict(toy.state_dict(), strict=True)
    x = torch.randn(3, 4)
    assert switches(twin.weight_quant) == BOTH
    assert switches(twin.act_quant) == ROUND
    assert torch.equal(twin(x), toy(x))
