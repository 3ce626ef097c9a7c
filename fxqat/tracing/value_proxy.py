"""Proxies that carry their value, so that Python code of the model can look at sizes, lengths, types and structure.

While the model is traced with example inputs, every node is computed on them as it is made. A proxy then answers what a
tensor would answer:

1. rank, type and structure (``x.dim()``, ``x.dtype``, ``len`` of a list, keys of a dict, ``isinstance``) are answered;
2. sizes are proxies that stand for numbers: arithmetic on them stays symbolic. Where Python needs a number (``range``,
   ``if``, ``int``) it gets one, and that is recorded;
3. what depends on the content of a tensor has no answer: :class:`DataDependent`.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from fxqat.tracing.attention import multi_head_attention

CONSTANT_METHODS = frozenset(
    ("dim", "ndimension", "is_floating_point", "is_complex", "is_contiguous", "element_size", "stride", "get_device")
)
"""Tensor methods whose answer does not depend on sizes that may vary."""

TENSOR_VALUED = frozenset(("T", "mT", "H", "mH", "data", "real", "imag", "grad", "device"))
"""Tensor attributes that become nodes; any other is answered."""


COMPOSED: dict[Any, Callable[..., Any]] = {F.multi_head_attention_forward: multi_head_attention}
"""Functions of torch that are traced into, and by what."""


ANSWERED = (torch.is_floating_point, torch.is_complex)
"""Functions of torch that are answered as the method of the same name."""


@dataclass(frozen=True)
class TracedValue:
    """A value that was computed while tracing, and what it depends on.

    Args:
        data: the value itself.
        from_input: it depends on the inputs of the model.
        sized: it depends on the sizes of the inputs.
        from_content: it, or its size, depends on the values of a tensor, so it may differ for other data.
    """

    data: Any
    from_input: bool = False
    sized: bool = False
    from_content: bool = False


class DataDependent(fx.proxy.TraceError):
    """Python asked for something that depends on the content of a tensor, or that is not known while tracing."""


class ValueProxy(fx.Proxy):
    """A proxy with what is known of its value (None if nothing is)."""

    def __init__(self, node: fx.Node, tracer: fx.Tracer, known: TracedValue | None) -> None:
        super().__init__(node, tracer)
        self.fxqat_value = known

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A function of torch that is called with a proxy becomes a node, or several."""
        if function in COMPOSED:
            return COMPOSED[function](*args, **(kwargs or {}))
        if function in ANSWERED:
            return getattr(args[0], function.__name__)()
        return super().__torch_function__(function, types, args, kwargs)

    # attributes and structure

    def __getattr__(self, name: str) -> Any:
        known = self.__dict__.get("fxqat_value")
        if name.startswith("__array"):  # numpy's protocols
            raise AttributeError(name)
        if known is None or name.startswith("__"):
            return super().__getattr__(name)
        value = known.data
        if isinstance(value, Tensor):
            if name == "shape":
                return self.size()
            if name == "ndim":
                return value.ndim
            if name in CONSTANT_METHODS:
                return getattr(value, name)
            if not callable(getattr(value, name)) and name not in TENSOR_VALUED:
                return getattr(value, name)
        elif isinstance(value, torch.device) and name in ("type", "index"):
            return getattr(value, name)
        elif isinstance(value, dict) and name in ("keys", "values", "items", "get"):
            return getattr({key: self._item(key) for key in value}, name)
        if callable(getattr(value, name)):
            return fx.proxy.Attribute(self, name)
        return self.tracer.create_proxy("call_function", builtins.getattr, (self, name), {})

    def size(self, dim: int | None = None) -> Any:
        """A size, or the tuple of all of them."""
        known = self.fxqat_value
        if dim is None and known is not None and isinstance(known.data, Tensor):
            return tuple(self.size(i) for i in range(known.data.dim()))
        args = (self,) if dim is None else (self, dim)
        return self.tracer.create_proxy("call_method", "size", args, {})

    def __iter__(self) -> Iterator[Any]:
        value = self.fxqat_answer("iterate over it")
        if isinstance(value, dict):
            return iter(list(value))
        count = len(self) if isinstance(value, Tensor) else len(list(value))
        return iter([self._item(i) for i in range(count)])

    def __getitem__(self, key: Any) -> Any:
        known = self.fxqat_value
        if known is not None and type(known.data) in (list, tuple):
            places = range(len(known.data))
            if isinstance(key, slice):  # a part of a list of tensors is a list of tensors
                return type(known.data)(self._item(i) for i in places[key])
            if type(key) is int and -len(places) <= key < 0:
                key = places[key]  # one spelling of each item
        return self.tracer.create_proxy("call_function", operator.getitem, (self, key), {})

    def _item(self, key: Any) -> Any:
        known = self.fxqat_value
        if known is not None and not isinstance(known.data, Tensor) and known.data[key] is None:
            return None  # so that "is None" sees it
        return self.tracer.create_proxy("call_function", operator.getitem, (self, key), {})

    def __len__(self) -> int:
        value = self.fxqat_answer("take its length")
        return int(self.size(0)) if isinstance(value, Tensor) else len(value)

    def __contains__(self, item: Any) -> bool:
        value = self.fxqat_answer("look into it")
        if isinstance(value, Tensor):
            raise DataDependent("'in' looks at the content of a tensor")
        return item in value

    def __setitem__(self, key: Any, item: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, item), {})

    # numbers

    def fxqat_answer(self, what: str) -> Any:
        """The value, if it is known."""
        known = self.fxqat_value
        if known is None:
            raise DataDependent(f"Python has to {what}, but the value of {self.node} is not known while tracing")
        return known.data

    def _number(self, what: str) -> Any:
        value = self.fxqat_answer(what)
        known = self.fxqat_value
        assert known is not None
        content = known.from_content or (isinstance(value, Tensor) and known.from_input)
        if content:
            raise DataDependent(f"Python has to {what}, which depends on the content of the tensor {self.node}")
        if known.sized and isinstance(value, (bool, int, float)):
            self.tracer.force(self.node, value)  # type: ignore[attr-defined]
        return value

    def __bool__(self) -> bool:
        return bool(self._number("decide"))

    def __int__(self) -> int:
        return int(self._number("have a number"))

    def __index__(self) -> int:
        return operator.index(self._number("have a number"))

    def __float__(self) -> float:
        return float(self._number("have a number"))

    def __hash__(self) -> int:
        known = self.__dict__.get("fxqat_value")
        if known is not None and isinstance(known.data, (bool, int, float)):
            self.tracer.hashed = True  # type: ignore[attr-defined]
            return hash(self._number("hash it"))
        return id(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._number("have a number"), dtype)

    def __round__(self, digits: int | None = None) -> Any:
        args = (self,) if digits is None else (self, digits)
        return self.tracer.create_proxy("call_function", builtins.round, args, {})

    def __format__(self, spec: str) -> str:
        known = self.fxqat_value
        if known is None or isinstance(known.data, Tensor) or known.from_content:
            return str(self)
        return format(self._number("write it"), spec)


def _in_place(name: str) -> Callable[[ValueProxy, Any], Any]:
    """``x += y``: overwrites a tensor; makes another number of a number."""
    out_of_place = getattr(operator, name)

    def assign(self: ValueProxy, other: Any) -> Any:
        known = self.fxqat_value
        overwrites = known is not None and isinstance(known.data, Tensor)
        target = getattr(operator, f"i{name}") if overwrites else out_of_place
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return assign


for _name in ("add", "sub", "mul", "truediv"):
    setattr(ValueProxy, f"__i{_name}__", _in_place(_name))


class TrainingFlag:
    """``self.training`` while tracing: False where it is passed on; whoever decides by it is noticed and told.

    Args:
        decide: called when Python code decides by it; gives what that code sees.
    """

    def __init__(self, decide: Callable[[], bool]) -> None:
        self.decide = decide

    def __bool__(self) -> bool:
        return self.decide()

    def __fx_create_arg__(self, tracer: fx.Tracer) -> bool:
        return False


def value_of(argument: Any) -> Any:
    """The value of an argument structure, proxies replaced by their values.

    Raises:
        DataDependent: a proxy in it has no known value.
    """
    if isinstance(argument, ValueProxy):
        return argument.fxqat_answer("use it")
    if isinstance(argument, TrainingFlag):
        return False
    if isinstance(argument, fx.Proxy):
        raise DataDependent(f"the value of {argument} is not known")
    if isinstance(argument, tuple):
        items = [value_of(item) for item in argument]
        return type(argument)(*items) if hasattr(argument, "_fields") else tuple(items)
    if isinstance(argument, list):
        return [value_of(item) for item in argument]
    if isinstance(argument, dict):
        return {key: value_of(item) for key, item in argument.items()}
    if isinstance(argument, slice):
        return slice(value_of(argument.start), value_of(argument.stop), value_of(argument.step))
    return argument


def proxies_in(argument: Any) -> Iterator[ValueProxy]:
    """All proxies in an argument structure."""
    if isinstance(argument, ValueProxy):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from proxies_in(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from proxies_in(item)
    elif isinstance(argument, slice):
        yield from proxies_in((argument.start, argument.stop, argument.step))
