"""Walking nested inputs and outputs."""

import copy
from collections import Counter, OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from fxqat import prepare_by_platform
from fxqat.utils.tensors import copies_by_hand, copy_by_hand, flatten_tensors, map_tensors

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
