"""Names of the keys for which a rank waits in the store of its process group: `wire.stacks` reads them in the stack."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

#: The methods of torch's stores that wait for keys. Their first argument names the keys; a second one is a limit.
_METHODS = ("get", "multi_get", "wait")


def name_awaited_keys() -> None:
    """Wrap, once in a process, the methods of torch's stores that wait for a key."""
    from torch._C import _distributed_c10d as c10d

    for name in _METHODS:
        if (method := getattr(c10d.Store, name, None)) is not None:
            setattr(c10d.Store, name, _wrapped(method))


def _wrapped(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method, updated=())
    def wait_for_key(store: Any, *args: Any, **kwargs: Any) -> Any:
        awaited = functools.partial(_awaited, store, [*args, *kwargs.values()])  # noqa: F841 (read from this frame)
        return method(store, *args, **kwargs)

    return wait_for_key


def _awaited(store: Any, given: Sequence[Any]) -> str:
    """Return the keys as text; empty if the wait has a limit, or if other processes than ranks have the store."""
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    own = c10d._world.pg_map.get(c10d._world.default_pg)
    if len(given) != 1 or own is None or _root(store) is not _root(own[1]):
        return ""
    keys = [given[0]] if isinstance(given[0], str) else given[0]
    return ", ".join(f"{key!r:.100}" for key in keys[:3])


def _root(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store
