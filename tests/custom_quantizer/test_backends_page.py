"""The page of the backends is what the tables say."""

import re

import pytest

from fxqat.custom_quantizer.backend_type import TABLES, BackendType
from fxqat.ops.table import OPS
from tests.custom_quantizer.generate_backends import COMMAND, DOCS, PAGES, PLACED, rows_of_float, rows_of_rules

PAGE = DOCS / "reference" / "backends.rst"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_committed_page_is_the_generated_one(path):
    committed = path.read_text(encoding="utf-8")
    assert committed.splitlines() == PAGES[path]().splitlines(), f"run {COMMAND}"
    assert committed.endswith("\n")


def test_every_backend_has_a_section_with_its_source():
    text = PAGE.read_text(encoding="utf-8")
    for spec in TABLES:
        assert f"\n{spec.name}\n{'-' * len(spec.name)}\n" in text
        assert f"Source: {spec.source}." in text
    assert len(TABLES) == len(BackendType)


def test_every_op_is_in_one_row_of_every_backend():
    families = {op.family for op in PLACED}
    for spec in TABLES:
        cells = [row[0] for row in (*rows_of_rules(spec), *rows_of_float(spec))]
        named = re.findall(r"``(\w+)``", ", ".join(cells))
        whole = re.findall(r"(?<!\*)\*(\w+)\*(?!\*)", ", ".join(cells))
        expanded = named + [op.name for op in OPS if op.family in whole]
        assert sorted(expanded) == sorted(op.name for op in PLACED), spec.name
        assert set(whole) <= families
