"""A program of ``torch.export`` as a module of torch's functions, which fxqat knows by their names.

1. What checks the inputs (sizes, guards) goes;
2. ``torch.ops.aten.NAME.OVERLOAD`` becomes the function NAME of ``torch.nn.functional`` or ``torch``, or the method
   NAME, which take the same arguments in the same order, except those in :data:`OTHERS`;
3. a BatchNorm with statistics becomes the module, which fxqat folds into the convolution before it.

Parameters and buffers keep their names. The module that torch makes of a program refuses eval(), this one does not.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxqat.errors import ConfigError
from fxqat.utils.contexts import buffers_kept, equal_random_numbers
from fxqat.utils.tensors import flatten_tensors
from fxqat.utils.torch_compat import OPERATORS

logger = logging.getLogger(__name__)


def _slice(x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    end = None if isinstance(end, int) and end >= 2**62 else end
    return x[(*[slice(None)] * (dim % x.dim()), slice(start, end, step))]


def _embedding(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    padding = None if padding_idx < 0 else padding_idx
    return F.embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _interpolate(mode: str) -> Callable[..., Any]:
    def interpolate(x: Any, size: Any = None, *rest: Any) -> Any:
        align_corners, factors = rest if len(rest) == 2 else (None, *rest)
        return F.interpolate(x, size, factors if size is None else None, mode, align_corners)

    return interpolate


OTHERS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "div": torch.div,
    "embedding": _embedding,
    "layer_norm": lambda x, shape, weight=None, bias=None, eps=1e-5, *_: F.layer_norm(x, shape, weight, bias, eps),
    "mul": operator.mul,
    "slice": _slice,
    "softmax": lambda x, dim, dtype=None: F.softmax(x, dim, dtype=dtype),
    "sym_size": lambda x, dim: x.size(dim),
    "upsample_bilinear2d": _interpolate("bilinear"),
    "upsample_nearest2d": _interpolate("nearest"),
}
"""By the name of the operator: functions that take its arguments."""

NORMS: dict[int, type[nn.Module]] = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
"""By the number of dimensions of their input."""

CHECKS = {"_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range_for_size", "_guards_fn"}


def read_exported(path: Path) -> nn.Module:
    """The module of a program that ``torch.export.save`` wrote, in eval mode.

    Raises:
        ConfigError: it is none, has an operator for which there is no function of torch, or computes something else
            with these functions on the inputs that it was exported with.
    """
    try:
        program = torch.export.load(str(path))
        module = program.module(check_guards=False)
    except Exception as error:
        raise ConfigError(f"MODEL {path} is not a program of torch.export.save: {error}") from error
    assert isinstance(module, fx.GraphModule)
    written = fx.GraphModule(module, _Written(module).transform().graph, type(module).__name__).eval()
    if program.example_inputs is None:
        logger.warning("%s holds no example inputs: the model read from it is not compared with the program", path)
    else:
        _check_same(path, written, module, program.example_inputs)
    return written


def _check_same(path: Path, written: nn.Module, module: nn.Module, inputs: tuple[tuple[Any, ...], Any]) -> None:
    """Check that the written module computes what the program does, with the same random numbers."""
    args, kwargs = inputs
    with torch.no_grad(), equal_random_numbers(module), buffers_kept(module):
        exact = flatten_tensors(module(*args, **kwargs))
    with torch.no_grad(), equal_random_numbers(module), buffers_kept(module):
        found = flatten_tensors(written(*args, **kwargs))
    if len(found) != len(exact) or not all(map(_is_close, found, exact)):
        raise ConfigError(
            f"MODEL {path}: fxqat cannot read this program: written with torch's functions it computes something else "
            "on the inputs that it was exported with. Give the Python model, or its ONNX file"
        )


def _is_close(found: Tensor, exact: Tensor) -> bool:
    if not exact.is_floating_point() or found.shape != exact.shape:
        return torch.equal(found, exact)
    return torch.allclose(found, exact, rtol=1e-4, atol=1e-5, equal_nan=True)


class _Written(fx.Transformer):
    """Writes the graph again with functions of torch."""

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a submodule; case 1."""
        return None if target in CHECKS else super().call_module(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; cases 1 and 2."""
        if not isinstance(target, OPERATORS):
            return super().call_function(target, args, kwargs)
        name = target.overloadpacket.__name__
        if name in CHECKS:
            return None
        if name == "batch_norm":
            return self._batch_norm(*args)
        found = OTHERS.get(name) or next((vars(home)[name] for home in (F, torch) if name in vars(home)), None)
        if found is None and hasattr(Tensor, name):
            return super().call_method(name, args, kwargs)
        if found is None:
            raise ConfigError(f"MODEL: {target} of the program has no function in torch")
        return super().call_function(found, args, kwargs)

    def _batch_norm(self, x: fx.Proxy, weight: Any, bias: Any, mean: Any, var: Any, *rest: Any) -> Any:
        """Case 3."""
        training, momentum, eps, _ = rest
        if training or mean is None:
            arguments: Any = (x, mean, var, weight, bias, training, momentum, eps)
            return super().call_function(F.batch_norm, arguments, {})
        path = str(mean.node.target).rpartition(".")[0]
        state = self.module.get_submodule(path).state_dict()
        norm = NORMS[self.rank](len(state["running_mean"]), eps, momentum, weight is not None)
        norm.load_state_dict(state, strict=False)
        self.module.set_submodule(path, norm)
        return self.tracer.create_proxy("call_module", path, (x,), {})

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and keep how many dimensions its result has."""
        self.rank = n.meta["val"].dim() if isinstance(n.meta.get("val"), Tensor) else 0
        return super().run_node(n)
