"""Cells of test_front_ends.py, and the notebook of marimo that it runs."""

# %% a cell of VS Code
import os
import time

import beside

from nbdist import in_ddp


def train(x):
    print("printed in", os.getcwd())
    return x * beside.three()


def fails():
    open("begun", "w").close()
    time.sleep(1000)


in_ddp(2, train, 2)

# %% a figure that is clicked
import time

import plotly.graph_objects as go
from IPython.display import display

from nbdist import in_ddp


def draw():
    figure, heard = go.FigureWidget(), []
    figure.add_scatter(y=[1, 2, 3])
    figure.data[0].on_click(lambda trace, points, state: heard.append(points.point_inds))
    display(figure)
    figure.add_scatter(y=[3, 2, 1])
    while not heard:
        time.sleep(0.01)
    figure.data[0].y = [7, 8, 9]
    return heard


print(in_ddp(1, draw))

# %% a figure that travels
import plotly.graph_objects as go

from nbdist import in_ddp

figure = go.FigureWidget()
figure.add_scatter(y=[1, 2, 3])


def more():
    figure.add_scatter(y=[3, 2, 1])
    return figure


back = in_ddp(2, more)
print(type(back).__name__, [trace.y for trace in back.data], len(figure.data))

# %% marimo
import marimo

app = marimo.App()


@app.cell
def _():
    from nbdist import Session, in_ddp

    return Session, in_ddp


@app.cell
def _():
    scale = 3

    class Own(Exception):
        pass

    def helper(x):
        return scale * x

    def train(steps):
        from tqdm.auto import tqdm

        for step in tqdm(range(steps)):
            print("step", step)
        return helper(steps)

    def fails():
        raise Own("in a cell")

    return Own, fails, train


@app.cell
def _(in_ddp, train):
    in_ddp(2, train, 2)
    return


@app.cell
def _(Own, fails, in_ddp):
    try:
        in_ddp(2, fails)
    except Own as exc:
        print("caught", exc, exc.__cause__)
    return


@app.cell
def _(Session):
    with Session(2, output="all") as session:
        print(session.run_all(lambda: print("mine") or str(input)))
    return


if __name__ == "__main__":
    app.run()

# %% the debugger is on
assert "debugpy" in sys.modules


def traced():
    return "pydevd" in sys.modules or sys.gettrace() is not None


assert in_ddp(2, traced) is False
with Session(2) as session:
    assert session.run_all(traced) == [False, False]
    session.restart()
    assert session.run_all(traced) == [False, False]
assert parallel_map(lambda x: (x, traced()), [1, 2], workers=2, progress=False) == [(1, False), (2, False)]

# %% nbconvert
import torch.distributed as dist

from nbdist import in_ddp


def train():
    print("rank", dist.get_rank())
    return 5


in_ddp(2, train)
# ---
import matplotlib.pyplot as plt


def draw():
    plt.plot([1, 2])
    plt.show()


in_ddp(2, draw)
# ---
in_ddp(2, lambda: 1 / 0)
