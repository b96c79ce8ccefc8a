"""Cells of test_assigned.py."""

# %% begin
import pathlib
import string
import sys

from nbdist import Session, in_ddp

pathlib.Path("own_settings.py").write_text("RATE = 1\nSIZES = {'a': [1]}\nclass Net:\n    width = 1\nnet = Net()\n")
pathlib.Path("own_package").mkdir()
pathlib.Path("own_package/__init__.py").write_text("")
pathlib.Path("own_package/inner.py").write_text("DEPTH = 1\ndef depth(): return DEPTH\n")
sys.path.insert(0, "")
import own_package.inner
import own_settings

session = Session(1)


def answer():
    mine = own_settings
    return mine.RATE, mine.SIZES, mine.Net.width, mine.net.width, own_package.inner.depth(), string.capwords("a b")


def agree():
    mine = answer()
    assert (session.run(answer), in_ddp(1, answer)) == (mine, mine), (mine, session.run(answer), in_ddp(1, answer))


agree()

# %% values
own_settings.RATE = 2
own_settings.SIZES["a"].append(2)
own_settings.SIZES.update(b=[3])
own_settings.net.width = 5
setattr(own_package.inner, "DEPTH", 4)  # noqa: B010
agree()
own_settings.RATE += 1
own_settings.Net.width = 7
agree()

# %% variables with a module's objects
from own_settings import SIZES, net
from own_settings import SIZES as by_another_name

SIZES["c"] = [4]
net.width = 6
agree()
by_another_name.pop("c")
agree()


def through_a_variable():
    SIZES["d"] = [5]
    return own_settings.SIZES == {**SIZES, "d": [5]} and own_settings.net is net


def change():
    by_another_name["e"] = net.width = 7


change()
assert through_a_variable() and (session.run(through_a_variable), in_ddp(1, through_a_variable)) == (True, True)
SIZES.pop("d")
agree()

# %% the same cell
capwords = string.capwords
session.run(answer)
string.capwords = lambda text: "patched"
agree()
string.capwords = capwords
agree()

# %% taken back
import importlib

string.capwords = lambda text: "patched once more"
agree()
string.capwords = capwords
importlib.reload(own_settings)
importlib.reload(own_package.inner)
agree()
assert own_settings.RATE == 1


# %% deleted
def there():
    mine = own_settings
    return hasattr(mine, "RATE"), hasattr(mine.Net, "width"), hasattr(mine, "EXTRA")


own_settings.EXTRA = 1
assert there() == session.run(there) == in_ddp(1, there) == (True, True, True)
del own_settings.RATE, own_settings.Net.width, own_settings.EXTRA
for _ in range(2):
    assert there() == session.run(there) == in_ddp(1, there) == (False, False, False), session.run(there)
own_settings.RATE = 3
assert there() == session.run(there) == (True, False, False)
del own_settings.RATE
assert there() == session.run(there) == (False, False, False)
importlib.reload(own_settings)
agree()

# %% set by a function of the module
import warnings

pathlib.Path("configured.py").write_text(
    """RATE, DEPTH, CACHE = 1, 1, None

def configure(rate):
    global RATE, DEPTH, CACHE
    RATE, DEPTH, CACHE = rate, rate, object()

def rate():
    return RATE
"""
)
import configured
from configured import rate

configured.configure(5)


def said(fn):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        value = session.run(fn)
    return value, [str(one.message) for one in caught]


def too():
    configured.configure(6)
    return rate()


assert said(int) == (0, []) and said(too) == (6, [])
configured.DEPTH = 7
value, (text,) = said(lambda: configured.DEPTH)
assert value == 7 and "configured.configure, which a cell has called, has set RATE of the module" in text, text
assert "Call configure in the function, too, or set configured.RATE in a cell" in text and said(rate)[1] == []

# %% a method of a class
import warnings

import pyarrow

pyarrow.ExtensionArray.from_storage(pyarrow.bool8(), pyarrow.array([1], pyarrow.int8()))
with warnings.catch_warnings():
    warnings.simplefilter("error")
    agree()

# %% a class that cannot be changed in a rank
pathlib.Path("guarded.py").write_text(
    """import os

class Guard(type):
    def __setattr__(cls, name, value):
        if "RANK" in os.environ:
            raise TypeError("it is final")
        super().__setattr__(name, value)

class Guarded(metaclass=Guard):
    width = 1
"""
)
import guarded

guarded.Guarded.width = 2
own_settings.RATE = 11
agree()

# %% too large
own_settings.RATE = bytes(2_000_000)
in_ddp(1, int)

# %% threads
import string
from concurrent.futures import ThreadPoolExecutor

from nbdist import Session

sessions = [Session(1) for _ in range(3)]


def use():
    return string.capwords("a b")


for session in sessions:
    session.run(use)


def call_all():
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda session: session.run(use), sessions))
