"""Cells of test_widgets.py."""

# %% first cell
import time

import ipywidgets
from IPython.display import display

from nbdist import Session, in_ddp


def controls():
    "A slider, a button and what their handlers have noted."
    slider, button, label, noted = ipywidgets.IntSlider(), ipywidgets.Button(), ipywidgets.Label("none"), []

    def moved(change):
        noted.append(change.new)
        label.value = f"at {change.new}"

    def clicked(button):
        noted.append("click")
        print("clicked")

    slider.observe(moved, "value")
    button.on_click(clicked)
    return ipywidgets.VBox([slider, button, label]), noted


def use(many):
    box, noted = controls()
    display(box)
    while len(noted) < many:
        time.sleep(0.01)
    return noted


# %% a widget between calls
session = Session(2)


def show():
    global noted
    box, noted = controls()
    display(box)


session.run(show)

# %% until the widget has moved
import os


def waits():
    while not os.path.exists("moved"):
        time.sleep(0.01)


session.run(waits)
print("moved")


# %% a widget of another package
def show():
    class Other(ipywidgets.DOMWidget):
        from traitlets import Bytes, Unicode

        _model_module, _view_module = Unicode("other").tag(sync=True), Unicode("other").tag(sync=True)
        _model_name, _view_name = Unicode("OtherModel").tag(sync=True), Unicode("OtherView").tag(sync=True)
        data = Bytes(b"binary").tag(sync=True)

    display(Other())


in_ddp(1, show)

# %% a widget of the notebook
stop = ipywidgets.Checkbox()
pressed = []
stop.observe(lambda change: pressed.append(change.new), "value")


def train():
    display("begun")
    while not stop.value:
        time.sleep(0.01)
    return "stopped"


session = Session(2)
print(session.run_all(train))


# %% a bar
def train():
    from tqdm.notebook import tqdm

    for step in tqdm(range(3), mininterval=0):
        while step and not os.path.exists(f"step{step}"):
            time.sleep(0.01)
