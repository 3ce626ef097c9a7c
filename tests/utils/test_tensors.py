"""Walking nested inputs and outputs."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch

from fxqat.utils.tensors import copies_of_results, flatten_tensors, map_tensors

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


def test_only_what_autograd_refuses_to_copy_is_copied():
    layer = torch.nn.Linear(2, 2)
    assert copies_of_results(layer) == {}
    layer.kept = layer(T([1.0, 2.0]))
    layer.register_buffer("also_kept", layer.kept * 2)
    found = copies_of_results(torch.nn.Sequential(layer))
    assert found.keys() == {id(layer.kept), id(layer.also_kept)}
    assert torch.equal(found[id(layer.kept)], layer.kept)
    assert all(tensor.is_leaf for tensor in found.values())
