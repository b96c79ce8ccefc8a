"""Definitions in pickles: functions, classes, modules and closures of the notebook by value.

All functions of the notebook find their globals in the rank's `__main__`. The globals that they use are sent, too, once
each, and are set in this namespace. So are functions and classes that the notebook has under their own names, because
code in a rank may pickle them by name.
"""

from __future__ import annotations

import io
import operator
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle
from cloudpickle.cloudpickle import subimport

from . import classes, reading, reducers, torch_objects
from .names import (
    Outputs,
    attributes_of,
    globals_of,
    globals_of_class,
    importable,
    namespace_of,
    submodules,
    travels_by_value,
)
from .need import main_namespace
from .steps import (
    CallStep,
    Close,
    Enter,
    EnterConstants,
    EnterOwn,
    Named,
    Open,
    Progress,
    UnpickleStep,
    is_constant,
    is_definition,
)

#: Of code, and of data that it refers to.
Steps = tuple[list[Any], list[Any]]

_FUNCTION_ATTRIBUTES = ("__defaults__", "__kwdefaults__", "__annotations__", "__type_params__")
_PACKAGE = ("__package__", "__path__", "__file__")
_LOADING = frozenset(["__builtins__", "__name__", "__doc__", "__loader__", "__spec__"])
_EMPTY = object()


class DefinitionPickler(cloudpickle.Pickler):
    """A pickler in C that sends definitions by value, with the globals that they use.

    Args:
        file: The file for the pickle.
        skip: A function that returns, for the key of a namespace and the name of a global, whether the reader has this
            global already.
        need: Values that replace the globals of these names, in the namespaces with the keys `need_in`.
        need_in: The keys of the namespaces for `need`.
        out_of_band: The `buffer_callback` of `pickle.Pickler`.
    """

    def __init__(
        self,
        file: io.BytesIO,
        *,
        skip: Callable[[str, str], bool],
        need: Mapping[str, Any] | None,
        need_in: Iterable[str],
        out_of_band: Callable[[pickle.PickleBuffer], bool] | None,
    ) -> None:
        self.file = file
        self.originals: list[Any] = []  # functions and classes sent by value, in the order of their numbers
        self.modules: set[str] = set()  # modules of what is sent by reference: the reader has to import them
        self.used: set[tuple[str, str]] = set()  # globals that functions use: key of the namespace, name
        self.captured: dict[str, Any] = {}  # the variables that travel
        self.defines = False  # whether anything is sent by value: then only `reading.read` reads it
        self._progress = Progress()
        self._skip = skip
        self._need, self._need_in = need or {}, frozenset(need_in)
        self._skipped: dict[tuple[str, str], bool] = {}
        self._numbers: dict[int, int] = {}
        self._cells: set[int] = set()  # those whose content some function's steps write
        super().__init__(file, protocol=5, buffer_callback=out_of_band)

    def needed(self) -> tuple[UnpickleStep, ...]:
        """Return the steps that send the names in `need`, even if the function does not seem to use them."""
        return self._definition([], [], *(self._variables(key, self._need) for key in self._need_in))

    def reduce_definition(self, obj: Any) -> Any:
        """Return the reduction of a function, class, module or closure; None for other objects."""
        if type(obj) is types.CodeType:
            return NotImplemented  # cloudpickle's, by its type
        if type(obj) is types.FunctionType:  # isinstance says so of wrapt's proxies, too
            if importable(obj):
                self.modules.add(obj.__module__)
                return NotImplemented
            self.number(obj)
            return self._reduce_function(obj)
        if issubclass(type(obj), type):  # isinstance says so of `Sequence[int]`, too, before Python 3.11
            if obj.__module__ == "builtins" or obj in classes.BUILT_IN:  # where NoneType and its like say they are
                return super().reducer_override(obj)
            if importable(obj):
                self.modules.add(obj.__module__)
                return NotImplemented
            self.number(obj)
            return self._reduce_class(obj)
        if isinstance(obj, types.ModuleType):
            return self._reduce_module(obj)
        if isinstance(obj, types.CellType):
            return self._reduce_cell(obj)
        if type(obj) in classes.VARIABLES:
            self.number(obj)
            return classes.reduce_variable(obj)
        return None

    def number(self, obj: Any) -> None:
        """Give an object that is sent by value the next number, under which it may come back."""
        if id(obj) not in self._numbers:
            self._numbers[id(obj)] = len(self.originals)
            self.originals.append(obj)

    # The following methods give steps in pairs of lists: first code, then data, which wait until all code is there.

    def _reduce_function(self, fn: types.FunctionType) -> tuple[Any, ...]:
        key, captured = namespace_of(fn.__globals__)
        names = globals_of(fn)
        if "#" in key:  # what relative imports go by
            names.update((name, fn.__globals__[name]) for name in _PACKAGE if name in fn.__globals__)
        if not captured:  # pytest's rewritten asserts use names such as '@pytest_ar' that no import of the module gives
            names = {name: value for name, value in names.items() if name.startswith("@")}
        self.used.update((key, name) for name in names)
        attributes = {name: value for name in _FUNCTION_ATTRIBUTES if (value := getattr(fn, name, None))}
        args = (fn.__code__, key, fn.__name__, fn.__module__, fn.__qualname__, fn.__doc__, fn.__closure__)
        steps = self._definition(
            self._own_name(fn),
            [],
            _attributes(reading.set_function, fn, attributes),
            _attributes(reducers.set_state, fn, fn.__dict__),
            self._contents(fn),
            self._reached_modules(fn, names.values() if captured else ()),
            self._variables(key, names),
        )
        return reading.make_function, args, steps, None, None, reading.nothing

    def _reduce_class(self, cls: type) -> tuple[Any, ...]:
        ctypes = sys.modules.get("ctypes")
        if ctypes is not None and type(cls) is type(ctypes.Array):
            return operator.mul, (cls._type_, cls._length_)  # type: ignore[attr-defined]
        if ctypes is not None and type(cls) is type(ctypes._Pointer):
            return ctypes.POINTER, (cls._type_,)  # type: ignore[attr-defined]
        make, args, attributes, data = classes.reduce_class(cls)
        steps = self._definition(
            [*self._own_name(cls), CallStep(classes.keep_attributes, cls, frozenset(attributes))],
            data,
            _attributes(classes.set_attributes, cls, attributes),
            self._variables("__main__", globals_of_class(cls)),
        )
        return make, args, steps, None, None, reading.nothing

    def _reduce_module(self, module: types.ModuleType) -> Any:
        if not travels_by_value(module):
            if sys.modules.get(module.__name__) is module:
                self.modules.add(module.__name__)
                return subimport, (module.__name__,)  # also one of a subclass, as transformers and torch.backends are
            package, _, name = module.__name__.rpartition(".")
            if package in sys.modules and getattr(sys.modules[package], name, None) is module:  # torch.ops
                return getattr, (sys.modules[package], name)
        key, _ = namespace_of(vars(module))
        names = {name: value for name, value in vars(module).items() if name not in _LOADING}
        steps = self._definition([], [], self._variables(key, names))
        return reading.module_for, (key, module.__doc__), steps, None, None, reading.nothing

    def _reduce_cell(self, cell: types.CellType) -> tuple[Any, ...]:
        # First the empty cell, then its content: two functions that share a cell still do, and recursion ends.
        if id(cell) in self._cells or (content := _content(cell)) is _EMPTY:
            return types.CellType, ()
        return types.CellType, (), (content,), None, None, reading.set_cell_state

    def _definition(self, code: list[Any], data: list[UnpickleStep], *more: Steps) -> tuple[Any, ...]:
        self.defines = True
        for some_code, some_data in more:
            code += some_code
            data += some_data
        return (Open(), *code, Close(data)) if code or data else ()

    def _own_name(self, obj: Any) -> list[Any]:
        """Return the steps that set `obj` under its own name in the reader, if the notebook knows it by this name."""
        name, *inner = obj.__qualname__.split(".")
        outermost = main_namespace().get(name) if obj.__module__ == "__main__" else None
        found = outermost
        for part in inner:
            found = getattr(found, part, None)
        if found is not obj or not self._travels("__main__", name):
            return []
        if "__main__" in self._need_in and name in self._need:
            return []
        return [Enter("__main__", name, outermost) if inner else EnterOwn("__main__", name, obj)]

    def _contents(self, fn: types.FunctionType) -> Steps:
        code, data = [], []
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            content = _content(cell)
            if id(cell) in self._cells or content is _EMPTY:
                continue
            self._cells.add(id(cell))
            if is_constant(content) or is_definition(content):
                code.append(CallStep(reading.set_cell, cell, content))
            else:
                data.append(CallStep(reading.set_cell, cell, Named(name, content)))
        return code, data

    def _reached_modules(self, fn: types.FunctionType, values: Iterable[Any]) -> Steps:
        contents = (_content(cell) for cell in fn.__closure__ or ())
        packages = [value for value in (*values, *contents) if isinstance(value, types.ModuleType)]
        found: list[Any] = [inner for package in packages for inner in submodules(package, fn.__code__)]
        return found + torch_objects.operators_named(attributes_of(fn.__code__)), []

    def _variables(self, key: str, names: Mapping[str, Any]) -> Steps:
        constants: dict[str, Any] = {}
        code: list[Any] = []
        data: list[Any] = []
        for name, value in names.items():
            if key in self._need_in and name in self._need:
                value = self._need[name]
            elif not self._travels(key, name):
                continue
            if self._progress.entered.get((key, name)):
                continue
            self.captured[name] = value
            if isinstance(value, Outputs):
                shown = {number: Named(f"Out[{number}]", output) for number, output in value.items()}
                data.append(CallStep(reading.enter_outputs, key, shown))
            elif is_constant(value):
                constants[name] = value
            else:
                (code if is_definition(value) else data).append(Enter(key, name, value))
        return [EnterConstants(key, constants), *code] if constants else code, data

    def _travels(self, key: str, name: str) -> bool:
        if (key, name) not in self._skipped:
            self._skipped[key, name] = self._skip(key, name)
        return not self._skipped[key, name]


def _attributes(setter: Callable[..., None], obj: Any, attributes: Mapping[str, Any]) -> Steps:
    code: dict[str, Any] = {}
    data: dict[str, Any] = {}
    for name, value in attributes.items():
        (code if is_constant(value) or is_definition(value) else data)[name] = value
    return [CallStep(setter, obj, code)] if code else [], [CallStep(setter, obj, data)] if data else []


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
