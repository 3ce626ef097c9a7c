"""Writes in place become new values: fake-quant of an overwritten value would lose the write.

``z = y[:, :2]; z += 1`` changes ``y`` and its other views, too. What is read afterwards is read from new values: ``y``
is ``assign_item(y, (slice(None), slice(2)), z + 1)``, and its views are views of that. Buffers are updated in place.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from fxqat.errors import TraceError
from fxqat.ops.assign_item import after_method, assign_item
from fxqat.ops.identify import identify, operands, out_of_place_method, works_in_place
from fxqat.ops.table import OUT_OF_PLACE
from fxqat.utils.fx_graph import called_module, writes_state
from fxqat.utils.node_meta import ADDRESS, MODE, SHAPE, SPELLING, VALUE, kind_of
from fxqat.utils.source import line_of_node
from fxqat.utils.train_eval_graph import eval_or_train

SHAPING = ("reshape", "flatten", "unflatten", "squeeze", "unsqueeze")
SWAPPING = ("transpose", "swapaxes", "swapdims", "t", "adjoint")
VIEWS = (*SHAPING, "permute", "getitem", "select", "split", "contiguous", "to", "expand", "diagonal", "unfold")
"""Ops whose result may be a view of their first operand, or this operand itself."""

COPIES = ("clone", torch.clone, "to", "float", "type_as", "cpu", "cuda")
"""Those of their spellings that are taken for copies where no example inputs tell."""

GIVEN = {"fill_": "value", "copy_": "other"}
"""Methods that overwrite a tensor with what they are given, and the name of that argument."""

COMPARING = {"eq", "ge", "greater", "greater_equal", "gt", "le", "less", "less_equal", "lt", "ne", "not_equal"}
COMPARING |= {"logical_and", "logical_not", "logical_or", "logical_xor"}
"""Methods whose result has truth values, but numbers where they overwrite numbers with it."""

BASIC = (int, slice, type(None), type(...))
"""The types of the items of a key that selects without copying."""


def no_writes_to_values(gm: fx.GraphModule) -> None:
    """Rewrite the graph so that no call overwrites a value, except for those that update a buffer.

    Raises:
        TraceError: forward writes to a view of a kind that is not followed, and reads what it is a view of later.
    """
    results: set[fx.Node] = set()
    for node in list(gm.graph.nodes):
        if works_in_place(node) and not writes_state(node):
            results.add(node)
            overwritten = _out_of_place(node)
            if isinstance(overwritten, fx.Node):
                _Write(node, overwritten, results).run()


def _out_of_place(node: fx.Node) -> Any:
    """Let a call compute a new value, and return its operand that it would overwrite."""
    overwritten = next(iter(operands(node, identify(node))), None)
    module = called_module(node)
    if isinstance(overwritten, fx.Node) and _without_reading(node, overwritten):
        return overwritten
    if module is not None:
        module.inplace = False  # type: ignore[assignment]  # this module is in our copy of the model
    elif node.op == "call_function" and node.target in OUT_OF_PLACE:
        node.target = OUT_OF_PLACE[node.target]
    elif node.op == "call_method":
        name = out_of_place_method(str(node.target))
        gives_numbers = name in COMPARING and isinstance(overwritten, fx.Node) and _has_numbers(overwritten)
        if hasattr(Tensor, name) and not gives_numbers and name != "bernoulli":  # which takes probabilities there
            node.target = name
        else:
            node.args = (node.args[0], str(node.target), *node.args[1:])
            node.op, node.target = "call_function", after_method
    else:
        position = list(inspect.signature(node.target).parameters).index("inplace")  # type: ignore[arg-type]
        if position < len(node.args):
            node.args = (*node.args[:position], False, *node.args[position + 1 :])
        else:
            node.kwargs = {**node.kwargs, "inplace": False}
    return overwritten


def _has_numbers(node: fx.Node) -> bool:
    """Whether the example inputs show that a value has numbers, or that it may have."""
    return kind_of(node) is not None and identify(node).name != "compare"


def _without_reading(node: fx.Node, overwritten: fx.Node) -> bool:
    """Rewrite a call whose result does not depend on the values that it overwrites; False for any other."""
    if node.op == "call_method" and node.target == "zero_":
        _rewrite(node, "call_function", torch.zeros_like, overwritten)
        return True
    given, kind = _given_for_all(node, overwritten), kind_of(overwritten)
    if isinstance(given, fx.Node) and kind_of(given) == kind != "tensor":  # which is of integers or of truth values
        _rewrite(node, "call_method", "expand_as", given, overwritten)
        return True
    if isinstance(given, (int, float)):
        _rewrite(node, "call_function", torch.full_like, overwritten, given)
        return True
    return False


def _given_for_all(node: fx.Node, overwritten: fx.Node) -> Any:
    """What a call writes to all places of a tensor: by ``x.copy_(y)``, ``x.fill_(2)`` or ``x[:] = y``; else None."""
    if node.op == "call_method" and node.target in GIVEN:
        return _given(node, GIVEN[str(node.target)])[0]
    if node.target is not operator.setitem or SHAPE not in overwritten.meta or not _selects_all(node.args[1]):
        return None
    value = node.args[2]
    shape = value.meta.get(SHAPE) if isinstance(value, fx.Node) else ()
    return value if shape is not None and len(shape) <= len(overwritten.meta[SHAPE]) else None


def _rewrite(node: fx.Node, kind: str, target: Any, *args: Any) -> None:
    node.op, node.target, node.args, node.kwargs = kind, target, args, {}


def _selects_all(key: Any) -> bool:
    """Whether ``x[key]`` is all of ``x``, in its shape."""
    items = key if isinstance(key, tuple) else (key,)
    return all(item is ... or (type(item) is slice and _is_whole(item)) for item in items)


def _is_whole(item: slice) -> bool:
    """Whether a slice selects everything, whatever there is."""
    return item.start in (None, 0) and item.stop is None and item.step in (None, 1)


class _Write:
    """Gives the readers after a call what they would read if the call had overwritten a value.

    Args:
        node: the call, which is out of place now.
        overwritten: the value.
        results: all such calls so far. They are values of their own, although their memory was that of another.
    """

    def __init__(self, node: fx.Node, overwritten: fx.Node, results: set[fx.Node]) -> None:
        self.node = self.last = node
        self.overwritten = overwritten
        self.results = results
        if VALUE in overwritten.meta:  # setitem itself returns None
            node.meta[VALUE] = overwritten.meta[VALUE]
        node.meta[ADDRESS] = overwritten.meta.get(ADDRESS, 0)

    def run(self) -> None:
        """Add the new values behind the call, and let later readers read them."""
        self.chain = [self.overwritten]
        while (parent := self._viewed(self.chain[-1])) is not None:
            self.chain.append(parent)
        self.apart = {source for value in self.chain if (source := self._source(value)) not in self.chain}
        state = self.chain[-1] if self.chain[-1].op == "get_attr" or writes_state(self.chain[-1]) else None
        if self._is_assigned_next():
            del self.chain[1:]
        while state is None and len(self.chain) > 1 and not self._is_read_later(self.chain[-1]):
            self.chain.pop()
        new = {self.overwritten: self.node}
        for view, parent in zip(self.chain, self.chain[1:], strict=False):
            new[parent] = self._whole(view, parent, new[view])
        if state in new:
            new[state] = self._add("call_method", "copy_", (state, new[state]))
        for value in list(new):
            self._view_again(value, new)
        for old, value in new.items():
            self._replace_later(old, value)

    def _replace_later(self, old: fx.Node, value: fx.Node) -> None:
        """Let later readers read a new value; after a write in one mode only, in the other mode the old one."""
        mode = self.node.meta.get(MODE)
        if mode is not None and old.meta.get(MODE) is not mode:
            value = self._add("call_function", eval_or_train, (old, value) if mode else (value, old))
            del value.meta[MODE]
        old.replace_all_uses_with(value, delete_user_cb=lambda user: self.last < user)

    def _viewed(self, node: fx.Node) -> fx.Node | None:
        """The tensor of which a value is a view; None if it has memory of its own."""
        source = self._source(node)
        return self._source(source) if source is not None and identify(source).gives_tuple else source

    def _source(self, node: fx.Node) -> fx.Node | None:
        """The tensor, or the tuple of tensors, whose memory a value shares."""
        name = identify(node).name
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if first is None or node in self.results or name not in VIEWS:
            return None
        if node.meta.get(ADDRESS) and first.meta.get(ADDRESS):
            return first if node.meta[ADDRESS] == first.meta[ADDRESS] else None
        if name == "getitem" and not identify(first).gives_tuple:
            key = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            return first if all(isinstance(item, BASIC) for item in key) else None
        return None if node.target in COPIES else first

    def _views(self, value: fx.Node) -> Iterator[fx.Node]:
        """The views of a tensor that exist before the call, and may share memory with what it overwrites."""
        for user in value.users:
            if user < self.node and user not in (*self.chain, *self.apart) and self._source(user) is value:
                yield user

    def _is_read_later(self, value: fx.Node) -> bool:
        return any(self.node < user for user in value.users) or any(map(self._is_read_later, self._views(value)))

    def _is_assigned_next(self) -> bool:
        """Whether the next node assigns the result to the place of the view, as by ``y[:, :2] += 1``."""
        following, assigned = self.node.next, (*self.overwritten.args, self.node)
        is_item = self.overwritten.target is operator.getitem
        return is_item and following.target is operator.setitem and following.args == assigned

    def _view_again(self, value: fx.Node, new: dict[fx.Node, fx.Node]) -> None:
        for view in list(self._views(value)):
            if self._is_read_later(view):
                with view.graph.inserting_after(self.last):
                    self.last = new[view] = view.graph.node_copy(view, lambda node: new.get(node, node))
                self._view_again(view, new)

    def _add(self, kind: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        with self.node.graph.inserting_after(self.last):
            self.last = self.node.graph.create_node(kind, target, args, kwargs)
        self.last.meta = {name: found for name, found in self.node.meta.items() if name not in (SPELLING, SHAPE)}
        return self.last

    def _assigned(self, tensor: fx.Node, key: Any, value: fx.Node) -> fx.Node:
        return self._add("call_function", assign_item, (tensor, key, value))

    def _whole(self, view: fx.Node, parent: fx.Node, value: fx.Node) -> fx.Node:
        """The tensor after one of its views got a new value."""
        name, target = identify(view).name, str(getattr(view.target, "__name__", view.target))
        if name == "getitem" and self._source(view) is parent:
            return self._assigned(parent, view.args[1], value)
        if target == "select":
            dim, index = _given(view, "dim", "index")
            return self._assigned(parent, _along(dim, index), value)
        if target == "narrow" and not any(isinstance(argument, fx.Node) for argument in view.args[1:]):
            dim, start, length = _given(view, "dim", "start", "length")
            return self._assigned(parent, _along(dim, slice(start, start + length)), value)
        if name in SHAPING:
            return self._add("call_method", "reshape_as", (value, parent))
        if target == "getattr" or target in SWAPPING:
            return self._add(view.op, view.target, (value, *view.args[1:]), dict(view.kwargs))
        if target == "permute":
            dims: Any = view.args[1] if isinstance(view.args[1], (tuple, list)) else view.args[1:]
            order = sorted(range(len(dims)), key=lambda place: dims[place] % len(dims))
            return self._add("call_method", "permute", (value, *order))
        if name in ("contiguous", "to") and (target != "detach" or parent.op == "get_attr"):
            return value
        raise TraceError(
            f"cannot follow a write in place to a view by {target} of {parent}, which forward reads later\n"
            f"  at: {line_of_node(self.node)}\n"
            "Remedy: compute the new value out of place."
        )


def _given(node: fx.Node, *names: str) -> list[Any]:
    """The arguments of a call after its first one, by position or by name."""
    bound = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
    return [bound[name] for name in names]


def _along(dim: int, item: Any) -> tuple[Any, ...]:
    """The key of an item along a dimension."""
    return (slice(None),) * dim + (item,) if dim >= 0 else (..., item, *[slice(None)] * (-dim - 1))
