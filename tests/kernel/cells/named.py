# %% training
import time

from IPython.display import HTML, display

from nbdist import Session

session = Session(2, name="notebook", devices="cpu")


class Trained:
    def __init__(self, steps):
        self.steps = steps


def train(steps):
    bar = display("bar: 0", display_id=True)
    display(HTML("<b>table</b>"))
    for step in range(steps):
        print("step", step)
        bar.update(f"bar: {step + 1}")
        time.sleep(0.1)
    return Trained(steps)


# %% the call
trained = session.run(train, 20)
