"""Torch's exporter parses its hundreds of operator translations anew for each export, which is half of the time that a
small model takes. In the tests it does so once in each process.
"""

from torch.onnx._internal.exporter import _registration


def build_once() -> None:
    """Make torch's exporter copy a table that was built before; custom translations are added to the copy."""
    registry_type = _registration.ONNXRegistry
    build, built = registry_type.from_torchlib, {}

    def from_torchlib(*args, **kwargs):
        key = (args, tuple(sorted(kwargs.items())))
        if key not in built:
            built[key] = build(*args, **kwargs)
        copied = registry_type()
        vars(copied).update(vars(built[key]))
        copied.functions = {op: list(translations) for op, translations in built[key].functions.items()}
        return copied

    registry_type.from_torchlib = staticmethod(from_torchlib)
