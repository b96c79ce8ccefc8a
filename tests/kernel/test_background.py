"""Calls in the background: where their output goes, also where no page shows it; that they say when they fail."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import nbformat
import pytest
from conftest import Kernel, poll
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

from nbdist import Session

ROOT = str(Path(__file__).parent.parent.parent)


def gather(kernel: Kernel, cell: str, part: str) -> str:
    """The text that a cell has shown when `part` is in it."""
    text = ""
    while part not in text:
        message = kernel.client.get_iopub_msg()
        if message["parent_header"].get("msg_id") == cell:
            text += message["content"].get("text", "")
    return text


def test_a_failure_is_shown_in_its_own_cell(kernel: Kernel) -> None:
    kernel.ok("from nbdist import Session\nsession = Session(2)\nsession.run(int)")
    cell = kernel.start("def train(): raise ValueError('boom\\nmore')\nfuture = session.submit(train)", watched=True)
    text = gather(kernel, cell, "result() raises it")
    assert "nbdist: train failed in the background: rank " in text and "raised ValueError: boom. result()" in text
    assert kernel.run("future.result()").error == "ValueError"


def test_the_title_of_the_status() -> None:
    with Session(1) as session:
        assert str(session.status()).startswith("1 rank, not started\n")
        session.run(int)
        assert str(session.status()).startswith("1 rank, idle\n")
        future = session.submit(__import__("time").sleep, 1000)
        assert poll(lambda: str(session.status()).startswith("1 rank, running\n"))
        future.cancel()
    assert str(session.status()).startswith("1 rank, closed\n")


@pytest.mark.slow
def test_a_notebook_that_a_program_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs such as nbconvert and papermill receive nothing from a cell that is done."""
    monkeypatch.setenv("PYTHONPATH", ROOT)
    cells = """
    import time
    from nbdist import Session
    session = Session(2)
    def train():
        for epoch in range(3):
            print("epoch", epoch)
            time.sleep(0.2)
        return "trained"
    ---
    future = session.submit(train)
    session.status()
    ---
    time.sleep(0.3)
    ---
    print(future.result())
    ---
    later = session.submit(lambda: 1 / 0)
    ---
    import concurrent.futures, threading
    concurrent.futures.wait([later])
    while "nbdist: status" in [thread.name for thread in threading.enumerate()]:
        time.sleep(0.1)
    """
    notebook = new_notebook(cells=[new_code_cell(cell) for cell in textwrap.dedent(cells).split("---\n")])
    notebook.metadata.kernelspec = {"name": "python3", "display_name": "", "language": "python"}
    NotebookClient(notebook, iopub_timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.outputs]
    text = "".join(output.get("text", "") for output in outputs)
    assert [text.count(f"epoch {number}\n") for number in range(3)] == [1, 1, 1] and "trained\n" in text
    assert "failed in the background: rank " in text and "ZeroDivisionError" in text
    status = next(output for output in outputs if "data" in output)
    assert "2 ranks, idle" in status["data"]["text/plain"], "the table is as it was last"
    assert nbformat.validate(notebook) is None
