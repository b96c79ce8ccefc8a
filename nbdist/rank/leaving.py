"""The regular end of a rank: the steps of Python at the end of a program, so that loggers and writers lose nothing.

A rank cannot end like a program: the server's frames are below its own, and torch's threads crash when a fork finalizes
    the interpreter. So it runs these steps itself, and ends by `os._exit`. The kernel kills it if they take too long.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import itertools
import sys
import threading
import weakref
from typing import Any


def disarm() -> None:
    """Forget, in the fork, the steps of the server's own end, such as deleting its temporary files."""
    atexit._clear()
    finalizers: Any = weakref.finalize
    # The server's has been registered already, which is done once.
    atexit.register(_finalize, next(finalizers._index_iter))
    utilities = ("multiprocessing.util", "multiprocess.util")
    for name, at_exit in (("logging", "shutdown"), *((name, "_exit_function") for name in utilities)):
        if name in sys.modules:
            atexit.register(getattr(sys.modules[name], at_exit))
    for name in utilities:
        if name in sys.modules:
            sys.modules[name]._finalizer_registry.clear()


def _finalize(first: int) -> None:
    """Call functions that were registered with `weakref.finalize`, from this number on. Older ones are skipped."""
    finalizers: Any = weakref.finalize
    registry = finalizers._registry
    own = list(itertools.takewhile(lambda finalizer: registry[finalizer].index >= first, reversed(registry)))
    finalizers._registry = {finalizer: registry[finalizer] for finalizer in reversed(own)}
    finalizers._exitfunc()
    finalizers._registry = registry  # with no other name, it would be taken apart now


def leave() -> None:
    """Wait for threads, call `atexit` functions, write open files: in Python's own order."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    # The files of the server are not among them: `gc.freeze` has put them elsewhere.
    # By type: `isinstance` asks a weak proxy for its object, which may be gone.
    for file in [found for found in gc.get_objects() if issubclass(type(found), (io.TextIOWrapper, io.BufferedWriter))]:
        with contextlib.suppress(Exception):  # closed, detached, or the disk is full
            file.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)
