"""Cells of test_columns.py."""


# %% a column for each rank
def f():
    from IPython.display import HTML, display
    from tqdm.auto import tqdm

    rank = dist.get_rank()
    print(f"<rank {rank}>")
    handle = display(HTML("<i>begin</i>"), display_id=True)
    for _ in tqdm(range(4), desc="bar"):
        pass
    handle.update(HTML(f"<i>end {rank}</i>"))
    print("\x1b[31mred\x1b[0m")


in_ddp.options(output="tabs")(2, f)


# %% a rank that fails
def f():
    print("I am", dist.get_rank())
    dist.barrier()
    if dist.get_rank() == 1:
        raise ZeroDivisionError
    dist.barrier()


in_ddp.options(output="tabs")(2, f)


# %% plots and cleared output
def f():
    import matplotlib.pyplot as plt
    from IPython.display import clear_output

    print("gone")
    clear_output()
    plt.plot([1, 2])


in_ddp.options(output="tabs")(1, f)

# %% a widget of the notebook
import ipywidgets

bar, out = ipywidgets.IntProgress(max=3), ipywidgets.Output()


def work():
    for _ in range(3):
        bar.value += 1
    bar.bar_style = "success"
    return bar.max


print(in_ddp(2, work), bar.value, bar.bar_style, bar.comm.comm_id)


# %% a widget that comes back
def make():
    import ipywidgets

    return ipywidgets.VBox([ipywidgets.IntSlider(value=3, max=9)])


(slider,) = in_ddp(2, make).children
print(slider.comm.comm_id)
