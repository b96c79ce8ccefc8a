"""A rank's end in good order: what Python does at the end of a program, so that loggers and writers lose nothing.

A rank cannot end as a program does: below its frames are the server's, and torch's threads crash where a fork
takes the interpreter down. So it does the steps itself, and leaves by `os._exit`. Their bound is the kernel's patience.
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
    """In the fork: forget what the server would do at its own end, such as to delete its temporary files."""
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
    """Do what was registered with `weakref.finalize`, from this number on. What is older is not even looked at."""
    finalizers: Any = weakref.finalize
    registry = finalizers._registry
    own = list(itertools.takewhile(lambda finalizer: registry[finalizer].index >= first, reversed(registry)))
    finalizers._registry = {finalizer: registry[finalizer] for finalizer in reversed(own)}
    finalizers._exitfunc()
    finalizers._registry = registry  # with no other name, it would be taken apart now


def leave() -> None:
    """Wait for threads, call what was registered with `atexit`, write out open files: in Python's own order."""
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
