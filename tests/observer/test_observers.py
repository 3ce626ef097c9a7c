"""The names that backends and users write, and the page that describes them."""

import inspect
import re
from pathlib import Path

import pytest

import fxqat.observer
from fxqat.config.config import parse_config
from fxqat.errors import ConfigError
from fxqat.observer.base import ObserverBase
from fxqat.observer.ema_min_max import EMAMinMaxObserver
from fxqat.observer.min_max import MinMaxObserver
from fxqat.observer.mse import MSEObserver
from fxqat.observer.observers import ALIASES, HINTS, OBSERVERS
from fxqat.observer.pot_floor import PoTFloorObserver

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "observers.rst").read_text(encoding="utf-8")


def test_names_and_classes() -> None:
    assert OBSERVERS["MinMax"] is MinMaxObserver
    assert OBSERVERS["EMAMinMax"] is EMAMinMaxObserver
    assert OBSERVERS["MSE"] is MSEObserver
    assert all(issubclass(kind, ObserverBase) for kind in OBSERVERS.values())


def test_a_class_is_called_as_its_name_says() -> None:
    assert [kind.__name__ for kind in OBSERVERS.values()] == [f"{name}Observer" for name in OBSERVERS]
    assert len(set(OBSERVERS.values())) == len(OBSERVERS)
    assert {*fxqat.observer.__all__} == {"ObserverBase", *(kind.__name__ for kind in OBSERVERS.values())}


def test_other_names_mean_one_of_ours() -> None:
    assert not {*ALIASES} & {*OBSERVERS}
    assert {*ALIASES.values()} <= {*OBSERVERS}


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("EMAQuantileObserver", "Percentile"),
        ("KLDObserver", "KL"),
        ("LSQPlusObserver", "LSQPlus"),
        ("LSQObserver", "LSQ"),
        ("PoTModeObserver", "PoTMode"),
        ("MinMaxFloorObserver", "PoTFloor"),
        ("ModeMinMaxFloorObserver", "PoTMode"),
        ("AverageMinMaxObserver", "Average"),
        ("EMAMSEObserver", "EMAMSE"),
        ("ClipStdObserver", "ClipStd"),
        ("AverageMinMax", "Average"),
    ],
)
def test_the_names_of_others_are_read_in_every_place(written: str, meant: str) -> None:
    config = parse_config(
        {
            "extra_qconfig_dict": {"w_observer": written, "a_observer": written},
            "overrides": [{"match": {"node": "x"}, "output": {"observer": written}}],
        }
    )
    assert config.weight.modules["observer"] == meant
    assert config.activation.modules["observer"] == meant
    assert config.overrides[0].changes["output"].modules == {"observer": meant}


def arguments_of(kind: type[ObserverBase]) -> dict[str, str]:
    """The arguments beyond those of all observers, with their defaults."""
    parameters = list(inspect.signature(kind).parameters.values())
    assert [p.name for p in parameters[:3]] == ["scheme", "axis", "num_channels"]
    return {p.name: str(p.default) for p in parameters[3:] if p.kind is not p.VAR_KEYWORD}


@pytest.mark.parametrize("name", OBSERVERS)
def test_the_page_has_every_argument_and_its_default(name: str) -> None:
    row = PAGE.split(f"   * - ``{name}``\n")[1].split("   * - ")[0].split("\nEach range")[0]
    cells = re.split(r"^     - ?", row, flags=re.MULTILINE)[1:]
    assert len(cells) == 3
    assert dict(re.findall(r"``(\w+)`` \(([^)]*)\)", cells[1])) == arguments_of(OBSERVERS[name])


def test_the_page_documents_every_file_and_every_alias_it_names() -> None:
    files = {kind.__module__ for kind in OBSERVERS.values()}
    assert files <= set(re.findall(r"automodule:: (\S+)", PAGE))
    named = dict(re.findall(r"``(\w+)Observer``\s+is\s+``(\w+)``", PAGE))
    assert len(named) == 5
    assert named.items() <= ALIASES.items()
    assert named["MinMaxFloor"] == PoTFloorObserver.__name__.removesuffix("Observer")


@pytest.mark.parametrize("spelling", HINTS)
def test_what_is_spelled_in_another_way_here_is_answered_with_a_hint(spelling: str) -> None:
    with pytest.raises(ConfigError, match="unknown observer") as caught:
        parse_config({"extra_qconfig_dict": {"a_observer": spelling}})
    assert HINTS[spelling] in str(caught.value)
    rows = set(re.findall(r"'(\w+)'", HINTS[spelling])) - {"Fixed"}
    assert rows <= {*OBSERVERS}
    assert rows or "null" in HINTS[spelling]


@pytest.mark.parametrize(
    ("spelling", "row"),
    [
        ("kl", "KL"),
        ("mse", "MSE"),
        ("avg", "Average"),
        ("hist", "Percentile"),
        ("min_max", "MinMax"),
        ("KLQuantizer", "KL"),
    ],
)
def test_paddles_names_of_algorithms_are_understood(spelling: str, row: str) -> None:
    assert parse_config({"extra_qconfig_dict": {"a_observer": spelling}}).activation.modules["observer"] == row
