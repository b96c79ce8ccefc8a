"""The cell as a person sees it: a real JupyterLab, in a browser without a screen."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cells import cells
from conftest import living
from pages import NEEDED, Notebook, poll, write

CELLS = cells("browser/cells/jupyterlab.py")

pytestmark = NEEDED

#: Where a picture of each test's page is left, if anywhere.
SCREENSHOTS = os.environ.get("NBDIST_SCREENSHOTS", "")


Open = Callable[..., Notebook]


@pytest.fixture
def open_notebook(lab: tuple[str, Path], page: Any, request: pytest.FixtureRequest) -> Iterator[Open]:
    """Opens a notebook with these cells."""
    url, folder = lab
    name = request.node.name.removeprefix("test_")
    page.set_viewport_size({"width": 1100, "height": 700})

    def made(*cells: str) -> Notebook:
        return Notebook(page, url, write(folder / f"{name}.ipynb", cells))

    yield made
    if SCREENSHOTS:
        page.locator(".jp-Notebook").screenshot(path=f"{SCREENSHOTS}/{name}.png")


def test_launch_with_a_bar(open_notebook: Open, lab: tuple[str, Path]) -> None:
    book = open_notebook("NAME = 'launch'\n" + CELLS["a bar"], "in_ddp(2, train)")
    book.run(0)
    book.start(1)
    book.until(1, "1/4")
    assert book.cell(1).locator(".widget-hprogress, .jupyter-widgets").count(), "a bar of widgets"
    for step in (1, 2, 3):
        (lab[1] / f"launch{step}").touch()
    shown = book.end(1)
    assert "4/4" in shown and "step 3" in shown and "'trained'" in shown
    assert not book.cell(1).locator(".jupyter-widgets").count(), "it is a picture at the end"


def stop(book: Notebook) -> None:
    """Interrupt as the stop button does."""
    book.command("notebook:interrupt-kernel")


NEXT = "in_ddp(2, lambda: 'the next one works')"


def test_stop_while_the_first_call_starts(open_notebook: Open) -> None:
    call = "print('runs')\nin_ddp(2, time.sleep, 1000)"
    book = open_notebook("import time\nfrom nbdist import in_ddp", call, NEXT)
    book.run(0)
    book.start(1)
    book.until(1, "runs")  # a kernel ignores an interrupt that comes before its cell runs
    stop(book)
    shown = book.end(1)
    says = "stopped (before (rank.* had started|any rank had got the call)|while the ranks were started)"
    assert "KeyboardInterrupt" in shown, shown
    assert "raised KeyboardInterrupt" in shown or (re.search(says, shown) and len(shown.splitlines()) < 9), shown
    assert "the next one works" in book.run(2)


def test_stop_while_ranks_work(open_notebook: Open) -> None:
    book = open_notebook(CELLS["ranks that work"], "in_ddp(2, train)", NEXT)
    book.run(0)
    book.start(1)
    book.until(1, "begun")
    stop(book)
    assert "KeyboardInterrupt" in book.end(1)
    assert "the next one works" in book.run(2)


def test_stop_that_ranks_do_not_answer(open_notebook: Open) -> None:
    book = open_notebook(CELLS["ranks that do not answer"], "in_ddp(2, train)", NEXT)
    book.run(0)
    book.start(1)
    book.until(1, "begun")
    stop(book)
    shown = book.end(1)
    assert re.search(r"KeyboardInterrupt: .*killed", shown) and len(shown.splitlines()) < 12, shown
    assert "the next one works" in book.run(2)


def test_the_kernel_is_restarted(open_notebook: Open) -> None:
    book = open_notebook(
        CELLS["a session"],
        "print(*session.run_all(os.getpid))",
        "session.run(lambda: 'works again')",
    )
    book.run(0)
    ranks = [psutil.Process(int(pid)) for pid in re.findall(r"\d+", book.run(1))]
    assert len(ranks) == 2
    book.command("notebook:restart-kernel")
    book.page.locator(".jp-Dialog button.jp-mod-warn").click()
    assert poll(lambda: not living(ranks)), "ranks go with their kernel"
    book.run(0)
    assert "works again" in book.run(2)


def test_a_page_that_is_loaded_again(open_notebook: Open, lab: tuple[str, Path]) -> None:
    book = open_notebook("NAME = 'reload'\n" + CELLS["a bar"], "in_ddp(2, train)", "1 + 1")
    book.run(0)
    book.start(1)
    book.until(1, "1/4")
    book.save()
    book.load()
    book.until(1, "1/4")
    assert book.cell(1).locator(".jupyter-widgets").count() and "Error displaying widget" not in book.shown(1)
    for step in (1, 2, 3):
        (lab[1] / f"reload{step}").touch()
    book.until(1, "4/4")
    assert "2" in book.run(2)
    book.save()
    book.load()
    book.until(1, "4/4")
    assert "Error displaying widget" not in book.shown(1), "also once it is over"


def test_tabs(open_notebook: Open) -> None:
    book = open_notebook(CELLS["tabs"], "session.run(lambda: print('I am', dist.get_rank()))")
    book.run(0)
    shown = book.run(1)
    assert all(f"rank {rank}" in shown and f"I am {rank}" in shown for rank in (0, 1))


def test_a_breakpoint_is_typed_in_the_input_box(open_notebook: Open) -> None:
    book = open_notebook(CELLS["a breakpoint"], "in_ddp(1, train, 20)")
    book.run(0)
    book.start(1)
    book.answer(1, "p x + 3")
    book.until(1, r"\b23\b")
    book.answer(1, "x = 42")
    book.answer(1, "c")
    assert re.search(r"\b42\b", book.end(1))


def test_a_widget_is_clicked(open_notebook: Open) -> None:
    book = open_notebook(CELLS["widgets"], "session.run(wait, ranks=[0])", "session.run(show)", "session.close()")
    book.run(0)
    book.start(1)
    book.cell(1).get_by_role("button", name="press").click()
    assert "'pressed in rank 0'" in book.end(1)
    book.run(2)
    book.cell(2).get_by_role("button", name="press").click()
    book.until(2, "pressed in rank 0")
    book.until(2, "printed by the handler")
    book.run(3)
    assert poll(lambda: not book.cell(2).locator(".jupyter-widgets").count())
    picture = book.cell(2).locator("summary")
    assert "press" in picture.inner_text() and "pressed in rank 0" in picture.inner_text()
    picture.click()
    book.until(2, "ranks of this widget have ended")


@pytest.mark.skipif(importlib.util.find_spec("plotly") is None, reason="plotly is not installed")
@pytest.mark.skipif(importlib.util.find_spec("anywidget") is None, reason="anywidget is not installed")
def test_a_plot_of_plotly_follows_its_rank(open_notebook: Open, lab: tuple[str, Path]) -> None:
    last = (CELLS["more of the plot"], "session.close()")
    book = open_notebook(CELLS["a plot"], "session.run(live, ranks=[0])", "session.run(draw)", *last)

    def points(number: int) -> int:
        return int(book.cell(number).locator(".js-plotly-plot .scatterlayer .point").count())

    def click(number: int) -> None:
        book.cell(number).locator(".js-plotly-plot").scroll_into_view_if_needed()
        place = book.cell(number).locator(".js-plotly-plot .scatterlayer .point").first.bounding_box()
        book.page.mouse.move(place["x"] + place["width"] / 2, place["y"] + place["height"] / 2)
        book.cell(number).locator(".js-plotly-plot .hovertext").first.wait_for()
        book.page.mouse.down()
        book.page.mouse.up()

    book.run(0)
    book.start(1)
    assert poll(lambda: points(1) == 3), book.shown(1)
    (lab[1] / "begun").touch()
    assert poll(lambda: points(1) == 6), book.shown(1)
    book.until(1, "two lines")
    click(1)
    assert "[[0]]" in book.end(1)
    book.save()
    for _ in range(10):  # JupyterLab waits four seconds for all models, and this one brings 5 MB of JavaScript
        book.load()
        assert poll(lambda: points(1) or "Error displaying widget" in book.shown(1)), book.shown(1)
        if points(1):
            break
    assert poll(lambda: points(1) == 3), (points(1), book.shown(1))  # as it was displayed: plotly's own way
    book.run(2)
    assert poll(lambda: points(2) == 3), book.shown(2)
    click(2)
    assert "[[0]]" in book.run(3)
    assert poll(lambda: points(2) == 6), "what a later call adds"
    book.run(4)
    click(2)
    book.until(2, "ranks of this widget have ended")
