"""Cells of test_magics.py."""

# %% a function without ranks
from nbdist import in_ddp  # noqa: F401


def f(x):
    y = x + 1
    return y / 0


def g(x):
    breakpoint()
    return x + 1


# %% training in the background
import os
import time

from nbdist import Session

session = Session(2)
session.run(int)


def train():
    from IPython.display import display

    handle = display("begin", display_id=True)
    for epoch in range(5):
        print("epoch", epoch)
        while epoch == 2 and not os.path.exists("seen"):
            time.sleep(0.05)
    handle.update("end")
    display("over")
    return 7


future = session.submit(train)

# %% a call that waits
import os
import time

from nbdist import Session

session = Session(1)
session.run(int)


def waits():
    while not os.path.exists("seen"):
        time.sleep(0.05)


# %% a call in the background
import time

from nbdist import Session

future = Session(2).submit(time.sleep, 1000)
