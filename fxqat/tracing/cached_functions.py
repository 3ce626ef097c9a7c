"""Functions with a cache (``functools.lru_cache``) are called without it while a model is traced.

The cache of an earlier run would return sizes as numbers.
"""

from __future__ import annotations

import functools
import gc
import operator
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from fxqat.tracing.function_leaf import NOT_USER_PACKAGES
from fxqat.tracing.value_proxy import proxies_in

LRU_CACHE = type(functools.lru_cache(len))
"""The type of a cached function."""

Place = tuple[Any, str, Any, Callable[..., Any]]
"""Where a cached function is found, a module or a class and a name, with the function and the one that replaces it."""


class CachedFunctions:
    """The cached functions and methods that user code finds in a module or in a class of it.

    A module is searched again when it has more or fewer names than before; ``__main__``, which may be a notebook,
    always. There may be hundreds of them, so that what replaces each is made once.
    """

    def __init__(self) -> None:
        self._loaded: list[Any] = []
        self._users: list[ModuleType] = []
        self._sizes: list[int] = []
        self._found: dict[ModuleType, tuple[int, list[Place]]] = {}
        self._lock = threading.RLock()
        self._replaced: list[Place] = []
        self._traces = 0
        self._in_thread = threading.local()

    @contextmanager
    def replaced(self, is_suspended: Callable[[], bool]) -> Iterator[None]:
        """In the block, and in this thread, a call with proxies does not use the cache.

        Args:
            is_suspended: whether it does now: asked in each call with a proxy.
        """
        outer = getattr(self._in_thread, "is_suspended", None)
        self._in_thread.is_suspended = is_suspended
        with self._lock:
            self._traces += 1
            if self._traces == 1:
                self._replaced = [place for place in self.find() if vars(place[0]).get(place[1]) is place[2]]
                for owner, key, _, uncached in self._replaced:
                    _assign(owner, key, uncached)
        try:
            yield
        finally:
            self._in_thread.is_suspended = outer
            with self._lock:
                self._traces -= 1
                if self._traces == 0:
                    for owner, key, cached, _ in self._replaced:
                        _assign(owner, key, cached)

    def find(self) -> list[Place]:
        """All places."""
        loaded = list(sys.modules.values())
        if len(loaded) != len(self._loaded) or not all(map(operator.is_, loaded, self._loaded)):
            plain = {name: module for name, module in sys.modules.copy().items() if type(module) is ModuleType}
            not_searched = (*NOT_USER_PACKAGES, "__main__")
            self._users = [module for name, module in plain.items() if name.partition(".")[0] not in not_searched]
            self._loaded, self._sizes = loaded, []
        sizes = [*map(len, map(vars, self._users))]
        if sizes != self._sizes:
            known, found = self._found, {}
            for module, size in zip(self._users, sizes, strict=True):
                is_known = module in known and known[module][0] == size
                found[module] = known[module] if is_known else (size, self._places(module))
            self._found, self._sizes = found, sizes
        main = sys.modules.get("__main__")
        of_main = self._places(main) if type(main) is ModuleType else []
        return [*(place for _, places in self._found.values() for place in places), *of_main]

    def _places(self, module: ModuleType) -> list[Place]:
        members = list(vars(module).items())
        classes = [value for _, value in members if type(value) is type and value.__module__ == module.__name__]
        owners = [(module, members), *((owner, list(vars(owner).items())) for owner in classes)]
        cached = [(owner, key, value) for owner, items in owners for key, value in items if type(value) is LRU_CACHE]
        return [(*place, self._uncached(place[2])) for place in cached]

    def _uncached(self, cached: Any) -> Callable[..., Any]:
        @functools.wraps(cached)
        def call(*args: Any, **kwargs: Any) -> Any:
            is_suspended = getattr(self._in_thread, "is_suspended", None)
            if is_suspended is None or is_suspended() or next(proxies_in((args, kwargs)), None) is None:
                return cached(*args, **kwargs)
            return cached.__wrapped__(*args, **kwargs)

        for name in ("cache_info", "cache_clear", "cache_parameters"):
            setattr(call, name, getattr(cached, name))
        return call


CACHED_FUNCTIONS = CachedFunctions()


def _assign(owner: Any, key: str, function: Any) -> None:
    if type(owner) is ModuleType:
        vars(owner)[key] = function
    else:
        setattr(owner, key, function)


def clear_caches_of_proxies() -> None:
    """Clear each cache in the process that has proxies as keys, which belong to one trace."""
    for cached in [found for found in gc.get_objects() if type(found) is LRU_CACHE and _holds_proxies(found)]:
        cached.cache_clear()


def _holds_proxies(cached: Any) -> bool:
    caches = [held for held in gc.get_referents(cached) if type(held) is dict]
    return any(next(proxies_in(list(cache)), None) is not None for cache in caches)
