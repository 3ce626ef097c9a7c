"""Walking nested inputs and outputs."""

import copy
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fxqat import prepare_by_platform
from fxqat.utils import tensors
from fxqat.utils.tensors import (
    call_with_tensors,
    copies_by_hand,
    copy_by_hand,
    flatten_tensors,
    is_close,
    largest_magnitude,
    map_tensors,
)

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Output:
    """A model output as some libraries give it."""

    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


def numbers(value: object) -> list[float]:
    """The values of all tensors, which hold one number each."""
    return [tensor.item() for tensor in flatten_tensors(value)]


T = torch.tensor


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (T(1.0), [1.0]),
        ([T(1.0), (T(2.0), T(3.0))], [1.0, 2.0, 3.0]),
        ({"b": T(1.0), "a": [T(2.0)]}, [1.0, 2.0]),
        (OrderedDict(x=T(1.0)), [1.0]),
        (Pair(T(1.0), T(2.0)), [1.0, 2.0]),
        (Output(T(1.0), (T(2.0), T(3.0))), [1.0, 2.0, 3.0]),
        ([T(1.0), None, "text", 3, [T(2.0)]], [1.0, 2.0]),
        (None, []),
    ],
)
def test_tensors_are_found_in_order(value: object, expected: list[float]) -> None:
    assert numbers(value) == expected
    assert all(isinstance(tensor, torch.Tensor) for tensor in flatten_tensors(value))


@pytest.mark.parametrize(
    "value",
    [T(1.0), [T(1.0), (T(2.0), "text", None)], {"a": T(1.0), "b": [T(2.0)]}, Pair(T(1.0), T(2.0)), (T(1.0),), 7],
)
def test_mapping_keeps_the_structure_and_the_original(value: object) -> None:
    before = numbers(value)
    mapped = map_tensors(value, lambda tensor: tensor + 10)
    assert numbers(mapped) == [number + 10 for number in before]
    assert type(mapped) is type(value)
    assert numbers(value) == before


def test_mapping_keeps_what_is_not_a_tensor() -> None:
    mapped = map_tensors({"a": [T(1.0), "text", None, 3]}, torch.neg)
    assert mapped["a"][1:] == ["text", None, 3]
    assert mapped["a"][0] == -1.0


def test_tensors_of_the_last_run_and_empty_containers_are_copied_by_hand():
    layer = torch.nn.Linear(2, 2)
    layer.kept = layer(T([1.0, 2.0]))
    layer.register_buffer("also_kept", layer.kept * 2)
    layer.filled, layer.counts = {"a": 1}, Counter()
    found = copies_by_hand(torch.nn.Sequential(layer))
    tensors = {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}
    assert tensors.keys() == {id(layer.kept), id(layer.also_kept)}
    assert torch.equal(tensors[id(layer.kept)], layer.kept)
    assert all(tensor.is_leaf for tensor in tensors.values())
    assert id(layer._forward_hooks) in found
    assert {type(value) for value in found.values()} == {torch.Tensor, dict, OrderedDict, set}
    assert [copy_by_hand(value) for value in (layer.weight, layer.filled, layer.counts, 3)] == [None] * 4


def test_copies_have_hooks_of_their_own():
    layer = torch.nn.Sequential(torch.nn.Linear(2, 2))
    gm = prepare_by_platform(layer)
    copied = copy.deepcopy(gm)
    copied.get_submodule("0").register_forward_hook(lambda *_: None)
    assert [len(of.get_submodule("0")._forward_hooks) for of in (gm, copied)] == [0, 1]


def test_a_module_with_two_names_and_tied_weights_are_called_with_other_tensors():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = self.b = nn.BatchNorm1d(2)
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.second.weight = self.first.weight
            self.register_buffer("calls", T(0.0))

        def forward(self, x):
            self.calls = self.calls + 1
            return self.second(self.b(self.first(self.a(x))))

    model, expected, x = Shared(), Shared(), torch.randn(6, 2)
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    values = {name: tensor.clone() for name, tensor in own.items()}
    tensors = {name: tensor.detach().clone() for name, tensor in expected.state_dict().items()}
    for name in list(tensors):
        if name.startswith("b."):
            tensors[name] = tensors[name.replace("b.", "a.", 1)]
    del tensors["second.weight"]
    torch.testing.assert_close(call_with_tensors(model, tensors, (x,), {}), expected(x))
    assert list(tensors) == [name for name in expected.state_dict() if name != "second.weight"]
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])
    now = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    assert all(now[name] is tensor and torch.equal(tensor, values[name]) for name, tensor in own.items())


@pytest.mark.parametrize("part", [3, 1 << 22])
def test_tensors_are_compared_part_by_part_with_the_largest_value_of_all(monkeypatch, part):
    monkeypatch.setattr(tensors, "PART", part)
    exact = torch.tensor([[100.0, 1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0, 9.0]]).T  # is not contiguous
    near, far = exact.clone(), exact.clone()
    near[-1, -1] += 0.9
    far[-1, -1] += 1.5
    assert is_close(exact, near, 0.01)  # 1 is allowed, because of the 100 of another part, and 0.09 of the value
    assert not is_close(exact, far, 0.01)
    assert is_close(exact, far, 0.01, floor=0.5)
    assert largest_magnitude(-exact) == 100
    assert largest_magnitude(torch.tensor([3.0, float("nan"), float("-inf"), -4.0])) == 4
    assert largest_magnitude(torch.zeros(0, 2)) == 0


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), True),
        (torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, float("nan")]), False),
        (torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 1.0]), True),
        (torch.tensor([float("inf"), 1.0]), torch.tensor([float("-inf"), 1.0]), False),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.float64), True),
        (torch.tensor([True, False]), torch.tensor([True, True]), False),
        (torch.tensor([1 + 1j, 2j]), torch.tensor([1 + 1j, 2j + 1e-9]), True),
        (torch.tensor([1 + 1j, 2j]), torch.tensor([1 + 1j, 3j]), False),
        (torch.ones(2), torch.ones(2, 1), False),
        (torch.ones(0), torch.ones(0), True),
    ],
)
def test_values_that_are_no_numbers_and_types_are_compared(a, b, expected):
    assert is_close(a, b, 1e-6) is expected
