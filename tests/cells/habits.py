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
assert list(shared) == [5, 5]  # type: ignore[call-overload]
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

# %% argparse in a function, as scripts for torchrun have it
# happens: The notebook's own arguments are no options, as in a cell: argparse says so. `parse_args([])` has none.
# reported: pytorch/examples#369, microsoft/vscode-jupyter#7304
import argparse


def train(*given):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    return parser.parse_args(*given).epochs


assert in_ddp(1, train, []) == 3
try:
    in_ddp(1, train)
except SystemExit as exc:
    assert exc.code == 2
else:
    raise AssertionError

# %% A multiprocessing.Pool in the function, for functions of the notebook
# happens: It works: a rank is no daemon, and its children have the notebook's functions.
# reported: pytorch/pytorch#15950, jupyter/notebook#2080, ThilinaRajapakse/simpletransformers#1247
import multiprocessing


def square(x):
    return x * x


def pools():
    found = []
    for method in ("fork", "spawn"):
        with multiprocessing.get_context(method).Pool(2) as pool:
            found.append(pool.map(square, [1, 2, 3]))
    return found


assert in_ddp(2, pools) == [[1, 4, 9]] * 2

# %% A data set of a class of the notebook, and a loader whose workers are spawned
# happens: The workers find the class.
# reported: pytorch/pytorch#87016, pytorch/pytorch#51344
import torch


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, place):
        return place * place


def batches():
    loader = torch.utils.data.DataLoader(Squares(), batch_size=2, num_workers=2, multiprocessing_context="spawn")
    return [batch.tolist() for batch in loader]


assert in_ddp(1, batches) == [[0, 1], [4, 9]]

# %% joblib.Parallel in the function, with its own processes
# happens: It works, in processes of its own.
# reported: joblib/joblib#1367, joblib/joblib#1247
import os

from joblib import Parallel, delayed


def parallel():
    return Parallel(n_jobs=2)(delayed(lambda x: (x + 1, os.getpid()))(x) for x in range(4))


found = in_ddp(1, parallel)
assert [value for value, _ in found] == [1, 2, 3, 4] and os.getpid() not in {pid for _, pid in found}

# %% A logger of experiments that has a thread and a queue, made in an earlier cell
# happens: It is refused by name: make it in the function.
# reported: facebookresearch/moco#35, Lightning-AI/pytorch-lightning#3444
import queue
import threading


class Writer:
    def __init__(self):
        self.queue = queue.Queue()
        self.thread = threading.Thread(target=self.write, daemon=True)
        self.thread.start()

    def write(self):
        while self.queue.get() is not None:
            pass

    def add_scalar(self, name, value):
        self.queue.put((name, value))


writer = Writer()
try:
    in_ddp(2, lambda: writer.add_scalar("loss", 1.0))
except CaptureError as exc:
    assert "writer" in str(exc), exc
else:
    raise AssertionError
assert in_ddp(2, lambda: Writer().add_scalar("loss", 1.0)) is None

# %% A model under torch.compile, of the notebook or made in the function, that comes back
# happens: It arrives, and comes back, with its weights; it is compiled again where it is called.
# reported: pytorch/pytorch#101107, pytorch/torchdynamo#1967

import torch

compiled = torch.compile(torch.nn.Linear(2, 1), backend="eager")
inputs = torch.ones(3, 2)
before = compiled(inputs).detach()


def step():
    out = compiled(inputs)
    assert torch.allclose(out, before)
    compiled.weight.data.zero_()
    return compiled


trained = in_ddp(1, step)
assert float(trained.weight.sum()) == 0 and float(compiled.weight.abs().sum()) != 0
assert torch.allclose(trained(inputs), trained.bias.expand(3, 1))

# %% `__file__` in a function
# happens: NameError, as in a cell of the notebook. A rank works in the notebook's folder.
# reported: mammothb/symspellpy#23
import os


def place():
    return os.path.dirname(__file__)


try:
    in_ddp(1, place)
except NameError as exc:
    assert "__file__" in str(exc)
else:
    raise AssertionError
assert in_ddp(1, os.getcwd) == os.getcwd()

# %% torchrun's decorator `record` around the function
# happens: Its value comes back, and its exception is the notebook's, with the rank's traceback.
# reported: pytorch/pytorch#60910
import os

import torch
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main(fails):
    if fails:
        raise KeyError("no such column")
    return int(os.environ["LOCAL_RANK"])


assert in_ddp(2, main, False) == 0
try:
    in_ddp(2, main, True)
except KeyError as exc:
    assert "no such column" in str(exc) and "no such column" in str(exc.__cause__)
else:
    raise AssertionError

# %% torch.set_default_dtype in an earlier cell
# happens: It holds in ranks.
# reported: pytorch/pytorch#75269
import torch

torch.set_default_dtype(torch.float64)
try:
    assert in_ddp(1, lambda: str(torch.ones(1).dtype)) == "torch.float64"
finally:
    torch.set_default_dtype(torch.float32)

# %% A function under numba's njit or vectorize
# happens: It arrives, and is compiled where it is called, also with `parallel=True` or `cache=True`.
# reported: numba/numba#795, numba/numba#2956, cloudpipe/cloudpickle#439, cloudpipe/cloudpickle#502
import numba
import numpy as np


@numba.njit
def inner(x):
    return 2 * x


@numba.njit
def outer(values):
    total = 0.0
    for value in values:
        total += inner(value)
    return total


table = np.arange(5.0)


@numba.njit(parallel=True, cache=True)
def total(values):
    found = table[2]
    for i in numba.prange(len(values)):
        found += values[i]
    return found


@numba.vectorize
def plus(a, b):
    return a + b


assert outer(np.arange(3.0)) == 6 and total(np.ones(4)) == 6
assert in_ddp(1, outer, np.arange(4.0)) == 12
assert in_ddp(1, lambda: (total(np.ones(100)), plus(np.ones(2), 1).tolist())) == (102, [2.0, 2.0])

# %% An engine or a connection of SQLAlchemy, and classes that are mapped to tables
# happens: A connected engine, a connection and a mapped class of a cell are refused by name. Classes of a module work.
# reported: sqlalchemy/sqlalchemy#10077, uqfoundation/pathos#117, facebookincubator/submitit#28
import sqlalchemy
from sqlalchemy.orm import declarative_base

with open("models.py", "w") as file:
    file.write(
        "import sqlalchemy\n"
        "from sqlalchemy.orm import declarative_base\n"
        "Base = declarative_base()\n"
        "class City(Base):\n"
        "    __tablename__ = 'cities'\n"
        "    name = sqlalchemy.Column(sqlalchemy.String, primary_key=True)\n"
    )
import models

Base = declarative_base()


class Row(Base):
    __tablename__ = "rows"
    id = sqlalchemy.Column(sqlalchemy.Integer, primary_key=True)


def ask(engine):
    with engine.connect() as connection:
        return connection.execute(sqlalchemy.text("select 1")).scalar()


engine = sqlalchemy.create_engine("sqlite:///rows.db")
ask(engine)
connection = sqlalchemy.create_engine("sqlite://").connect()
assert in_ddp(1, lambda: ask(sqlalchemy.create_engine("sqlite://"))) == 1
for name, uses in (("engine", lambda: ask(engine)), ("connection", lambda: connection.closed), ("Row", lambda: Row)):
    try:
        in_ddp(1, uses)
    except CaptureError as exc:
        assert name in str(exc), exc
    else:
        raise AssertionError(name)
try:
    in_ddp(1, lambda: Row)
except CaptureError as exc:
    assert "SQLAlchemy builds this class" in str(exc) and "module" in str(exc), exc


def add():
    made = sqlalchemy.create_engine("sqlite://")
    models.Base.metadata.create_all(made)
    with sqlalchemy.orm.Session(made, expire_on_commit=False) as rows:
        rows.add(models.City(name="Rome"))
        rows.commit()
        return rows.scalars(sqlalchemy.select(models.City)).one()


city = in_ddp(1, add)
assert type(city) is models.City and city.name == "Rome", city
connection.close()
engine.dispose()

# %% Logging that is set up in an earlier cell
# happens: What ranks log is in the cell, by the notebook's handlers, levels and formats.
# reported: jupyterlab/jupyterlab#9668, quaquel/EMAworkbench#403
import logging

from IPython.utils.capture import capture_output

logging.basicConfig(level=logging.INFO, format="%(levelname)s at %(name)s: %(message)s", force=True)
with capture_output() as shown:
    in_ddp(2, lambda: logging.getLogger("train").info("loss 0.5"))
logging.basicConfig(force=True)
assert "INFO at train: loss 0.5" in shown.stderr, (shown.stdout, shown.stderr)

# %% A class that is defined again while a session runs
# happens: Objects that come back are of the class as it is now, and `isinstance` is true.
# reported: cloudpipe/cloudpickle#195, dask/distributed#2228, pyiron/pyiron_workflow#510
from dataclasses import dataclass


@dataclass
class Result:
    loss: float


with Session(1) as session:
    assert isinstance(session.run(lambda: Result(0.5)), Result)

    @dataclass
    class Result:
        loss: float
        epoch: int = 0

    found = session.run(lambda: Result(0.5))
    assert isinstance(found, Result) and found == Result(0.5) and found.epoch == 0

# %% A temporary folder of the notebook
# happens: Ranks use it, and it stays until the notebook removes it.
# reported: apache/airflow#22404, python/cpython#88271
import tempfile
from pathlib import Path

folder = tempfile.TemporaryDirectory()


def save():
    Path(folder.name, "weights").write_text("1.0")


in_ddp(1, save)
assert Path(folder.name, "weights").read_text() == "1.0"
folder.cleanup()

# %% An open archive or binary file as an attribute of a data set
# happens: It is refused by name: open it at the first `__getitem__`, or in the function.
# reported: allenai/tango#542, ACEsuit/mace#117, pytorch/pytorch#11929
import zipfile

import torch

with zipfile.ZipFile("archive.zip", "w") as archive:
    archive.writestr("0", "zero")


class Files(torch.utils.data.Dataset):
    def __init__(self):
        self.archive = zipfile.ZipFile("archive.zip")

    def __getitem__(self, place):
        return self.archive.read(str(place))


files = Files()
try:
    in_ddp(1, lambda: files[0])
except CaptureError as exc:
    assert "files" in str(exc) and "archive" in str(exc), exc
else:
    raise AssertionError
assert in_ddp(1, lambda: Files()[0]) == b"zero"

# %% A pool of multiprocessing in the notebook, for functions of cells
# happens: It works with `nbdist.context("multiprocessing").Pool`.
# reported: ipython/ipython#10894, microsoft/vscode-jupyter#12485, jupyter/notebook#5951
import nbdist


def cube(x):
    return x**3


with nbdist.context("multiprocessing").Pool(2) as pool:
    assert pool.map(cube, [1, 2, 3]) == [1, 8, 27]

# %% CUDA was asked for, threads computed and a pool ran in the notebook, before the first launch
# happens: Ranks start all the same: nothing is forked from the notebook.
# reported: huggingface/accelerate#3524, huggingface/accelerate#1956, fastai/fastai#3923
from concurrent.futures import ThreadPoolExecutor

import torch

torch.cuda.is_available(), torch.cuda.device_count()
torch.set_num_threads(2)
with ThreadPoolExecutor(2) as threads:
    sizes = list(threads.map(lambda size: float((torch.ones(size, size) @ torch.ones(size, size)).sum()), [300, 400]))
assert in_ddp(2, lambda: float((torch.ones(300, 300) @ torch.ones(300, 300)).sum())) == sizes[0]

# %% A learning rate by a lambda, and the optimizer and scheduler that come back
# happens: They come back; the optimizer has the parameters of the model that comes with it.
# reported: huggingface/transformers#10880, Lightning-AI/pytorch-lightning#7618
import torch

model = torch.nn.Linear(2, 1)


def fit():
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    return model, optimizer, scheduler


trained, optimizer, scheduler = in_ddp(2, fit)
assert optimizer.param_groups[0]["params"][0] is trained.weight and scheduler.optimizer is optimizer
assert scheduler.get_last_lr() == [0.025]
scheduler.step()

# %% `sys.path.append` for a folder of modules, in a cell after the first call of a session
# happens: Ranks find the modules from the next call on.
# reported: modin-project/modin#3362, ray-project/ray#2515
import importlib
import os
import sys

with Session(2) as session:
    session.run(int)
    os.makedirs("late_modules", exist_ok=True)
    with open("late_modules/late_module.py", "w") as file:
        file.write("value = 7\n")
    importlib.invalidate_caches()
    sys.path.append(os.path.abspath("late_modules"))
    import late_module

    assert session.run(lambda: late_module.value) == 7
    sys.path.pop()

# %% A module that is edited and reloaded while a session is open
# happens: Ranks have the new code, as the notebook has.
# reported: jupyter/notebook#4156, microsoft/vscode-jupyter#4555
import importlib
import os

with open("edited_module.py", "w") as file:
    file.write("def value():\n    return 1\n")
importlib.invalidate_caches()
import edited_module

with Session(1) as session:
    assert session.run(lambda: edited_module.value()) == 1
    with open("edited_module.py", "w") as file:
        file.write("def value():\n    return 'two'\n")
    importlib.reload(edited_module)
    assert session.run(lambda: edited_module.value()) == "two"
os.unlink("edited_module.py")

# %% A bar of tqdm in each rank, and one that was made in the notebook
# happens: Rank 0's bar is in the cell. A bar of the notebook arrives as a bar.
# reported: tqdm/tqdm#485, tqdm/tqdm#1133, hyperactive-project/Hyperactive#61
from tqdm.auto import tqdm

bar = tqdm(range(3))


def loops():
    return sum(tqdm(range(4))) + sum(bar)


assert in_ddp(2, loops) == 9

# %% A LightningModule that comes back after `Trainer.fit`
# happens: It comes back with its weights and hyperparameters, and so do the metrics.
# reported: Lightning-AI/pytorch-lightning#2565, ray-project/ray_lightning#162
import torch
from lightning.pytorch import LightningModule, Trainer


class Net(LightningModule):
    def __init__(self, width=1):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, width)

    def training_step(self, batch, number):
        loss = self.layer(batch).sum()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


net = Net()
data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)


def fit():
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", max_epochs=1, enable_model_summary=False, **quiet)
    trainer.fit(net, data)
    return net, trainer.callback_metrics, trainer.global_step


trained, metrics, steps = in_ddp(2, fit)
assert type(trained) is Net and trained.hparams.width == 1 and steps == 2 and "loss" in metrics
assert not torch.equal(trained.layer.weight, net.layer.weight)

# %% Several submitted calls that a cell awaits together
# happens: `await asyncio.gather(...)` gives their values in order, and the notebook's event loop goes on meanwhile.
# reported: jupyter/notebook#4312
import asyncio

from nbdist import Session

ticks = []


async def tick():
    while True:
        ticks.append(1)
        await asyncio.sleep(0)


with Session(1) as session:
    ticking = asyncio.ensure_future(tick())
    values = await asyncio.gather(*[session.submit(pow, base, 2) for base in range(4)])  # noqa: F704
    ticking.cancel()
assert values == [0, 1, 4, 9] and ticks, values

# %% A bar of tqdm.notebook over a pool of threads, in the function
# happens: The bar is in the cell, and counts what the threads have done.
# reported: tqdm/tqdm#1133
from concurrent.futures import ThreadPoolExecutor

from tqdm.notebook import tqdm


def squares():
    with ThreadPoolExecutor(3) as threads:
        bar = tqdm(threads.map(lambda one: one * one, range(8)), total=8)
        return list(bar), bar.n


assert in_ddp(1, squares) == ([one * one for one in range(8)], 8)

# %% A type and an accessor of pandas that a cell registers
# happens: Ranks have both, by name, too; a frame with a column of the type comes back.
# reported: joblib/joblib#1163, modin-project/modin#7281
import numpy as np
import pandas as pd
from pandas.api import extensions


@extensions.register_extension_dtype
class MoneyType(extensions.ExtensionDtype):
    name, type = "money", float

    @classmethod
    def construct_array_type(cls):
        return Money


class Money(extensions.ExtensionArray):
    dtype, nbytes = MoneyType(), 0

    def __init__(self, values):
        self.values = np.asarray(values, float)

    @classmethod
    def _from_sequence(cls, values, *, dtype=None, copy=False):
        return cls(values)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        found = self.values[index]
        return found if np.isscalar(found) else Money(found)

    def copy(self):
        return Money(self.values.copy())


@extensions.register_series_accessor("account")
class Account:
    def __init__(self, series):
        self.total = series.array.values.sum()


def booked():
    return pd.DataFrame({"paid": pd.Series([1.0, 2.0]).astype("money")})


assert in_ddp(1, lambda: booked()["paid"].account.total) == 3
assert type(in_ddp(1, booked)["paid"].array) is Money

# %% A class or function in a registry of a library that is an object, or that wraps what it is given
# happens: It is registered in the rank.
# reported: ray-project/ray#4591, facebookresearch/mmf#370, open-mmlab/mmdetection#10576
import functools
import os
import sys

os.makedirs("libraries/site-packages")
with open("libraries/site-packages/registering.py", "w") as file:
    file.write(
        """import functools
from types import SimpleNamespace

class Registry:
    def __init__(self):
        self._items = {}

    def register(self, item):
        self._items[item.__name__] = item
        return item

models, environments, resolvers = Registry(), {}, {}

def register_environment(name, entry_point):
    environments[name] = SimpleNamespace(entry_point=entry_point)

def register_resolver(name, fn):
    resolvers[name] = lambda *args: fn(*args)
    resolvers["partial", name] = functools.partial(fn, 1)
"""
    )
sys.path.append(os.path.abspath("libraries/site-packages"))
import registering


@registering.models.register
class Model:
    depth = 3


registering.register_environment("walk", Model)
registering.register_resolver("next", lambda number: number + 1)


def found():
    by_object = registering.models._items["Model"].depth
    by_entry = registering.environments["walk"].entry_point.depth
    return by_object, by_entry, registering.resolvers["next"](1), registering.resolvers["partial", "next"]()


try:
    assert in_ddp(1, found) == found() == (3, 3, 2, 2)
finally:
    sys.path.pop()

# %% A model with weight_norm, spectral_norm or a parametrization of one's own
# happens: It arrives, and comes back, with its parametrizations, which torch itself does not pickle.
# reported: ray-project/ray#23894, pytorch/pytorch#102983
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).T


normed = nn.Sequential(parametrizations.weight_norm(nn.Linear(3, 3)), parametrizations.spectral_norm(nn.Linear(3, 3)))
normed.append(parametrize.register_parametrization(nn.Linear(3, 3), "weight", Symmetric())).eval()
rows = torch.ones(2, 3)


def train():
    optimizer = torch.optim.SGD(normed.parameters(), lr=0.1)
    before = normed(rows)
    before.sum().backward()
    optimizer.step()
    return before.detach(), normed, normed(rows).detach()


expected = normed(rows).detach()
before, back, after = in_ddp(1, train)
torch.testing.assert_close((before, back(rows).detach()), (expected, after))
assert all(parametrize.is_parametrized(layer, "weight") for layer in back)
assert torch.equal(back[2].weight, back[2].weight.T) and not torch.equal(after, before)

# %% A decorator that a function under `contextlib.contextmanager` makes
# happens: The decorated function arrives, and each of its calls is in a context of its own.
# reported: cloudpipe/cloudpickle#509
import contextlib

entered = []


@contextlib.contextmanager
def timed(name):
    entered.append(name)
    yield


@timed("step")
def step():
    return list(entered)


step()
assert in_ddp(1, lambda: (step(), step())[1]) == ["step"] * 3

# %% `tqdm.pandas()` in an earlier cell
# happens: Ranks have `progress_apply`, with the options of the notebook.
# reported: awarebayes/RecNN#13
import pandas as pd
from tqdm import tqdm

tqdm.pandas(desc="squares", leave=False)
assert in_ddp(1, lambda: int(pd.Series(range(5)).progress_apply(lambda x: x * x).sum())) == 30

# %% A log file that is open to append
# happens: A rank opens it, too, and what it writes is appended. So do loggers that hold such a file, as loguru's.
# reported: Delgan/loguru#831, Delgan/loguru#498
log = open("appended.log", "a", encoding="latin-1")  # noqa: SIM115
log.write("é notebook\n")


class Loss:
    def __init__(self):
        self.file = open("losses", "ab")  # noqa: SIM115


loss = Loss()


def write():
    loss.file.write(b"0.5")
    return log.write("é rank\n")


with log, loss.file, Session(1) as session:
    assert in_ddp(1, write) == session.run(write) == 7
with open("appended.log", encoding="latin-1") as file, open("losses") as losses:
    assert (file.read(), losses.read()) == ("é notebook\n" + 2 * "é rank\n", "0.50.5")

# %% Generic classes, protocols and typed dictionaries of a cell
# happens: They arrive with their attributes, and come back as the notebook's classes.
# reported: cloudpipe/cloudpickle#463, python/cpython#129250
from typing import Generic, NewType, Protocol, TypedDict, TypeVar, runtime_checkable

T = TypeVar("T")
Identity = NewType("Identity", int)


class Base(Generic[T]):
    kind = "base"

    @property
    def twice(self):
        return 2 * self.value


class Child(Base[T]):
    def __init__(self, value: T):
        self.value = value


@runtime_checkable
class Doubled(Protocol):
    twice: int


class Line(TypedDict):
    user: Identity


child = Child[int](5)


def typed():
    return child.kind, child.twice, isinstance(child, Doubled), Line(user=Identity(4)), child.__orig_class__


assert in_ddp(1, typed) == ("base", 10, True, {"user": 4}, Child[int])
assert isinstance(in_ddp(1, lambda: Child(7)), Child)

# %% `torch.serialization.add_safe_globals` in an earlier cell
# happens: It holds in ranks; one that only loads the file needs `need="Options"`.
# reported: e3nn/e3nn#519, pytorch/pytorch#146886
import torch


class Options:
    rate = 0.5


torch.serialization.add_safe_globals([Options])
torch.save({"options": Options()}, "options.pt")
try:
    loaded = in_ddp(1, lambda: torch.load("options.pt", weights_only=True)["options"], need="Options")
    assert type(loaded) is Options
finally:
    torch.serialization.clear_safe_globals()

# %% A function under `torch.fx.wrap`, and a trace in a rank of a model that calls it
# happens: The trace calls the function, as in the notebook.
# reported: pytorch/pytorch#67774, pytorch/pytorch#53534
import torch
import torch.fx


@torch.fx.wrap
def halved(x):
    return x / 2 if x.sum() > 0 else x


def doubled(x):
    return 2 * x if x.sum() > 0 else x


torch.fx.wrap("doubled")


class Net(torch.nn.Module):
    def forward(self, x):
        return halved(x) + 1


def calls():
    return [node.target.__name__ for node in torch.fx.symbolic_trace(Net()).graph.nodes if node.op == "call_function"]


with Session(1) as session:
    assert session.run(calls) == in_ddp(1, calls) == calls() == ["halved", "add"]
    del doubled
    assert session.run(calls) == ["halved", "add"]
torch.fx._symbolic_trace._wrapped_fns_to_patch.clear()  # or the next trace of this kernel looks for the functions

# %% A colormap that a cell registers in matplotlib, and a format in PIL
# happens: Ranks have both, by their names.
# reported: holoviz/holoviews#5478, bigcat88/pillow_heif#277
import matplotlib
from matplotlib.colors import ListedColormap
from PIL import Image

matplotlib.colormaps.register(ListedColormap(["red", "blue"], name="flag of two"))


def opened(file, name=None):
    return Image.new("L", (1, 1), 7)


Image.register_open("TWO", opened, lambda begin: begin == b"two")
Image.register_extension("TWO", ".two")
Image.register_save("TWO", lambda image, file, name: file.write(b"two"))


def both():
    Image.new("L", (2, 2)).save("a.two")
    return matplotlib.colormaps["flag of two"].N, Image.open("a.two").getpixel((0, 0))


try:
    assert in_ddp(1, both) == both() == (2, 7)
finally:
    matplotlib.colormaps.unregister("flag of two")

# %% A function under pydantic's `validate_call`, and generic models
# happens: They arrive, without the other variables of the notebook.
# reported: pydantic/pydantic#7846
import warnings
from typing import Generic, TypeVar

from pydantic import BaseModel, TypeAdapter, validate_call

Item = TypeVar("Item")
stuck = (number for number in ())  # cannot be sent


class Crate(BaseModel, Generic[Item]):
    item: Item


@validate_call(validate_return=True)
def number_of(text: int, crate: Crate[int] | None = None) -> int:
    return text


crates = TypeAdapter(list[Crate[int]])


def validated():
    return number_of("4"), crates.validate_python([{"item": "3"}])[0].item


with warnings.catch_warnings():
    warnings.simplefilter("error")
    assert in_ddp(1, validated) == (4, 3)

# %% A library that ctypes has loaded, and its functions
# happens: A rank loads the library again. Functions have the types that cells have set.
# reported: uqfoundation/dill#342, uqfoundation/pathos#307, pytorch/pytorch#83065
import ctypes

from nbdist import parallel_map

library = ctypes.CDLL(None)
library.atof.restype, library.atof.argtypes = ctypes.c_double, [ctypes.c_char_p]
labs = library.labs


class Agent:
    def __init__(self):
        self.library = library


agent = Agent()


def numbers():
    return library.atof(b"1.5"), labs(-3), agent.library is library, library.labs is labs


assert in_ddp(1, numbers) == numbers() == (1.5, 3, True, True)
assert parallel_map(labs, [-1, -2], workers=1, progress=False) == [1, 2]

# %% Functions that `%run` and `runpy.run_path` bring
# happens: Each has the variables of its own file.
# reported: qutip/qutip-notebooks#100, microsoft/vscode-jupyter#12485
import pathlib
import runpy

pathlib.Path("brought.py").write_text("SCALE = 3\n\n\ndef scaled(x):\n    return x * SCALE\n")
get_ipython().run_line_magic("run", "brought.py")
SCALE = 5
other = runpy.run_path("brought.py")["scaled"]
assert in_ddp(1, scaled, 2) == 6 and in_ddp(1, lambda: (scaled(1), SCALE, other(2))) == (3, 5, 6)

# %% A module that importlib has loaded from a path, with and without an entry in `sys.modules`
# happens: It arrives, and objects of its classes come back as the notebook's.
# reported: microsoft/qlib#431, vllm-project/llm-compressor#3194
import importlib.util
import pathlib
import sys

pathlib.Path("of-a-path.py").write_text("K = 7\n\n\nclass Box:\n    def __init__(self, v):\n        self.v = v * K\n")


def load(name):
    spec = importlib.util.spec_from_file_location(name, "of-a-path.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


one, two = load("one"), load("two")  # type: ignore[call-arg]
sys.modules["two"] = two
boxes = in_ddp(1, lambda: (one.Box(2), two.Box(3)))
assert (type(boxes[0]), type(boxes[1])) == (one.Box, two.Box) and (boxes[0].v, boxes[1].v) == (14, 21)
del sys.modules["two"]

# %% Calls under `redirect_stdout`, `capture_output` and `%%capture`
# happens: What rank 0 prints and displays is there.
# reported: ipython/ipyparallel#401, openmc-dev/openmc#390, ipython/ipython#1870
import contextlib
import io

from IPython.utils.capture import capture_output


def speak():
    from IPython.display import HTML, display

    print("one line")
    display(HTML("<b>bold</b>"))


with contextlib.redirect_stdout(io.StringIO()) as text:
    in_ddp(2, lambda: print("one line"))
with capture_output() as captured:
    in_ddp(2, speak)
get_ipython().run_cell_magic("capture", "kept", "in_ddp(2, speak)")
assert text.getvalue() == captured.stdout == kept.stdout == "one line\n"
assert [list(one.data) for one in captured.outputs] == [["text/plain", "text/html"]]
assert "<b>bold</b>" in str(kept.outputs[0].data)

# %% `optuna.TrialPruned`, raised in a rank
# happens: It prunes the trial of the notebook.
# reported: optuna/optuna#2726, optuna/optuna-examples#294
import optuna

optuna.logging.set_verbosity(optuna.logging.WARNING)


def train(rate):
    if rate > 0.5:
        raise optuna.TrialPruned
    return rate


study = optuna.create_study()
for rate in (0.2, 0.8):
    study.enqueue_trial({"rate": rate})
study.optimize(lambda trial: in_ddp(1, train, trial.suggest_float("rate", 0, 1)), n_trials=2)
assert [trial.state.name for trial in study.trials] == ["COMPLETE", "PRUNED"]

# %% `torch.distributed.rpc` between ranks, with a function of the notebook
# happens: The other rank has the function.
# reported: pytorch/pytorch#24920
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc


def add(a, b):
    return a + b


def ask():
    rank = dist.get_rank()
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2)
    value = rpc.rpc_sync(f"worker{1 - rank}", add, args=(torch.ones(2), rank))
    rpc.shutdown()
    return value.tolist()


with Session(2) as session:
    assert session.run_all(ask) == [[1.0, 1.0], [2.0, 2.0]]

# %% Functions that torch.func, torch.vmap, torch.compile and torch.fx have made, as globals
# happens: They arrive.
# reported: pytorch/pytorch#116589, ray-project/ray#42295, pymc-devs/pytensor#1072
import torch
from torch import nn

traced = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
halves, slope = torch.vmap(lambda x: x / 2), torch.func.grad(lambda x: (x**2).sum())


@torch.compile(backend="eager")
def compiled(x):
    return x + 1


def values():
    ones = torch.ones(1, 1)
    return [fn(ones).item() for fn in (traced, halves, slope, compiled)]


assert in_ddp(1, values) == values() and values()[1:] == [0.5, 2.0, 2.0]
