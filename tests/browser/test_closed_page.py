"""A training goes on while the page is closed, or the kernel is gone; what it has shown is there later."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

from cells import cells
from pages import NEEDED, Notebook, poll, write
from test_pictures import FOLDER, HIDDEN

from nbdist import attach

pytestmark = NEEDED

CELLS = cells("browser/cells/closed_page.py")


def opened(browser: Any, lab: tuple[str, Path]) -> Notebook:
    """The notebook, in a page of its own."""
    page = browser.new_page()
    page.set_viewport_size({"width": 1100, "height": 900})
    return Notebook(page, lab[0], lab[1] / "closed.ipynb")


def check(book: Notebook, number: int) -> None:
    """All that the training has shown is in a cell."""
    book.until(number, r"epoch 3: loss 0\.250")
    shown = book.shown(number)
    assert [shown.count(f"epoch {epoch}: loss") for epoch in range(4)] == [1, 1, 1, 1], shown
    assert "4/4" in shown, "the bar in its last state"
    assert book.cell(number).locator("table.dataframe").count() == 1
    assert book.cell(number).locator("img").count() == 1, "the plot"


def test_a_page_that_is_closed(lab: tuple[str, Path], browser: Any) -> None:
    url, folder = lab
    texts = [CELLS["training"], CELLS["the call"], "session.replay()", CELLS["later"], "session.close()"]
    write(folder / "closed.ipynb", texts)
    book = opened(browser, lab)
    book.run(0)
    book.start(1)
    book.until(1, "epoch 1")
    book.save()
    book.page.close()
    (folder / "closed").touch()
    session = attach("ratings")
    assert len(session.result()) == 4
    book = opened(browser, lab)
    book.run(2)
    check(book, 2)
    if FOLDER:
        book.page.add_style_tag(content=HIDDEN)
        book.cell(2).screenshot(path=f"{FOLDER}/replay.png")
    with urllib.request.urlopen(f"{url}/api/kernels") as answer:
        (kernel,) = json.load(answer)
    book.page.close()
    urllib.request.urlopen(urllib.request.Request(f"{url}/api/kernels/{kernel['id']}", method="DELETE"))
    book = opened(browser, lab)
    assert "4" in book.run(3), "another kernel"
    check(book, 3)
    book.run(4)
    assert poll(lambda: "closed" in repr(session) or not session.is_idle())
    book.page.close()
