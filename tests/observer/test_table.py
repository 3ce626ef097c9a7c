"""The names that backends and users write."""

from fxqat.observer.base import ObserverBase
from fxqat.observer.ema_min_max import EMAMinMaxObserver
from fxqat.observer.min_max import MinMaxObserver
from fxqat.observer.mse import MSEObserver
from fxqat.observer.table import OBSERVERS


def test_names_and_classes() -> None:
    assert OBSERVERS["MinMax"] is MinMaxObserver
    assert OBSERVERS["EMAMinMax"] is EMAMinMaxObserver
    assert OBSERVERS["MSE"] is MSEObserver
    assert all(issubclass(kind, ObserverBase) for kind in OBSERVERS.values())


def test_a_class_is_called_as_its_name_says() -> None:
    assert [kind.__name__ for kind in OBSERVERS.values()] == [f"{name}Observer" for name in OBSERVERS]
    assert len(set(OBSERVERS.values())) == len(OBSERVERS)
