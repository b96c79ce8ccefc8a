"""The modes of Python in a process: read in the notebook, set in its ranks."""

from __future__ import annotations

import csv
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from .foreign import is_a, text

#: Signals that neither nbdist nor Jupyter uses.
_SIGNALS = [name for name in ("SIGUSR1", "SIGUSR2", "SIGALRM") if hasattr(signal, name)]


#: The attributes of a dialect of csv.
_DIALECT = (
    *("delimiter", "quotechar", "escapechar", "doublequote", "skipinitialspace", "lineterminator", "quoting", "strict"),
)


class _Mode(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], Any]


def read(sys: Any) -> dict[str, Any]:
    """Return the current modes, by name."""
    return {name: mode.read() for name, mode in _MODES.items()}


def write(value: Mapping[str, Any], last: Mapping[str, Any]) -> None:
    """Set the modes in `value` that differ from the `last` ones."""
    for name, new in value.items():
        if last.get(name) != new:
            _MODES[name].write(new)


def _read_umask() -> int:
    mask = os.umask(0o077)  # there is no other way to read it: what a thread makes meanwhile is private
    os.umask(mask)
    return mask


def _write_gc(value: tuple[bool, tuple[int, int, int]]) -> None:
    on, thresholds = value
    (gc.enable if on else gc.disable)()
    gc.set_threshold(*thresholds)


def _read_signals() -> dict[str, Any]:
    """Return the signal handlers by the names of their signals, except the handlers of libraries, which are meant for
    this process alone."""
    found = {name: signal.getsignal(getattr(signal, name)) for name in _SIGNALS}
    return {name: one for name, one in found.items() if is_a(one, int) or text(one, "__module__") == "__main__"}


def _write_signals(value: Mapping[str, Any]) -> None:
    for name, handler in value.items():
        if signal.getsignal(getattr(signal, name)) != handler:
            signal.signal(getattr(signal, name), handler)


def _write_levels(value: Mapping[int, str]) -> None:
    for level, name in value.items():
        logging.addLevelName(level, name)


def _read_dialects() -> dict[str, dict[str, Any]]:
    found = {name: csv.get_dialect(name) for name in csv.list_dialects()}
    return {name: {option: getattr(one, option) for option in _DIALECT} for name, one in found.items()}


def _write_dialects(value: Mapping[str, Any]) -> None:
    for name in csv.list_dialects():
        if name not in value:
            csv.unregister_dialect(name)
    for name, options in value.items():
        csv.register_dialect(name, **options)


_MODES = {
    "recursion limit": _Mode(sys.getrecursionlimit, sys.setrecursionlimit),
    "switch interval": _Mode(sys.getswitchinterval, sys.setswitchinterval),
    "garbage collector": _Mode(lambda: (gc.isenabled(), gc.get_threshold()), _write_gc),
    "signals": _Mode(_read_signals, _write_signals),
    "umask": _Mode(_read_umask, os.umask),
    "fields of csv": _Mode(csv.field_size_limit, csv.field_size_limit),
    "dialects of csv": _Mode(_read_dialects, _write_dialects),
    "timeout of sockets": _Mode(socket.getdefaulttimeout, socket.setdefaulttimeout),
    "warnings to logging": _Mode(
        lambda: getattr(logging, "_warnings_showwarning", None) is not None, logging.captureWarnings
    ),
    "levels of logging": _Mode(lambda: dict(logging._levelToName), _write_levels),
    "class of loggers": _Mode(logging.getLoggerClass, logging.setLoggerClass),
}
if hasattr(sys, "set_int_max_str_digits"):  # Python 3.11, and later releases of 3.10
    _MODES["digits of int"] = _Mode(sys.get_int_max_str_digits, sys.set_int_max_str_digits)
