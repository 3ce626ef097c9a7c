"""``int(...)`` of a size stays a size.

What ``int()`` returns is always a number, whatever ``__int__`` returns. So ``int`` itself is replaced by
:class:`OpenInt`, in the module files whose code calls it with sizes. A quotient of sizes, as in
``int(windows.shape[0] / (height * width / side / side))``, or a product with a float such as 0.5 becomes a division of
integers.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

from fxqat.tracing.value_proxy import ValueProxy

FRACTIONS = (operator.mul, operator.truediv)
"""The operators of which a quotient of sizes consists."""

LARGEST_BELOW = 1024
"""A factor that is a float is a quotient of integers if this power of two is enough: products with it are exact."""


class _OpenIntType(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        is_proxy = len(args) == 1 and not kwargs and type(args[0]) is ValueProxy
        return whole_number(args[0]) if is_proxy and stays_open(args[0]) else int(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, int)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, int)

    def __getattr__(cls, name: str) -> Any:
        return getattr(int, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is int

    def __hash__(cls) -> int:
        return hash(int)


class OpenInt(metaclass=_OpenIntType):
    """``int``, but a size stays one."""


@contextmanager
def open_ints(namespaces: list[dict[str, Any]]) -> Iterator[None]:
    """In the block, ``int`` is :class:`OpenInt` in these namespaces of modules, but for those with one of their own."""
    replaced = [namespace for namespace in namespaces if "int" not in namespace]
    for namespace in replaced:
        namespace["int"] = OpenInt
    try:
        yield
    finally:
        for namespace in replaced:
            namespace.pop("int", None)


def without_open_int(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, with ``int`` for :class:`OpenInt`."""
    positional = tuple(int if value is OpenInt else value for value in args)
    return positional, {name: int if value is OpenInt else value for name, value in kwargs.items()}


def stays_open(proxy: ValueProxy) -> bool:
    """Whether ``int`` of it can stay a node: it is an integer, or a quotient of positive integers."""
    traced = proxy.fxqat_value
    if traced is None or traced.from_content or not traced.sized or traced.reads:
        return False
    if type(traced.data) is not float:
        return type(traced.data) is int
    fraction = _fraction(proxy)
    return fraction is not None and _value(fraction[0]) // _value(fraction[1]) == int(traced.data)


def whole_number(proxy: ValueProxy) -> Any:
    """``int`` of a proxy that :func:`stays_open`, as a proxy or a number."""
    if proxy.fxqat_value is not None and type(proxy.fxqat_value.data) is int:
        return proxy
    above, below = _fraction(proxy) or ([], [])
    common = math.gcd(_constant(above), _constant(below))
    divisor = _product(below, common)
    return _product(above, common) if type(divisor) is int and divisor == 1 else _product(above, common) // divisor


Factors = list[Any]


def _fraction(value: Any) -> tuple[Factors, Factors] | None:
    """The factors above and below the line, positive integers and proxies of such; None if it is no such quotient."""
    if type(value) in (int, float):
        above, below = value.as_integer_ratio() if math.isfinite(value) and value > 0 else (0, 0)
        return ([above], [below]) if 0 < below <= LARGEST_BELOW else None
    traced = value.fxqat_value if type(value) is ValueProxy else None
    if traced is None or type(traced.data) not in (int, float):
        return None
    if type(traced.data) is int:
        return ([value], []) if traced.data > 0 else None
    if value.fxqat_operands is None:
        return None
    is_quotient, first, second = value.fxqat_operands
    if is_quotient and not _is_exact(second):
        return None
    (a, b), (c, d) = _fraction(first) or (None, None), _fraction(second) or (None, None)
    if a is None or b is None or c is None or d is None:
        return None
    return (a + d, b + c) if is_quotient else (a + c, b + d)


def _is_exact(value: Any) -> bool:
    """Whether a divisor is no rounded quotient, for which the result may be rounded to just below an integer."""
    number = value.fxqat_require("divides by") if type(value) is ValueProxy else value
    return type(number) is int or (type(number) is float and number.as_integer_ratio()[1] <= LARGEST_BELOW)


def _value(factors: Factors) -> int:
    return math.prod(f.fxqat_require("divides") if type(f) is ValueProxy else f for f in factors)


def _constant(factors: Factors) -> int:
    return math.prod(factor for factor in factors if type(factor) is int)


def _product(factors: Factors, common: int) -> Any:
    """The product of factors, divided by a divisor of those that are numbers."""
    constant = _constant(factors) // common
    proxies = [factor for factor in factors if type(factor) is ValueProxy]
    return reduce(operator.mul, [*proxies, *([constant] if constant != 1 or not proxies else [])])
