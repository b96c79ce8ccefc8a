"""Objects of the notebook, which travel by value: each cell is a case of test_call.py."""

# %% enum
import enum


class Color(enum.Enum):
    RED = 1
    BLUE = "b"

    def show(self):
        return f"{self.name}!"


class Flags(enum.IntFlag):
    A = enum.auto()
    B = enum.auto()


out = in_ddp(1, lambda c: (c, Color.RED, c is Color.BLUE, c.show(), Flags.A | Flags.B), Color.BLUE)
assert out == (Color.BLUE, Color.RED, True, "BLUE!", Flags.A | Flags.B) and out[1] is Color.RED

# %% dataclasses
from dataclasses import dataclass, field, replace


@dataclass
class Config:
    lr: float = 0.1
    layers: list = field(default_factory=lambda: [LAYER])


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    y: int = 2


LAYER = 50
out = in_ddp(1, lambda c, p: (replace(c, lr=1.0), Config(), p, hash(p), Point(3)), Config(), Point(1))
assert out == (Config(1.0, [50]), Config(), Point(1), hash(Point(1)), Point(3, 2))

# %% namedtuples
import collections
import typing

Pair = collections.namedtuple("Pair", "a b", defaults=[7])


class Row(typing.NamedTuple):
    user: int
    item: int = 3

    def total(self):
        return self.user + self.item


out = in_ddp(1, lambda p: (p, Pair(2), Row(1), Row(1).total()), Pair(1))
assert out == (Pair(1, 7), Pair(2, 7), Row(1, 3), 4)
assert type(out[0]) is Pair and type(out[2]) is Row

# %% generics
from collections.abc import Sequence
from typing import Generic, Protocol, TypedDict, TypeVar, runtime_checkable

T = TypeVar("T")


class Box(Generic[T]):
    def __init__(self, value: T) -> None:
        self.value = value

    def get(self) -> T:
        return self.value


class IntBox(Box[int]):
    pass


class Options(TypedDict, total=False):
    lr: float


@runtime_checkable
class HasGet(Protocol):
    def get(self): ...


def fn(box: Box[int], more: "Sequence[T] | None" = None) -> Box[T]:
    return Box[str]("b"), box.get(), IntBox(4), Box[int], T, Options(lr=1.0), isinstance(box, HasGet), Options


out = in_ddp(1, fn, Box(3))
assert type(out[0]) is Box and out[1] == 3 and isinstance(out[2], Box) and out[3] == Box[int]
assert out[5:7] == ({"lr": 1.0}, True) and out[7] is Options

# %% abstract base classes
import abc


class Model(abc.ABC):
    @abc.abstractmethod
    def forward(self): ...


class Dot(Model):
    def forward(self):
        return "dot"


@Model.register
class Virtual:
    pass


def fn(model):
    try:
        Model()  # type: ignore[abstract]
    except TypeError:
        return model, isinstance(model, Model), isinstance(Virtual(), Model), model.forward()


out = in_ddp(1, fn, Dot())
assert isinstance(out[0], Dot) and out[1:] == (True, True, "dot")


# %% a class that refers to itself
class Node:
    root = None
    made = []  # noqa: RUF012

    def __init__(self, parent=None):
        self.parent, self.children = parent, [self]
        Node.made.append(self)

    def again(self):
        return __class__(self)


Node.root = Node()


def fn(node):
    child = node.again()
    return child, Node.root is node, node in Node.made, type(child) is Node


out = in_ddp(1, fn, Node.root)
assert type(out[0]) is Node and out[1:] == (True, True, True) and out[0].children[0] is out[0]


# %% metaclasses
class Registry(type):
    classes = {}  # noqa: RUF012

    def __new__(mcls, name, bases, space, **options):
        cls = super().__new__(mcls, name, bases, {**space, "options": options})
        mcls.classes[name] = cls
        return cls

    def __init__(cls, name, bases, space, **options):
        super().__init__(name, bases, space)


class A(metaclass=Registry, speed=3):
    pass


class B(A):
    pass


class Strict(type):
    def __new__(mcls, name, bases, space, needed):
        return super().__new__(mcls, name, bases, space)

    def __init__(cls, name, bases, space, needed):
        super().__init__(name, bases, space)

    def __call__(cls, *args):
        return "made", super().__call__(*args)


class C(metaclass=Strict, needed=True):
    pass


out = in_ddp(1, lambda: (type(B) is Registry, A.options, Registry.classes["B"] is B, B(), C()))
assert out[:3] == (True, {"speed": 3}, True) and type(out[3]) is B and type(out[4][1]) is C


# %% a metaclass of an enumeration that registers it
import enum


class Named(enum.EnumMeta):
    made = []  # noqa: RUF012

    def __new__(mcls, name, bases, space, **options):
        cls = super().__new__(mcls, name, bases, space, **options)
        mcls.made.append(name)
        return cls

    def __getitem__(cls, name):
        return super().__getitem__(name.upper())


class Access(enum.Flag, metaclass=Named):
    READ = 1
    WRITE = 2


out = in_ddp(1, lambda: (Access["read"] | Access.WRITE, Named.made, type(Access) is Named))
assert out == (Access.READ | Access.WRITE, ["Access"], True), out


# %% structures and unions of ctypes
import ctypes


class Pixel(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("kind", ctypes.c_uint8), ("value", ctypes.c_int32)]

    def doubled(self):
        return 2 * self.value


class Either(ctypes.Union):
    _anonymous_ = ("pixel",)
    _fields_ = [("pixel", Pixel), ("whole", ctypes.c_uint64)]


class Link(ctypes.Structure):
    pass


Link._fields_ = [("value", ctypes.c_int), ("next", ctypes.POINTER(Link))]
pixel = Pixel(1, 5)


def fn():
    first = Link(1)
    first.next = ctypes.pointer(Link(2))
    return pixel.doubled(), ctypes.sizeof(Pixel), Either(pixel).kind, first.next.contents.value, Pixel(3, 4)


with Session(1) as session:
    for _ in range(2):  # a class that is there already keeps its fields
        out = session.run(fn)
        assert out[:4] == (10, 5, 1, 2) and type(out[4]) is Pixel and out[4].doubled() == 8, out
    link = Link(1, ctypes.pointer(Link(2)))
    try:
        session.run(lambda: link.value)
    except CaptureError as exc:
        assert "link" in str(exc) and "pointers" in str(exc), exc
    else:
        raise AssertionError("the address is another process's")


# %% names by way of the module that a cell runs in
limit, ways = 3, {"double": 2}


def by_name(value):
    from __main__ import limit as most

    return min(value, most)


def by_attribute(value):
    import __main__

    return __main__.by_name(value) * __main__.ways["double"]


assert in_ddp(1, by_attribute, 5) == 6


# %% classes derived from threading.local, and what holds one, such as a console of rich
import threading

from rich.console import Console
from rich.progress import Progress


class Buffers(threading.local):
    def __init__(self, size, *, fill=0):
        self.size, self.fill = size, fill
        self.values = [fill] * size


class Counter(threading.local):
    count = 0


class Holder(threading.local):
    def __init__(self, value):
        self.kept = value


buffers, counter, holder = Buffers(2, fill=7), Counter(), Holder(1)
buffers.values.append(1)
counter.count = 4


def fn():
    found = [buffers.values, counter.count, isinstance(buffers, Buffers)]
    thread = threading.Thread(target=lambda: found.append(buffers.values))
    thread.start()
    thread.join()
    return found


def show():
    with progress:
        progress.update(progress.add_task("steps", total=2), advance=2)
    console.print("[bold]shown[/bold]")
    return progress.finished


console, progress = Console(), Progress()
assert in_ddp(1, fn) == [[7, 7], 0, True, [7, 7]]
assert in_ddp(1, show) is True
try:
    in_ddp(1, lambda: holder.kept)
except CaptureError as exc:
    assert "holder cannot be sent" in str(exc), exc
else:
    raise AssertionError("its argument is not known")


# %% hooks of class definitions
class Base:
    registry = {}  # noqa: RUF012

    def __init_subclass__(cls, speed, **options):
        super().__init_subclass__(**options)
        Base.registry[cls.kind] = cls, speed


class A(Base, speed=3):
    kind = "a"


class Field:
    def __set_name__(self, owner, name):
        self.name, self.owner = name, owner

    def __get__(self, obj, owner=None):
        return self.name, self.owner


class Row:
    item = Field()


def fn():
    class Later(Base, speed=4):
        kind = "b"

    return Base.registry["a"][0] is A, sorted(Base.registry), Row().item == ("item", Row), A(), Later  # type: ignore[call-arg]


out = in_ddp(1, fn)
assert out[:3] == (True, ["a", "b"], True) and type(out[3]) is A
assert out[4].kind == "b" and issubclass(out[4], Base) and list(Base.registry) == ["a"]

# %% caches, dispatch and locks
import functools
import threading


@functools.lru_cache(maxsize=16)
def square(x):
    return x * x * ONE


ONE = 1


@functools.singledispatch
def kind(x):
    return "object"


@kind.register
def _(x: int):
    return "int"


class Lazy:
    calls = 0

    def __init__(self):
        self.lock, self.rlock = threading.Lock(), threading.RLock()

    @functools.cached_property
    def value(self):
        with self.lock, self.rlock:
            type(self).calls += 1
            return square(3)

    @functools.singledispatchmethod
    def show(self, x):
        return "object"

    @show.register
    def _(self, x: str):
        return "str"


lock = threading.Lock()


def fn(lazy):
    with lock:
        return lazy.value, lazy.value, lazy.calls, kind(1), kind("a"), lazy.show("a"), lazy.show(1), lazy


out = in_ddp(1, fn, Lazy())
assert out[:-1] == (9, 9, 1, "int", "object", "str", "object")
assert square.cache_info().currsize == 0
lock.acquire()
assert in_ddp(1, lambda: lock.acquire(blocking=False))
assert out[-1].value == 9 and kind(1) == "int"


# %% nested classes and slots
class Outer:
    class Inner:
        __slots__ = ("__weakref__", "__y", "x")

        def __init__(self, x):
            self.x = self.__y = x

        def y(self):
            return self.__y

        class Innermost:
            value = 3

    def make(self):
        return self.Inner(4)


def local():
    class Hidden:
        def __eq__(self, other):
            return type(other).__name__ == "Hidden"

        __hash__ = None

    return Hidden


Hidden = local()
out = in_ddp(1, lambda o: (o.make(), Outer.Inner.Innermost.value, Outer.Inner(5), Hidden()), Outer())
assert type(out[0]) is Outer.Inner and (out[0].x, out[1], out[2].x) == (4, 3, 5)
assert type(out[3]) is Hidden and out[0].y() == 4 and not hasattr(out[0], "__dict__")
assert not in_ddp(1, lambda o: hasattr(o.make(), "__dict__"), Outer())


# %% exceptions
class Bad(Exception):
    def __init__(self, code, *, why):
        super().__init__(f"{code}: {why}")
        self.code, self.why = code, why


out = in_ddp(1, lambda e: (e, Bad(2, why="so")), Bad(1, why="because"))
assert [(type(e), e.code, e.why, str(e)) for e in out] == [(Bad, 1, "because", "1: because"), (Bad, 2, "so", "2: so")]

# %% modules of torch
import torch
from torch import nn


class Embedding(nn.Module):
    def __init__(self, n, k):
        super().__init__()
        self.weight = nn.Parameter(torch.full((n, k), SCALE))
        self.register_buffer("steps", torch.zeros(1))
        self.act = activation
        self.register_forward_hook(hook)

    def forward(self, i):
        return self.act(self.weight[i]).sum()


SCALE = 2.0
seen = []


def hook(module, args, output):
    seen.append(1)


def activation(x):
    return x * SCALE


def fn(model):
    loss = model(torch.tensor([1])) + Embedding(3, 4)(torch.tensor([0]))
    loss.backward()
    return model, loss.item(), model.weight.grad.sum().item(), len(seen)


out = in_ddp(2, fn, Embedding(3, 4))
assert type(out[0]) is Embedding and out[1:] == (32.0, 8.0, 2) and isinstance(out[0].weight, nn.Parameter)
assert out[0](torch.tensor([1])).item() == 16.0 and len(seen) == 1

# %% weak references and modules
import os.path as p
import weakref


class Thing:
    pass


thing = Thing()
ref, table = weakref.ref(thing), weakref.WeakValueDictionary(a=thing)
assert in_ddp(1, lambda: (ref() is thing, table["a"] is thing, p.basename("a/b"))) == (True, True, "b")

# %% the lines that scripts for GPUs begin with
import torch


def set_flags():
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = True
    return torch.backends.cudnn.benchmark, torch.backends.cuda.matmul.allow_tf32


assert in_ddp(1, set_flags) == (True, True)


# %% classes that are found by __subclasses__
class Loss:
    def all_names(cls):
        return sorted(found.__name__ for found in cls.__subclasses__())

    all_names = classmethod(all_names)


class Hinge(Loss): ...


class Huber(Loss): ...


assert in_ddp(1, Loss.all_names) == ["Hinge", "Huber"]
assert in_ddp(1, lambda: [found.__name__ for found in Loss.__subclasses__()]) == ["Hinge", "Huber"]
