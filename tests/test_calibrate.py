"""Calibration: every form of batches gives the same scales, and what does not fit is an error that says so."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fxqat
from fxqat.errors import CalibrationError, ConfigError
from fxqat.fake_quantize.state import named_fake_quants
from fxqat.tools import WidthBank, correct_bias, equalize, profile, ptq, reconstruct, reestimate_batch_norm, sensitivity
from fxqat.utils.batches import read_batch
from tests.models import build, inputs


class TwoInputs(nn.Module):
    """One required input and an optional one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, y=None):
        return self.first(x).relu() + self.second(y).relu()


def by_hand(gm, batches):
    """The loop that calibrate replaces."""
    gm.eval()
    fxqat.enable_calibration(gm)
    with torch.no_grad():
        for batch in batches:
            gm(*batch)
    fxqat.enable_quantization(gm)
    return gm


def scales(gm):
    return {name: quant.qparams() for name, quant in named_fake_quants(gm)}


def assert_same_scales(gm, expected):
    found, wanted = scales(gm), scales(expected)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name][0], wanted[name][0]), name
        assert torch.equal(found[name][1], wanted[name][1]), name


DATA = torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(0))
BATCHES = DATA.split(4)
CLASSES = torch.arange(12)
FORMS = {
    "list of tensors": lambda: list(BATCHES),
    "generator": lambda: (x for x in BATCHES),
    "tuples": lambda: [(x,) for x in BATCHES],
    "lists": lambda: [[x] for x in BATCHES],
    "dicts": lambda: [{"x": x} for x in BATCHES],
    "dicts with labels": lambda: [{"x": x, "labels": CLASSES[:4]} for x in BATCHES],
    "tuples with labels": lambda: [(x, CLASSES[:4]) for x in BATCHES],
    "tuples with None": lambda: [(x, None) for x in BATCHES],
    "DataLoader of tensors": lambda: DataLoader(DATA, 4),
    "DataLoader of (x, y)": lambda: DataLoader(TensorDataset(DATA, CLASSES), 4),
}


@pytest.fixture(scope="module")
def prepared():
    return fxqat.prepare_by_platform(build("conv_bn_relu").train(), "TSQAT")


@pytest.fixture(scope="module")
def expected(prepared):
    return by_hand(copy.deepcopy(prepared), [(x,) for x in BATCHES])


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_batches_gives_the_same_scales(form, prepared, expected):
    gm = copy.deepcopy(prepared)
    assert fxqat.calibrate(gm, FORMS[form](), progress=False) == 3
    fxqat.enable_quantization(gm)
    assert_same_scales(gm, expected)


def test_two_inputs():
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    gm = fxqat.prepare_by_platform(TwoInputs(), example_inputs=(x, y))
    expected = by_hand(copy.deepcopy(gm), [(x, y)])
    for batch in ((x, y), [x, y], {"y": y, "x": x}, (x, y, torch.arange(8)), {"x": x, "y": y, "target": torch.ones(8)}):
        found = copy.deepcopy(gm)
        fxqat.calibrate(found, [batch])
        fxqat.enable_quantization(found)
        assert_same_scales(found, expected)


def test_state_and_modes_afterwards(prepared):
    gm = copy.deepcopy(prepared)
    gm.get_submodule("fc").eval()
    modes = [module.training for module in gm.modules()]
    statistics = gm.get_submodule("conv1").bn.running_mean.clone()
    fxqat.calibrate(gm, BATCHES)
    assert [module.training for module in gm.modules()] == modes
    assert modes[0]
    assert not any(quant.observer_enabled or quant.fake_quant_enabled for _, quant in named_fake_quants(gm))
    assert torch.equal(gm.get_submodule("conv1").bn.running_mean, statistics)
    x = BATCHES[0]
    torch.testing.assert_close(gm.eval()(x), build("conv_bn_relu")(x), rtol=1e-4, atol=1e-5)
    assert not any(parameter.grad is not None for parameter in gm.parameters())


def test_a_second_call_starts_anew(prepared, expected):
    gm = copy.deepcopy(prepared)
    fxqat.calibrate(gm, [x * 50.0 for x in BATCHES])
    fxqat.enable_quantization(gm)
    assert fxqat.calibrate(gm, BATCHES) == 3
    fxqat.enable_quantization(gm)
    assert_same_scales(gm, expected)


def test_a_second_call_adds_to_the_first_on_request(prepared, expected):
    gm = copy.deepcopy(prepared)
    assert fxqat.calibrate(gm, BATCHES[:2]) == 2
    assert fxqat.calibrate(gm, BATCHES[2:], keep=True) == 1
    fxqat.enable_quantization(gm)
    assert_same_scales(gm, expected)


def test_a_calibration_that_was_interrupted_leaves_nothing(prepared, expected):
    gm = copy.deepcopy(prepared)
    with pytest.raises(ConfigError, match="batch 1"):
        fxqat.calibrate(gm, [BATCHES[0] * 50.0, torch.ones(2, 2)])
    fxqat.calibrate(gm, BATCHES)
    fxqat.enable_quantization(gm)
    assert_same_scales(gm, expected)


def switches(gm):
    return [(quant.observer_enabled, quant.fake_quant_enabled) for _, quant in named_fake_quants(gm)]


def failing(error):
    yield BATCHES[0] * 50.0
    raise error


FAILURES = {
    "a wrong batch": (lambda: [BATCHES[0] * 50.0, torch.ones(2, 2)], ConfigError),
    "no batch": (list, ConfigError),
    "a loader that fails": (lambda: failing(OSError("no such image")), OSError),
    "Ctrl-C": (lambda: failing(KeyboardInterrupt()), KeyboardInterrupt),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("observers", ["MinMax", "KL", "MSE", "Average"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_calibration_that_fails_changes_nothing(failure, observers, keep):
    batches, error = FAILURES[failure]
    config = {"extra_qconfig_dict": {"a_observer": observers}}
    gm = fxqat.prepare_by_platform(build("conv_bn_relu").train(), "TSQAT", config)
    fxqat.calibrate(gm, BATCHES[:2])
    fxqat.enable_quantization(gm)
    state, noise, modes = copy.deepcopy(gm.state_dict()), gm.quantization_noise, [m.training for m in gm.modules()]
    tensors = [id(tensor) for tensor in (*gm.parameters(), *gm.buffers())]
    with pytest.raises(error):
        fxqat.calibrate(gm, batches(), progress=False, keep=keep)
    assert switches(gm) == [(False, True)] * len(switches(gm))
    assert gm.quantization_noise is noise
    assert noise is not None
    assert [module.training for module in gm.modules()] == modes
    assert [id(tensor) for tensor in (*gm.parameters(), *gm.buffers())] == tensors
    for name, value in gm.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_a_first_calibration_that_fails_leaves_the_model_uncalibrated(prepared):
    gm = copy.deepcopy(prepared)
    with pytest.raises(ConfigError, match="batch 1"):
        fxqat.calibrate(gm, [BATCHES[0], torch.ones(2, 2)])
    assert switches(gm) == [(False, False)] * len(switches(gm))
    with pytest.raises(CalibrationError, match="fake-quants saw no data"):
        fxqat.enable_quantization(gm)


def test_zeros_only_and_huge_values_are_told(prepared, caplog):
    gm = copy.deepcopy(prepared)
    fxqat.calibrate(gm, [x * 0.0 for x in BATCHES])
    fxqat.enable_quantization(gm)
    message = caplog.messages[0]  # the comparison with the float model tells it, too
    assert "1 of 8 fake-quants saw only zeros: x_act_fake_quant." in message
    caplog.clear()
    fxqat.calibrate(gm, [BATCHES[0], BATCHES[1] * 1e30])
    message = caplog.messages[0]
    assert "values beyond 1e+10 reached" in message
    assert "x_act_fake_quant" in message
    assert "conv1.weight_fake_quant" not in message
    caplog.clear()
    fxqat.calibrate(gm, BATCHES)
    fxqat.enable_quantization(gm)
    assert caplog.messages == []


def test_no_more_than_max_batches_are_read(prepared):
    gm, read = copy.deepcopy(prepared), []
    assert fxqat.calibrate(gm, (read.append(1) or x for x in BATCHES), max_batches=2) == len(read) == 2
    fxqat.enable_quantization(gm)
    assert_same_scales(gm, by_hand(copy.deepcopy(prepared), [(x,) for x in BATCHES[:2]]))
    assert fxqat.calibrate(gm, BATCHES, max_batches=100) == 3


def parallel(gm):
    """DataParallel around a model that stays where it is: the constructor would move it to a GPU."""
    wrapper = nn.DataParallel(nn.Identity())
    wrapper.module = gm
    return wrapper


@pytest.mark.filterwarnings("ignore")
def test_wrapped_models(prepared, expected):
    for wrap in (lambda gm: torch.compile(gm, backend="eager"), parallel):
        gm = copy.deepcopy(prepared)
        fxqat.calibrate(wrap(gm), BATCHES)
        fxqat.enable_quantization(gm)
        assert_same_scales(gm, expected)


@pytest.mark.parametrize("batch", [torch.ones(2, 4), [torch.ones(2, 4), None], {"x": torch.ones(2, 4)}])
def test_batches_are_moved_to_the_models_device(batch):
    gm = fxqat.prepare_by_platform(nn.Sequential(nn.Linear(4, 4)), example_inputs=torch.ones(2, 4))
    batch = {"input": batch["x"]} if isinstance(batch, dict) else batch
    (here,) = read_batch(gm, batch, "calibrate")
    (there,) = read_batch(parallel(gm.to("meta")), batch, "calibrate")
    assert (here.device.type, there.device.type) == ("cpu", "meta")
    assert here.shape == there.shape


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_of_the_cpu_calibrate_a_model_on_a_gpu(prepared, expected):
    gm = copy.deepcopy(prepared).cuda()
    fxqat.calibrate(gm, DataLoader(TensorDataset(DATA, CLASSES), 4))
    fxqat.enable_quantization(gm)
    for name, (scale, _) in scales(expected).items():
        torch.testing.assert_close(scales(gm)[name][0].cpu(), scale, rtol=1e-4, atol=1e-6)
    assert next(gm.parameters()).is_cuda


def test_no_bar_where_the_output_is_no_terminal(prepared, capsys):
    fxqat.calibrate(copy.deepcopy(prepared), BATCHES, progress=True)
    ptq(build("conv_bn_relu"), BATCHES, progress=True)
    captured = capsys.readouterr()
    assert captured.err == captured.out == ""


TOOLS = {
    "equalize": lambda gm, batches: equalize(gm, batches),
    "correct_bias": lambda gm, batches: correct_bias(gm, batches),
    "reconstruct": lambda gm, batches: reconstruct(gm, batches, "GPTQ"),
    "reestimate_batch_norm": lambda gm, batches: reestimate_batch_norm(gm, batches),
    "profile": lambda gm, batches: profile(gm, batches),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_every_tool_takes_every_form(tool, prepared, expected):
    found = []
    for form in ("tuples", "DataLoader of (x, y)", "dicts with labels", "generator"):
        gm = copy.deepcopy(prepared if tool == "equalize" else expected)
        result = TOOLS[tool](gm, FORMS[form]())
        found.append((str(result), {k: v for k, v in gm.state_dict().items() if torch.is_tensor(v)}))
    for text, state in found[1:]:
        assert text == found[0][0]
        assert all(torch.equal(value, found[0][1][name]) for name, value in state.items())


def test_tools_on_float_models_take_every_form():
    model = build("conv_bn_relu")
    for form in FORMS:
        assert_same_scales(ptq(model, FORMS[form]()), ptq(model, BATCHES))
    bank = WidthBank(model, FORMS["DataLoader of (x, y)"](), (4, 8))
    one, other = (sensitivity(bank, FORMS[form](), "fisher").scores for form in ("dicts", "list of tensors"))
    assert one == other
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    config = {"concrete_args": {"y": torch.zeros(4)}}
    assert ptq(TwoInputs(), [{"x": x, "y": y}])(x, y).shape == (8, 4)
    assert ptq(TwoInputs(), [(x, torch.arange(8))], prepare_custom_config_dict=config)(x).shape == (8, 4)


def test_wrong_batches_are_errors(prepared):
    gm = copy.deepcopy(prepared)
    for batches, message in (
        ([], "calibrate: needs at least one batch of inputs"),
        (iter(()), "calibrate: needs at least one batch of inputs"),
        (
            DATA,
            r"iterable of batches .* got float32 tensor \(12, 3, 8, 8\)\. Put a single batch into a list",
        ),
        ({"x": DATA}, r"must be an iterable of batches .* got {'x': float32 tensor \(12, 3, 8, 8\)}"),
        (7, "must be an iterable of batches .* got int"),
        ([()], r"batch 0: a batch does not fit forward\(x\): it is \(\)\. Expected a tensor, a tuple or list"),
        ([(DATA, 1, 2)], r"does not fit forward\(x\): it is \(float32 tensor \(12, 3, 8, 8\), int, int\)"),
        ([{"image": DATA}], r"does not fit forward\(x\): it is {'image': float32 tensor"),
        ([{"x": DATA, "y": DATA}], r"does not fit forward\(x\)"),
        (
            [DATA, DATA[:, :2]],
            r"batch 1: forward\(x\) fails on float32 tensor \(12, 2, 8, 8\): RuntimeError: ",
        ),
        ([["a", "b"]], r"batch 0: forward\(x\) fails on \[str, str\]: TypeError"),
    ):
        with pytest.raises(ConfigError, match=message):
            fxqat.calibrate(gm, batches)
    for wrong in (0, -1, 1.5):
        with pytest.raises(ConfigError, match=f"max_batches must be at least 1, or None for all batches, got {wrong}"):
            fxqat.calibrate(gm, BATCHES, wrong)
    with pytest.raises(CalibrationError, match="Linear has no fake-quant: pass the model that prepare_by"):
        fxqat.calibrate(nn.Linear(2, 2), BATCHES)


def test_a_label_that_may_be_an_optional_input_is_an_error():
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    gm = fxqat.prepare_by_platform(TwoInputs())
    message = r"its last item may be a label or the argument 'y' of forward\(x, y=None\)\. Give the inputs"
    with pytest.raises(ConfigError, match=message):
        fxqat.calibrate(gm, [(x, torch.arange(8))])
    assert fxqat.calibrate(gm, [(x, y), {"x": x, "y": y}, (x, y, torch.arange(8))]) == 3
    model = TwoInputs()
    with pytest.raises(ConfigError, match=message):
        ptq(model, [(x, torch.arange(8))])


def test_any_number_of_inputs():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, *xs):
            return self.linear(xs[0] + xs[1])

    x = torch.randn(8, 4)
    gm = fxqat.prepare_by_platform(Sum(), example_inputs=(x, x))
    assert fxqat.calibrate(gm, [(x, x), (x, x, torch.arange(8))]) == 2
    assert read_batch(Sum(), (x, x, x), "calibrate")[2] is x


def test_the_inputs_of_other_toys():
    for name in ("attention", "shared_module"):
        gm = fxqat.prepare_by_platform(build(name), example_inputs=inputs(name))
        expected = by_hand(copy.deepcopy(gm), [inputs(name)])
        fxqat.calibrate(gm, [inputs(name)])
        fxqat.enable_quantization(gm)
        assert_same_scales(gm, expected)
