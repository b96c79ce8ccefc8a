"""The pictures of the documentation: what its pages show is what a JupyterLab shows.

`make pictures` keeps them, in `docs/pictures/`, light and dark.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from cells import cells
from pages import NEEDED, Notebook, poll, write

pytestmark = NEEDED

CELLS = cells("browser/cells/pictures.py")
FOLDER = os.environ.get("NBDIST_PICTURES", "")
#: A text in each picture.
SHOWN = {
    "failure": "ZeroDivisionError",
    "tabs": "rank 1",
    "status": "epoch 3: loss 0.127",
    "collectives": "is the first that differs",
    "profile": "communication",
    "training": "auc",
    "plan": "row_wise",
}
#: What a picture leaves out.
HIDDEN = ".jp-cell-toolbar, .jp-Collapser { display: none !important }"


def take(page: Any, cell: Any, name: str) -> None:
    """Keep a picture of a cell in both color schemes."""
    page.add_style_tag(content=HIDDEN)
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        is_light = str(scheme == "light").lower()
        page.wait_for_selector(f'body[data-jp-theme-light="{is_light}"]', state="attached")
        page.wait_for_selector("#jupyterlab-splash", state="detached")  # it covers the page while colors change
        cell.screenshot(path=f"{FOLDER}/{name}-{scheme}.png")


@pytest.mark.parametrize("name", SHOWN)
def test_picture(name: str, page: Any, lab: tuple[str, Path]) -> None:
    url, folder = lab
    texts = [re.sub(r"\n{3,}", "\n\n", CELLS[part]).strip() for part in (f"before {name}", name)]
    page.set_viewport_size({"width": 1250, "height": 1000})
    book = Notebook(page, url, write(folder / f"{name}.ipynb", texts))
    book.run(0)
    book.run(1)
    assert poll(lambda: SHOWN[name] in book.shown(1)), book.shown(1)
    if FOLDER:
        page.locator(".jp-Notebook").click(position={"x": 5, "y": 5})  # no cell is being edited
        take(page, book.cell(1), name)
