"""What a call takes along: the function, its arguments, the names that it needs, the import block."""

from __future__ import annotations

import ast
import copyreg
import difflib
import functools
import importlib.machinery
import io
import keyword
import linecache
import os
import re
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import pickling, transport
from .errors import CaptureError, cell_numbers

#: What `need=` takes.
Names = str | Iterable[str] | Mapping[str, Any]

IMPORTS_FILE = "<nbdist imports>"


@dataclass(frozen=True)
class Header:
    """What a rank has to know before it can open the parcel of a call."""

    imports: str
    sources: Mapping[str, str] = field(default_factory=dict)
    """Source text by file name, of code that is in no file (the cells of a notebook)."""
    cells: Mapping[str, int] = field(default_factory=dict)
    """The number of the cell, by the same file names."""
    need: frozenset[str] = frozenset()
    """Names that the caller listed: they go before the same names from the import block."""
    places: Mapping[str, tuple[str | None, list[str] | None]] = field(default_factory=dict)
    """File and sub-module folders of modules that a rank could not find by `sys.path`."""


@dataclass(frozen=True)
class Call:
    """A call, ready to be sent: the parcel, what goes before it, what comes back by number, what ranks will import."""

    header: Header
    parcel: transport.Parcel
    originals: list[Any]
    modules: set[str]


def capture_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    imports: str,
    need: Mapping[str, Any],
    shelf: transport.Shelf,
) -> Call:
    """A call of `fn` with everything it needs, `imports` and `need` as checked by their parsers.

    What is on the `shelf` is not sent again. Raises `CaptureError` for what cannot be pickled.
    """
    pickler = pickle_call(fn, args, kwargs, imports, need)
    sources = _sources(pickler.originals)
    numbers = cell_numbers()
    header = Header(
        imports=imports,
        sources=sources,
        cells={name: numbers[name] for name in sources if name in numbers},
        need=frozenset(need),
        places=_places(pickler.modules),
    )
    parcel = transport.pack(pickler.file.getbuffer(), pickler.buffers, shelf)
    return Call(header, parcel, pickler.originals, pickler.modules)


def pickle_call(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], imports: str, need: Mapping[str, Any]
) -> pickling.Pickler:
    """Pickle a call; the pickler holds the result, and knows what became of what. Raises `CaptureError`."""
    given = names_given(imports) - set(need)
    hidden = _hidden_by_ipython()

    def skip(key: str, name: str) -> bool:
        if name in need:
            return True
        value = main_namespace().get(name)
        if key == "__main__" and name in given:
            _warn_if_shadowed(name, value)
            return True
        return key == "__main__" and name in hidden and hidden[name] is value

    pickler = pickling.Pickler(io.BytesIO(), skip=skip)
    needed = [pickling.Globals(key, need) for key in dict.fromkeys(("__main__", pickling.namespace_key(fn)))]
    try:
        # The names first: to read what comes after them may be to run it. The numbers last: they are complete then.
        pickler.dump((needed, fn, args, kwargs, pickler.originals))
    except Exception as exc:
        parts: dict[str, Any] = {**need, "the function": fn}
        parts.update((f"argument {number}", value) for number, value in enumerate(args, 1))
        parts.update((f"argument {name}", value) for name, value in kwargs.items())
        raise explain_failure(exc, parts) from None
    return pickler


def main_namespace() -> dict[str, Any]:
    """The notebook's (or script's) own variables."""
    return sys.modules["__main__"].__dict__


# ------------------------------------------------------------------------------------------------------ imports=


def parse_imports(imports: str | Iterable[str]) -> str:
    """The import block as one string. Raises `ValueError`, which shows the line, for anything but imports."""
    if not isinstance(imports, str):
        imports = list(imports) if isinstance(imports, Iterable) else [imports]
        if not all(isinstance(line, str) for line in imports):
            raise TypeError("imports= takes import statements: one string, or a list of strings")
        imports = "\n".join(textwrap.dedent(line) for line in imports)
    block = textwrap.dedent(imports).strip("\n")
    try:
        statements = ast.parse(block, IMPORTS_FILE).body
    except SyntaxError as exc:
        line = (exc.text or _line(block, exc.lineno or 1)).strip()
        raise ValueError(f"imports= line {exc.lineno} is not valid Python ({exc.msg}): {line}") from None
    for statement in statements:
        line = _line(block, statement.lineno)
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            raise ValueError(f"imports= takes import statements only, but line {statement.lineno} is: {line}")
        if isinstance(statement, ast.ImportFrom) and statement.level:
            raise ValueError(
                f"imports= line {statement.lineno} is a relative import, and a notebook is in no package: {line}"
            )
    return block


def _line(block: str, lineno: int) -> str:
    lines = block.splitlines()
    return lines[lineno - 1].strip() if 0 < lineno <= len(lines) else ""


def names_given(block: str) -> set[str]:
    """The names that the import block binds, as far as that is known here.

    Of `from x import *` they are known where x is loaded in this process; a rank knows them all.
    """
    names: set[str] = set()
    for statement in ast.parse(block).body:
        assert isinstance(statement, (ast.Import, ast.ImportFrom))
        for alias in statement.names:
            if alias.name == "*":
                module = sys.modules.get(getattr(statement, "module", "") or "")
                names |= set(_public_names(module)) if module is not None else set()
            elif isinstance(statement, ast.Import):
                names.add(alias.asname or alias.name.partition(".")[0])
            else:
                names.add(alias.asname or alias.name)
    return names


def modules_named(block: str) -> list[str]:
    """The modules that the import block names, in its order."""
    modules: dict[str, None] = {}
    for statement in ast.parse(block).body:
        if isinstance(statement, ast.Import):
            modules.update(dict.fromkeys(alias.name for alias in statement.names))
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            modules[statement.module] = None
    return list(modules)


def _public_names(module: types.ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [name for name in vars(module) if not name.startswith("_")]


def keep_source(file: str, text: str) -> None:
    """Let tracebacks show the lines of code that is in no file."""
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)


def run_imports(block: str, namespace: dict[str, Any]) -> set[str]:
    """Execute the import block in `namespace`; returns the names it gave."""
    keep_source(IMPORTS_FILE, block)
    given: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(block, IMPORTS_FILE, "exec"), given)
    del given["__name__"], given["__builtins__"]
    namespace.update(given)
    return set(given)


def _warn_if_shadowed(name: str, value: Any) -> None:
    if getattr(value, "__module__", None) == "__main__" and isinstance(value, (type, types.FunctionType)):
        warnings.warn(
            f"{name!r} is defined in the notebook, but imports= gives that name too: ranks use the imported one. "
            f"List it in need= to send the notebook's.",
            stacklevel=2,
        )


# --------------------------------------------------------------------------------------------------------- need=


def resolve_need(need: Any, fn: Callable[..., Any]) -> dict[str, Any]:
    """The names in `need` with their values. Raises `NameError`, naming the nearest existing names."""
    if isinstance(need, Mapping):
        for name in need:
            _check_name(name)
        return dict(need)
    if not isinstance(need, Iterable):
        raise TypeError(f"need= takes a string of names, a list, or a mapping name → value, not {need!r}")
    if isinstance(need, str):
        need = [name for name in re.split(r"[\s,]+", need) if name]
    namespaces = [main_namespace(), getattr(fn, "__globals__", {})]
    found = {}
    for name in need:
        _check_name(name)
        for namespace in namespaces:
            if name in namespace:
                found[name] = namespace[name]
                break
        else:
            near = difflib.get_close_matches(name, [n for n in {**namespaces[1], **namespaces[0]} if n[0] != "_"])
            hint = f". Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise NameError(f"need= names {name!r}, but the notebook has no such variable{hint}", name=name)
    return found


def _check_name(name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"need= takes names, not {type(name).__name__}: a string, a list, or a mapping name → value")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"need= takes names of variables, and {name!r} is not one")


# --------------------------------------------------------------------------------------------------- what goes along


def _hidden_by_ipython() -> dict[str, Any]:
    """The names that IPython itself puts into the notebook (`get_ipython`, `exit`, `open`): ranks have their own."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return dict(shell.user_ns_hidden) if shell is not None else {}


def _sources(objects: Iterable[Any]) -> dict[str, str]:
    sources = {}
    for obj in objects:
        name = obj.__code__.co_filename if isinstance(obj, types.FunctionType) else None
        if name is not None and name not in sources and not os.path.exists(name):
            lines = linecache.getlines(name)
            if lines:
                sources[name] = "".join(lines)
    return sources


def _places(modules: Iterable[str]) -> dict[str, tuple[str | None, list[str] | None]]:
    """Where those of `modules` and their parents lie that a fresh interpreter would not find by `sys.path`."""
    places: dict[str, tuple[str | None, list[str] | None]] = {}
    for name in {m.split(".")[0] for m in modules}.difference(sys.builtin_module_names):
        top = sys.modules.get(name)
        found = importlib.machinery.PathFinder.find_spec(name) if top is not None else None
        if top is not None and found is not None and _same_place(top, found):
            continue
        for loaded, module in list(sys.modules.items()):
            if (loaded == name or loaded.startswith(name + ".")) and isinstance(module, types.ModuleType):
                file = getattr(module, "__file__", None)
                folders = list(getattr(module, "__path__", [])) or None
                if (file and file.endswith(".py")) or folders:
                    places[loaded] = (file, folders)
    return places


def _same_place(module: types.ModuleType, spec: importlib.machinery.ModuleSpec) -> bool:
    if spec.origin is not None and spec.origin == getattr(module, "__file__", None):
        return True
    return list(spec.submodule_search_locations or []) == list(getattr(module, "__path__", [])) != []


# -------------------------------------------------------------------------------------------- what cannot be pickled


def explain_failure(exc: Exception, parts: Mapping[str, Any]) -> CaptureError:
    """A `CaptureError` for a failure to pickle: which of `parts` it was, where inside it, and why."""
    where, culprit = next(
        (_culprit(what, part) for what, part in parts.items() if _fails(part)), (" or ".join(parts), None)
    )
    return CaptureError(
        f"{where} cannot be sent between the notebook and the ranks: it is of type {type(culprit).__qualname__} "
        f"({type(exc).__name__}: {exc}). Make it inside the function instead, or pass what it is made from."
    )


def _fails(obj: Any) -> bool:
    try:
        pickling.Pickler(io.BytesIO()).dump(obj)
    except Exception:
        return True
    return False


def _culprit(path: str, obj: Any, seen: frozenset[int] = frozenset()) -> tuple[str, Any]:
    """The innermost part of `obj` that cannot be pickled by itself, and the path to it."""
    seen |= {id(obj)}
    for step, child in _parts(obj):
        if id(child) not in seen and _fails(child):
            return _culprit(path + step if step[0] in "[.(" else step, child, seen)
    return path, obj


def _parts(obj: Any) -> Iterable[tuple[str, Any]]:
    """What pickling `obj` reaches next: each with the source text that leads to it, or with a name of its own."""
    if isinstance(obj, types.FunctionType):
        closure = zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=True)
        yield from ((name, _content(cell)) for name, cell in closure)
        for name in pickling.globals_used(obj.__code__):
            if name in obj.__globals__:
                yield name, obj.__globals__[name]
        yield from ((f"(default {i})", value) for i, value in enumerate(obj.__defaults__ or ()))
    elif isinstance(obj, types.MethodType):
        yield from ((".__func__", obj.__func__), (".__self__", obj.__self__))
    elif isinstance(obj, functools.partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    elif isinstance(obj, Mapping):
        yield from ((f"[{key!r}]", value) for key, value in list(obj.items()))
    elif isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", value) for i, value in enumerate(obj))
    if isinstance(obj, type) or hasattr(obj, "__dict__"):
        yield from ((f".{name}", value) for name, value in list(vars(obj).items()))
    if not isinstance(obj, type):
        yield ".__class__", type(obj)
        for name in copyreg._slotnames(type(obj)):  # type: ignore[attr-defined]
            if hasattr(obj, name):
                yield f".{name}", getattr(obj, name)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
