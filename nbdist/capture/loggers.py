"""Settings of loggers in the notebook: levels, filters, and handlers that ranks can have."""

from __future__ import annotations

import io
import logging
import os
import sys
from typing import Any

from .foreign import attribute, contents, is_a, text
from .refusals import Refusals

#: Loggers of the notebook's own machinery, by the first part of their names.
_KERNEL_LOGGERS = frozenset(["IPKernelApp", "ipykernel", "traitlets", "tornado", "asyncio", "jupyter_client"])


class Loggers:
    """Reader of the settings of loggers: of about a hundred loggers, nearly all have the settings of their
    libraries."""

    def __init__(self) -> None:
        self._rows: list[tuple[Any, ...]] = []
        self._formatters: dict[logging.Handler, logging.Formatter | None] = {}
        self._described: dict[logging.Handler, tuple[Any, ...]] = {}
        self._refusals = Refusals()
        self._read: dict[str, tuple[Any, ...]] = {}

    def __call__(self, module: Any) -> Any:
        every: dict[str, Any] = logging.root.manager.loggerDict
        placeholder, root = logging.PlaceHolder, logging.root
        rows = [
            (name, logger.level, logger.disabled, logger.propagate, own_filters(logger), *logger.handlers)
            for name, logger in every.copy().items()  # other threads make loggers
            if type(logger) is not placeholder
            and (logger.handlers or logger.level or logger.disabled or logger.filters or not logger.propagate)
        ]
        rows.append(("", root.level, root.disabled, root.propagate, own_filters(root), *root.handlers))
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
        self._formatters = {handler: handler.formatter for row in rows for handler in row[5:]}
        described = {handler: describe_handler(handler) for handler in self._formatters}
        self._described = {handler: spec for handler, spec in described.items() if spec is not None}
        self._read = {}
        for name, level, disabled, propagate, filters, *handlers in rows:
            specs = [self._described[own] for own in handlers if own in self._described]
            if name.partition(".")[0] not in _KERNEL_LOGGERS:
                specs = self._refusals.without(specs, _place)
                filters = self._refusals.without(filters, lambda one: f"the filter of logging {one!r}")
                settings = level, disabled, propagate, specs, filters
                if settings != (0, False, True, [], []):
                    self._read[name] = settings


def _place(spec: tuple[Any, ...]) -> str:
    """Return the name of a handler for a warning; empty if the handler has a library's formatter, because that library
    adds it in the ranks, too.
    """
    formatter = spec[2]
    of_library = not isinstance(formatter, (tuple, type(None))) and text(type(formatter), "__module__") != "__main__"
    return "" if of_library else f"the handler of logging {spec[0]!r}"


def own_filters(logger: logging.Logger) -> list[Any]:
    """Return the filters of a logger that the notebook has defined."""
    return [one for one in logger.filters if "__main__" in (text(one, "__module__"), text(type(one), "__module__"))]


def describe_handler(handler: Any) -> tuple[Any, ...] | None:
    """Return the arguments that rebuild a handler; None for torch's handlers, and for a library's handlers that write
    to no stream or file.
    """
    formatter = handler.formatter
    if text(type(formatter), "__module__") == "torch._logging._internal":  # there are dozens of these
        return None
    if is_a(handler, logging.FileHandler):
        target: Any = handler.baseFilename, handler.encoding
    elif type(handler) is logging.StreamHandler:
        target = _stream(contents(handler).get("stream"))
        if target is None:
            return None
    elif text(type(handler), "__module__") == "__main__":
        return handler, handler.level, formatter, handler.filters[:]
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
