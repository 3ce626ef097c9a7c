"""Proxies with values: what they return, what they record, and what they refuse."""

import copy
from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import Tensor, fx, nn

from fxqat import calibrate, prepare_by_platform
from fxqat.errors import TraceError
from fxqat.tracing.value_proxy import DataDependent, TracedValue, TrainingFlag, ValueProxy, proxies_in, value_of
from fxqat.utils.train_eval_graph import follows_mode


class Recorder:
    """A tracer that makes nodes of calls, computes them, and records the forced numbers."""

    def __init__(self):
        self.graph = fx.Graph()
        self.inner = fx.Tracer()
        self.inner.graph = self.graph
        self.forced = []

    def input(self, value, **options):
        node = self.graph.placeholder(f"x{len(self.graph.nodes)}")
        return ValueProxy(node, self, TracedValue(value, **({"from_input": True, "sized": True} | options)))

    def unknown(self):
        return ValueProxy(self.graph.placeholder("unknown"), self, None)

    def record_forced(self, node, value):
        self.forced.append(value)

    def record_int(self, proxy, frame):
        assert frame.f_code.co_filename.endswith(".py")

    def check_constant(self, reads, use):
        assert reads == frozenset()

    def create_proxy(self, kind, target, args, kwargs, *rest, **options):
        node = self.graph.create_node(kind, target, *self.inner.create_arg((args, kwargs)))
        values, named = value_of(tuple(args)), value_of(dict(kwargs))
        call = target
        if kind == "call_method":
            call, values = getattr(values[0], target), values[1:]
        data = call(*values, **named)
        read = [proxy.fxqat_value for proxy in proxies_in((args, kwargs))]
        known = TracedValue(data, *(any(getattr(k, f) for k in read) for f in ("from_input", "sized", "from_content")))
        return ValueProxy(node, self, known)


@pytest.fixture
def recorder():
    return Recorder()


@pytest.fixture
def image(recorder):
    return recorder.input(torch.arange(24.0).view(2, 3, 4))


def test_rank_and_type_need_no_node(recorder, image):
    assert (image.ndim, image.dim(), image.dtype, image.is_floating_point()) == (3, 3, torch.float32, True)
    assert image.is_cuda is False
    assert recorder.forced == []
    assert len(recorder.graph.nodes) == 1


@pytest.mark.parametrize("name", ["requires_grad", "grad_fn", "is_leaf"])
def test_whether_gradients_are_computed_is_not_known(image, name):
    with pytest.raises(DataDependent, match=f"reads {name} of x0"):
        getattr(image, name)
    assert image.dtype is torch.float32


def test_sizes_are_proxies_and_arithmetic_on_them_is_not_forced(recorder, image):
    half = (image.shape[2] * 2 + image.size(-1)) // 3
    assert isinstance(half, ValueProxy)
    assert half.fxqat_value == TracedValue(4, from_input=True, sized=True)
    assert isinstance(image.shape, tuple)
    assert [size.fxqat_value.data for size in image.size()] == [2, 3, 4]
    assert recorder.forced == []


@pytest.mark.parametrize(
    ("use", "answer", "forced"),
    [
        (lambda n: int(n), 3, 3),
        (lambda n: float(n), 3.0, 3),
        (lambda n: bool(n), True, 3),
        (lambda n: list(range(n)), [0, 1, 2], 3),
        (lambda n: [10, 11, 12, 13][n], 13, 3),
        (lambda n: {3: "three"}[n], "three", True),
        (lambda n: bool(n > 2), True, True),
        (lambda n: bool(n == 4), False, False),
        (lambda n: n in (1, 2, 3), True, True),
        (lambda n: sorted([n, 1])[0], 1, True),
    ],
)
def test_where_python_needs_a_number_it_gets_one_and_that_is_recorded(recorder, image, use, answer, forced):
    assert use(image.size(1)) == answer
    assert recorder.forced
    assert recorder.forced[-1] == forced


def test_numbers_that_depend_on_no_size_are_not_recorded(recorder):
    number = recorder.input(7, from_input=False, sized=False)
    assert int(number) == 7
    assert list(range(number)) == list(range(7))
    assert recorder.forced == []


def test_the_lengths_of_tensors_and_of_lists_among_the_inputs_are_recorded(recorder, image):
    pair = recorder.input([torch.zeros(1), torch.zeros(2)])
    assert len(pair) == 2
    assert recorder.forced == ["2 items"]
    assert [item.fxqat_value.data.numel() for item in pair] == [1, 2]
    named = recorder.input({"a": torch.zeros(1)})
    assert "a" in named
    assert recorder.forced == ["2 items", "2 items", ["a"]]
    chunks = recorder.create_proxy("call_method", "chunk", (image, 2), {})
    assert len(chunks) == 2
    assert recorder.forced == ["2 items", "2 items", ["a"]]
    assert len(image) == 2
    assert recorder.forced == ["2 items", "2 items", ["a"], 2]


def test_iterating_over_a_tensor_gives_its_rows(recorder, image):
    rows = list(image)
    assert [torch.equal(row.fxqat_value.data, image.fxqat_value.data[i]) for i, row in enumerate(rows)] == [True, True]
    assert set(recorder.forced) == {2}


def test_a_part_of_a_list_is_a_list_of_its_items_and_a_part_of_a_tensor_is_a_node(recorder, image):
    for kind in (list, tuple):
        parts = recorder.input(kind(torch.full((2,), float(i)) for i in range(4)))[:0:-2]
        assert type(parts) is kind
        assert [part.fxqat_value.data[0].item() for part in parts] == [3, 1]
        assert recorder.input(kind([torch.ones(1)] * 3))[-1].node.args[1] == 2
    assert torch.equal(image[1:].fxqat_value.data, image.fxqat_value.data[1:])


def test_dicts_have_keys_and_their_none_is_none(recorder):
    table = recorder.input({"a": torch.ones(2), "b": None})
    assert list(table) == ["a", "b"]
    assert "a" in table
    assert "c" not in table
    assert table.get("c") is None
    assert table.get("b") is None
    assert [key for key, _ in table.items()] == ["a", "b"]
    assert torch.equal(table["a"].fxqat_value.data, torch.ones(2))


@pytest.mark.parametrize(
    "use",
    [
        lambda x: bool(x.sum() > 0),
        lambda x: int(x.sum()),
        lambda x: float(x[0, 0, 0]),
        lambda x: x.max().item() > 3 and 1,
        lambda x: list(range(x.argmax())),
        lambda x: x.sum() in x,
        lambda x: bool(x[0, 0, 0] == 0),
    ],
)
def test_tensor_values_are_refused(recorder, image, use):
    if use.__code__.co_names[:3] == ("max", "item"):
        image.fxqat_value = TracedValue(image.fxqat_value.data, True, True, True)
    with pytest.raises(DataDependent) as caught:
        use(image)
    assert "which depends on tensor values" in str(caught.value)
    assert isinstance(caught.value, fx.proxy.TraceError)


def test_traced_values_are_frozen():
    value = TracedValue(1)
    with pytest.raises(FrozenInstanceError):
        value.data = 2
    assert value == TracedValue(1, from_input=False, sized=False, from_content=False)


def test_a_value_that_is_not_known_is_refused(recorder):
    unknown = recorder.unknown()
    for use in (bool, int, len, list, lambda x: x in unknown):
        with pytest.raises(DataDependent, match="not known while tracing"):
            use(unknown)
    assert hash(unknown) == id(unknown)


def test_proxies_of_tensors_are_hashed_by_identity(recorder, image):
    assert hash(image) == id(image)
    assert {image: 1}[image] == 1
    assert hash(image.size(1)) == hash(3)


def test_rounding_stays_in_the_graph(recorder, image):
    ratio = image.size(2) / image.size(1)
    assert round(ratio).fxqat_value.data == 1
    assert round(ratio, 2).fxqat_value.data == 1.33
    assert recorder.forced == []


def test_formats(recorder, image):
    assert f"{image.size(1):03d}" == "003"
    assert f"{image}" == str(image)
    assert f"{recorder.unknown()}" == "Proxy(unknown)"


def test_assigning_to_items_makes_a_node(recorder, image):
    image[0, :, 1] = image[1, :, 1]
    assert torch.equal(image.fxqat_value.data[0, :, 1], torch.tensor([13.0, 17.0, 21.0]))
    assert [node.name for node in recorder.graph.nodes][-1].startswith("setitem")


def test_devices_are_nodes_with_attributes(recorder, image):
    assert isinstance(image.device, ValueProxy)
    assert image.device.type == "cpu"
    assert image.device.index is None
    sequence = nn.utils.rnn.PackedSequence(torch.ones(2), torch.tensor([1, 1]))
    assert recorder.input(sequence).unsorted_indices is None


def test_values_of_structures(recorder, image):
    count = image.size(0)
    found = value_of({"a": [count, (1, slice(count, None))], "flag": TrainingFlag(lambda: None)})
    assert found == {"a": [2, (1, slice(2, None))], "flag": False}
    assert isinstance(value_of(image), Tensor)
    assert value_of(torch.Size([1, 2])) == (1, 2)
    with pytest.raises(DataDependent, match="unknown"):
        value_of([1, recorder.unknown()])
    with pytest.raises(DataDependent, match="is not known"):
        value_of(fx.Proxy(image.node, recorder.inner))


def test_proxies_in_structures(recorder, image):
    a, b = image.size(0), image.size(1)
    assert [id(p) for p in proxies_in(([a], {"k": (b, 1)}, slice(None, a), "x"))] == [id(a), id(b), id(a)]
    assert list(proxies_in((1, "a", torch.ones(1)))) == []


@pytest.mark.parametrize("seen", [True, False])
def test_a_training_flag_is_passed_on_as_a_node_and_reports_a_branch(seen):
    asked = []

    def decide():
        asked.append(1)
        return seen

    flag = TrainingFlag(decide)
    tracer = fx.Tracer()
    tracer.graph = fx.Graph()
    assert follows_mode(flag.__fx_create_arg__(tracer))
    assert asked == []
    assert bool(flag) is seen
    assert asked == [1]


class WritesItems(nn.Module):
    """Writes items of its inputs, in a module that branches on the mode and in one that does not."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, pair, batch):
        pair[0] = self.first(pair[0])
        pair[-1] = pair[0] + pair[1]
        batch["sum"] = self.last(pair[1])
        for name in list(batch):
            batch[name] = batch[name] * len(batch)
        return pair, batch, "sum" in batch


def test_items_that_forward_writes_into_its_inputs_are_read_later():
    model, x = WritesItems(), torch.randn(3, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=([x, x + 1], {"x": x}))
    assert [line.split(":")[0] for line in gm.quant_report.state_changes] == [
        "forward overwrites its input pair",
        "forward overwrites its input batch",
    ]
    given = [2 * x, x], {"x": x}
    found, expected = gm(*copy.deepcopy(given)), model(*copy.deepcopy(given))
    assert [type(part) for part in found] == [list, dict, bool]
    assert list(found[1]) == ["x", "sum"]
    torch.testing.assert_close(found, expected)
    calibrate(gm, [given], progress=False)
    assert list(given[1]) == ["x"]


class OptionalScale(nn.Module):
    """Asks for the truth of a parameter, as the RepVGG block of PP-YOLOE+ does."""

    def __init__(self, alpha):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.alpha = None if alpha is None else nn.Parameter(torch.tensor([alpha]))

    def forward(self, x):
        if self.alpha:
            return self.first(x) + self.alpha * self.second(x)
        return self.first(x) + self.second(x)


@pytest.mark.parametrize(("alpha", "fixed"), [(0.5, [True]), (None, [])])
def test_the_truth_of_a_parameter_is_fixed_and_reported(alpha, fixed):
    model, x = OptionalScale(alpha), torch.randn(3, 4)
    gm = prepare_by_platform(model, "TSQAT", example_inputs=(x,))
    assert [(forced.expression, forced.value) for forced in gm.quant_report.forced] == [
        ("bool(alpha)", v) for v in fixed
    ]
    torch.testing.assert_close(gm(x), model(x))
    assert sum(node.op == "call_module" and node.target in ("first", "second") for node in gm.graph.nodes) == 2


def test_a_model_whose_parameter_is_zero_now_is_refused():
    """With another value it takes the other branch."""
    with pytest.raises(TraceError, match="computes something else than the model on inputs with other values"):
        prepare_by_platform(OptionalScale(0.0), "TSQAT", example_inputs=(torch.randn(3, 4),))


def test_the_truth_of_what_is_computed_from_a_parameter_is_none():
    class Computed(OptionalScale):
        def forward(self, x):
            return self.first(x) if self.alpha - 1 else self.second(x)

    with pytest.raises(TraceError, match="which depends on alpha, and this changes"):
        prepare_by_platform(Computed(0.5), "TSQAT", example_inputs=(torch.randn(3, 4),))
