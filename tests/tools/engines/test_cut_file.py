"""What lies between quantized tensors, which of them are the ends of blocks, and which runs see every pair."""

import pytest

from fxqat.tools.engines.cut_file import read_units, runs_together
from tests.quantized_graph import clipped, concat, residual

BLOCK = residual()
MODELS = {"residual": BLOCK, "concat": concat(False), "clipped": clipped()}


def test_the_units_of_a_residual_block() -> None:
    file = read_units(BLOCK)
    assert file.sources == {
        "x_q": (),
        "inner_q": ("x_q",),
        "branch_q": ("inner_q",),
        "add_q": ("branch_q", "x_q"),
        "add_dq": ("add_q",),
    }
    operators = {name: [node.name for node in nodes] for name, nodes in file.operators.items()}
    assert operators == {"x_q": [], "inner_q": ["inner"], "branch_q": ["branch"], "add_q": ["add"], "add_dq": []}


def test_a_clip_of_integers_belongs_to_its_quantizer() -> None:
    file = read_units(clipped())
    assert list(file.clips) == ["inner_q"]
    assert file.sources["outer_q"] == ("inner_q",)
    assert [node.name for node in file.operators["outer_q"]] == ["outer"]


def test_the_first_run_has_whole_blocks_inside() -> None:
    inside, ends = runs_together(read_units(BLOCK))[0]
    assert inside == {"inner_q", "branch_q"}
    assert ends == {"x_q", "add_q", "add_dq"}


@pytest.mark.parametrize("name", MODELS)
def test_every_pair_is_in_a_run(name: str) -> None:
    file = read_units(MODELS[name])
    runs = runs_together(file)
    pairs = [(source, reader) for reader, sources in file.sources.items() for source in sources]
    seen = [any(source in inside and reader in readers for inside, readers in runs) for source, reader in pairs]
    assert all(seen)
    assert not any(inside & readers for inside, readers in runs)
