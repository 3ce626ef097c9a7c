"""Packed sequences become padded ones with lengths: the file is right for other lengths than it was exported with."""

import copy

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from fxqat import convert_export, enable_calibration, enable_quantization, prepare_by_platform
from fxqat.errors import ExportError
from fxqat.tools.to_float import to_float

BATCH, STEPS, FEATURES, HIDDEN = 3, 4, 5, 6
LENGTHS = torch.tensor([4, 2, 1])
OTHERS = ([1, 3, 2], [2, 2, 2], [1, 1, 1], [3, 1, 4])
KINDS = {
    "lstm": lambda **options: nn.LSTM(FEATURES, HIDDEN, **options),
    "gru": lambda **options: nn.GRU(FEATURES, HIDDEN, 2, bidirectional=True, **options),
    "rnn": lambda **options: nn.RNN(FEATURES, HIDDEN, bidirectional=True, nonlinearity="relu", **options),
}


class Net(nn.Module):
    """A linear layer, a recurrent module that reads packed sequences, and a linear layer."""

    def __init__(self, rnn, batch_first=True, enforce_sorted=False, total=None, **padding):
        super().__init__()
        self.first, self.rnn = nn.Linear(FEATURES, FEATURES), rnn
        self.last = nn.Linear(HIDDEN * (1 + rnn.bidirectional), 3)
        self.packing = {"batch_first": batch_first, "enforce_sorted": enforce_sorted}
        self.total, self.padding = total, {"batch_first": batch_first, **padding}

    def forward(self, x, lengths):
        y, states = self.rnn(pack_padded_sequence(self.first(x), lengths.cpu(), **self.packing))
        total = x.size(int(self.packing["batch_first"])) if self.total == "as the input" else self.total
        y, lengths = pad_packed_sequence(y, total_length=total, **self.padding)
        return self.last(y), states[0] if isinstance(states, tuple) else states, lengths


class Reader(nn.Module):
    """A model whose forward is a function of it, the input and the lengths."""

    def __init__(self, forward):
        super().__init__()
        self.first, self.rnn = nn.Linear(FEATURES, FEATURES), nn.LSTM(FEATURES, HIDDEN, batch_first=True)
        self.second = nn.GRU(HIDDEN, HIDDEN, 2, batch_first=True, bidirectional=True)
        self.last = nn.Linear(HIDDEN, 3)
        self.read = forward

    def forward(self, x, lengths):
        return self.read(self, x, lengths)


def packed(x, lengths):
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


def padded(y, **options):
    return pad_packed_sequence(y, batch_first=True, **options)


def last_state(model, x, lengths):
    return model.last(model.rnn(packed(model.first(x), lengths))[1][0][-1])


def states_at_the_start(model, x, lengths):
    h = x.mean((1, 2))[None, :, None].repeat(1, 1, HIDDEN)
    y, states = model.rnn(packed(model.first(x), lengths), (h, 2 * h))
    return padded(y)[0], states[1]


def two_modules(model, x, lengths):
    y, states = model.second(model.rnn(packed(model.first(x), lengths))[0])
    return padded(y)[0], states


def read_twice(model, x, lengths):
    sequence = packed(model.first(x), lengths)
    return padded(model.rnn(sequence)[0])[0] * 2, model.rnn(sequence)[1][0]


def lengths_of_a_mask(model, x, lengths):
    is_step = torch.arange(x.size(1))[None] < lengths[:, None]
    return padded(model.rnn(packed(model.first(x), is_step.sum(1).cpu()))[0], total_length=STEPS)[0]


def lengths_as_a_list(model, x, lengths):
    return padded(model.rnn(packed(model.first(x), lengths.tolist()))[0])


def mean_of_the_steps(model, x, lengths):
    y, lengths = padded(model.rnn(packed(model.first(x), lengths))[0])
    return model.last(y.sum(1) / lengths.unsqueeze(1).to(y.dtype))


def attention_over_the_steps(model, x, lengths):
    y, lengths = padded(model.rnn(packed(model.first(x), lengths))[0])
    ended = torch.arange(y.size(1))[None] >= lengths[:, None]
    weights = model.last(y)[..., 0].masked_fill(ended, float("-inf")).softmax(1)
    return (weights[..., None] * y).sum(1)


def largest_of_the_steps(model, x, lengths):
    y, _ = padded(model.rnn(packed(model.first(x), lengths))[0], padding_value=float("-inf"))
    return model.last(y.max(1)[0])


def step_at_the_end(model, x, lengths):
    y, lengths = padded(model.rnn(packed(model.first(x), lengths))[0])
    return model.last(y[torch.arange(y.size(0)), lengths - 1])


READERS = (
    last_state,
    states_at_the_start,
    two_modules,
    read_twice,
    lengths_of_a_mask,
    lengths_as_a_list,
    mean_of_the_steps,
    attention_over_the_steps,
    largest_of_the_steps,
    step_at_the_end,
)


def quantized(model, inputs, backend, **config):
    gm = prepare_by_platform(model.eval(), backend, config or None, example_inputs=inputs)
    enable_calibration(gm)
    gm(*inputs)
    enable_quantization(gm)
    return gm


def outputs(result):
    return result if isinstance(result, (tuple, list)) else [result]


@torch.no_grad()
def check_file(gm, inputs, others, path, **options):
    """Export, and compare the file with the model for other values and other lengths."""
    assert convert_export(gm, inputs, path, **options).certificate.passed
    session_options = ort.SessionOptions()
    session_options.intra_op_num_threads = 1  # each thread of DynamicQuantizeLSTM gives its samples their own range
    session_options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), session_options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    for values in (inputs, *others):
        given = {name: value.numpy() for name, value in zip(names, values, strict=True)}
        for ours, of_file in zip(outputs(gm(*values)), session.run(None, given), strict=True):
            torch.testing.assert_close(torch.from_numpy(of_file), ours, atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", ["TSQAT", "ONNXRuntime"])
@pytest.mark.parametrize("total", [None, "as the input", STEPS, STEPS + 2])
@pytest.mark.parametrize(("kind", "batch_first", "is_sorted"), [("lstm", True, False), ("gru", False, True)])
def test_the_file_is_right_for_other_lengths(kind, batch_first, is_sorted, total, backend, tmp_path):
    model = Net(KINDS[kind](batch_first=batch_first), batch_first, is_sorted, total)
    shape = (BATCH, STEPS, FEATURES) if batch_first else (STEPS, BATCH, FEATURES)
    inputs = (torch.randn(shape), LENGTHS)
    gm = quantized(model, inputs, backend)
    others = [(torch.randn(shape), torch.tensor(sorted(each, reverse=True) if is_sorted else each)) for each in OTHERS]
    check_file(gm, inputs, others, tmp_path / "net.onnx")
    operators = {node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node}
    assert not operators & {"TopK", "Loop", "Scan", "ScatterElements"}
    assert gm.quant_report.row("rnn" if kind == "lstm" else "rnn.layer_1").status == (
        "quantized" if backend == "TSQAT" else "float"
    )


@pytest.mark.parametrize("reader", READERS, ids=[each.__name__ for each in READERS])
def test_what_models_do_with_packed_sequences(reader, tmp_path):
    inputs = (torch.randn(BATCH, STEPS, FEATURES), LENGTHS)
    gm = quantized(Reader(reader), inputs, "TSQAT")
    others = [(torch.randn(BATCH, STEPS, FEATURES), torch.tensor(each)) for each in OTHERS]
    check_file(gm, inputs, others, tmp_path / "net.onnx")


def test_open_sizes(tmp_path):
    inputs = (torch.randn(BATCH, STEPS, FEATURES), LENGTHS)
    gm = quantized(Reader(attention_over_the_steps), inputs, "TSQAT")
    n, t = (torch.export.Dim(name) for name in "nt")
    others = [
        (torch.randn(2, 7, FEATURES), torch.tensor([3, 6])),
        (torch.randn(5, 3, FEATURES), torch.tensor([1, 2, 3, 1, 3])),
    ]
    check_file(gm, inputs, others, tmp_path / "net.onnx", dynamic_shapes={"x": {0: n, 1: t}, "lengths": {0: n}})


@pytest.mark.parametrize("kind", KINDS)
def test_training_is_that_of_the_model(kind):
    dropout = {"dropout": 0.4} if kind == "gru" else {}
    model, inputs = (
        Net(KINDS[kind](batch_first=True, **dropout)).train(),
        (torch.randn(BATCH, STEPS, FEATURES), LENGTHS),
    )
    expected = copy.deepcopy(model)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=inputs).train()
    for each in (gm, expected):
        torch.manual_seed(0)
        y, state, _ = each(*inputs)
        (y.square().sum() + state.square().sum()).backward()
    ours = {path.rpartition(".")[2]: parameter for path, parameter in gm.named_parameters()}
    for name, parameter in expected.rnn.named_parameters():
        torch.testing.assert_close(ours[name].grad, parameter.grad, atol=1e-5, rtol=1e-4)


def test_a_float_model_of_it_has_the_lengths():
    inputs = (torch.randn(BATCH, STEPS, FEATURES), LENGTHS)
    model = Net(KINDS["gru"](batch_first=True))
    restored = to_float(quantized(model, inputs, "TSQAT"))
    for lengths in OTHERS:
        for ours, expected in zip(
            restored(inputs[0], torch.tensor(lengths)), model(inputs[0], torch.tensor(lengths)), strict=True
        ):
            torch.testing.assert_close(ours, expected)


def of_values(model, x, lengths):
    y = model.rnn(packed(model.first(x), lengths))[0]
    y = PackedSequence(torch.relu(y.data), y.batch_sizes, y.sorted_indices, y.unsorted_indices)
    return padded(y)[0]


def test_what_reads_the_values_packed_computes_the_same_and_is_refused_with_the_remedy(tmp_path):
    inputs = (torch.randn(BATCH, STEPS, FEATURES), LENGTHS)
    model = Reader(of_values).eval()
    gm = quantized(model, inputs, "TSQAT")
    assert (gm(*inputs) - model(*inputs)).abs().max() < 0.05
    with pytest.raises(ExportError, match="let only nn.LSTM, nn.GRU, nn.RNN and pad_packed_sequence read"):
        convert_export(gm, inputs, tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", KINDS)
def test_unrolled_layers_stop_at_the_end_of_each_sample(kind, tmp_path):
    inputs = (torch.randn(BATCH, STEPS, FEATURES), LENGTHS)
    dropout = {"dropout": 0.4} if kind == "gru" else {}
    model = Net(KINDS[kind](batch_first=True, **dropout), total="as the input")
    gm = quantized(model, inputs, "TSQAT", overrides=[{"match": {"module": "rnn"}, "recurrent": "unrolled"}])
    assert all((a - b).abs().max() < 0.1 for a, b in zip(gm(*inputs), model(*inputs), strict=True))
    others = [(torch.randn(BATCH, STEPS, FEATURES), torch.tensor(each)) for each in OTHERS]
    check_file(gm, inputs, others, tmp_path / "net.onnx")
    assert not {node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node} & {"LSTM", "GRU", "RNN"}


@pytest.mark.parametrize(
    "reader",
    [
        lambda model, x, lengths: padded(model.rnn(packed(x, lengths))[0])[0],
        lambda model, x, lengths: model.rnn(packed(x, lengths))[1],
    ],
    ids=["output", "states"],
)
def test_an_lstm_quantizes_at_run_time_what_it_reads(reader, tmp_path):
    model = Reader(reader)
    with torch.no_grad():
        for parameter in model.rnn.parameters():
            parameter.mul_(4)
    inputs = (torch.randn(BATCH, STEPS, FEATURES), LENGTHS)
    gm = quantized(model, inputs, "ONNXRuntime", activation="dynamic")
    others = [(torch.randn(BATCH, STEPS, FEATURES), torch.tensor(each)) for each in OTHERS]
    check_file(gm, inputs, others, tmp_path / "net.onnx", runtime="onnxruntime_avx2")
    assert "DynamicQuantizeLSTM" in {node.op_type for node in onnx.load(tmp_path / "net.onnx").graph.node}
