"""A call, ready to be sent: the function, its arguments, the names that it needs, the import block."""

from __future__ import annotations

import functools
import importlib.machinery
import linecache
import os
import pickle
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..notebook.shell import cell_numbers, is_hidden
from ..system.free_memory import MeasuredFile
from ..system.search_path import search_path
from ..wire.cache import SentCache
from ..wire.messages import Header
from ..wire.parcel import Parcel, pack
from . import reading
from .depth import with_large_stack
from .diagnosis import explain_failure
from .foreign import contents, is_a, text
from .imports import modules_named, names_given
from .modules import objects_of_own_modules, own_file, own_sources
from .names import namespace_key
from .need import main_namespace
from .pickler import Pickler
from .settings import sender
from .side_effects import imported_alongside
from .steps import CallStep, Named, is_constant

#: How the files end from which a rank can load a module: sources, and what was compiled for this Python.
_LOADED = (".py", *importlib.machinery.EXTENSION_SUFFIXES)
_DATA = "the data that the call takes along"


@dataclass(frozen=True)
class Call:
    """A call, ready to be sent: its header and parcel, the objects that may come back by number, the modules to
    import."""

    header: bytes
    """The pickle of a `Header`: it is made once for all ranks, and a keeper passes it on."""
    cells: Mapping[str, int]
    """The field `cells` of the header."""
    parcel: Parcel
    originals: list[Any]
    modules: set[str]
    names: set[tuple[str, str]]
    """The globals that the ranks have after the call: key of the namespace, name."""


def capture_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    imports: str,
    need: Mapping[str, Any],
    cache: SentCache,
    settings: bool = True,
    make_pickler: Callable[..., Pickler] = Pickler,
) -> Call:
    """Capture a call of `fn` with everything that it needs; `imports` and `need` are checked already.

    Buffers in `cache` are not sent again; `settings` says whether to send the notebook's settings; `make_pickler` makes
    another kind of pickler. Raises `CaptureError` for objects that cannot be pickled.
    """
    pickler = pickle_call(fn, args, kwargs, imports, need, make_pickler)
    alongside = imported_alongside([*pickler.modules, *modules_named(imports)])
    sources = _sources(pickler.originals)
    numbers = cell_numbers()
    cells = {name: numbers[name] for name in sources if name in numbers}
    header = Header(
        imports=imports,
        sources=sources,
        cells=cells,
        need=frozenset(need),
        settings=sender.take() if settings else {},
        imported_alongside=tuple(alongside),
        modules=_in_order(pickler.modules),
        places=_places([*pickler.modules, *alongside]),
        own_sources=own_sources(),
        gone=_gone(pickler),
        in_modules=_in_modules(pickler),
    )
    if settings:
        sender.warn_of_module_state(pickler.modules, _names_in(pickler.originals))
    parcel = pack(pickler.file.getbuffer(), pickler.buffers, cache, _DATA)
    modules = pickler.modules | set(alongside) | (sender.modules() if settings else set())
    return Call(pickle.dumps(header, protocol=5), cells, parcel, pickler.originals, modules, pickler.used)


def pickle_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    imports: str,
    need: Mapping[str, Any],
    make_pickler: Callable[..., Pickler] = Pickler,
) -> Pickler:
    """Pickle a call. The pickler keeps the result and the objects by number. Raises `CaptureError`."""
    given = names_given(imports) - set(need)

    def skip(key: str, name: str) -> bool:
        value = main_namespace().get(name)
        if key == "__main__" and name in given:
            _warn_if_shadowed(name, value)
            return True
        return key == "__main__" and is_hidden(name, value)

    need_in = dict.fromkeys(("__main__", namespace_key(fn)))

    def write() -> Pickler:
        pickler = make_pickler(MeasuredFile(_DATA), skip=skip, need=need, need_in=need_in, says_copies=True)
        # The names first: to read what comes after them may be to run it. The numbers last: they are complete then.
        needed = CallStep(reading.nothing, *pickler.needed()) if need else None
        positional = [_named(f"argument {number}", value) for number, value in enumerate(args, 1)]
        by_name = {name: _named(f"argument {name}", value) for name, value in kwargs.items()}
        pickler.dump((needed, Named("the function", fn), positional, by_name, pickler.originals))
        return pickler

    try:
        return with_large_stack(write)
    except Exception as exc:
        parts: dict[str, Any] = {**need, "the function": fn}
        parts.update((f"argument {number}", value) for number, value in enumerate(args, 1))
        parts.update((f"argument {name}", value) for name, value in kwargs.items())
        raise explain_failure(exc, parts) from None


def _named(name: str, value: Any) -> Any:
    """Name a value for errors, if reading it can raise an error."""
    return value if is_constant(value) else Named(name, value)


def _warn_if_shadowed(name: str, value: Any) -> None:
    if is_a(value, (type, types.FunctionType)) and text(value, "__module__") == "__main__":
        warnings.warn(
            f"{name!r} is defined in the notebook, but imports= gives that name too: ranks use the imported one. "
            f"List it in need= to send the notebook's.",
            stacklevel=2,
        )


def _sources(objects: Iterable[Any]) -> dict[str, str]:
    sources = {}
    for name in {obj.__code__.co_filename for obj in objects if isinstance(obj, types.FunctionType)}:
        if not os.path.exists(name) and (lines := linecache.getlines(name)):
            sources[name] = "".join(lines)
    return sources


def _names_in(objects: Iterable[Any]) -> set[str]:
    codes = (obj.__code__ for obj in objects if isinstance(obj, types.FunctionType))
    return {name for code in codes for name in code.co_names}


#: Variables of the notebook that calls of this process have taken along.
_taken: set[str] = set()


def _gone(pickler: Pickler) -> tuple[str, ...]:
    """Add the names that `pickler` has sent to `_taken`. Return the names in it that the notebook no longer has."""
    main = main_namespace()
    defined = (obj.__qualname__.partition(".")[0] for obj in pickler.originals if hasattr(obj, "__qualname__"))
    _taken.update(name for name in (*pickler.captured, *defined) if name in main)
    return tuple(name for name in _taken.copy() if name not in main)


def _in_modules(pickler: Pickler) -> dict[str, list[tuple[str, str]]]:
    """Return the places in the user's own modules of the objects that `pickler` has sent, by variable."""
    captured = pickler.captured
    names = [name for key, name in pickler.used if key == "__main__" and name in captured]
    places = objects_of_own_modules() if names else {}
    return {name: places[id(captured[name])] for name in names if id(captured[name]) in places}


def _in_order(names: set[str]) -> tuple[str, ...]:
    """Return names of loaded modules in the order in which this process has imported the modules.

    One name needs no order, and most short calls need no more: the search through all modules takes 70 µs.
    """
    return tuple(names & sys.modules.keys()) if len(names) < 2 else tuple(filter(names.__contains__, list(sys.modules)))


def _places(modules: Iterable[str]) -> dict[str, tuple[str | None, list[str] | None]]:
    """Return the folders of those `modules`, and of their parents, that a fresh interpreter does not find by
    `sys.path`."""
    places: dict[str, tuple[str | None, list[str] | None]] = {}
    for name in {m.split(".")[0] for m in modules}.difference(sys.builtin_module_names):
        top = sys.modules.get(name)
        found = _found_by_path if own_file(top, name) is None else _found_by_path.__wrapped__  # files come and go
        if top is not None and found(name, id(top), tuple(search_path())):
            continue
        for loaded, module in list(sys.modules.items()):
            if (loaded == name or loaded.startswith(name + ".")) and is_a(module, types.ModuleType):
                file = contents(module).get("__file__")
                folders = list(contents(module).get("__path__", [])) or None
                if (file and file.endswith(_LOADED)) or folders:
                    places[loaded] = (file, folders)
    return places


@functools.lru_cache(maxsize=4096)
def _found_by_path(name: str, module_id: int, path: tuple[str, ...]) -> bool:
    """Return whether an import from `path` finds the loaded module."""
    found = importlib.machinery.PathFinder.find_spec(name, path)
    return found is not None and _same_place(sys.modules[name], found)


def _same_place(module: types.ModuleType, spec: importlib.machinery.ModuleSpec) -> bool:
    if spec.origin is not None and spec.origin == contents(module).get("__file__"):
        return True
    return list(spec.submodule_search_locations or []) == list(contents(module).get("__path__", [])) != []
