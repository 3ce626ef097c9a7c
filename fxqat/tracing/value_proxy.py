"""Proxies that carry their value, so that the model's Python code can look at sizes, lengths, types and structure.

While the model is traced with example inputs, every node is computed on them as it is made. A proxy then behaves like
its value:

1. rank, type and structure (``x.dim()``, ``x.dtype``, ``len`` of a list, keys of a dict, ``isinstance``) are those of
   the value;
2. sizes are proxies of numbers, and arithmetic on them stays symbolic. Where Python needs a number (``range``, ``if``)
   it gets that of the example inputs, and this is recorded. So are the lengths and keys of lists and dicts among the
   inputs, and the memory layout of a tensor;
3. where Python code needs the values of a tensor, also by way of numpy or a list, :class:`DataDependent` is raised. An
   ``assert`` of them is checked on the example inputs, and recorded: the graph does not have it. So is the truth of a
   trained parameter, as in ``if self.alpha:``, which in general asks whether there is one.
"""

from __future__ import annotations

import builtins
import inspect
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fxqat.tracing.asserts import is_asserted
from fxqat.tracing.attention import multi_head_attention
from fxqat.utils.train_eval_graph import eval_or_train

CONSTANT_METHODS = frozenset(("dim", "ndimension", "is_floating_point", "is_complex", "element_size", "get_device"))
"""Tensor methods whose result does not depend on sizes that may vary."""

LAYOUT_METHODS = frozenset(("is_contiguous", "stride", "storage_offset"))
"""Tensor methods whose result depends on how the values lie in memory: it is recorded."""

TENSOR_VALUED = frozenset(("T", "mT", "H", "mH", "data", "real", "imag", "grad", "device"))
"""Tensor attributes that become nodes; all others are read from the value."""

COMPOSED: dict[Any, Callable[..., Any]] = {F.multi_head_attention_forward: multi_head_attention}
"""Functions of torch that are traced into, and the function that is traced instead."""

ANSWERED = (torch.is_floating_point, torch.is_complex)
"""Functions of torch that are treated as the method of the same name."""


@dataclass(frozen=True)
class TracedValue:
    """A value that was computed while tracing, and what it depends on.

    Args:
        data: the value itself.
        from_input: it depends on the values of the inputs of the model.
        sized: it depends on the sizes of the inputs.
        from_content: it, or its size, depends on the values of a tensor, so it may differ for other data.
        reads: names of the parameters and buffers whose values it is computed from.
        sized_by: names of those whose values its size depends on.
    """

    data: Any
    from_input: bool = False
    sized: bool = False
    from_content: bool = False
    reads: frozenset[str] = frozenset()
    sized_by: frozenset[str] = frozenset()

    def depends_on_values(self) -> bool:
        """Whether it depends on the values of a tensor that may differ later: of an input, a parameter or a buffer."""
        return self.from_content or (isinstance(self.data, Tensor) and (self.from_input or bool(self.reads)))


OF_AUTOGRAD = frozenset(("requires_grad", "grad_fn", "is_leaf"))
"""Tensor attributes that say whether gradients are computed."""

NUMBERS = (bool, int, float, complex, np.generic)
"""The types of numbers."""


class DataDependent(fx.proxy.TraceError):
    """Python code needs something that depends on tensor values, or that is not known while tracing."""


class DataProxy(fx.Proxy):
    """A proxy to whose ``data`` forward can assign a tensor: its values are copied, which is seen as a write."""

    @property
    def data(self) -> Any:
        """The node that reads it."""
        return self.__getattr__("data")

    @data.setter
    def data(self, values: Any) -> None:
        self.data.copy_(values)


class ValueProxy(DataProxy):
    """A proxy with its value, or None if the value is not known.

    If forward writes an item of a list or dict among its inputs, ``fxqat_written`` is what it holds from then on. Of a
    product or quotient that is a float, ``fxqat_operands`` are whether it is a quotient, and what it is computed from.
    """

    __array_priority__ = 1000  # as of a tensor: numpy leaves the arithmetic of its scalars with a proxy to the proxy

    def __init__(self, node: fx.Node, tracer: fx.Tracer, value: TracedValue | None) -> None:
        super().__init__(node, tracer)
        self.fxqat_value = value
        self.fxqat_written: list[Any] | dict[Any, Any] | None = None
        self.fxqat_operands: tuple[bool, Any, Any] | None = None

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A call of a torch function with a proxy becomes a node, or several."""
        if function in COMPOSED:
            return COMPOSED[function](*args, **(kwargs or {}))
        if function in ANSWERED:
            return getattr(args[0], function.__name__)()
        return super().__torch_function__(function, types, args, kwargs)

    # attributes and structure

    def __getattr__(self, name: str) -> Any:
        traced = self.__dict__.get("fxqat_value")
        if name.startswith("__array"):  # numpy's protocols
            raise AttributeError(name)
        if traced is None or name.startswith("__"):
            return super().__getattr__(name)
        value = traced.data
        if isinstance(value, Tensor):
            if name == "shape":
                return self.size()
            if name == "data":
                return self.detach()
            if name == "ndim":
                return value.ndim
            if name in CONSTANT_METHODS:
                return getattr(value, name)
            if name in LAYOUT_METHODS:
                return self._recorded_method(name)
            if name in OF_AUTOGRAD:
                raise DataDependent(f"Python code reads {name} of {self.node}, which is not known while tracing")
            if not callable(getattr(value, name)) and name not in TENSOR_VALUED:
                return getattr(value, name)
        elif isinstance(value, torch.device) and name in ("type", "index"):
            return getattr(value, name)
        elif self.fxqat_written is not None:
            return getattr(self.fxqat_written, name)
        elif isinstance(value, dict) and name in ("keys", "values", "items", "get"):
            self._record_structure()
            return getattr({key: self._item(key) for key in value}, name)
        found = getattr(value, name)
        if found is None:
            return None  # so that "is None" works
        if callable(found):
            return fx.proxy.Attribute(self, name)
        return self.tracer.create_proxy("call_function", builtins.getattr, (self, name), {})

    def size(self, dim: int | None = None) -> Any:
        """One size, or the tuple of all sizes."""
        traced = self.fxqat_value
        if dim is None and traced is not None and isinstance(traced.data, Tensor):
            return tuple(self.size(i) for i in range(traced.data.dim()))
        args = (self,) if dim is None else (self, dim)
        return self.tracer.create_proxy("call_method", "size", args, {})

    def __iter__(self) -> Iterator[Any]:
        value = self.fxqat_require("iterates over")
        if self.fxqat_written is not None:
            return iter(list(self.fxqat_written))
        self._record_structure()
        if isinstance(value, dict):
            return iter(list(value))
        count = self.__len__() if isinstance(value, Tensor) else len(list(value))
        return iter([self._item(i) for i in range(count)])

    def __getitem__(self, key: Any) -> Any:
        traced = self.fxqat_value
        if self.fxqat_written is not None:
            return self.fxqat_written[key]
        if traced is not None and type(traced.data) in (list, tuple):
            places = range(len(traced.data))
            if isinstance(key, slice) or (type(key) is int and key < 0):
                self._record_structure()
            if isinstance(key, slice):  # a slice of a list of tensors is a list of tensors
                return type(traced.data)(self._item(i) for i in places[key])
            if type(key) is int and -len(places) <= key < 0:
                key = places[key]  # one spelling for each item
        return self.tracer.create_proxy("call_function", operator.getitem, (self, key), {})

    def _item(self, key: Any) -> Any:
        traced = self.fxqat_value
        if traced is not None and not isinstance(traced.data, Tensor) and traced.data[key] is None:
            return None  # so that "is None" works
        return self.tracer.create_proxy("call_function", operator.getitem, (self, key), {})

    def __len__(self) -> int:
        value = self.fxqat_require("takes the length of")
        if self.fxqat_written is not None:
            return len(self.fxqat_written)
        self._record_structure()
        return int(self.size(0)) if isinstance(value, Tensor) else len(value)

    def __contains__(self, item: Any) -> bool:
        value = self.fxqat_require("searches in")
        if isinstance(value, Tensor):
            raise self._depends_on_values("searches in")
        self._record_structure()
        return item in (value if self.fxqat_written is None else self.fxqat_written)

    def __setitem__(self, key: Any, item: Any) -> None:
        value = None if self.fxqat_value is None else self.fxqat_value.data
        if isinstance(value, (list, dict)):
            before = None if self.fxqat_written is None else self.fxqat_written.copy()
            self.tracer.patches.assigned.append(partial(setattr, self, "fxqat_written", before))  # type: ignore[attr-defined]
            if self.fxqat_written is None:
                self._record_structure()
                items = value if isinstance(value, dict) else range(len(value))
                content = {place: self._item(place) for place in items}
                self.fxqat_written = content if isinstance(value, dict) else list(content.values())
                if self.node.op == "placeholder":
                    self.tracer.written_inputs.append(str(self.node))  # type: ignore[attr-defined]
            self.fxqat_written[key] = item
            return
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, item), {})

    def _recorded_method(self, name: str) -> Callable[..., Any]:
        """A method of the value whose result is fixed in the graph, which is recorded."""
        traced = self.fxqat_value
        assert traced is not None

        def call(*args: Any, **kwargs: Any) -> Any:
            found = getattr(traced.data, name)(*args, **kwargs)
            if traced.from_input:
                self.tracer.record_forced(f"{self.node}.{name}()", found)  # type: ignore[attr-defined]
            return found

        return call

    def _record_structure(self) -> None:
        """Record that the length or the keys of a list or dict among the inputs are fixed in the graph."""
        traced, node = self.fxqat_value, self.node
        if traced is None or not isinstance(traced.data, (list, tuple, dict)):
            return
        while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        if node.op == "placeholder":
            content = list(traced.data) if isinstance(traced.data, dict) else f"{len(traced.data)} items"
            self.tracer.record_forced(f"structure of {self.node}", content)  # type: ignore[attr-defined]

    # numbers

    def fxqat_require(self, verb: str) -> Any:
        """The value.

        Args:
            verb: what Python code does with it, for the error: ``"iterates over"``.

        Raises:
            DataDependent: it is not known.
        """
        traced = self.fxqat_value
        if traced is None:
            raise DataDependent(f"Python code {verb} {self.node}, whose value is not known while tracing")
        return traced.data

    def _depends_on_values(self, verb: str) -> DataDependent:
        return DataDependent(f"Python code {verb} {self.node}, which depends on tensor values")

    def _number(self, verb: str) -> Any:
        value = self.fxqat_require(verb)
        traced = self.fxqat_value
        assert traced is not None
        if traced.from_content or (isinstance(value, Tensor) and traced.from_input):
            raise self._depends_on_values(verb)
        self.tracer.check_constant(traced.reads, f"{verb} {self.node}")  # type: ignore[attr-defined]
        number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        if traced.sized and isinstance(number, (bool, int, float)):
            self.tracer.record_forced(self.node, number)  # type: ignore[attr-defined]
        return value

    def __bool__(self) -> bool:
        traced, frame = self.fxqat_value, inspect.currentframe()
        if traced is None or not traced.depends_on_values():
            return bool(self._number("branches on"))
        is_trained = isinstance(traced.data, nn.Parameter) and traced.data.requires_grad
        if not is_trained and (frame is None or not is_asserted(frame.f_back)):
            return bool(self._number("branches on"))
        found = bool(traced.data)
        what = f"bool({self.node})" if is_trained else f"assert {self.node}"
        self.tracer.record_forced(what, found)  # type: ignore[attr-defined]
        return found

    def __int__(self) -> int:
        frame = inspect.currentframe()
        self.tracer.record_int(self, frame.f_back if frame is not None else None)  # type: ignore[attr-defined]
        return int(self._number("needs a number from"))

    def __index__(self) -> int:
        return operator.index(self._number("needs a number from"))

    def __float__(self) -> float:
        return float(self._number("needs a number from"))

    def __hash__(self) -> int:
        traced = self.__dict__.get("fxqat_value")
        if traced is not None and isinstance(traced.data, (*NUMBERS, str)):
            self.tracer.hashed = True  # type: ignore[attr-defined]
            return hash(self._number("hashes"))
        if traced is not None and isinstance(traced.data, (torch.device, torch.dtype)):  # the key of a dict, say
            self.tracer.hashed = True  # type: ignore[attr-defined]
            return hash(traced.data)
        return id(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self._number("needs a number from"), dtype)

    def __round__(self, digits: int | None = None) -> Any:
        args = (self,) if digits is None else (self, digits)
        return self.tracer.create_proxy("call_function", builtins.round, args, {})

    def __copy__(self) -> Any:  # as of a tensor: without its gradient
        return self.tracer.create_proxy("call_method", "detach", (self,), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.tracer.create_proxy("call_method", "clone", (self,), {})

    def __format__(self, spec: str) -> str:
        traced = self.fxqat_value
        if traced is None or isinstance(traced.data, Tensor):
            return repr(self)
        if not isinstance(traced.data, NUMBERS):
            return repr(self)
        return format(self._number("prints"), spec)

    def __repr__(self) -> str:
        traced = self.__dict__.get("fxqat_value")
        if traced is None or traced.from_content or not isinstance(traced.data, NUMBERS):
            return super().__repr__()
        return repr(self._number("prints"))


def _in_place(name: str) -> Callable[[ValueProxy, Any], Any]:
    """``x += y``: overwrites a tensor, but gives a new number for a number."""
    out_of_place = getattr(operator, name)

    def assign(self: ValueProxy, other: Any) -> Any:
        traced = self.fxqat_value
        overwrites = traced is not None and isinstance(traced.data, Tensor)
        target = getattr(operator, f"i{name}") if overwrites else out_of_place
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    return assign


for _name in ("add", "sub", "mul", "truediv"):
    setattr(ValueProxy, f"__i{_name}__", _in_place(_name))


class TrainingFlag:
    """``self.training`` while tracing: a node that follows the mode where it is passed on; a branch on it is reported.

    Args:
        decide: called when Python code branches on the flag; returns the value that this code sees.
    """

    def __init__(self, decide: Callable[[], bool]) -> None:
        self.decide = decide

    def __bool__(self) -> bool:
        return self.decide()

    __int__ = __index__ = __float__ = lambda self: int(self.decide())  # noqa: E731

    def __eq__(self, other: object) -> bool:
        return bool(self) == other

    def __hash__(self) -> int:
        return hash(bool(self))

    def __fx_create_arg__(self, tracer: fx.Tracer) -> fx.Node:
        return tracer.create_proxy("call_function", eval_or_train, (False, True), {}).node


def _of_flag(name: str) -> Callable[..., Any]:
    """An operator of a flag, as of the bool that it is."""

    def compute(self: TrainingFlag, *others: Any) -> Any:
        return getattr(bool(self), name)(*others)

    return compute


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "and",
    "rand",
    "or",
    "ror",
    "xor",
    "neg",
):
    setattr(TrainingFlag, f"__{_name}__", _of_flag(f"__{_name}__"))


def value_of(argument: Any) -> Any:
    """An argument structure with values in place of the proxies.

    Raises:
        DataDependent: the value of a proxy is not known.
    """
    if isinstance(argument, ValueProxy):
        return argument.fxqat_require("uses") if argument.fxqat_written is None else value_of(argument.fxqat_written)
    if isinstance(argument, TrainingFlag):
        return False
    if isinstance(argument, fx.Proxy):
        raise DataDependent(f"the value of {argument} is not known while tracing")
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
        yield from proxies_in(argument.fxqat_written)
    elif isinstance(argument, (tuple, list)):
        for item in argument:
            yield from proxies_in(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from proxies_in(item)
    elif isinstance(argument, slice):
        yield from proxies_in((argument.start, argument.stop, argument.step))
