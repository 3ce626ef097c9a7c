"""The table of fusions: complete, ordered, and its rows build what they name."""

import pytest
import torch
from torch import nn

from fxqat.fuser_method_mappings import FUSIBLE_ACTIVATIONS, FUSIONS, LAYERS_AND_NORMS, Fusion, fusions_without
from fxqat.nn.fused import FusedLayer
from fxqat.nn.weighted import WEIGHTED_TYPES
from fxqat.ops.identify import op_named


@pytest.mark.parametrize(("layer", "norm"), LAYERS_AND_NORMS)
def test_every_layer_has_each_combination_once(layer: str, norm: str) -> None:
    tails = [(norm, "relu"), (norm, "relu6"), ("relu",), ("relu6",), (norm,)]
    found = [row.pattern[1:] for row in FUSIONS if row.pattern[0] == layer]
    assert sorted(found) == sorted(tails)
    assert len(found) == len(set(found))


@pytest.mark.parametrize("row", FUSIONS, ids=lambda row: "-".join(row.pattern))
def test_a_row_is_made_of_known_ops_and_stands_before_its_prefixes(row: Fusion) -> None:
    assert all(op_named(name) is not None for name in row.pattern)
    later = [other.pattern for other in FUSIONS[FUSIONS.index(row) + 1 :]]
    assert not any(len(pattern) > len(row.pattern) and pattern[: len(row.pattern)] == row.pattern for pattern in later)


def test_layers_of_the_table_are_the_weighted_types() -> None:
    types = {kind for layer, _ in LAYERS_AND_NORMS for kind in op_named(layer).modules}
    assert types == set(WEIGHTED_TYPES)
    assert len(LAYERS_AND_NORMS) == len({layer for layer, _ in LAYERS_AND_NORMS})


def test_a_row_knows_its_norm_and_activation() -> None:
    whole, bare = Fusion(("conv2d", "batch_norm2d", "relu6")), Fusion(("linear", "relu"))
    assert (whole.norm, whole.activation) == ("batch_norm2d", "relu6")
    assert (bare.norm, bare.activation) == (None, "relu")
    assert Fusion(("conv2d", "batch_norm2d")).activation is None


def test_a_row_builds_a_container_that_computes_the_chain() -> None:
    conv, bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    x = torch.randn(2, 3, 6, 6)
    row = next(row for row in FUSIONS if row.pattern == ("conv2d", "batch_norm2d", "relu6"))
    fused = row.fused(conv, bn, FUSIBLE_ACTIVATIONS["relu6"]()).eval()
    assert isinstance(fused, FusedLayer)
    assert torch.equal(fused(x), torch.clamp(bn(conv(x)), 0, 6))


def test_activations_of_the_table_are_new_each_time_and_right() -> None:
    x = torch.tensor([-1.0, 3.0, 9.0])
    assert FUSIBLE_ACTIVATIONS["relu"]()(x.clone()).tolist() == [0.0, 3.0, 9.0]
    assert FUSIBLE_ACTIVATIONS["relu6"]()(x.clone()).tolist() == [0.0, 3.0, 6.0]
    assert FUSIBLE_ACTIVATIONS["relu"]() is not FUSIBLE_ACTIVATIONS["relu"]()


def test_fusions_without_takes_out_exactly_the_named_rows() -> None:
    unwanted = frozenset({("conv2d", "relu"), ("linear", "batch_norm1d", "relu")})
    rest = fusions_without(unwanted)
    assert len(rest) == len(FUSIONS) - 2
    assert not unwanted & {row.pattern for row in rest}
    assert fusions_without(frozenset()) == FUSIONS
