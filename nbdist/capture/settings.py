"""Settings of libraries that people change in cells: logging, warnings, options. Each call sends them to the ranks.

The settings and their sources:

| setting | source |
|---|---|
| levels, and handlers that write to streams or files | `logging` |
| filters | `warnings.filters` |
| recursion limit | `sys.getrecursionlimit()` |
| context | `decimal.getcontext()` |
| locale | `locale.setlocale(locale.LC_ALL)` |
| time zone | `TZ`, as `time.tzset` has taken it |
| environment, folder, module path | `os.environ`, `os.getcwd()`, `sys.path` |
| print options, error state | `numpy.get_printoptions()`, `numpy.geterr()` |
| options that are not at their default | `pandas.get_option` |
| parameters that are not at their default, but for the backend's | `matplotlib.rcParams` |
| default dtype and device, precisions, deterministic mode, grad mode, autocast, flags of kernels | `torch` |
"""

from __future__ import annotations

import copy
import functools
import io
import locale
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

from ..system.search_path import search_path
from . import torch_modes
from .assigned import Patch
from .foreign import attribute, contents, is_a, looked, text
from .patches import Patches
from .pickler import Pickler

#: Loggers of the notebook's own machinery, by the first part of their names.
_KERNEL_LOGGERS = frozenset(["IPKernelApp", "ipykernel", "traitlets", "tornado", "asyncio", "jupyter_client"])

#: Those that ranks start with. They follow what the notebook changes, and keep the rest.
SURROUNDINGS = ("environment", "folder", "module path")
#: Bytes that what the notebook has put into a module may have as a pickle: it goes along with each call.
LARGEST = 1 << 20


class SettingsSender:
    """The settings of this process that are sent with a call: pickles by name, written again when the settings have
    changed."""

    def __init__(self) -> None:
        self._patches = Patches()
        self._last: dict[str, Any] = {}
        self._pickled: dict[str, bytes] = {}
        self._modules: dict[str, set[str]] = {}
        self._lock = threading.RLock()  # several threads may call; what is pickled may call, too

    def modules(self) -> set[str]:
        """Return the modules that reading the latest settings imports: their libraries, and modules of named objects,
        such as categories of warnings."""
        with self._lock:
            return set().union(*self._modules.values())

    def take(self) -> dict[str, bytes]:
        """Return the pickles of all settings. A warning names the settings that cannot be pickled and are not set in
        ranks."""
        with self._lock:
            return self._take_all()

    def _take_all(self) -> dict[str, bytes]:
        found, last = current(), self._last
        nothing: list[Patch] = []
        found["patches"] = looked(self._find_patches, nothing, "what the notebook has patched")
        for name, value in found.items():
            # Patches bring the globals that they use as these are now.
            if name not in last or not same(last[name], value) or (name == "patches" and value):
                last[name] = value
                self._take(name, value)
        return dict(self._pickled)

    def _find_patches(self) -> list[Patch]:
        return self._patches.find(_refused)

    def _take(self, name: str, value: Any) -> None:
        self._pickled.pop(name, None)
        pickled, self._modules[name] = pickle_setting(value)
        if value and name in _SOURCES:
            self._modules[name].add(_SOURCES[name][0])
        if pickled is not None:
            self._pickled[name] = pickled
        else:
            warnings.warn(
                f"{_what(name)} do not hold in the ranks, for they cannot be pickled. "
                f"settings=False sends no settings.",
                stacklevel=3,
            )


#: Of this process.
sender = SettingsSender()


def _refused(value: Any) -> str:
    """Return the reason why a value cannot be set in ranks; empty if it can."""
    pickled, _ = pickle_setting(value)
    if pickled is None:
        return "it cannot be sent"
    return f"it has {len(pickled) / 1e6:.0f} MB" if len(pickled) > LARGEST else ""


def same(old: Any, new: Any) -> bool:
    """Return whether two readings of a setting are equal; False if they cannot be compared."""
    try:
        return bool(old == new)
    except Exception:  # it holds what does not compare, such as arrays
        return False


def pickle_setting(value: Any) -> tuple[bytes | None, set[str]]:
    """Return the pickle of a setting, None if it cannot be pickled, and the modules that its reader imports."""
    pickler = Pickler(io.BytesIO(), in_band=True)
    try:
        pickler.dump(value)
    except Exception:
        return None, set()
    return pickler.file.getvalue(), pickler.modules


class _Loggers:
    """Reader of the settings of loggers: of about a hundred loggers, nearly all have the settings of their
    libraries."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._formatters: dict[logging.Handler, logging.Formatter | None] = {}
        self._described: dict[logging.Handler, tuple[Any, ...]] = {}
        self._read: dict[str, tuple[int, bool, bool, list[tuple[Any, ...]]]] = {}

    def __call__(self, module: Any) -> Any:
        every: dict[str, Any] = logging.root.manager.loggerDict
        placeholder, root = logging.PlaceHolder, logging.root
        rows = [
            (name, logger.level, logger.disabled, logger.propagate, *logger.handlers)
            for name, logger in every.copy().items()  # other threads make loggers
            if type(logger) is not placeholder
            and (logger.handlers or logger.level or logger.disabled or not logger.propagate)
        ]
        rows.append(("", root.level, root.disabled, root.propagate, *root.handlers))
        # Whether a handler is described depends on its formatter alone, and only of those is anything else sent.
        if (
            rows != self._rows
            or [handler.formatter for handler in self._formatters] != [*self._formatters.values()]
            or [describe_handler(handler) for handler in self._described] != [*self._described.values()]
        ):
            self._read_again(rows)
        return logging.root.manager.disable, self._read

    def _read_again(self, rows: list[tuple[Any, ...]]) -> None:
        self._rows = rows
        self._formatters = {handler: handler.formatter for row in rows for handler in row[4:]}
        described = {handler: describe_handler(handler) for handler in self._formatters}
        self._described = {handler: spec for handler, spec in described.items() if spec is not None}
        self._read = {}
        for name, level, disabled, propagate, *handlers in rows:
            settings = level, disabled, propagate, [self._described[own] for own in handlers if own in self._described]
            if settings != (0, False, True, []) and name.partition(".")[0] not in _KERNEL_LOGGERS:
                self._read[name] = settings


def describe_handler(handler: Any) -> tuple[Any, ...] | None:
    """Return the arguments that rebuild a handler; None for a handler of torch, and for one without a stream or
    file."""
    formatter = handler.formatter
    if text(type(formatter), "__module__") == "torch._logging._internal":  # there are dozens of these
        return None
    if is_a(handler, logging.FileHandler):
        target: Any = handler.baseFilename, handler.encoding
    elif type(handler) is logging.StreamHandler:
        target = _stream(contents(handler).get("stream"))
        if target is None:
            return None
    else:
        return None
    if formatter is not None and type(formatter) is logging.Formatter:
        return target, handler.level, (formatter._fmt, formatter.datefmt, type(formatter._style)), handler.filters[:]
    return target, handler.level, formatter, handler.filters[:]


def _stream(stream: Any) -> str | tuple[str, str] | None:
    """Describe a handler's stream for a rank: the name of a standard stream, or a file's path and encoding.

    None if a rank cannot have the stream: a text in the notebook's memory, an archive, or a file without a name.
    """
    names = {id(sys.stdout): "stdout", id(sys.__stdout__): "stdout", id(sys.stderr): "stderr"}
    if id(stream) in names:
        return names[id(stream)]
    stream = contents(stream).get("file", stream)  # of `tempfile.NamedTemporaryFile`
    name = attribute(stream, "name")
    if is_a(stream, io.TextIOWrapper):
        plain = isinstance(stream.buffer, (io.BufferedWriter, io.BufferedRandom))  # and no archive
        if isinstance(name, str) and os.path.isfile(path := os.path.abspath(name)):
            return (path, stream.encoding) if plain else None
        if isinstance(name, int) and name > 2:
            return None  # a file without a name
    if is_a(stream, io.StringIO):
        return None
    return "stdout" if type(name) in (str, int) and name in ("stdout", "<stdout>", 1) else "stderr"


class _Environ:
    """Reader of the environment: it has about a hundred variables, and they rarely change."""

    def __init__(self) -> None:
        self._raw: Any = None
        self._read: dict[str, str] = {}

    def __call__(self, module: Any) -> dict[str, str]:
        raw = getattr(module.environ, "_data", None)
        if raw is None or raw != self._raw:
            self._raw, self._read = copy.copy(raw), dict(module.environ)
        return self._read


def _folder(module: Any) -> str:
    try:
        return str(module.getcwd())
    except FileNotFoundError:  # it is gone
        return ""


def _zone(module: Any) -> tuple[Any, ...]:
    return os.environ.get("TZ"), module.tzname, module.timezone, module.altzone


def _locale(module: Any) -> str:
    return locale.setlocale(locale.LC_ALL)


def _pandas(pandas: Any) -> dict[str, Any]:
    config = sys.modules["pandas._config.config"]
    if _unchanged("pandas", getattr(config, "_global_config", None)):
        return _seen["pandas"][1]
    options = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of options that are about to go
        for key, option in config._registered_options.items():
            value = pandas.get_option(key)
            if key not in config._deprecated_options and value is not option.defval and not same(value, option.defval):
                options[key] = value
    _seen["pandas"] = copy.deepcopy(getattr(config, "_global_config", None)), options
    return options


def _matplotlib(matplotlib: Any) -> dict[str, Any]:
    style = sys.modules.get("matplotlib.style.core") or sys.modules.get("matplotlib.style")
    skip = getattr(style, "STYLE_BLACKLIST", {"backend", "interactive"})
    now, default = dict(dict.items(matplotlib.rcParams)), dict(dict.items(matplotlib.rcParamsDefault))
    if not _unchanged("matplotlib", now):
        changed = {key: value for key, value in now.items() if key not in skip and not same(value, default[key])}
        _seen["matplotlib"] = copy.deepcopy(now), changed
    return _seen["matplotlib"][1]


#: Hundreds of options as they were when they were last compared with their defaults, and the result.
_seen: dict[str, tuple[Any, dict[str, Any]]] = {}


def _unchanged(name: str, now: Any) -> bool:
    return now is not None and name in _seen and same(_seen[name][0], now)


#: By name: the module that has the setting, which is not imported for it, and what reads it.
_SOURCES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "logging": ("logging", _Loggers()),
    "warnings": ("warnings", lambda module: list(module.filters)),
    "recursion limit": ("sys", lambda module: module.getrecursionlimit()),
    "decimal": ("decimal", lambda module: module.getcontext().__reduce__()[1]),
    "locale": ("locale", _locale),
    "time zone": ("time", _zone),
    "environment": ("os", _Environ()),
    "folder": ("os", _folder),
    "module path": ("sys", lambda module: search_path()),
    "numpy.printoptions": ("numpy", lambda module: module.get_printoptions()),
    "numpy.errstate": ("numpy", lambda module: module.geterr()),
    "pandas": ("pandas", _pandas),
    "matplotlib": ("matplotlib", _matplotlib),
    "torch": ("torch", torch_modes.read),
}


_UNREAD: Any = object()


def _what(name: str) -> str:
    return f"the notebook's settings of {name}"


def current() -> dict[str, Any]:
    """Return the current settings of the loaded libraries, by name, without patches."""
    found = {}
    for name, (module, read) in _SOURCES.items():
        loaded = sys.modules.get(module)
        if loaded is not None:
            try:  # each call does this: `looked` is for what raises
                value = read(loaded)
            except Exception:
                value = looked(functools.partial(read, loaded), _UNREAD, _what(name))
            if value is not _UNREAD:
                found[name] = value
    return found
