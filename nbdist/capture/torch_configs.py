"""Settings of torch that are kept in modules of their own, most of them for `torch.compile`: read in the notebook, set
in its ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from ..system.after_import import AfterImport
from .foreign import looked
from .refusals import Refusals

#: The modules whose settings are variables, and which keep those that a user has set apart from their defaults.
_MODULES = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._functorch.config",
    "torch._export.config",
    "torch.compiler.config",
    "torch.distributed.config",
    "torch.fx.experimental._config",
    "torch.utils.serialization.config",
)
#: Where `torch.compiler.set_stance` keeps the stance.
_STANCE = "torch._dynamo.eval_frame"

_refused = Refusals()
_refused_globals = Refusals()


def read(torch: Any) -> dict[str, dict[str, Any]]:
    """Return the settings that differ from their defaults, by module. A warning names, once, each one that cannot be
    sent."""
    found = [(name, key, value) for name in _MODULES for key, value in _changed(sys.modules.get(name)).items()]
    kept = _refused.without(found, lambda one: f"{one[0]}.{one[1]}")
    settings: dict[str, dict[str, Any]] = {}
    for name, key, value in kept:
        settings.setdefault(name, {})[key] = value
    stance = getattr(sys.modules.get(_STANCE), "_stance", None)
    if getattr(stance, "stance", "default") != "default":
        settings[_STANCE] = dict(vars(stance))
    return settings


def _changed(config: Any) -> dict[str, Any]:
    """Return the settings of a module that a user has set; none if the module is not loaded."""
    entries = vars(config).get("_config", {}) if config is not None else {}
    unset = getattr(sys.modules.get("torch.utils._config_module"), "_UNSET_SENTINEL", None)
    changed = {}
    for name, entry in entries.items():  # hundreds, at each call
        override = getattr(entry, "user_override", entry)  # torch 2.5 has values for entries
        if type(override) is ContextVar:  # torch 2.13
            override = override.get()
        if override is not unset and _differs(config, name, entry, override, unset):
            changed[name] = override
    return changed


def _differs(config: Any, name: str, entry: Any, override: Any, unset: Any) -> bool:
    """Return whether a setting is not the default: a list is copied to where users set it as soon as it is read."""
    if override is entry:
        default = config._default.get(name)
    else:
        default = entry.default if entry.env_value_default is unset else entry.env_value_default
    return bool(looked(lambda: override != default, False, f"{config.__name__}.{name}"))


class Writer:
    """Setter for these settings in a rank. A module that is imported later gets its settings then."""

    def __init__(self) -> None:
        self._wanted: Mapping[str, Mapping[str, Any]] = {}
        self._before: dict[tuple[str, str], Any] = {}
        self._awaited: set[str] = set()

    def write(self, value: Mapping[str, Mapping[str, Any]]) -> None:
        """Set the settings in `value`, and set back those that were in the last one alone."""
        last, self._wanted = self._wanted, value
        for name in {*last, *value}:
            if name in sys.modules:
                self._set(name, last.get(name, {}))
        later = [name for name in value if name not in sys.modules and name not in self._awaited]
        if later:
            self._awaited.update(later)
            actions: dict[str, Callable[[Any], Any]] = {
                name: lambda module: self._set(module.__name__) for name in later
            }
            sys.meta_path.insert(0, AfterImport(actions))

    def _set(self, name: str, last: Mapping[str, Any] | None = None) -> None:
        wanted, module = self._wanted.get(name, {}), sys.modules[name]
        if name == _STANCE:
            module._set_stance(module.DynamoStance(**{"stance": "default", **wanted}))
            return
        for key, value in wanted.items():
            self._before.setdefault((name, key), getattr(module, key))
            setattr(module, key, value)
        for key in (last or {}).keys() - wanted.keys():
            setattr(module, key, self._before[name, key])


def read_safe_globals(serialization: Any) -> list[Any]:
    """Return what the notebook has declared safe for `torch.load`, without torch's own classes. A warning names, once,
    each one that cannot be sent."""
    found = [one for one in serialization.get_safe_globals() if not _of_torch(one)]
    return _refused_globals.without(
        sorted(found, key=repr), lambda one: f"{one!r} among the safe globals of torch.load"
    )


def _of_torch(one: Any) -> bool:
    module = getattr(one[0] if isinstance(one, tuple) else one, "__module__", None) or ""
    return str(module).partition(".")[0] == "torch"


def write_safe_globals(serialization: Any, value: list[Any], last: list[Any]) -> None:
    """Declare safe what is in `value`, and no longer what was in the `last` one alone."""
    unpickler = sys.modules["torch._weights_only_unpickler"]
    unpickler._remove_safe_globals([one for one in last if one not in value])
    serialization.add_safe_globals(value)
