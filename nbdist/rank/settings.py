"""The notebook's settings from `capture.settings`, set in a rank."""

from __future__ import annotations

import decimal
import importlib
import locale
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..capture import experiment_tracking, library_options, python_modes, torch_configs, torch_modes
from ..capture.assigned import Gone
from ..capture.loggers import describe_handler, own_filters
from ..capture.patches import place
from ..capture.reading import Keep, Unreadable, read
from ..capture.refusals import pickle_setting
from ..capture.registries import Entry, enter
from ..capture.settings import SURROUNDINGS, current, same, sklearn_defaults
from ..system.interrupts import undivided
from ..system.visible_devices import VISIBLE, VISIBLE_HIP

#: Empty while all is at its default: a library need not be imported for that.
_OPTIONAL = (
    *("patches", "registries", "pandas", "matplotlib", "sklearn", "polars", "tqdm", "mlflow", "options"),
    *("torch.compile", "torch.load"),
)
#: Set before each call, although the notebook has not changed it.
_EACH_CALL = ("mlflow",)
#: The default settings of a logger: level, disabled, propagate, handlers, filters.
_PLAIN: tuple[int, bool, bool, list[Any], list[Any]] = (0, False, True, [], [])

_inherited: dict[str, Any] = {}
_inherited_pickles: dict[str, bytes] = {}


def note_inherited() -> None:
    """Record, in the fork server, its own settings: setting them again in ranks would copy the pages."""
    for name, value in current().items():
        if name in SURROUNDINGS:
            continue
        _inherited[name] = value
        pickled, _ = pickle_setting(value)
        if pickled is not None and name != "logging":  # whose handlers have a rank's own streams
            _inherited_pickles[name] = pickled


class Settings:
    """Setter for the settings that the notebook has changed since the last call. Settings that calls have changed in
    the rank stay."""

    def __init__(self) -> None:
        self._pickled = dict(_inherited_pickles)
        self._last = dict(_inherited)
        self._loggers: set[str] = set()  # those that the notebook has set
        self._before: dict[str, Any] = {}  # what options were that the notebook has set
        self._own: set[str] = set()  # variables of the environment that are the rank's own
        self._patched: dict[tuple[int, str], tuple[Any, Any, Any]] = {}  # the owner, the patch, and what was there
        self._configs = torch_configs.Writer()
        self._entered: list[Callable[[], object]] = []  # what takes the entries of registries out again

    def follow(self, settings: Mapping[str, bytes]) -> None:
        """Apply the changes since the last call of environment, folder and module path."""
        given = {name: settings[name] for name in SURROUNDINGS if name in settings}
        self.apply(given, lambda key, namespace, name: False)

    def apply_again(self, name: str) -> None:
        """Forget a setting, so that the next `apply` sets it again, because its module was executed again."""
        self._pickled.pop(name, None)
        self._last[name] = None  # equals no setting, an empty one neither

    def set_again(self) -> None:
        """Forget what modules change when they are imported, so that the next `apply` sets it again."""
        for name in ("logging", "warnings", "options"):
            self._pickled.pop(name, None)
            self._last.pop(name, None)

    @undivided("sets the notebook's settings")
    def apply(self, settings: Mapping[str, bytes], keep: Keep) -> None:
        """Unpickle settings and apply them. `keep` decides which globals in the pickles are set in this rank."""
        for name, pickled in settings.items():
            if self._pickled.get(name) == pickled and name not in _EACH_CALL:
                continue
            self._pickled[name] = pickled
            try:
                value = read(memoryview(pickled), [], originals=[], keep=keep)
                if name in self._last and same(self._last[name], value) and name not in _EACH_CALL:
                    continue
                if value or name not in _OPTIONAL or name in self._last:
                    self._appliers[name](self, value)
                    self._last[name] = value
            except Exception as exc:
                why = exc.__cause__ if isinstance(exc, Unreadable) else exc
                _warn(f"the notebook's settings of {name} are not set in this rank: {why!r}")

    def _environ(self, value: Mapping[str, str]) -> None:
        before = self._last.get("environment")
        if before is None:  # as the rank has started
            self._own = {name for name in {*value, *os.environ} if os.environ.get(name) != value.get(name)}
            self._own |= {VISIBLE, VISIBLE_HIP}
            return
        for name in {*value, *before} - self._own:
            if name not in value:
                os.environ.pop(name, None)
            elif before.get(name) != value[name]:
                os.environ[name] = value[name]

    def _folder(self, value: str) -> None:
        if "folder" in self._last and value:
            os.chdir(value)

    def _path(self, value: Sequence[str]) -> None:
        before = self._last.get("module path")
        if before is not None:
            sys.path[:] = [*value, *(part for part in sys.path if part not in before and part not in value)]
            importlib.invalidate_caches()

    def _zone(self, value: Any) -> None:
        name, *zone = value
        if zone == [time.tzname, time.timezone, time.altzone] or not hasattr(time, "tzset"):
            return
        if name is None:
            os.environ.pop("TZ", None)
        else:
            os.environ["TZ"] = name
        time.tzset()

    def _patches(self, value: Sequence[tuple[Any, str, Any]]) -> None:
        now = {(id(owner), name) for owner, name, _ in value}
        for key in self._patched.keys() - now:  # taken back
            owner, own, before = self._patched.pop(key)
            if vars(owner).get(key[1], Gone) is own:  # else its module was executed again
                _put(owner, key[1], before)
        for owner, name, own in value:
            there = vars(owner).get(name, Gone)
            _, last, before = self._patched.get((id(owner), name), (owner, Gone, there))
            try:
                _put(owner, name, own)
            except Exception as exc:
                _warn(f"{place((owner, name, own))} is not set in this rank: {exc!r}")
                continue
            self._patched[id(owner), name] = owner, own, before if there is last else there

    def _registries(self, value: Sequence[Entry]) -> None:
        while self._entered:
            self._entered.pop()()
        for entry in value:
            try:
                self._entered.append(enter(entry))
            except Exception as exc:
                _warn(f"{entry.place()} is not set in this rank: {exc!r}")

    def _logging(self, value: Any) -> None:
        disable, loggers = value
        if disable != logging.root.manager.disable:
            logging.disable(disable)
        known = self._last.get("logging", (0, {}))[1]
        for name in {*loggers, *self._loggers}:
            level, disabled, propagate, handlers, filters = settings = loggers.get(name, _PLAIN)
            if not handlers and name in known and same(known[name], settings):  # a handler has the rank's own stream
                continue
            logger = logging.getLogger(name)
            if level != logger.level:  # setting one clears the caches of all loggers
                logger.setLevel(level)
            logger.disabled, logger.propagate = disabled, propagate
            before = own_filters(logger)
            logger.filters[:] = [*filters, *(one for one in logger.filters if one not in before)]
            others = [handler for handler in logger.handlers if describe_handler(handler) is None]
            if handlers or others != logger.handlers:
                for old in logger.handlers:
                    if isinstance(old, logging.FileHandler):
                        old.close()
                logger.handlers[:] = [*(_handler(*spec) for spec in handlers), *others]
        self._loggers.update(loggers)

    def _warnings(self, value: Any) -> None:
        known = [*value, *self._last.get("warnings", ())]  # what the notebook has taken back is not the rank's own
        warnings.filters[:] = [*value, *(f for f in warnings.filters if f not in known)]  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]

    def _numpy_print(self, value: Any) -> None:
        importlib.import_module("numpy").set_printoptions(**value)

    def _numpy_errors(self, value: Any) -> None:
        numpy, (states, called, size) = importlib.import_module("numpy"), value
        numpy.seterr(**states)
        numpy.seterrcall(called)
        if size != numpy.getbufsize():
            numpy.setbufsize(size)

    def _pandas(self, value: Any) -> None:
        pandas = importlib.import_module("pandas")
        for key in {*value, *self._last.get("pandas", ())}:
            before = self._before.setdefault(f"pandas {key}", pandas.get_option(key))
            pandas.set_option(key, value.get(key, before))

    def _matplotlib(self, value: Any) -> None:
        matplotlib = importlib.import_module("matplotlib")
        for key in {*value, *self._last.get("matplotlib", ())}:
            before = self._before.setdefault(f"matplotlib {key}", matplotlib.rcParams[key])
            matplotlib.rcParams[key] = value.get(key, before)

    def _sklearn(self, value: Mapping[str, Any]) -> None:
        set_config, last = importlib.import_module("sklearn").set_config, self._last.get("sklearn", ())
        set_config(**{**{name: sklearn_defaults()[name] for name in last}, **value})

    def _polars(self, value: Mapping[str, Any]) -> None:
        config = importlib.import_module("polars").Config
        for name in {*value, *self._last.get("polars", ())}:
            getattr(config, name)(value.get(name))  # None: its default

    def _tqdm(self, value: tuple[Any, ...]) -> None:
        if value:
            bar, options = value
            bar.pandas(**options)

    def _mlflow(self, value: Mapping[str, Any]) -> None:
        experiment_tracking.write(value, self._last.get("mlflow") or {})

    def _python_modes(self, value: Any) -> None:
        python_modes.write(value, self._last.get("Python") or python_modes.read(sys))

    def _torch_modes(self, value: Any) -> None:
        torch = importlib.import_module("torch")
        failed = torch_modes.write(torch, value, self._last.get("torch") or torch_modes.read(torch))
        for name, exc in failed.items():
            _warn(f"the notebook's setting {name!r} of torch is not set in this rank: {exc!r}")

    def _torch_configs(self, value: Any) -> None:
        self._configs.write(value)

    def _safe_globals(self, value: Any) -> None:
        serialization = importlib.import_module("torch.serialization")
        torch_configs.write_safe_globals(serialization, value, self._last.get("torch.load") or [])

    _appliers: Mapping[str, Callable[[Settings, Any], object]] = {
        "environment": _environ,
        "folder": _folder,
        "module path": _path,
        "time zone": _zone,
        "patches": _patches,
        "registries": _registries,
        "logging": _logging,
        "warnings": _warnings,
        "Python": _python_modes,
        "decimal": lambda self, value: _set_decimal(*value),
        "locale": lambda self, value: _set_locale(value),
        "numpy.printoptions": _numpy_print,
        "numpy.errstate": _numpy_errors,
        "pandas": _pandas,
        "matplotlib": _matplotlib,
        "sklearn": _sklearn,
        "polars": _polars,
        "tqdm": _tqdm,
        "mlflow": _mlflow,
        "options": lambda self, value: library_options.write(value),
        "torch": _torch_modes,
        "torch.compile": _torch_configs,
        "torch.load": _safe_globals,
    }


def _put(owner: Any, name: str, value: Any) -> None:
    if value is not Gone:
        setattr(owner, name, value)
    elif name in vars(owner):
        delattr(owner, name)


def _warn(text: str) -> None:
    try:
        warnings.warn(text, stacklevel=2)
    except Warning:  # by the notebook's filters: no setting makes a call fail
        sys.stderr.write(f"{text}\n")


def _set_decimal(own: Sequence[Any], default: Sequence[Any]) -> None:
    decimal.setcontext(decimal.Context(*own))
    made = decimal.Context(*default)
    for name in ("prec", "rounding", "Emin", "Emax", "capitals", "clamp", "traps"):
        setattr(decimal.DefaultContext, name, getattr(made, name))


def _set_locale(name: str) -> None:
    locale.setlocale(locale.LC_ALL, name)


def _handler(target: Any, level: int, formatter: Any, filters: Sequence[Any]) -> logging.Handler:
    if isinstance(target, logging.Handler):  # of a class of the notebook
        return target
    if isinstance(target, str):
        made: logging.Handler = logging.StreamHandler(getattr(sys, target))
    else:
        made = logging.FileHandler(target[0], mode="a", encoding=target[1], delay=True)
    made.setLevel(level)
    if isinstance(formatter, tuple):
        text, dates, style = formatter
        mark: Any = next(mark for mark, (kind, _) in logging._STYLES.items() if kind is style)
        made.setFormatter(logging.Formatter(text, dates, mark))
    elif formatter is not None:
        made.setFormatter(formatter)
    for one in filters:
        made.addFilter(one)
    return made
