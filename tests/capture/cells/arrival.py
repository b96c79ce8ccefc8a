"""Objects that arrive as they are: each cell is a case of test_arrival.py."""

# %% types that only the text of hints names
from __future__ import annotations

import collections.abc as cabc
import decimal
import typing
from dataclasses import dataclass


class Row:
    pass


class Item:
    pass


@dataclass
class Table:
    row: Row
    items: cabc.Sequence[Item] | None = None


def fn(table: Table) -> decimal.Decimal:
    return {**typing.get_type_hints(Table), **typing.get_type_hints(fn)}


out = in_ddp(1, fn, None)
assert out["row"] is Row and out["items"] == cabc.Sequence[Item] | None and out["return"] is decimal.Decimal
assert out["table"] is Table

# %% a global that a hash uses and the function names too
SALT = 7


class Key:
    def __init__(self, x):
        self.x = x

    def __hash__(self):
        return hash((self.x, SALT))

    def __eq__(self, other):
        return self.x == other.x


table = {Key(1): "a"}


def f():
    return table[Key(1)], SALT


def g():
    return SALT, table[Key(1)]


assert in_ddp(1, f) == ("a", 7) and in_ddp(1, g) == (7, "a")
assert in_ddp(1, lambda: table[Key(1)], need="table SALT") == "a"
assert in_ddp(1, lambda t: t[Key(1)], table) == "a"


# %% a class whose methods use a table of its own instances
class Key:
    def __init__(self, x):
        self.x = x

    def lookup(self):
        return table[self]

    def __hash__(self):
        return helper(self.x)

    def __eq__(self, other):
        return self.x == other.x


def helper(x):
    return (len(names) if names else 0) + x


names = ["a"]
table = {Key(1): "one"}
assert in_ddp(1, lambda: Key(1).lookup()) == "one"
assert in_ddp(1, lambda key: key.lookup(), Key(1)) == "one"


def make():
    class Local:
        def __init__(self, x):
            self.x = x

        def lookup(self, default=None):
            return local[self]

        def __hash__(self):
            return self.x

        def __eq__(self, other):
            return self.x == other.x

    local = {Local(1): "local"}
    Local.known = {Local(2): "known"}
    return Local


Local = make()
assert in_ddp(1, lambda: (Local(1).lookup(), Local.known[Local(2)])) == ("local", "known")

# %% __setstate__, __reduce__, __new__ and __eq__ that need helpers
SCALE = 2


def scaled(x):
    return x * SCALE


def rebuild(x):
    return Reduced(scaled(x) // SCALE)


class Stated:
    def __init__(self, x):
        self.x = x

    def __getstate__(self):
        return self.x

    def __setstate__(self, x):
        self.x = scaled(x) // SCALE


class Reduced:
    def __init__(self, x):
        self.x = x

    def __reduce__(self):
        return rebuild, (self.x,)


class New:
    def __new__(cls, x=None):
        self = super().__new__(cls)
        self.made = scaled(3)
        return self

    def __getnewargs__(self):
        return (1,)


class Text(str):
    def __hash__(self):
        return scaled(len(self))

    def __eq__(self, other):
        return scaled(len(self)) == scaled(len(other))


def fn():
    return [s.x for s in stated], reduced.x, new.made, texts[Text("ba")], scaled(1), SCALE


stated, reduced, new, texts = [Stated(1), Stated(2)], Reduced(5), New(), {Text("ab"): "two"}
assert in_ddp(1, fn) == ([1, 2], 5, 6, "two", 2, 2)


def other_way():
    return SCALE, scaled(1), texts[Text("ba")], new.made, reduced.x, [s.x for s in stated]


assert in_ddp(1, other_way) == (2, 2, "two", 6, 5, [1, 2])

# %% submodules that are reached through their package
import concurrent.futures
import email.mime.text
import xml.etree.ElementTree

import matplotlib.pyplot
import PIL.Image
import torch
import torch.nn.utils.prune


def image():
    return PIL.Image.new("L", (1, 1)).size


def tree():
    return xml.etree.ElementTree.fromstring("<a/>").tag


def nested():
    return (lambda: [email.mime.text.MIMEText("x").get_content_type() for _ in range(1)])()


def prune():
    return torch.nn.utils.prune.is_pruned(torch.nn.Linear(1, 1))


def plot():
    return matplotlib.pyplot.figure().get_dpi() > 0


assert in_ddp(1, lambda: (image(), tree(), nested(), prune())) == ((1, 1), "a", ["text/plain"], False)
assert in_ddp(1, plot)


def close():
    package = concurrent

    def inner():
        return package.futures.ThreadPoolExecutor.__name__

    return inner


assert in_ddp(1, close()) == "ThreadPoolExecutor"

# %% plain pickle in ranks
import io
import multiprocessing
import pickle

import torch
import torch.distributed as dist
from torch import nn


class Net2(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)


class Outer:
    class Inner:
        value = 3


class Message:
    def __init__(self, text):
        self.text = text


def square(x):
    return x * x


def fn(net, message, function, inner):
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    messages = [None] * dist.get_world_size()
    dist.all_gather_object(messages, message)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        squares = pool.map(function, [1, 2])
    assert type(pickle.loads(pickle.dumps(inner))) is type(inner)
    return type(again) is type(net), [m.text for m in messages], squares


assert in_ddp(2, fn, Net2(), Message("hi"), square, Outer.Inner()) == (True, ["hi", "hi"], [1, 4])

# %% data loader workers that are spawned
import multiprocessing

from torch.utils.data import DataLoader, Dataset

SCALE = 10


class Rows(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return Row(i * SCALE)  # type: ignore[call-arg]


class Row:
    def __init__(self, x):
        self.x = x


def collate(rows):
    return [row.x for row in rows]


def fn(rows):
    loader = DataLoader(rows, batch_size=3, num_workers=1, multiprocessing_context="spawn", collate_fn=collate)
    return [x for batch in loader for x in batch]


assert in_ddp(1, fn, Rows()) == [0, 10, 20]

# %% pools whose processes are spawned
import multiprocessing

FACTOR = 10


class Point:
    def __init__(self, x):
        self.x = x


def scaled(point):
    return Point(point.x * FACTOR)


def pools():
    found = []
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            points = pool.map(scaled, [Point(1), Point(2)])
            found.append([(type(point) is Point, point.x) for point in points])
    return found


assert in_ddp(1, pools) == [[(True, 10), (True, 20)]] * 3

# %% typing's variables, also where only hints name them
import typing

UserId = typing.NewType("UserId", int)
P, T = typing.ParamSpec("P"), typing.TypeVar("T", bound="Base", covariant=True)


class Base:
    pass


def fn(f: typing.Callable[P, T], user: UserId) -> T:
    return UserId(user), P, T, UserId


out = in_ddp(1, fn, None, 3)
assert out[0] == 3 and out[1] is P and out[2] is T and out[3] is UserId
if hasattr(typing, "TypeVarTuple"):
    Ts = typing.TypeVarTuple("Ts")

    class Many(typing.Generic[typing.Unpack[Ts]]):
        pass

    assert in_ddp(1, lambda: (Ts, Many[int, str], Many))[::2] == (Ts, Many)


class Movie(typing.TypedDict):
    name: str


class Rated(Movie, total=False):
    stars: int


got, keys, movie = in_ddp(1, lambda: (Rated, sorted(Rated.__required_keys__), Rated(name="x", stars=3)))
assert got is Rated and keys == ["name"] and movie == {"name": "x", "stars": 3}
assert in_ddp(1, lambda: typing.get_type_hints(Rated)) == {"name": str, "stars": int}

# %% enumerations whose members have attributes
import enum

G = 6.7e-11


class Planet(enum.Enum):
    MERCURY = (3.303e23, 2.4397e6)
    EARTH = (5.976e24, 6.37814e6)
    HOME = (5.976e24, 6.37814e6)

    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius

    @property
    def surface_gravity(self):
        return G * self.mass / (self.radius * self.radius)


class Coordinate(bytes, enum.Enum):
    def __new__(cls, value, label, unit):
        obj = bytes.__new__(cls, [value])
        obj._value_, obj.label, obj.unit = value, label, unit
        return obj

    PX = (0, "P.X", "km")
    PY = (1, "P.Y", "km")


class Auto(enum.Enum):
    def __new__(cls, text):
        obj = object.__new__(cls)
        obj._value_, obj.text = len(cls.__members__) + 1, text
        return obj

    ONE = "one"
    TWO = "two"


class Perm(enum.Flag):
    R, W = 4, 2
    RW = 6


class Level(enum.IntEnum):
    LOW = 1
    MINIMUM = 1

    def __str__(self):
        return "level " + self.name


class Pair(tuple, enum.Enum):
    A = (1, 2)


class Name(str, enum.Enum):
    X = "x"


def fn(planet):
    assert planet is Planet.EARTH is Planet["HOME"] is Planet.HOME and planet.mass == 5.976e24, vars(planet)
    assert list(Planet) == [Planet.MERCURY, Planet.EARTH] and list(Planet.__members__)[-1] == "HOME"
    assert Coordinate.PY == b"\x01" and Coordinate(1) is Coordinate.PY and Coordinate.PY.unit == "km"
    assert Auto.TWO.text == "two" and Auto(2) is Auto.TWO
    assert Perm.R | Perm.W is Perm.RW and Perm(0).value == 0 and Perm.R in Perm.RW
    assert Level.MINIMUM is Level.LOW and str(Level.LOW) == "level LOW" and Level.LOW + 1 == 2
    assert Pair.A == (1, 2) and Name.X == "x" and Name("x") is Name.X
    try:
        Planet((1, 2))
    except ValueError:
        return planet.surface_gravity, Coordinate.PX, Perm.R | Perm.W


assert in_ddp(1, fn, Planet.EARTH) == fn(Planet.EARTH)

# %% data that kept no more than its numbers
import numpy as np
import torch


class Signal(np.ndarray):
    def __new__(cls, data, rate):
        obj = np.asarray(data).view(cls)
        obj.rate = rate
        return obj

    def __array_finalize__(self, obj):
        self.rate = getattr(obj, "rate", None)


for n in (3, 30_000):
    rate, kind, total = in_ddp(1, lambda s: (s.rate, type(s) is Signal, float(s.sum())), Signal(np.ones(n), 44))
    assert (rate, kind, total) == (44, True, n)
    out = in_ddp(1, lambda s: s, Signal(np.ones(n), 44))
    assert type(out) is Signal and out.rate == 44
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint32, torch.uint64):
        value = torch.ones(n).to(dtype)
        out = in_ddp(1, lambda t: (t, t[1:], t.untyped_storage()), value)
        assert out[0].dtype == dtype and torch.equal(out[0].to(torch.float32), torch.ones(n))
        assert out[1].untyped_storage().data_ptr() == out[0].untyped_storage().data_ptr() == out[2].data_ptr()

# %% modules that are registered to travel by value
import pathlib
import sys
import textwrap

import cloudpickle

pathlib.Path("by_value_module.py").write_text(
    textwrap.dedent("""
    import math
    STEP = 1
    class Model:
        def value(self): return add(STEP)
    def add(x): return math.floor(x) + STEP
    def set_step(x):
        global STEP
        STEP = x
""")
)
sys.path.insert(0, "")
import by_value_module as m

del sys.path[0]
pathlib.Path("by_value_module.py").unlink()
cloudpickle.register_pickle_by_value(m)


def fn():
    m.set_step(5)
    return m.STEP, m.add(1), m.Model().value(), sys.modules.get("by_value_module")


try:
    assert in_ddp(1, fn) == (5, 6, 10, None)
    assert m.STEP == 1 and in_ddp(1, m.add, 2) == 3 and type(in_ddp(1, lambda: m.Model())) is m.Model
finally:
    cloudpickle.unregister_pickle_by_value(m)

# %% standard streams inside values
import logging
import sys


class Tee:
    def __init__(self):
        self.terminal, self.log = sys.stdout, []

    def write(self, text):
        self.terminal.write(text)
        self.log.append(text)

    def flush(self):
        pass


tee, handler = Tee(), logging.StreamHandler()
real = sys.__stdout__


def fn():
    tee.write("to the cell")
    return tee.terminal is sys.stdout, handler.stream is sys.stderr, real is sys.__stdout__, tee


*same, back = in_ddp(1, fn)
assert all(same) and back.terminal is sys.stdout and back.log == ["to the cell"] and tee.log == []

# %% a long chain of nodes
import sys


class Node:
    def __init__(self, next):
        self.next = next


def chain(n):
    node = None
    for _ in range(n):
        node = Node(node)
    return node


def length(node):
    n = 0
    while node is not None:
        n, node = n + 1, node.next
    return n


long = chain(50_000)
if sys.version_info < (3, 12):
    limit = sys.getrecursionlimit()
    assert in_ddp(1, lambda: length(long)) == 50_000 == length(in_ddp(1, lambda: chain(50_000)))
    assert sys.getrecursionlimit() == limit
    long = chain(2_000_000)
try:
    in_ddp(1, lambda: length(long))
except CaptureError as exc:
    assert str(exc).startswith("long cannot be sent") and "deep" in str(exc), exc
else:
    raise AssertionError("sent")
while long is not None:
    long = long.next


# %% objects that pass on to another what they do not have
class Wrapper:
    def __init__(self, inner, tag):
        self.inner, self.tag = inner, tag

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Slotted:
    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


chain = [1, 2, 3]
for number in range(50):
    chain = Wrapper(chain, number)
tag, counted, back, slotted = in_ddp(1, lambda: (chain.tag, chain.count(2), chain, Slotted(chain)))
assert (tag, counted, back.tag, back.count(1), slotted.tag) == (49, 1, 49, 1, 49)

# %% functions that a decorator of wrapt has wrapped
import wrapt


@wrapt.decorator
def logged(wrapped, instance, args, kwargs):
    return "logged", wrapped(*args, **kwargs)


@logged
def add_one(x):
    return x + 1


class Model:
    @logged
    def fit(self, x):
        return x * 2


assert in_ddp(1, lambda: (add_one(1), Model().fit(3))) == (("logged", 2), ("logged", 6))
assert in_ddp(1, add_one, 1) == ("logged", 2)

# %% a module that code has made
import sys
import types

made = sys.modules["made_by_code"] = types.ModuleType("made_by_code")
exec("K = 2\ndef double(x): return K * x\nclass Box:\n    def __init__(self, v): self.v = v * K", made.__dict__)
from made_by_code import Box, double

box = Box(1)
assert in_ddp(1, lambda: (double(3), made.K, Box(2).v, box.v)) == (6, 2, 4, 2)
assert type(in_ddp(1, lambda: Box(5))) is Box
del sys.modules["made_by_code"]
