"""Habits of people in notebooks, by public reports: each cell is a case of test_habits.py and a row of its page.

The comments at the top of a cell say what happens, and where it was reported.
"""

# %% A pydantic model with a validator, as an argument and as an item
# happens: It arrives, and its validators run in the rank.
# reported: joblib/joblib#1732, pydantic/pydantic#12095
from pydantic import BaseModel, model_validator

from nbdist import parallel_map


class Point(BaseModel):
    x: int

    @model_validator(mode="before")
    @classmethod
    def shifted(cls, values):
        return {"x": values["x"] + 1}


point = Point(x=1)
assert in_ddp(1, lambda: (point.x, Point(x=5))) == (2, Point(x=5))
assert parallel_map(lambda one: one.x, [point, point], workers=1, progress=False) == [2, 2]

# %% A function under lru_cache, cached_property or singledispatch
# happens: It arrives; the cache is empty in each rank.
# reported: joblib/loky#268, python-adaptive/adaptive#292
from functools import cached_property, lru_cache, singledispatch


@lru_cache
def double(x):
    return 2 * x


class Settings:
    @cached_property
    def rate(self):
        return 7


@singledispatch
def kind(x):
    return "any"


@kind.register
def _(x: int):
    return "int"


settings = Settings()
double(2), settings.rate
assert in_ddp(1, lambda: (double(2), double.cache_info().hits, settings.rate, kind(3), kind("a"))) == (
    4,
    0,
    7,
    "int",
    "any",
)

# %% An object with a logger, a lock, an event and a threading.local
# happens: It arrives. The lock is free in the rank, and the `threading.local` empty.
# reported: cloudpipe/cloudpickle#81, cloudpipe/cloudpickle#160, cloudpipe/cloudpickle#447, joblib/joblib#634
import logging
import threading


class Client:
    def __init__(self):
        self.log, self.lock, self.event = logging.getLogger(), threading.RLock(), threading.Event()
        self.local, self.name = threading.local(), "kept"
        self.event.set()


client = Client()
client.lock.acquire()
assert in_ddp(1, lambda: (client.name, client.event.is_set(), client.lock.acquire(False))) == ("kept", True, True)
client.lock.release()

# %% Classes that are defined in functions, and super() in a subclass of list
# happens: They arrive, and come back.
# reported: uqfoundation/dill#26, uqfoundation/dill#75, uqfoundation/dill#209, uqfoundation/dill#365
import abc


def make():
    class Base(abc.ABC):
        @abc.abstractproperty
        def five(self): ...

    class Own(Base):
        def __init__(self):
            super().__init__()

        five = property(lambda self: 5)

    return Own()


class Stack(list):
    def append(self, item):
        super().append(item)


stack = Stack()
stack.append(1)
assert in_ddp(1, lambda: ([*stack, 2], make().five)) == ([1, 2], 5)
assert in_ddp(1, make).five == 5

# %% A global with the name of a built-in function
# happens: The rank has the notebook's; the built-in function is there again after `del`.
# reported: ipython/ipyparallel#155
id = 5


def shadowed():
    return id + 1


assert in_ddp(1, shadowed) == 6
del id
assert in_ddp(1, lambda: id(3)) > 6


# %% A function that was defined again, while a table has the old one
# happens: The table has the old one in the rank, too.
# reported: polynote/polynote#1256
def one():
    return 1


table = {"old": one}


def one():
    return 2


assert in_ddp(1, lambda: (table["old"](), one())) == (1, 2)

# %% A scikit-learn pipeline with a lambda, fitted in a rank
# happens: It comes back, and predicts.
# reported: microsoft/FLAML#730, py-why/EconML#403
import numpy as np
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

pipeline = in_ddp(
    1, lambda: make_pipeline(FunctionTransformer(lambda x: 2 * x), Ridge()).fit(np.ones((4, 2)), np.ones(4))
)
assert abs(pipeline.predict(np.ones((1, 2)))[0] - 1) < 1e-6

# %% A function that joblib.Memory caches
# happens: It arrives, and uses the same cache on disk.
# reported: joblib/joblib#274
import joblib

memory = joblib.Memory("cache", verbose=0)


@memory.cache
def slow(x):
    open(f"ran-{x}", "x").close()
    return x + 1


assert slow(3) == in_ddp(1, lambda: slow(3)) == 4

# %% Models of a class of the notebook, saved in a rank with torch.save or pickle, and read in the notebook
# happens: Instances of the notebook's class. A rank that only loads them needs `need="Net"`: the error says so.
# reported: ray-project/ray#27998
import pickle

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)


def save():
    torch.save(Net(), "net.pt")
    with open("net.pkl", "wb") as file:
        pickle.dump(Net(), file)


in_ddp(1, save)
assert type(torch.load("net.pt", weights_only=False)) is Net
with open("net.pkl", "rb") as file:
    assert type(pickle.load(file)) is Net
load = lambda: type(torch.load("net.pt", weights_only=False)).__name__  # noqa: E731
assert in_ddp(1, load, need="Net") == "Net"
try:
    in_ddp(1, load)
except AttributeError as error:
    assert "need='Net'" in "".join(error._render_traceback_())
else:
    raise AssertionError

# %% A loader with a torch.Generator and a lambda, and a model with a hook
# happens: They arrive; the generator goes on where the notebook's is.
# reported: microsoft/FLAML#379
import torch
from torch import nn
from torch.utils.data import DataLoader

generator = torch.Generator().manual_seed(3)
loader = DataLoader(range(6), 2, shuffle=True, generator=generator, collate_fn=lambda xs: sum(xs), num_workers=1)
model = nn.Linear(1, 1)
model.register_forward_hook(lambda module, args, output: output + 100)
assert in_ddp(1, lambda: (sum(loader), model(torch.zeros(1, 1)).item() > 90)) == (15, True)

# %% A model whose attribute is the `apply` of an autograd.Function
# happens: It arrives.
# reported: ray-project/ray#42295
import torch
from torch import nn


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.twice = Twice.apply

    def forward(self, x):
        return self.twice(x)


net = Net()
assert in_ddp(1, lambda: net(torch.ones(1)).item()) == 2.0

# %% A function that changes a model of the notebook, and returns nothing
# happens: The notebook's model stays as it was: ranks have copies. Return the model.
# reported: Lightning-AI/pytorch-lightning#2092, ray-project/ray_lightning#160
import torch
from torch import nn

model = nn.Linear(1, 1)


def fill():
    nn.init.constant_(model.weight, 9.0)
    return model


before = model.weight.item()
returned = in_ddp(1, fill)
assert model.weight.item() == before and returned.weight.item() == 9.0

# %% A ShareableList or a SharedMemory block of the notebook
# happens: It is shared: what ranks write, the notebook sees. The block is there until the notebook removes it.
# reported: python/cpython#82300, python/cpython#13276
from multiprocessing import shared_memory

import torch.distributed as dist

shared = shared_memory.ShareableList([0, 0])


def write():
    shared[dist.get_rank()] = 5
    dist.barrier()


in_ddp(2, write)
assert list(shared) == [5, 5]
shared.shm.close()
shared.shm.unlink()

# %% A multiprocessing.Value or Lock of the notebook
# happens: It is refused by name. A `multiprocessing.Manager().Value(...)` or a `SharedMemory` is shared.
# reported: cloudpipe/cloudpickle#81
import multiprocessing

counter = multiprocessing.Value("i", 0)


def count():
    counter.value += 1


try:
    in_ddp(1, count)
except CaptureError as error:
    assert str(error).startswith("counter"), error
else:
    raise AssertionError

# %% A connection to a database, or a hash object, as a global
# happens: It is refused by name: open it in the function.
# reported: ray-project/ray#40511, ray-project/ray#3192
import hashlib
import sqlite3

connection, digest = sqlite3.connect(":memory:"), hashlib.sha256(b"x")
for fn, name in [(lambda: connection.execute("select 1"), "connection"), (lambda: digest.hexdigest(), "digest")]:
    try:
        in_ddp(1, fn)
    except CaptureError as error:
        assert str(error).startswith(f"{name} cannot be sent"), error
    else:
        raise AssertionError(name)
connection.close()

# %% A concurrent.futures.ProcessPoolExecutor with functions of cells
# happens: It works with `mp_context=nbdist.context("multiprocessing")`.
# reported: jupyter/nbconvert#1398, python-adaptive/adaptive#292
from concurrent.futures import ProcessPoolExecutor

import nbdist

step = 2
with ProcessPoolExecutor(2, mp_context=nbdist.context("multiprocessing")) as executor:
    assert list(executor.map(lambda x: x + step, range(3))) == [2, 3, 4]

# %% A matplotlib figure, returned from a rank
# happens: It comes back as a figure that can be drawn on.
# reported: ipython/ipyparallel#401
import matplotlib.pyplot as plt

figure = in_ddp(1, lambda: plt.plot([1, 2])[0].figure)
assert len(figure.axes) == 1 and figure.axes[0].lines[0].get_ydata().tolist() == [1, 2]
plt.close("all")

# %% Bound methods, class methods, partials, classes and callable objects in parallel_map
# happens: Each is called as in the notebook.
# reported: joblib/joblib#643, joblib/joblib#674
import functools

from nbdist import parallel_map


class Scale:
    def __init__(self, k=2):
        self.k = k

    def times(self, x):
        return self.k * x

    @classmethod
    def made(cls, x):
        return cls(x).k

    def __call__(self, x):
        return x - self.k


functions = Scale().times, Scale.made, Scale(1), functools.partial(Scale().times), functools.partial(pow, 2)
assert [parallel_map(fn, [3], workers=1, progress=False)[0] for fn in functions] == [6, 3, 2, 6, 8]
assert parallel_map(Scale, [3], workers=1, progress=False)[0].k == 3

# %% Enumerations, named tuples and dataclasses with slots, as items and results
# happens: They arrive, and come back as instances of the notebook's classes.
# reported: cloudpipe/cloudpickle#225
import collections
import dataclasses
import enum

from nbdist import parallel_map


class Color(enum.Enum):
    RED = 1


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass(slots=True)
class Row:
    x: int
    ys: list = dataclasses.field(default_factory=lambda: [3])


items = [Color.RED, Pair(1, 2), Row(1)]
back = parallel_map(lambda item: item, items, workers=1, progress=False)
assert back == items and back[0] is Color.RED and type(back[2]) is Row

# %% A coroutine that is run in the function, under the notebook's own event loop
# happens: `asyncio.run` works in a rank, which has no event loop of its own.
# reported: ipython/ipykernel#548
import asyncio


async def answer():
    await asyncio.sleep(0)
    return 5


assert in_ddp(1, lambda: asyncio.run(answer())) == 5
