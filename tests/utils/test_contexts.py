"""Each context manager changes only what its name says, and restores it, also after an error."""

import gc
import threading

import pytest
import torch
from torch import nn

import fxqat
from fxqat.custom_symbolic_opset import run_exporter
from fxqat.utils.contexts import (
    attributes_kept,
    buffers_kept,
    collector_paused,
    equal_random_numbers,
    eval_mode,
    hooked,
    parameters_kept,
    writes_to_data_seen,
)
from tests.models import Counting


def mixed_modes() -> nn.Module:
    """A model in training mode with one frozen part."""
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()))
    model[1][0].eval()
    return model


def test_every_module_evaluates_and_gets_its_own_mode_back() -> None:
    model = mixed_modes()
    before = [module.training for module in model.modules()]
    with eval_mode(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    assert before == [True, True, True, False, True]


def test_modes_come_back_after_a_failure() -> None:
    model = mixed_modes()

    def fail() -> None:
        with eval_mode(model):
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert model.training
    assert not model[1][0].training


def test_buffers_are_the_same_and_have_their_content_afterwards():
    model, x = Counting(), torch.randn(2, 3)
    before = dict(model.named_buffers())
    with buffers_kept(model):
        model(x)
        assert int(model.calls) == int(model.again) == 1
        assert model.again is not before["again"]
    assert int(model.calls) == int(model.again) == 0
    assert all(buffer is before[name] for name, buffer in model.named_buffers())


@pytest.fixture
def collector_as_before():
    enabled = gc.isenabled()
    yield
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_paused_inside_and_as_before_outside(collector_as_before, enabled):
    (gc.enable if enabled else gc.disable)()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is enabled


def test_an_error_does_not_leave_the_collector_off(collector_as_before):
    gc.enable()
    with pytest.raises(ValueError, match="no"), collector_paused():
        raise ValueError("no")
    assert gc.isenabled()
    with pytest.raises(fxqat.errors.ConfigError):
        fxqat.prepare_by_platform(nn.ReLU(), "no such backend")
    assert gc.isenabled()


class Looks(nn.Module):
    """Looks whether the collector is on when it is called."""

    def __init__(self, seen):
        super().__init__()
        self.fc, self.look = nn.Linear(4, 4), lambda: seen.append(gc.isenabled())

    def forward(self, x):
        self.look()
        return self.fc(x)


@pytest.mark.parametrize("work", [fxqat.prepare_by_platform, lambda model: run_exporter(model, (torch.randn(2, 4),))])
def test_the_collector_is_paused_while_a_model_is_prepared_and_while_torch_exports(collector_as_before, work):
    seen = []
    gc.enable()
    work(Looks(seen).eval())
    assert set(seen) == {False}
    assert gc.isenabled()


class Scaled(nn.Module):
    def forward(self, x, factor=1.0):
        return x * factor


def test_a_hook_is_called_for_each_module_inside_the_block_only():
    first, second, x = Scaled(), Scaled(), torch.ones(2)
    seen = []
    with hooked([first, second], lambda module, args, kwargs, y: seen.append((module, kwargs, y)), with_kwargs=True):
        second(first(x, factor=2.0))
    first(x)
    assert [(module, kwargs) for module, kwargs, _ in seen] == [(first, {"factor": 2.0}), (second, {})]
    assert all(torch.equal(y, 2 * x) for _, _, y in seen)


def test_a_pre_hook_may_change_the_input():
    module, x = Scaled(), torch.ones(2)
    with hooked([module], lambda _, args: (args[0] + 1,), pre=True):
        assert torch.equal(module(x), x + 1)
    assert torch.equal(module(x), x)


def test_hooks_are_removed_after_an_error():
    modules = [Scaled(), Scaled()]

    def fail(module, args, output):
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"), hooked(modules, fail):
        modules[1](torch.ones(2))
    assert not any(module._forward_hooks for module in modules)


class Keeps(nn.Module):
    """Keeps state in Python."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen, self.by_size = 0, [], {}

    def forward(self, x):
        self.calls += 1
        self.seen.append(x.shape)
        self.by_size[x.shape] = self.last = x
        return x


def test_attributes_and_what_they_hold_are_as_before_afterwards() -> None:
    model = nn.Sequential(Keeps(), nn.Dropout())
    seen = model[0].seen
    with attributes_kept(model):
        model(torch.ones(2))
        assert (model[0].calls, len(seen), len(model[0].by_size)) == (1, 1, 1)
    assert (model[0].calls, seen, model[0].by_size) == (0, [], {})
    assert model[0].seen is seen
    assert not hasattr(model[0], "last")


def test_parameters_have_their_values_afterwards() -> None:
    weight = nn.Parameter(torch.ones(2))
    with parameters_kept([weight]):
        weight.data.zero_()
        assert weight.tolist() == [0, 0]
    assert weight.tolist() == [1, 1]


def test_equal_calls_give_equal_random_numbers_in_any_order() -> None:
    model = nn.Linear(2, 2)
    state = torch.get_rng_state()
    with equal_random_numbers(model):
        first, other = torch.rand(3), torch.randn(3)
    with equal_random_numbers(model):
        assert torch.equal(torch.randn(3), other)
        assert torch.equal(torch.rand(3), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_of_a_gpu_draws_the_numbers_of_dropout_in_place() -> None:
    x = torch.randn(4, 300, requires_grad=True)
    with equal_random_numbers(nn.Linear(2, 2)):
        expected = nn.functional.dropout(x * 1.0, 0.3, training=True, inplace=True)
        found, mask = torch.native_dropout(x, 0.3, train=True)
    assert torch.equal(found, expected)
    assert torch.equal(mask, expected != 0)
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)))


def test_an_expanded_buffer_is_left_as_it_is():
    model = nn.Module()
    model.register_buffer("index", torch.tensor([0, 2]).expand(3, 2))
    model.register_buffer("listed", torch.eye(2).to_sparse())
    model.register_buffer("count", torch.zeros(2))
    held = dict(model.named_buffers())
    with buffers_kept(model):
        model.count += 1
        model.index = torch.zeros(3, 2)
    assert all(model.get_buffer(name) is tensor for name, tensor in held.items())
    assert model.index.tolist() == [[0, 2]] * 3
    assert model.count.tolist() == [0, 0]


def test_writes_to_data_are_seen_in_this_thread_and_as_before_outside() -> None:
    weight, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def in_another_thread() -> None:
        other.data = torch.zeros(5)  # as torch does it: it may have another shape

    with writes_to_data_seen():
        version, place = weight._version, weight.data_ptr()
        weight.data = torch.full((3,), 2.0)
        weight.data.mul_(2)
        assert weight._version == version + 2
        assert weight.data_ptr() == place
        with pytest.raises(RuntimeError, match="size"):
            weight.data = torch.zeros(5)
        with writes_to_data_seen():
            pass
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
    assert weight.tolist() == [4.0] * 3
    assert other.shape == (5,)
    assert "data" not in vars(torch.Tensor)
    weight.data = torch.zeros(5)
    assert weight.shape == (5,)


def test_two_threads_leave_the_data_of_tensors_as_it_was() -> None:
    entered, left = threading.Event(), threading.Event()

    def first() -> None:
        with writes_to_data_seen():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    entered.wait(10)
    with writes_to_data_seen():
        left.set()
        thread.join()
        weight = nn.Parameter(torch.ones(3))
        weight.data = torch.zeros(3)
        assert weight._version == 1
    assert "data" not in vars(torch.Tensor)
