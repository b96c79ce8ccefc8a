"""Cells of test_call.py: functions, and everything that they use without an argument that says so."""

# %% mistakes
import psutil

from nbdist import CaptureError, in_ddp

ratings, stuck = [], (i for i in ())


def use():
    return stuck


for error, fn, how in [
    (NameError, len, dict(need="ratngs")),
    (ValueError, len, dict(imports="x = 1")),
    (TypeError, "len", {}),
    (CaptureError, use, {}),
]:
    try:
        in_ddp(1, fn, **how)
    except error:
        print(error.__name__, psutil.Process().children())

# %% functions, classes and closures
import math as m

K, OFFSET, later = 3, 100, lambda: EVEN_LATER


def leaf(x):
    return x * K


class Base:
    scale = 2

    def go(self, x):
        return leaf(x) * self.scale


class Derived(Base):
    def go(self, x):
        return super().go(x) + OFFSET


def make(n):
    def inner(x):
        return Derived().go(x) + n + sum(m.floor(i * K) for i in [1, 2])

    return inner


made = make(1)


def fn(x=K, *, call=made):
    return call(x), later()


EVEN_LATER = "later"
assert in_ddp(1, fn) == fn() == (3 * 3 * 2 + 100 + 1 + 9, "later")

# %% callables of all kinds
import functools
import math
import operator

N = 5


def add(a, b=0):
    return a + b + N


def decorated(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return "wrapped", fn(*args), N

    return wrapper


@decorated
def wrapped(x):
    return add(x)


class Model:
    n = N

    def __init__(self, k):
        self.k = k

    def method(self, x):
        return x + self.k + N

    def __call__(self, x):
        return self.method(x)

    @classmethod
    def of_class(cls, x):
        return cls.n + x

    @staticmethod
    def static(x):
        return x + N

    @property
    def squared(self):
        return self.k**2

    more = functools.partialmethod(method, 7)


calls = [
    add,
    wrapped,
    decorated(math.sqrt),
    decorated(len),
    functools.partial(add, b=2),
    lambda x: add(x, N),
    Model(3).method,
    Model(3),
    Model.of_class,
    Model.static,
    functools.partial(Model(1).method, 4),
    functools.reduce,
    math.sqrt,
    operator.neg,
    str.upper,
    "x".join,
    Model,
    functools.lru_cache(add),
]
args = [[1], [1], [4.0], ["abc"], [1], [1], [1], [1], [1], [1], [], [add, [1, 2]], [4.0], [1], ["a"], ["ab"], [3], [1]]
for call, arg in zip(calls, args, strict=True):
    want, got = call(*arg), in_ddp(1, call, *arg)
    assert (got == want) or (type(got) is Model and got.squared == 9 and got.more() == 15), (call, got)
with Session(2) as s:
    assert (
        s.run_all(lambda calls: [c(*a) for c, a in zip(calls[:6], args, strict=False)], calls)
        == [[c(*a) for c, a in zip(calls[:6], args, strict=False)]] * 2
    )

# %% generators, coroutines, recursion and global statements
import asyncio

LIMIT, counter = 3, 0


def numbers():
    yield from range(LIMIT)


async def nap():
    return LIMIT


async def both():
    return await asyncio.gather(nap(), nap())


def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


def count():
    global counter, fresh
    counter += 1
    fresh = counter
    return counter, fresh


def nested():
    class Local:
        value = LIMIT

        def get(self):
            return [LIMIT for _ in range(1) if (lambda: LIMIT)()]

    return [*Local().get(), Local.value]


assert in_ddp(1, lambda: (list(numbers()), asyncio.run(both()), even(10), count(), count(), nested())) == (
    [0, 1, 2],
    [3, 3],
    True,
    (1, 1),
    (2, 2),
    [3, 3],
)
assert counter == 0 and "fresh" not in globals()

# %% what functions share
shared, also = [], {}
also["list"] = shared


def pair():
    n = 0

    def add():
        nonlocal n
        n += 1

    def get():
        return n

    return add, get


add, get = pair()


def extend():
    shared.append(1)


def fn(same):
    add()  # type: ignore[call-arg]
    add()  # type: ignore[call-arg]
    extend()
    return get(), shared, also["list"] is shared, same is shared


assert in_ddp(1, fn, shared) == (2, [1], True, True)
assert get() == 0 and shared == []

# %% a class
session = Session(2)


class Model:
    version = 1

    def __init__(self):
        self.made_by = helper()


def helper():
    return "old"


def make():
    return Model(), Model, [Model()]  # type: ignore[call-arg]


before, cls, _ = session.run(make)
assert isinstance(before, Model) and cls is Model


# %% the class redefined
class Model:
    version = 2

    def __init__(self):
        self.made_by = helper()


def helper():
    return "new"


for value, cls, (inside,) in [*session.run_all(make), in_ddp(2, make)]:
    assert cls is Model and type(value) is type(inside) is Model
    assert (value.version, value.made_by) == (2, "new")
assert not isinstance(before, Model) and before.version == 1
assert session.run(lambda old: (old, type(old).version, Model.version), before)[1:] == (1, 2)
assert type(session.run(lambda old: old, before)) is type(before)
session.close()

# %% names that the import block gives
OrderedDict = sqrt = p = (i for i in ())
block = """
    from collections import OrderedDict
    from math import *
    import os.path as p
"""


def fn():
    return OrderedDict(a=1), sqrt(4.0), p.basename("a/b")


assert in_ddp(1, fn, imports=block) == ({"a": 1}, 2.0, "b")


# %% an import that shadows
def sqrt(x):
    return "mine"


print(in_ddp(1, lambda: sqrt(4.0), imports="from math import sqrt"))


# %% need before imports
def sqrt(x):
    return "mine"


def fn():
    return sqrt(4.0), floor(2.5)


for block in ["from math import sqrt, floor", "from math import *"]:
    assert in_ddp(1, fn, imports=block, need="sqrt") == ("mine", 2)
    assert in_ddp(1, fn, imports=block, need={"floor": lambda x: "given"}) == (2.0, "given")

# %% code made at run time
hidden = 3


def fn(text):
    return eval(text)


assert in_ddp(1, fn, "floor(2.5) + hidden", imports="from math import *", need="hidden") == 5


# %% names that IPython owns
def fn(name):
    with open(name, "w") as file:
        file.write("x")
    if name is None:
        get_ipython(), display(name), exit(), quit(), In, Out, _, __, _oh
    with open(name) as file:
        return file.read()


assert in_ddp(1, fn, "written") == "x"

# %% a variable that cannot be captured
stuck = (i for i in ())


class Model:
    pass


model = Model()
model.feed = {"x": stuck}


def helper():
    return model


def fn():
    return helper()


try:
    in_ddp(2, fn)
except CaptureError as exc:
    assert str(exc).startswith("model.feed['x'] cannot be sent"), exc
else:
    raise AssertionError("sent")
del model.feed
assert isinstance(in_ddp(2, fn), Model)

# %% script
import torch
import torch.distributed as dist

from nbdist import in_ddp

print("once")
SCALE = 10.0


class Answer:
    pass


def fn(answer):
    t = torch.full((), SCALE)
    dist.all_reduce(t)
    answer.value = t.item()
    return answer, __name__, type(answer) is Answer
