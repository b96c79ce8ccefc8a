"""Objects that the notebook shares with other processes: managers of `multiprocessing`, memory, Optuna's trials.

A manager is shared with the ranks, too. Other objects are copied, and a warning says so.
"""

from __future__ import annotations

import importlib
import mmap
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

Reduction = tuple[Any, ...]

#: A library, a manager's authentication key, and whether the process that has sent it has the same key.
_Key = tuple[str, bytes, bool]

#: The modules of managers, by library.
_MANAGERS = {"multiprocessing": "multiprocessing.managers", "multiprocess": "multiprocess.managers"}


def reduce_managed(obj: Any) -> Reduction | None:
    """Return the reduction of managers of `multiprocessing` and their proxies; None for any other object.

    The authentication key of the reader differs from this process's, so the manager's key is sent. If it is this
    process's own key, as by default, the reader adopts it like a child of `multiprocessing`: the manager may return
    another proxy.
    """
    for library, managers in _MANAGERS.items():
        module: Any = sys.modules.get(managers)
        if module is None:
            continue
        if not isinstance(obj, (module.BaseProxy, module.BaseManager)):
            continue
        key = library, bytes(obj._authkey), obj._authkey == module.process.current_process().authkey
        if isinstance(obj, module.BaseManager):
            return _connect, (type(obj), obj._address, obj._serializer, key)
        make, (kind, token, serializer, options) = obj.__reduce__()
        return _make_proxy, (make, kind, token, serializer, options, key)
    return None


def _make_proxy(make: Callable[..., Any], kind: Any, token: Any, serializer: str, options: Any, key: _Key) -> Any:
    return make(kind, token, serializer, {**options, "authkey": _take(key)})


def _connect(kind: Any, address: Any, serializer: str, key: _Key) -> Any:
    manager = kind(address, _take(key), serializer)
    manager.connect()
    return manager


def _take(key: _Key) -> Any:
    library, secret, is_default = key
    process: Any = importlib.import_module(f"{library}.process")
    if is_default:
        process.current_process().authkey = secret
    return process.AuthenticationString(secret)


def warn_of_shared_tensor(untyped: Any) -> None:
    """Warn of a torch storage in memory that this process shares with others, as after `share_memory_()`."""
    if untyped.device.type != "cpu" or not untyped.nbytes() or not untyped.is_shared():
        return
    if getattr(untyped, "filename", None) is None and _made_here(untyped):
        _warn_of_copy("a tensor", "share_memory_()")


def _made_here(untyped: Any) -> bool:
    """Return whether this process has put the storage into shared memory, and not a worker that sent a batch."""
    try:
        descriptor, _ = untyped._share_fd_cpu_()
        name = os.readlink(f"/proc/self/fd/{descriptor}")
    except (RuntimeError, OSError):  # another strategy of sharing, or another system
        return True
    return not name.startswith("/dev/shm/torch_") or name.startswith(f"/dev/shm/torch_{os.getpid()}_")


def warn_of_shared_array(array: Any) -> None:
    """Warn of a NumPy array in an `mmap` or in a `SharedMemory` block of `multiprocessing`."""
    base = array.base
    while type(base) is type(array):
        base = base.base
    if type(base.obj if type(base) is memoryview else base) is mmap.mmap:
        _warn_of_copy("an array", "mmap, SharedMemory")


def _warn_of_copy(what: str, maker: str) -> None:
    warnings.warn(
        f"{what} in shared memory ({maker}) is sent as a copy: what a rank writes to it is seen in that rank alone. To "
        f"share it, open a multiprocessing.shared_memory.SharedMemory by its name in the function",
        stacklevel=2,
    )


def warn_of_study(obj: Any) -> None:
    """Warn if `obj` is an Optuna study in this process's memory, which a trial of it has, too."""
    studies: Any = sys.modules.get("optuna.study")
    storages: Any = sys.modules.get("optuna.storages")
    if studies is None or storages is None or type(obj) is not studies.Study:
        return
    if isinstance(obj._storage, storages.InMemoryStorage):
        warnings.warn(
            "an Optuna study in memory is sent as a copy: what ranks suggest and report to a trial of it, and trials "
            "that they begin, the study does not see. Suggest before the call and use what it returns, or give the "
            "study a storage: optuna.create_study(storage='sqlite:///study.db')",
            stacklevel=2,
        )
