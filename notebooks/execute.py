"""Execute a notebook in a real kernel, show what it does, and keep the result as .ipynb and as HTML.

python notebooks/execute.py NOTEBOOK.ipynb [--output DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError
from nbconvert import HTMLExporter
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from nbformat import NotebookNode

Show = Callable[[str], None]

# A row of an HTML table, and a cell of a row.
ROW, CELL = re.compile(r"<tr\b.*?</tr>", re.DOTALL), re.compile(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", re.DOTALL)
HEADING = re.compile(r"^#+ +(.*)", re.MULTILINE)


class Terminal:
    """Lines on a terminal, and below them what is waited for, and for how long."""

    def __call__(self, text: str) -> None:
        print(f"\r\x1b[K{text}", flush=True)

    def waits(self, what: str, seconds: float) -> None:
        line = f"    {seconds:.0f} s: {what}"[: shutil.get_terminal_size().columns - 1]
        print(f"\r\x1b[K{line}", end="", flush=True)


class ThisPython(KernelSpecManager):
    """Kernels run in the interpreter that runs this; an installed kernelspec might name another one."""

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python")


class Runner(NotebookClient):
    """A notebook client that shows each cell as it starts, and its printed lines and table rows as they come."""

    def __init__(self, notebook: NotebookNode, folder: Path, show: Show, sockets: str) -> None:
        # No ports: another process could take one before the kernel does.
        address = {"transport": "ipc", "ip": f"{sockets}/kernel"}
        super().__init__(
            notebook,
            km=AsyncKernelManager(kernel_spec_manager=ThisPython(), **address),
            timeout=None,
            iopub_timeout=600,  # or what a busy machine has not read 4 s after the end of a cell is left out
            resources={"metadata": {"path": str(folder)}},
            on_notebook_start=self._start,
            on_notebook_complete=self._stop,
            on_cell_execute=self._announce,
        )
        # The manager is handed in, but it is ours all the same: its kernel ends with the run.
        self.owns_km = True
        self.show = show
        self.interrupted = False
        self._started = self._cell_started = time.monotonic()
        self._doing = ""
        self._ticking: asyncio.Future[None] | None = None
        self._line = ""
        self._rows: set[str] = set()

    def _start(self, **_: Any) -> None:
        self._catch_interrupts()
        if isinstance(self.show, Terminal):
            self._ticking = asyncio.ensure_future(self._tick(self.show))

    def _stop(self, **_: Any) -> None:
        if self._ticking is not None:
            self._ticking.cancel()

    async def _tick(self, terminal: Terminal) -> None:
        while True:
            await asyncio.sleep(1)
            terminal.waits(self._doing, time.monotonic() - self._cell_started)

    def _catch_interrupts(self) -> None:
        """Ctrl-C interrupts the cell, as in Jupyter, so that it ends its ranks; once more ends the kernel."""
        loop, run = asyncio.get_running_loop(), asyncio.current_task()
        assert run is not None

        def interrupt() -> None:
            if self.interrupted:
                run.cancel()
            else:
                self.interrupted = True
                self._interrupting = asyncio.ensure_future(self.km.interrupt_kernel())

        loop.add_signal_handler(signal.SIGINT, interrupt)

    def _announce(self, cell: NotebookNode, cell_index: int) -> None:
        if self.interrupted:  # it came between two cells
            raise KeyboardInterrupt
        codes = [index for index, other in enumerate(self.nb.cells) if other.cell_type == "code"]
        self._cell_started = time.monotonic()
        lines = [line for line in cell.source.splitlines() if line and not line.startswith("#")]
        self._doing = f"{self._heading(cell_index)}: {lines[0] if lines else ''}"
        self._line, self._rows = "", set()
        elapsed = self._cell_started - self._started
        self.show(f"[{codes.index(cell_index) + 1}/{len(codes)} {elapsed:6.1f} s] {self._doing}")

    def _heading(self, cell_index: int) -> str:
        """The one that a cell is under."""
        above = "\n".join(cell.source for cell in self.nb.cells[:cell_index] if cell.cell_type == "markdown")
        return (HEADING.findall(above) or ["no heading"])[-1]

    def process_message(self, msg: dict[str, Any], cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        if msg["msg_type"] == "stream":
            *lines, self._line = (self._line + msg["content"]["text"]).split("\n")
            for line in lines:
                # What stands before a carriage return was a progress bar, since overwritten.
                line = line.rstrip("\r").rpartition("\r")[2].rstrip()
                if line:
                    self.show(f"    {line}")
        elif msg["msg_type"] in ("display_data", "update_display_data"):
            # A loss table is sent again with every row it gets.
            for row in ROW.findall(msg["content"]["data"].get("text/html", "")):
                if row not in self._rows:
                    self._rows.add(row)
                    self.show("    " + "".join(f"{value.strip():12}" for value in CELL.findall(row)).rstrip())
        return super().process_message(msg, cell, cell_index)


def execute(notebook: Path, output: Path, show: Show = print) -> tuple[NotebookNode, int]:
    """Run `notebook` in its own folder and write it, as far as it came, to `output` as .ipynb and .html.

    Returns the executed notebook and an exit status: 0, 1 if a cell failed, 130 if Ctrl-C ended it.
    """
    node = nbformat.read(notebook, as_version=4)
    status = 0
    try:
        with tempfile.TemporaryDirectory() as sockets:
            runner = Runner(node, notebook.resolve().parent, show, sockets)
            runner.execute()
    except (CellExecutionError, DeadKernelError, KeyboardInterrupt, asyncio.CancelledError) as error:
        status = 130 if runner.interrupted else 1
        show("interrupted" if runner.interrupted else str(error))
    finally:
        # Only now: what is updated in later cells, such as a session's status, is found by its place among the outputs.
        node, _ = CoalesceStreamsPreprocessor().preprocess(node, {})
        output.mkdir(parents=True, exist_ok=True)
        executed, page = output / notebook.name, output / f"{notebook.stem}.html"
        nbformat.write(node, executed)
        page.write_text(HTMLExporter().from_notebook_node(node)[0], encoding="utf-8")
    if status == 0:
        show(last_result(node))
    show(f"{executed}\n{page}")
    return node, status


def last_result(node: NotebookNode) -> str:
    """The results of the last code cell as text: the summary, by convention."""
    last = next(cell for cell in reversed(node.cells) if cell.cell_type == "code")
    return "\n".join(part.data["text/plain"] for part in last.outputs if "text/plain" in part.get("data", {}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--output", type=Path, default=Path("build"), help="folder for the results (build)")
    arguments = parser.parse_args()
    show = Terminal() if sys.stdout.isatty() else functools.partial(print, flush=True)
    return execute(arguments.notebook, arguments.output, show)[1]


if __name__ == "__main__":
    sys.exit(main())
