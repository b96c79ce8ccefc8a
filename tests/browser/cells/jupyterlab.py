"""Cells of the notebooks of test_jupyterlab.py."""

# %% a bar
import os
import time

from nbdist import Session, in_ddp


def train(steps=4):
    from tqdm.notebook import tqdm

    for step in tqdm(range(steps), mininterval=0):
        print("step", step)
        while step and not os.path.exists(f"{NAME}{step}"):
            time.sleep(0.02)
    return "trained"


# %% ranks that work
import time

from nbdist import in_ddp


def train():
    print("begun")
    time.sleep(1000)


# %% ranks that do not answer
import time

from nbdist import in_ddp


def train():
    while True:
        try:
            print("begun")
            time.sleep(1000)
        except BaseException:
            pass


# %% a session
import os

from nbdist import Session

session = Session(2)

# %% tabs
import torch.distributed as dist

from nbdist import Session

session = Session(2, output="tabs")

# %% a breakpoint
from nbdist import in_ddp  # noqa: F401


def train(x):
    breakpoint()
    return x


# %% widgets
import time

import ipywidgets
import torch.distributed as dist
from IPython.display import display

from nbdist import Session


def show():
    global button, label
    button, label = ipywidgets.Button(description="press"), ipywidgets.Label("not yet")

    def pressed(button):
        label.value = f"pressed in rank {dist.get_rank()}"
        print("printed by the handler")

    button.on_click(pressed)
    display(ipywidgets.HBox([button, label]))


def wait():
    show()
    while label.value == "not yet":
        time.sleep(0.02)
    return label.value


session = Session(2)

# %% a plot
import os
import time

import plotly.graph_objects as go
from IPython.display import display

from nbdist import Session


def draw():
    global figure, heard
    # plotly's page loses a trace that is added before its JavaScript is loaded, in any notebook.
    first = go.Scatter(y=[1, 2, 3], mode="markers", marker={"size": 30})
    heard, figure = [], go.FigureWidget([first], layout={"width": 500, "height": 300, "showlegend": False})
    figure.data[0].on_click(lambda trace, points, state: heard.append(points.point_inds))
    display(figure)


def live():
    draw()
    while not os.path.exists("begun"):
        time.sleep(0.02)
    figure.add_scatter(y=[3, 2, 1], mode="markers", marker={"size": 30})
    figure.layout.title = "two lines"
    while not heard:
        time.sleep(0.02)
    figure.data[0].y = [5, 5, 5]
    return heard


session = Session(2)


# %% more of the plot
def more():
    while os.environ["RANK"] == "0" and not heard:  # the page sends a click when it has drawn it
        time.sleep(0.02)
    figure.add_scatter(y=[3, 2, 1], mode="markers", marker={"size": 30})
    return heard


session.run(more)
