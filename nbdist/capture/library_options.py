"""Options of libraries that have a function to read all of them and one to set them: read in the notebook, set in its
ranks. Ranks do not import a library for its options."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


class _Options(NamedTuple):
    read: Callable[[Any], Mapping[str, Any]]
    """A function of the library's module that reads the options."""
    write: Callable[[Any, Mapping[str, Any]], object]
    """A function of the module and of the options to set."""


def read(sys: Any) -> dict[str, dict[str, Any]]:
    """Return the options of each loaded library."""
    loaded = {name: sys.modules.get(name) for name in _LIBRARIES}
    return {name: dict(_LIBRARIES[name].read(module)) for name, module in loaded.items() if module is not None}


def write(value: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the options that differ, in the libraries that are loaded."""
    for name, options in value.items():
        module = sys.modules.get(name)
        if module is not None:
            now = _LIBRARIES[name].read(module)
            changed = {key: option for key, option in options.items() if key not in now or now[key] != option}
            if changed:
                _LIBRARIES[name].write(module, changed)


def _write_jax(jax: Any, options: Mapping[str, Any]) -> None:
    for name, option in options.items():
        jax.config.update(name, option)


_LIBRARIES = {
    "xarray": _Options(lambda xarray: xarray.get_options(), lambda xarray, options: xarray.set_options(**options)),
    "xgboost": _Options(lambda xgboost: xgboost.get_config(), lambda xgboost, options: xgboost.set_config(**options)),
    "dask": _Options(lambda dask: dask.config.config, lambda dask, options: dask.config.set(options)),
    "jax": _Options(lambda jax: jax.config.values, _write_jax),
}
