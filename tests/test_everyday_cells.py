"""Everyday cells of users, in a real kernel of whatever IPython, ipykernel and ipywidgets are here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from cells import cells
from conftest import Kernel, Result, endless

CELLS = cells("cells/everyday.py")
WIDGET = "application/vnd.jupyter.widget-view+json"


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    try:
        kernel.ok(CELLS["first cell"])
        yield kernel
        kernel.ok("%load_ext nbdist\n%unload_ext nbdist")
    finally:
        kernel.close()


def widgets(result: Result) -> list[str]:
    """The models of the widgets that the cell shows; each must have been opened before it is shown."""
    opened: dict[str, str] = {}
    shown = []
    for output in result.outputs:
        if output["kind"] == "comm_open":
            opened[output["comm_id"]] = output["data"]["state"]["_model_name"]
        elif WIDGET in output.get("data", {}):
            shown.append(opened[output["data"][WIDGET]["model_id"]])
    return shown


def test_in_ddp_prints_its_value(notebook: Kernel) -> None:
    assert notebook.ok("print('value', in_ddp(2, sums))").text == "value 2.0\n"


@pytest.mark.parametrize("module", ["tqdm.notebook", "tqdm.auto"])
def test_a_bar_is_a_widget(module: str, notebook: Kernel) -> None:
    notebook.ok(f"def bar():\n    from {module} import tqdm\n    return sum(tqdm(range(20), mininterval=0))")
    result = notebook.ok("in_ddp(2, bar)")
    assert widgets(result) == ["HBoxModel"]
    states = [output["data"].get("state", {}) for output in result.outputs if output["kind"] == "comm_msg"]
    assert {"value": 20.0} in states
    assert not [output for output in result.outputs if output["kind"] == "stream"]  # what a bar is without widgets


def test_a_rank_keeps_its_own_objects(notebook: Kernel) -> None:
    notebook.ok(CELLS["what a rank has of its own"])
    assert notebook.ok("a, b, c = in_ddp(1, own); print(a, b, c is shell)").text == "True True True\n"
    assert (
        notebook.ok("print(in_ddp(1, get_ipython) is shell, in_ddp(1, lambda: input) == input)").text == "True True\n"
    )


def test_an_exception_has_its_type_and_its_line(notebook: Kernel) -> None:
    notebook.ok("def divide(by):\n    return 1 / by")
    result = notebook.run("in_ddp(2, divide, 0)")
    assert (result.error, result.message) == ("ZeroDivisionError", "division by zero")
    before, shown, after = result.plain_traceback.partition("return 1 / by")
    assert shown and "decorator" not in before + after
    assert "in_ddp(2, divide, 0)" in before and re.search(r"rank [01] \(pid \d+\) raised ZeroDivisionError", before)
    assert notebook.ok(CELLS["an exception that is caught"]).text == "caught\n"


def test_plots_and_html(notebook: Kernel) -> None:
    notebook.ok("%matplotlib inline\nimport matplotlib.pyplot as plt\nfrom IPython.display import HTML")
    result = notebook.ok(CELLS["plots and HTML"])
    data = [output["data"] for output in result.outputs if output["kind"] == "display_data"]
    assert len(data) == 2
    assert data[0]["image/png"].startswith("iVBORw0KGgo")  # what a PNG begins with, in base64
    assert data[1]["text/html"] == "<b>bold</b>"


def test_magics(notebook: Kernel) -> None:
    notebook.ok("%load_ext nbdist")
    started = notebook.ok("%ddp start 2").text
    assert "Session" in started and "2 ranks" in started
    notebook.ok("x = 3\n%ddp push x")
    notebook.ok("%%ddp\ny = x + 4")
    assert notebook.ok("%ddp pull y\nprint(y)").text == "7\n"
    assert "idle" in notebook.ok("print(get_ipython().run_line_magic('ddp', 'status'))").text
    notebook.ok("%ddp stop")


def test_cells_on_all_ranks(notebook: Kernel) -> None:
    notebook.ok("%load_ext nbdist")
    notebook.ok("%ddp start 2")
    try:
        result = notebook.ok("%%ddp --output all --need sums\n%time z = sums()\ndist.get_rank() + z")
        assert "[rank 1]\n3.0\n" in result.text and "[rank 1] Wall time" in result.text
        result = notebook.run("%%ddp\n1 / (dist.get_rank() - 1)")
        assert result.error == "ZeroDivisionError"
        assert "1 / (dist.get_rank() - 1)" in result.plain_traceback
        assert "decorator" not in result.plain_traceback
    finally:
        notebook.ok("%ddp stop")


def test_status_and_a_future(notebook: Kernel) -> None:
    notebook.ok(CELLS["naps"])
    cell = notebook.start("future = session.submit(naps)\nsession.status()", watched=True)
    shown = notebook.finish(cell)
    assert "2 ranks" in shown.text
    (table,) = [output for output in shown.outputs if output["kind"] == "display_data"]
    assert "<table" in table["data"]["text/html"]
    notebook.finish(cell, until=lambda result: "running" in result.text and "naps" in result.text)  # it is kept up
    (notebook.cwd / "seen").touch()
    notebook.finish(cell, until=lambda result: "awake\n" in result.text)  # output goes to the cell that asked
    assert notebook.ok("print(future.result()); session.close()").text == "5\n"


def test_a_timeout(notebook: Kernel) -> None:
    tests = str(Path(__file__).parent)
    notebook.ok(f"import sys; sys.path.append({tests!r})\nfrom clocks import CallClock, one_answered")
    result = notebook.run(CELLS["a timeout"])
    assert result.error == "RankTimeout"
    assert "rank 0 waits in all_reduce at Cell In[" in result.message and "rank 1 has returned" in result.message


def test_a_session_outlives_a_failure_in_a_collective(notebook: Kernel) -> None:
    notebook.ok("session = Session(2)\npids = session.run_all(__import__('os').getpid)")
    with endless(notebook, "GRACE_AFTER_FAILURE"):
        result = notebook.run(CELLS["a failure in a collective"])
    assert (result.error, result.message) == ("ValueError", "boom")
    text = notebook.ok("print(session.run(sums), session.run_all(__import__('os').getpid) == pids)").text
    assert text == "2.0 True\n"
    notebook.ok("session.close()")


def test_a_frame(notebook: Kernel) -> None:
    result = notebook.ok(CELLS["a frame"])
    assert result.text.startswith("True 0.0\n")
    assert "<table" in result.outputs[-1]["data"]["text/html"]


def test_an_interrupt(notebook: Kernel) -> None:
    cell = notebook.start(CELLS["an interrupt"])
    notebook.finish(cell, until=lambda result: "asleep" in result.text)
    notebook.interrupt()
    assert notebook.finish(cell).error == "KeyboardInterrupt"
    assert notebook.ok("print(in_ddp(2, sums))").text == "2.0\n"
