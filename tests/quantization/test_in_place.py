"""Writes in place, also to views, reach all that is read later."""

import copy

import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fxqat
from fxqat.errors import TraceError


def to_a_slice(y):
    y[:, 2:4].zero_()
    return y


def to_a_slice_by_an_operator(y):
    part = y[:, 2:4]
    part *= 3.0
    return y


def to_a_slice_by_a_function(y):
    F.relu(y[:, 2:5], inplace=True)
    return y


def to_another_shape(y):
    y.view(-1, 2, 3).clamp_(max=0.1)
    return y


def to_a_transpose(y):
    y.t()[1:3].neg_()
    return y


def to_a_permuted_slice(y):
    y.unsqueeze(1).permute(2, 0, 1)[0].add_(1.0)
    return y


def to_selected_columns(y):
    y.select(1, 2).fill_(0.5)
    y.narrow(1, 0, 2).copy_(y[:, 4:])
    return y


def with_arguments_by_name(y):
    y[:, 0].fill_(value=0.5)
    y[:, 1].fill_(y.mean())
    y[:, 2:4].copy_(other=y[:, 4:], non_blocking=True)
    return y


def to_what_another_view_shows(y):
    other = y[:, 2:]
    y[:, 1:4].zero_()
    return torch.cat([y, other], 1)[:, 3:9]


def to_the_value_of_a_view(y):
    part = y[:, :3]
    y.mul_(2.0)
    return torch.cat([part, y[:, 3:]], 1)


def twice(y):
    y[:, 0].add_(1.0)
    y[:, :2].mul_(2.0)
    return y


def by_items(y):
    y[:, :2] += 1
    y[:, 3] *= 2
    return y


def by_an_item_that_is_assigned_later(y):
    part = y[:, :2]
    part += 1
    total = y.sum(1, keepdim=True)
    y[:, :2] = part
    return y + total


def to_the_same_tensor(y):
    y.float().contiguous().add_(1.0)
    return y


def to_a_part_that_is_read_alone(y):
    first, second = y.chunk(2, 1)
    return torch.cat([first, second.sigmoid().mul_(2.0)], 1)


WRITES = (
    *(to_a_slice, to_a_slice_by_an_operator, to_a_slice_by_a_function, to_another_shape, to_a_transpose),
    *(to_a_permuted_slice, to_selected_columns, with_arguments_by_name, to_what_another_view_shows),
    *(to_the_value_of_a_view, twice, by_items, by_an_item_that_is_assigned_later, to_the_same_tensor),
    *(to_a_part_that_is_read_alone,),
)


NOISE = 1e-2
"""More than the share of the rounding in a result, and a twentieth of that of a lost write."""


class Net(nn.Module):
    """Two layers and a write to what is between them."""

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.write(self.first(x)))


def quantized(model, x, backend, **options):
    gm = fxqat.prepare_by_platform(model, backend, **options)
    fxqat.calibrate(gm, [x], progress=False)
    fxqat.enable_quantization(gm)
    return gm


@torch.no_grad()
def noise(found, expected):
    return float((found - expected).square().mean() / expected.square().mean())


class Nets(nn.ModuleDict):
    """A net for each write; one preparation and one export for all."""

    def __init__(self, writes):
        super().__init__({write.__name__: Net(write) for write in writes})

    def forward(self, x):
        return {name: net(x) for name, net in self.items()}


@pytest.mark.parametrize("backend", ["TSQAT", "OpenVINO"])
def test_what_is_read_later_has_the_write(backend, tmp_path):
    torch.manual_seed(0)
    model, x = Nets(WRITES).eval(), torch.randn(32, 4)
    gm = quantized(model, x, backend, example_inputs=x)
    found, expected = gm.train()(x), model(x)
    assert [name for name in expected if noise(found[name], expected[name]) >= NOISE] == []
    sum(output.square().sum() for output in found.values()).backward()
    assert all(parameter.grad.any() for name, parameter in gm.named_parameters() if name.endswith(".weight"))
    fxqat.convert_export(gm.eval(), (x,), tmp_path / "model.onnx")
    of_file = ort.InferenceSession(tmp_path / "model.onnx").run(None, {"x": x.numpy()})
    for output, wanted in zip(of_file, gm(x).values(), strict=True):
        torch.testing.assert_close(torch.from_numpy(output), wanted, rtol=0, atol=1e-5)


def test_without_example_inputs():
    torch.manual_seed(0)
    model, x = Nets([WRITES[0], *WRITES[2:10]]).eval(), torch.randn(32, 4)
    gm = quantized(model, x, "TSQAT")
    found, expected = gm(x), model(x)
    assert [name for name in expected if noise(found[name], expected[name]) >= NOISE] == []
    assert not [node for node in gm.graph.nodes if str(node.target).endswith("_")]


def test_a_computed_bias():
    class Bias(nn.Module):  # as in torchvision's second Swin
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))

        def forward(self, x):
            bias = self.bias.clone()
            length = bias.numel() // 3
            bias[length : 2 * length].zero_()
            return F.linear(x, self.weight, bias)

    torch.manual_seed(0)
    model, x = Bias(), torch.randn(32, 4)
    gm = quantized(model, x, "OpenVINO", example_inputs=x)
    gm(x).sum().backward()
    assert noise(gm(x), model(x)) < NOISE
    assert all(parameter.grad.any() for parameter in gm.parameters() if parameter.dim() == 2)
    gm.zero_grad()
    fxqat.disable_all(gm)  # at the end of a range, the gradient through a fake-quant is 0
    gm(x).sum().backward()
    expected = torch.full((6,), 32.0)
    expected[2:4] = 0.0
    torch.testing.assert_close(gm.linear.parametrizations.bias.original.grad, expected)


class Cache(nn.Module):
    """Writes to views of a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("kept", torch.zeros(3, 4))
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        self.kept[:2].copy_(x[:2].detach())
        self.kept[2].add_(1.0)
        return self.fc(x) + self.kept.sum()


def test_a_view_of_a_buffer_is_updated():
    model, x = Cache(), torch.randn(5, 4)
    gm = fxqat.prepare_by_platform(copy.deepcopy(model), "TSQAT", example_inputs=x)
    for _ in range(3):
        torch.testing.assert_close(gm(x), model(x))
    torch.testing.assert_close(gm.kept, model.kept, rtol=0, atol=0)


class Counter(nn.Module):
    """Writes to a buffer past autograd."""

    def __init__(self, write):
        super().__init__()
        self.register_buffer("kept", torch.ones(4))
        self.fc, self.write = nn.Linear(4, 4), write

    def forward(self, x):
        self.write(self)
        return self.fc(x) * self.kept


def scales(self):
    self.kept.data.mul_(0.5)


def copies(self):
    self.kept.data.copy_(self.kept.data * 0.5)


def assigns(self):
    self.kept.data = self.kept.data * 0.5


@pytest.mark.parametrize("write", [scales, copies, assigns])
def test_a_buffer_is_written_through_its_data(write):
    model, x = Counter(write), torch.randn(5, 4)
    gm = fxqat.prepare_by_platform(copy.deepcopy(model), "TSQAT", example_inputs=x)
    for _ in range(3):
        torch.testing.assert_close(gm(x), model(x))
    torch.testing.assert_close(gm.kept, model.kept, rtol=0, atol=0)
    assert gm.kept[0] == 0.125


def test_a_value_that_is_written_past_autograd_is_refused_by_line():
    def write(y):
        y.data = y.data * 2
        return y

    message = r"write in place to a view by detach of first(?s:.*)test_in_place.py"
    with pytest.raises(TraceError, match=message):
        fxqat.prepare_by_platform(Net(write), "TSQAT", example_inputs=torch.randn(6, 4))


def test_reading_the_data_of_a_value_adds_no_quantizer():
    reads = (lambda y: y.detach(), lambda y: y.data)
    prepared = [fxqat.prepare_by_platform(Net(read), "TSQAT", example_inputs=torch.randn(6, 4)) for read in reads]
    assert str(prepared[0].graph) == str(prepared[1].graph)


@pytest.mark.parametrize("view", [lambda y: y.diagonal(), lambda y: y.chunk(2, 1)[0]], ids=["diagonal", "chunk"])
def test_other_views_are_refused_by_line(view):
    def write(y):
        view(y).add_(1.0)
        return y

    message = r"write in place to a view by [a-z]+ of first(?s:.*)test_in_place.py"
    with torch.no_grad(), pytest.raises(TraceError, match=message):
        fxqat.prepare_by_platform(Net(write), "TSQAT", example_inputs=torch.randn(6, 4))


class MasksInTraining(nn.Module):
    """Overwrites a value or its first column in training only, as SpecAugment does."""

    def __init__(self, step):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 2)
        self.token = nn.Parameter(torch.rand(6))
        self.step = step

    def forward(self, x):
        y = self.first(x)
        if self.training:
            self.step(self, y)
        return self.last(y)


def masks_rows(self, y):
    y[torch.tensor([True, False, False, True])] = self.token


def scales_a_column(self, y):
    y[:, 0] *= 2
    y[:, 0] += 1


def adds(self, y):
    y += self.token


@pytest.mark.parametrize("step", [masks_rows, scales_a_column, adds])
def test_a_write_in_training_only_is_not_read_in_eval_mode(step, tmp_path):
    model = MasksInTraining(step).eval()
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert gm.quant_report.leaves == gm.quant_report.eval_only == ()
    assert "float" not in [row.status for row in gm.quant_report if row.op == "linear"]
    for training in (False, True, False):
        torch.testing.assert_close(gm.train(training)(x), model.train(training)(x))
    for net in (gm, model):
        net.train()(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gm.get_parameter(name).grad, parameter.grad)
    fxqat.calibrate(gm.eval(), [(x,)], progress=False)
    fxqat.enable_quantization(gm)
    fxqat.convert_export(gm, (x,), tmp_path / "model.onnx", dynamic_batch=True)
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x[:3].numpy()})[0]
    expected = gm(torch.cat([x[:3], x[:1]]))[:3].detach()
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=0.03, rtol=0)


class Whole(nn.Module):
    """All of a new tensor is overwritten."""

    def __init__(self, write):
        super().__init__()
        self.first, self.last, self.write = nn.Linear(4, 6), nn.Linear(6, 3), write

    def forward(self, x):
        return self.last(self.write(x.new_zeros(len(x), 6), self.first(x)))


def by_item(key):
    def write(h, y):
        h[key] = y
        return h

    return write


def by_its_sizes(h, y):
    h[:, 0 : y.shape[1]] = y
    return h


def by_a_view_of_all(h, y):
    h[:].add_(y)
    return h


@pytest.mark.parametrize(
    "write",
    [by_item(slice(None)), by_item(...), by_item((slice(None), slice(0, None, 1))), by_its_sizes, by_a_view_of_all],
)
def test_a_tensor_that_is_overwritten_as_a_whole_is_no_quantized_tensor_of_the_file(write, tmp_path):
    torch.manual_seed(0)
    model, x = Whole(write).eval(), torch.randn(8, 4)
    gm = quantized(model, x, "TSQAT", example_inputs=x)
    assert noise(gm(x), model(x)) < NOISE
    report = fxqat.convert_export(gm, (x,), tmp_path / "model.onnx")
    assert report.certificate.passed
    told = [text for text in report.warnings if text.startswith("not in the file, since nothing else depends on it: ")]
    assert len(told) == (write in (by_its_sizes, by_a_view_of_all))  # the exporter finds these, prepare the others
    of_file = ort.InferenceSession(tmp_path / "model.onnx").run(None, {"x": x.numpy()})[0]
    torch.testing.assert_close(torch.from_numpy(of_file), gm(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (slice(1, None), torch.ones(1, 3)),
        ((slice(None), slice(None, None, 2)), torch.ones(2, 2)),
        ((slice(None), slice(None, 2)), 7.0),
        ([1], torch.ones(3)),
        (slice(None), torch.ones(1, 1, 1, 3)),  # more dimensions than there are
        (slice(None), torch.ones(3)),
        (slice(None), 2),
        ((), torch.ones(2, 1)),
        (slice(None), torch.tensor([True, False, True])),
    ],
)
def test_what_is_written_is_what_torch_writes(key, value):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.register_buffer("value", torch.as_tensor(value))

        def forward(self, x):
            y = self.lin(x)
            y[key] = self.value if isinstance(value, torch.Tensor) else value
            return y, self.lin(y)

    torch.manual_seed(0)
    model, x = Writes().eval(), torch.randn(2, 3)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=x)
    fxqat.disable_all(gm)
    for found, expected in zip(gm(x), model(x), strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["setitem", "copy_"])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        (torch.tensor([0, 2, 3]), torch.bool),
        (torch.tensor([True, False, True]), torch.int64),
        (torch.ones(3), torch.float64),
    ],
)
def test_a_tensor_that_is_overwritten_keeps_its_type(name, values, dtype):
    class Writes(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 3)
            self.register_buffer("values", values)

        def forward(self, x):
            h = torch.zeros(len(x), 3, dtype=dtype)
            if name == "copy_":
                h.copy_(self.values)
            else:
                h[:] = self.values
            return h + 0 * h, self.lin(x) * h

    model, x = Writes().eval(), torch.randn(2, 3)
    gm = fxqat.prepare_by_platform(model, "TSQAT", example_inputs=x)
    fxqat.disable_all(gm)
    for found, expected in zip(gm(x), model(x), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y.gt_(0),
        lambda y: y.eq_(y.roll(1, -1)),
        lambda y: y.relu().logical_and_(y > -1),
        lambda y: y.logical_not_(),
        lambda y: y.argmax(-1, keepdim=True).not_equal_(2),
        lambda y: (y > 0).logical_xor_(y < 1).logical_not_() * y,
    ],
)
def test_truth_values_that_overwrite_numbers_are_numbers(write, tmp_path):
    class Compares(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x):
            y = write(self.first(x))
            return y, y - self.second(x) / 3

    model, x = Compares().eval(), torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    gm = quantized(model, x, "TSQAT", example_inputs=(x,))
    assert fxqat.convert_export(gm, (x,), tmp_path / "file.onnx").certificate.passed
    fxqat.disable_all(gm)
    for found, expected in zip(gm(x), model(x), strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected)


def test_truth_values_that_overwrite_truth_values_without_example_inputs():
    class Compares(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)

        def forward(self, x):
            y = self.first(x)
            return y * (y > 0).logical_not_().ne_(y < -1) * x.new_ones(6, dtype=torch.bool).logical_and_(y[0] > -9)

    gm = quantized(Compares().eval(), torch.randn(8, 6), "TSQAT")
    assert [row.status for row in gm.quant_report if row.op == "compare"] == ["float"] * 6
