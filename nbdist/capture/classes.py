"""Classes, enumerations and typing variables, rebuilt as they were defined, without running the code that defined
them."""

from __future__ import annotations

import contextlib
import enum
import functools
import types
import typing
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle.cloudpickle as cp

from ..errors import CaptureError
from .names import importable
from .steps import CallStep, UnpickleStep

#: Classes that are in `types` alone, such as the class of functions.
BUILT_IN = frozenset(cp._BUILTIN_TYPE_NAMES)

#: What makes a class, its arguments, the attributes to set, and what is to be done when all of these are there.
ClassReduction = tuple[Any, tuple[Any, ...], dict[str, Any], list[UnpickleStep]]


def reduce_class(cls: Any) -> ClassReduction:
    """Return the reduction of a class. `set_attributes` sets its attributes when it is rebuilt."""
    if issubclass(cls, enum.Enum):
        return _reduce_enum(cls)
    if library := _builder(cls):
        raise CaptureError(
            f"{cls.__qualname__} cannot be sent between the notebook and the ranks: {library} builds this class from "
            f"the text of its definition. Write the class into a module (%%writefile models.py) and import it, or "
            f"define it inside the function."
        )
    make, (metaclass, name, bases, namespace, *more), (attributes, _), *_ = cp._dynamic_class_reduce(cls)
    namespace = {**namespace, "__qualname__": cls.__qualname__}
    if "__slots__" in attributes and typing.NamedTuple not in bases:  # that one makes its own
        namespace = {**namespace, "__slots__": attributes["__slots__"]}
        attributes = {
            key: value
            for key, value in attributes.items()
            if key != "__slots__" and not isinstance(value, types.MemberDescriptorType)
        }
    if metaclass.__module__ == "_ctypes":  # not importable before Python 3.13
        fields = _take_fields(attributes, namespace)
        data: list[UnpickleStep] = [CallStep(set_fields, cls, fields)] if fields else []
        return make, (_make_c_class, name, bases, namespace, *more), attributes, data
    imported = next(filter(importable, metaclass.__mro__))
    if metaclass.__name__ == "_TypedDictMeta":  # its `__new__` reads hints, and there are none yet
        imported, bases = type, cls.__bases__
    return make, (functools.partial(_make_class, metaclass, imported), name, bases, namespace, *more), attributes, []


#: Metaclasses that register a class, or make code and descriptors for it, when its body is there.
_BUILDERS = {
    "django.db.models.base.ModelBase": "Django",
    "msgspec._core.StructMeta": "msgspec",
    "peewee.ModelBase": "peewee",
    "pony.orm.core.EntityMeta": "Pony",
}


def _builder(cls: Any) -> str:
    """Return the library that keeps more about a class than its attributes show; empty if none does."""
    if "_sa_class_manager" in vars(cls) or "_sa_registry" in vars(cls):  # mapped, or a base of what is
        return "SQLAlchemy"
    kinds = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(cls).__mro__)
    return next((_BUILDERS[kind] for kind in kinds if kind in _BUILDERS), "")


def _take_fields(attributes: dict[str, Any], namespace: dict[str, Any]) -> Any:
    """Separate the fields of a ctypes structure from its attributes, which contain a descriptor for each field. Move
    the options of the layout into the namespace, because they must be set before the fields.
    """
    fields = attributes.pop("_fields_", [])
    for name in ("_anonymous_", "_pack_", "_align_", "_layout_"):
        if name in attributes:
            namespace[name] = attributes.pop(name)
    for name, value in list(attributes.items()):
        if type(value).__module__ == "_ctypes":
            del attributes[name]
    return fields


def _make_c_class(name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    return types.new_class(name, bases, {}, lambda body: body.update(namespace))


def set_fields(cls: Any, fields: Any) -> None:
    """Set the fields of a ctypes structure, which can be set only once."""
    if "_fields_" not in vars(cls):
        cls._fields_ = fields


def set_attributes(cls: type, attributes: dict[str, Any]) -> None:
    """Set attributes of a class that is being rebuilt."""
    cp._class_setstate(cls, (attributes, {}))


#: By class: the attributes that the other side gave it last.
_given: weakref.WeakKeyDictionary[type, frozenset[str]] = weakref.WeakKeyDictionary()


def keep_attributes(cls: type, names: frozenset[str]) -> None:
    """Remove the attributes that an earlier call gave a class and that are not among these `names`."""
    for name in _given.get(cls, frozenset()) - names:
        with contextlib.suppress(AttributeError, TypeError):
            type.__delattr__(cls, name)
    _given[cls] = names


def _make_class(metaclass: type, imported: Any, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> type:
    """Make a class without running its metaclass's code and `__init_subclass__`: they ran when it was defined, and must
    not run again on an empty class."""
    hooks = [
        (base, vars(base)["__init_subclass__"])
        for base in dict.fromkeys(b for base in bases for b in base.__mro__)
        if "__init_subclass__" in vars(base) and not importable(base)
    ]
    for base, _ in hooks:
        type.__delattr__(base, "__init_subclass__")
    try:
        cls: type = imported.__new__(metaclass, name, bases, namespace)
        imported.__init__(cls, name, bases, namespace)
        return cls
    finally:
        for base, hook in hooks:
            type.__setattr__(base, "__init_subclass__", hook)


# -------------------------------------------------------------------------------------------------- enumerations

_MACHINERY = ("_generate_next_value_", "_member_names_", "_member_map_", "_member_type_", "_value2member_map_")
_OF_EVERY_MEMBER = frozenset(["_value_", "_name_", "__objclass__", "_sort_order_", "_inverted_"])
_CONTENT: Any = (int, float, complex, str, bytes, tuple, frozenset)


def _reduce_enum(cls: Any) -> ClassReduction:
    attributes, _ = cp._class_getstate(cls)
    for name in (*_MACHINERY, *cls.__members__):
        attributes.pop(name, None)
    members = {name: (member._value_, _content(member)) for name, member in cls.__members__.items()}
    boundary = getattr(cls, "_boundary_", None)
    args = (type(cls), cls.__bases__, cls.__name__, cls.__qualname__, cls.__module__, members, boundary)
    more = {
        name: {key: value for key, value in vars(member).items() if key not in _OF_EVERY_MEMBER}
        for name, member in cls.__members__.items()
        if hasattr(member, "__dict__")
    }
    data: list[UnpickleStep] = [CallStep(set_members, cls, more)] if any(more.values()) else []
    return make_enum, (*args, cp._get_or_create_tracker_id(cls)), attributes, data


def _content(member: Any) -> tuple[Any, ...] | None:
    """Return the value of the part of a member that belongs to another type, as in `class Level(int, Enum)`."""
    for base in _CONTENT:
        if isinstance(member, base):
            return (frozenset(member),) if base is frozenset else tuple(base.__getnewargs__(member))
    return None


def make_enum(
    metaclass: Any,
    bases: tuple[Any, ...],
    name: str,
    qualname: str,
    module: str,
    members: Mapping[str, tuple[Any, tuple[Any, ...] | None]],
    boundary: Any,
    tracker: str,
) -> Any:
    """Make an enumeration with these members, each with its value and its content, without running code of the
    notebook."""
    imported = next(filter(importable, metaclass.__mro__))  # a metaclass of the notebook has run already
    namespace = imported.__prepare__(name, bases)
    made = iter(members.values())

    def __new__(cls: Any, *args: Any) -> Any:
        value, content = next(made)
        kind = cls._member_type_
        if content is None and kind.__new__ is object.__new__:
            member = object.__new__(cls)
        else:
            member = kind.__new__(cls, *(args if content is None else content))
        member._value_ = value
        return member

    for member_name, (value, _) in members.items():
        namespace[member_name] = enum.member(value) if hasattr(enum, "member") else value
    if members:
        namespace["__new__"], namespace["__init__"] = __new__, lambda self, *args: None
    options = {} if boundary is None else {"boundary": boundary}
    cls = imported.__new__(metaclass, name, bases, namespace, **options)
    for leftover in ("__init__", "__new_member__", "_new_member_") if members else ():
        if leftover in vars(cls):
            type.__delattr__(cls, leftover)
    cls.__module__, cls.__qualname__ = module, qualname
    return cp._lookup_class_or_track(tracker, cls)


def set_members(cls: Any, attributes: Mapping[str, Mapping[str, Any]]) -> None:
    """Set the own attributes of the members."""
    for name, own in attributes.items():
        vars(cls.__members__[name]).update(own)


# ---------------------------------------------------------------------------------------------- typing's variables


def _variables() -> Iterator[type]:
    for name in ("NewType", "TypeVar", "ParamSpec", "TypeVarTuple", "TypeAliasType"):
        kind = getattr(typing, name, None)
        if isinstance(kind, type):
            yield kind


#: Types of what is defined by a name of its own, like a class.
VARIABLES = frozenset(_variables())


def reduce_variable(obj: Any) -> tuple[Any, ...]:
    """Return the reduction of a `NewType`, `TypeVar`, `ParamSpec`, `TypeVarTuple` or `type` alias."""
    where = cp._lookup_module_and_qualname(obj, name=obj.__name__)
    if where is not None and not cp._is_registered_pickle_by_value(where[0]):
        return getattr, where
    kind = type(obj)
    options: dict[str, Any] = {}
    if kind is typing.NewType:
        args: tuple[Any, ...] = (obj.__name__, obj.__supertype__)
    elif kind.__name__ == "TypeAliasType":
        args, options = (obj.__name__, obj.__value__), {"type_params": obj.__type_params__}
    else:
        args = (obj.__name__, *getattr(obj, "__constraints__", ()))
        for name in ("bound", "covariant", "contravariant", "infer_variance"):
            if getattr(obj, f"__{name}__", None):
                options[name] = getattr(obj, f"__{name}__")
        if hasattr(obj, "has_default") and obj.has_default():
            options["default"] = obj.__default__
    return make_variable, (kind, args, options, obj.__module__, cp._get_or_create_tracker_id(obj))


def make_variable(kind: Any, args: tuple[Any, ...], options: Mapping[str, Any], module: str, tracker: str) -> Any:
    made = kind(*args, **options)
    if kind.__name__ != "TypeAliasType":
        made.__module__ = module
    return cp._lookup_class_or_track(tracker, made)
