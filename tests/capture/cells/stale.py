"""Cells of test_stale_state.py."""

# %% begin
import builtins
import contextvars
import gc
import importlib
import logging
import os
import shutil
import signal
import string
import sys
import time
import warnings
from decimal import getcontext

from nbdist import Session, in_ddp

HOME = os.getcwd()
sys.path.insert(0, HOME)
sessions = [Session(1), Session(1)]
capwords = string.capwords
THRESHOLDS = gc.get_threshold()
rate = contextvars.ContextVar("rate", default=1)


def fresh(fn):
    return in_ddp(1, fn)


# %% reset
os.chdir(HOME)
for name in ("a", "b", "c", "Kind"):
    globals().pop(name, None)
string.capwords = capwords
for name in ("STATE_ONE", "TZ"):
    os.environ.pop(name, None)
time.tzset()
warnings.resetwarnings()
getcontext().prec = 28
logging.getLogger("state").setLevel(logging.NOTSET)
logging.getLogger("state").filters.clear()
vars(builtins).pop("of_state", None)
gc.set_threshold(*THRESHOLDS)
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
shutil._ARCHIVE_FORMATS.pop("state", None)
sys.argv = ["notebook"]
rate.set(1)
import own_state

importlib.reload(own_state)


class Kind:
    kept = 0
    first = 1
    second = 2


def answer():
    found = []
    try:
        found.append(a)
    except NameError:
        found.append("no a")
    try:
        found.append(b)
    except NameError:
        found.append("no b")
    try:
        found.append(c())
    except NameError:
        found.append("no c")
    found += [getattr(Kind, name, None) for name in ("first", "second")]
    found += [string.capwords("x y"), os.environ.get("STATE_ONE"), os.path.relpath(os.getcwd(), HOME)]
    found += [time.strftime("%Z"), getcontext().prec, logging.getLogger("state").level]
    try:
        warnings.warn("careful", DeprecationWarning, stacklevel=1)
        found.append("no error")
    except DeprecationWarning:
        found.append("an error")
    found += [vars(builtins).get("of_state"), gc.get_threshold(), len(logging.getLogger("state").filters)]
    found += [
        str(signal.getsignal(signal.SIGUSR1)),
        "state" in dict(shutil.get_archive_formats()),
        sys.argv,
        rate.get(),
    ]
    return *found, own_state.RATE, own_state.OPTIONS


def compare(where):
    """Print the notebook's answer and the ranks' answer: the last part is the module's own value."""
    mine = answer(), own_state.value()
    theirs = where(lambda: (answer(), own_state.value()))
    print("same" if mine == theirs else "module" if mine[0] == theirs[0] else "other", mine, theirs)


for session in sessions:
    session.restart()
    session.run(int)  # a session follows environment and folder from its first call on
