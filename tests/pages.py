"""A JupyterLab in a browser without a screen, which the tests in browser/ share."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import conftest
import nbformat
import psutil
import pytest
import warm as warm_programs
from conftest import living, site_packages
from nbformat.v4 import new_code_cell, new_notebook

BROWSER = next(filter(None, map(shutil.which, ["chromium", "chromium-browser", "google-chrome"])), None)
MISSING = [name for name in ("jupyterlab", "playwright") if importlib.util.find_spec(name) is None]

#: The marks of files whose tests need it.
NEEDED = [
    pytest.mark.browser,
    pytest.mark.long("a JupyterLab in Chromium"),
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium"),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]

#: JupyterLab's settings: colors follow the system's, and no question about news covers the page.
SETTINGS = {"themes": {"adaptive-theme": True}, "notification": {"fetchNews": "false"}}
#: In the page: close what is open, and open a notebook if one is named.
OPEN = """async path => {
    for (const widget of [...window.jupyterapp.shell.widgets('main')]) widget.dispose()
    if (path) await window.jupyterapp.commands.execute('docmanager:open', {path, factory: 'Notebook'})
}"""
#: In the page: whether the open notebook's kernel has answered, and the page has fetched the kernel's widgets. Before
#: that, a cell may not run. While the page fetches, updates of a new widget may be lost.
READY = """async () => {
    const panel = window.jupyterapp?.shell.currentWidget, kernel = panel?.sessionContext?.session?.kernel
    if (!panel?.sessionContext?.isReady || kernel?.connectionStatus != 'connected') return false
    if (!['idle', 'busy'].includes(kernel.status)) return false
    const renderer = panel.content.rendermime.createRenderer('application/vnd.jupyter.widget-view+json', {})
    const manager = await Promise.race([renderer._manager.promise, new Promise(later => setTimeout(later, 100))])
    renderer.dispose()
    return Boolean(manager?.restoredStatus && !manager._kernelRestoreInProgress)
}"""


def poll(condition: Callable[[], Any], seconds: float = 300.0) -> bool:
    """Wait as conftest's `poll` does, with fewer looks: each makes the browser lay out its page."""

    def looked() -> Any:
        found = condition()
        if not found:
            time.sleep(0.1)
        return found

    return conftest.poll(looked, seconds)


@pytest.fixture(scope="session")
def running_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("lab")
    kernels = folder / "share" / "jupyter" / "kernels" / "python3"
    kernels.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "Python 3", "language": "python", "env": {"PYTHONPATH": site_packages()}}
    (kernels / "kernel.json").write_text(json.dumps(spec))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--port={port}"]
    command += [
        "--ServerApp.port_retries=0",
        "--LabApp.expose_app_in_browser=True",
        "--IdentityProvider.token=",
        "--ServerApp.password=",
        "--ServerApp.disable_check_xsrf=True",
    ]
    places = {name: str(folder / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR")}
    places |= {"JUPYTER_PATH": str(folder / "share" / "jupyter"), "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings")}
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    for name, values in SETTINGS.items():
        (settings / f"{name}.jupyterlab-settings").write_text(json.dumps(values))
    with open(folder / "log", "w") as log:
        env = {**os.environ, **places, warm_programs.FORKS: "1"}
        server = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{url}/api/status").status == 200)
        return False

    try:
        assert poll(answers, 300), (folder / "log").read_text()  # a busy machine takes minutes
        yield url, folder
    finally:
        family = psutil.Process(server.pid).children(recursive=True)
        server.terminate()
        assert poll(lambda: server.poll() is not None)
        assert poll(lambda: not living(family)), living(family)


@pytest.fixture
def lab(running_lab: tuple[str, Path]) -> Iterator[tuple[str, Path]]:
    """The address of a JupyterLab, and its folder. Kernels of a test end with it."""
    url, _ = running_lab
    yield running_lab
    with urllib.request.urlopen(f"{url}/api/kernels") as answer:
        kernels = json.load(answer)
    for kernel in kernels:
        urllib.request.urlopen(urllib.request.Request(f"{url}/api/kernels/{kernel['id']}", method="DELETE"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for a file. While it is open, this thread has a running event loop, and `asyncio.run` fails."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        context = chromium.new_context()  # one, whose pages share a cache: JupyterLab takes seconds to load and compile
        context.set_default_timeout(60_000)
        yield context
        chromium.close()


@pytest.fixture(scope="module")
def lab_page(browser: Any) -> Iterator[Any]:
    page = browser.new_page()
    yield page
    page.close()


@pytest.fixture
def page(lab_page: Any, lab: tuple[str, Path]) -> Iterator[Any]:
    """The page that tests of a file share. JupyterLab stays in it for the next test, without notebooks."""
    yield lab_page
    if lab_page.url.startswith(lab[0]):
        lab_page.evaluate(OPEN, "")


def write(file: Path, cells: Iterable[str]) -> Path:
    """Write a notebook with these cells, and return its file."""
    node = new_notebook(cells=[new_code_cell(cell.strip()) for cell in cells])
    node.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(node, file)
    return file


class Notebook:
    """A notebook that is open in the browser. If the page shows a JupyterLab already, the notebook is opened there."""

    def __init__(self, page: Any, url: str, file: Path) -> None:
        self.page, self._url, self.file = page, f"{url}/lab/tree/{file.name}?reset", file
        if page.url.startswith(url) and not page.locator(".jp-Dialog").count():
            page.evaluate(OPEN, file.name)
            self._await_cells()
        else:
            self.load()

    def load(self) -> None:
        """Load JupyterLab with the notebook, or load it again."""
        self.page.goto(self._url)
        self._await_cells()

    def _await_cells(self) -> None:
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")

    def cell(self, number: int) -> Any:
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def start(self, number: int) -> None:
        """Run a cell, as Control and Enter do."""
        assert poll(lambda: self.page.evaluate(READY)), "the notebook's kernel has not answered"
        self.cell(number).locator(".cm-content").click()
        self.page.keyboard.press("Control+Enter")  # once: a cell that is run again loses what its first run shows
        assert poll(lambda: re.search(r"[*\d]", self.prompt(number))), "the cell has not started"

    def run(self, number: int) -> str:
        """Run a cell to its end; what it shows."""
        self.start(number)
        return self.end(number)

    def end(self, number: int) -> str:
        assert poll(lambda: re.search(r"\[\d+\]", self.prompt(number))), self.shown(number)
        return self.shown(number)

    def prompt(self, number: int) -> str:
        return str(self.cell(number).locator(".jp-InputArea-prompt").inner_text())

    def shown(self, number: int) -> str:
        return str(self.cell(number).locator(".jp-OutputArea").first.inner_text())

    def until(self, number: int, text: str) -> None:
        assert poll(lambda: re.search(text, self.shown(number))), self.shown(number)

    def answer(self, number: int, line: str) -> None:
        """Type a line in the input box of a cell. If the page takes the box away meanwhile, type it in the next one."""
        from playwright.sync_api import Error

        boxes, echo = self.cell(number).locator(".jp-Stdin-input"), rf"\) +{re.escape(line)}\n"

        def typed() -> bool:
            if re.search(echo, self.shown(number)):
                return True
            with contextlib.suppress(Error):
                box = boxes.last.element_handle(timeout=1000)
                box.fill(line, timeout=1000)
                box.press("Enter", timeout=1000)
                taken = poll(lambda: not box.evaluate("one => one.isConnected"))
                assert taken, f"the line was not taken: {self.shown(number)}"
            return False

        assert poll(typed), self.shown(number)

    def command(self, name: str) -> None:
        """Give a command, as its button does. Of two keys that belong together, the second may come too late."""
        self.page.evaluate("name => { window.jupyterapp.commands.execute(name) }", name)

    def save(self) -> None:
        before = self.file.stat().st_mtime_ns
        self.command("docmanager:save")
        assert poll(lambda: self.file.stat().st_mtime_ns != before)
