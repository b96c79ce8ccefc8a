"""Settings of libraries that people change in cells: logging, warnings, options. Each call sends them to the ranks.

The settings and their sources:

| setting | source |
|---|---|
| levels, and handlers that write to streams or files | `logging` |
| filters | `warnings.filters` |
| recursion limit, garbage collector, handlers of signals and more | `python_modes` |
| contexts | `decimal.getcontext()`, `decimal.DefaultContext` |
| locale | `locale.setlocale(locale.LC_ALL)` |
| time zone | `TZ`, as of the last `time.tzset` |
| environment, folder, module path | `os.environ`, `os.getcwd()`, `sys.path` |
| print options, error state, buffers | `numpy.get_printoptions()`, `geterr()`, `geterrcall()`, `getbufsize()` |
| options that are not at their default | `pandas.get_option` |
| parameters that are not at their default, except the backend's | `matplotlib.rcParams` |
| options that are not at their default | `sklearn.get_config()`, `polars.Config` |
| bars for methods of pandas | `tqdm.pandas(...)` |
| active run, autologging | `mlflow` |
| options of xarray, XGBoost, dask, JAX | `library_options` |
| default dtype and device, precisions, deterministic mode, grad mode, autocast, flags of kernels | `torch` |
| settings that a user has changed, safe globals of `torch.load` | `torch_configs` |
"""

from __future__ import annotations

import copy
import functools
import inspect
import locale
import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection
from typing import Any

from ..system.search_path import search_path
from . import experiment_tracking, library_options, python_modes, torch_configs, torch_modes
from .foreign import looked
from .loggers import Loggers
from .module_state import ModuleState
from .patches import Patches
from .refusals import pickle_setting
from .registries import Registries

#: Those that ranks start with. They follow what the notebook changes, and keep the rest.
SURROUNDINGS = ("environment", "folder", "module path")


class SettingsSender:
    """The settings of this process that are sent with a call: pickles by name, written again when the settings have
    changed."""

    def __init__(self) -> None:
        self._patches, self._registries, self._module_state = Patches(), Registries(), ModuleState()
        self._last: dict[str, Any] = {}
        self._pickled: dict[str, bytes] = {}
        self._modules: dict[str, set[str]] = {}
        self._lock = threading.RLock()  # several threads may call; what is pickled may call, too

    def modules(self) -> set[str]:
        """Return the modules that reading the latest settings imports: their libraries, and modules of named objects,
        such as categories of warnings."""
        with self._lock:
            return set().union(*self._modules.values())

    def warn_of_module_state(self, modules: Collection[str], called: Collection[str]) -> None:
        """Warn of what cells have set in these `modules` by functions of the modules, except those whose names are
        `called` in ranks."""
        with self._lock:
            patches = self._last.get("patches", ())
            looked(
                lambda: self._module_state.warn(modules, called, patches), None, "what functions of modules have set"
            )

    def take(self) -> dict[str, bytes]:
        """Return the pickles of all settings. A warning names the settings that cannot be pickled and are not set in
        ranks."""
        with self._lock:
            return self._take_all()

    def _take_all(self) -> dict[str, bytes]:
        last, nothing = self._last, list[Any]()
        found = {  # these two first: ranks import their modules, which change other settings
            "patches": looked(self._patches.find, nothing, "what the notebook has patched"),
            "registries": looked(self._registries.find, nothing, "what the notebook has registered"),
            **current(),
        }
        for name, value in found.items():
            # Patches bring the globals that they use as these are now.
            if name not in last or not same(last[name], value) or (name in ("patches", "registries") and value):
                last[name] = value
                self._take(name, value)
        return {name: self._pickled[name] for name in found if name in self._pickled}

    def _take(self, name: str, value: Any) -> None:
        self._pickled.pop(name, None)
        pickled, self._modules[name] = pickle_setting(value)
        if value and name in _SOURCES:
            self._modules[name].add(_SOURCES[name][0])
        if pickled is not None:
            self._pickled[name] = pickled
        else:
            warnings.warn(
                f"{_what(name)} are not set in the ranks, because they cannot be pickled. "
                f"settings=False sends no settings.",
                stacklevel=3,
            )


#: Of this process.
sender = SettingsSender()


def same(old: Any, new: Any) -> bool:
    """Return whether two readings of a setting are equal; False if they cannot be compared."""
    try:
        return bool(old == new)
    except Exception:  # it holds what does not compare, such as arrays
        return False


class _Environ:
    """Reader of the environment, which copies the variables only if one has changed since the last reading."""

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


def sklearn_defaults() -> dict[str, Any]:
    """Return scikit-learn's default values of its options. `set_config` changes the values of its own thread only."""
    return getattr(sys.modules["sklearn._config"], "_global_config", {})


def _sklearn(sklearn: Any) -> dict[str, Any]:
    defaults = sklearn_defaults()
    return {name: value for name, value in sklearn.get_config().items() if defaults.get(name, _UNREAD) != value}


def _tqdm(tqdm: Any) -> tuple[Any, ...]:
    """Return the class and the options of the notebook's `tqdm.pandas(...)`; nothing if it has not been called."""
    frame = sys.modules.get("pandas.core.frame")
    given = None if frame is None else vars(frame.DataFrame).get("progress_apply")
    if given is None:
        return ()
    inside = inspect.getclosurevars(given).nonlocals
    return inside["cls"], inside["tqdm_kwargs"]


#: The defaults of the options of polars that are not in the environment. polars keeps them in compiled code.
_POLARS_DEFAULTS: dict[str, Any] = {
    "set_fmt_float": "mixed",
    "set_float_precision": None,
    "set_thousands_separator": "",
    "set_decimal_separator": ".",
    "set_trim_decimal_zeros": False,
}


def _polars(polars: Any) -> dict[str, Any]:
    """Return the options that are not in the environment, by the methods of `Config` that set them."""
    options = {name: read() for name, read in getattr(polars.config, "_POLARS_CFG_DIRECT_VARS", {}).items()}
    return {name: value for name, value in options.items() if _POLARS_DEFAULTS.get(name, _UNREAD) != value}


#: Hundreds of options as they were when they were last compared with their defaults, and the result.
_seen: dict[str, tuple[Any, dict[str, Any]]] = {}


def _unchanged(name: str, now: Any) -> bool:
    return now is not None and name in _seen and same(_seen[name][0], now)


#: By name: the module that has the setting, which is not imported for it, and what reads it.
_SOURCES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "logging": ("logging", Loggers()),
    "warnings": ("warnings", lambda module: list(module.filters)),
    "Python": ("sys", python_modes.read),
    "decimal": (
        "decimal",
        lambda module: [one.__reduce__()[1] for one in (module.getcontext(), module.DefaultContext)],
    ),
    "locale": ("locale", _locale),
    "time zone": ("time", _zone),
    "environment": ("os", _Environ()),
    "folder": ("os", _folder),
    "module path": ("sys", lambda module: search_path()),
    "numpy.printoptions": ("numpy", lambda module: module.get_printoptions()),
    "numpy.errstate": ("numpy", lambda module: (module.geterr(), module.geterrcall(), module.getbufsize())),
    "pandas": ("pandas", _pandas),
    "matplotlib": ("matplotlib", _matplotlib),
    "sklearn": ("sklearn", _sklearn),
    "polars": ("polars", _polars),
    "tqdm": ("tqdm", _tqdm),
    "mlflow": ("sys", experiment_tracking.read),
    "options": ("sys", library_options.read),
    "torch": ("torch", torch_modes.read),
    "torch.compile": ("torch", torch_configs.read),
    "torch.load": ("torch.serialization", torch_configs.read_safe_globals),
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
