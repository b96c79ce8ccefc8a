"""Differences of other front ends from a plain kernel's client: VS Code's requests, plots of plotly, marimo."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cells import cells
from conftest import Kernel, Result, poll, typed
from test_widgets import Page

CELLS = cells("kernel/cells/front_ends.py")
ROOT = str(Path(__file__).parent.parent.parent)


def needs(*packages: str) -> Any:
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


# --------------------------------------------------------------------------------------------------------- VS Code


class VSCode(Kernel):
    """A kernel driven as Microsoft's Jupyter extension does: see `executeSilently` and `executeCodeCell` there."""

    def hidden(self, code: str) -> Result:
        """Code that the extension runs for itself, before the first cell and between cells."""
        asked = {"silent": False, "store_history": False, "allow_stdin": True, "stop_on_error": False}
        result = self.finish(str(self.client.execute(code, **asked)))
        assert result.error is None, result.traceback
        return result

    def start(self, code: str, watched: bool = True) -> str:
        asked = {"silent": False, "store_history": True, "allow_stdin": watched, "stop_on_error": False}
        content = {"code": code, "user_expressions": {}, **asked}
        message = self.client.session.msg(
            "execute_request", content, metadata={"cellId": "vscode-notebook-cell:a.ipynb#W0"}
        )
        self.client.shell_channel.send(message)
        variables = "print({name: type(value).__name__ for name, value in globals().items() if name[0] != '_'})"
        self.client.execute(variables, silent=True, store_history=False)  # it waits for its turn
        return str(message["header"]["msg_id"])


@pytest.fixture
def vscode(tmp_path: Path) -> Iterator[VSCode]:
    kernel = VSCode(Path(ROOT))
    try:
        folder = repr(str(tmp_path))
        kernel.hidden("%config Completer.use_jedi = False\n%matplotlib inline")
        kernel.hidden(f"import os as _VSCODE_os; _VSCODE_os.chdir({folder})")
        kernel.hidden(f"import sys as _VSCODE_sys; _VSCODE_sys.path.insert(0, {folder})")
        kernel.hidden("if '__vsc_ipynb_file__' not in globals():\n    __vsc_ipynb_file__ = 'a.ipynb'")
        yield kernel
    finally:
        kernel.close()


def test_cells_that_vs_code_runs(vscode: VSCode, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("def three():\n    return 3\n")
    result = vscode.ok(CELLS["a cell of VS Code"])
    assert result.text == f"printed in {tmp_path}\n6\n" and result.number == 1, "hidden requests have no number"
    assert "train" in vscode.hidden("print(list(globals()))").text
    assert vscode.ok("in_ddp(2, lambda: get_ipython().__class__.__name__)").text == "'ZMQInteractiveShell'\n"
    failed = vscode.run("in_ddp(2, lambda: 1 / 0)")
    assert failed.error == "ZeroDivisionError" and "lambda: 1 / 0" in failed.plain_traceback
    assert vscode.ok("in_ddp(1, train, 1)").number == 4, "stop_on_error is off"
    cell = vscode.start("in_ddp(2, fails)")
    assert poll((tmp_path / "begun").exists)
    vscode.interrupt()
    assert vscode.finish(cell).error == "KeyboardInterrupt"
    prompts, text = typed(vscode, "print(in_ddp(1, lambda: input('name? ')))", "me")
    assert prompts == ["(rank 0) name? "] and "me" in text


def test_hidden_requests_between_calls_of_a_session(vscode: VSCode) -> None:
    """They are no cells: what ranks print later must not go to them, nor the ranks end with them."""
    vscode.ok("from nbdist import Session\nsession = Session(2)\ndef say(x):\n    print('said', x)\n    return x")
    for number in range(3):
        assert vscode.ok(f"session.run(say, {number})").text == f"said {number}\n{number}\n"
        assert "said" not in vscode.hidden("import sys as _VSCODE_sys; print(_VSCODE_sys.version_info)").text
    later = vscode.start("import time\nfuture = session.submit(lambda: time.sleep(1) or print('in its own cell'))")
    printed = Page(vscode).until(lambda message: "in its own cell" in message["content"].get("text", ""))
    assert printed["parent_header"]["msg_id"] == later
    assert vscode.ok("print(future.result()); session.close()").text == "None\n"


# ---------------------------------------------------------------------------------------------------------- plotly


@pytest.mark.long("other front ends")
@needs("plotly", "anywidget")
def test_a_plotly_figure_gets_a_click_during_a_call(notebook: Kernel) -> None:
    page = Page(notebook)
    cell = notebook.start(CELLS["a figure that is clicked"])
    added = page.until(lambda m: m["content"].get("data", {}).get("state", {}).get("_py2js_addTraces") and said(page))
    assert added["content"]["data"]["state"]["_py2js_addTraces"]["trace_data"][0]["y"] == [3, 2, 1], "after display"
    points = {"trace_indexes": [0], "point_indexes": [2], "xs": [2], "ys": [3]}
    clicked = {"event_type": "plotly_click", "points": points, "device_state": None, "selector": None}
    state = {"_js2py_pointsCallback": clicked}
    page.say(page.model("AnyModel"), method="update", state=state, buffer_paths=[])
    page.done(cell)
    assert page.text(cell) == "[[2]]\n"
    restyled = [m["content"]["data"]["state"].get("_py2js_restyle") for m in page.heard if m["msg_type"] == "comm_msg"]
    assert [7, 8, 9] in [change["restyle_data"]["y"][0] for change in restyled if change], "it is seen in the page"


def said(page: Page) -> bool:
    """Return whether something was displayed."""
    return any(page.shown(message) for message in page.heard)


@pytest.mark.long("other front ends")
@needs("plotly", "anywidget")
def test_a_figure_of_plotly_travels_with_its_data(notebook: Kernel) -> None:
    """The figure defines its own reduction; as a widget alone it would come without its data."""
    assert notebook.ok(CELLS["a figure that travels"]).text == "FigureWidget [(1, 2, 3), (3, 2, 1)] 1\n"


# ---------------------------------------------------------------------------------------------------------- marimo


@pytest.mark.slow
@needs("marimo")
def test_cells_of_marimo(tmp_path: Path) -> None:
    (tmp_path / "book.py").write_text(CELLS["marimo"])
    command = [sys.executable, "-m", "marimo", "export", "ipynb", "book.py", "-o", "book.ipynb", "--include-outputs"]
    environ = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    cells = json.loads((tmp_path / "book.ipynb").read_text())["cells"]
    texts: list[str] = []
    for cell in cells:
        parts = [output.get("text") or output.get("data", {}).get("text/html", "") for output in cell["outputs"]]
        texts.append("".join("".join(part) for part in parts))
    _, _, trained, caught, session = texts
    assert "step 0\nstep 1\n" in trained and "2/2" in trained and ">6<" in trained, "prints, a bar, the value"
    assert "caught in a cell on rank" in caught and 'raise Own("in a cell")' in caught, "by its type, with its line"
    assert "[rank 1] mine" in session and "Keyboard._input" in session, "input() is a rank's own, not marimo's"


# ------------------------------------------------------------------------------------------ a debugger of the front end


def attach_debugger(kernel: Kernel) -> None:
    """Send what JupyterLab and VS Code send when their debugger is switched on: the protocol of debug adapters."""
    client: Any = kernel.client

    def ask(command: str, **arguments: Any) -> dict[str, Any]:
        content = {"type": "request", "seq": 1, "command": command, "arguments": arguments}
        message = client.session.msg("debug_request", content)
        client.control_channel.send(message)
        while True:
            reply = client.get_control_msg(timeout=60)
            if reply["parent_header"].get("msg_id") == message["header"]["msg_id"]:
                return dict(reply["content"])

    ask("debugInfo")
    ask("initialize", clientID="tests", adapterID="", pathFormat="path", linesStartAt1=True, columnsStartAt1=True)
    assert ask("attach")["success"]
    ask("configurationDone")
    code = ask("dumpCell", code="x = 1")["body"]["sourcePath"]
    ask("setBreakpoints", breakpoints=[{"line": 1}], source={"path": code})


@needs("debugpy")
@pytest.mark.started
@pytest.mark.slow
def test_ranks_start_while_the_debugger_of_the_page_is_on(kernel: Kernel) -> None:
    kernel.ok("import sys\nfrom nbdist import Session, in_ddp, parallel_map")
    attach_debugger(kernel)
    kernel.ok(CELLS["the debugger is on"])


# ------------------------------------------------------------------------------------------------------- nbconvert


@pytest.mark.long("other front ends")
@needs("nbconvert", "nbformat")
def test_a_notebook_that_nbconvert_executes(tmp_path: Path) -> None:
    import nbformat
    from nbformat import v4

    notebook = v4.new_notebook(cells=[v4.new_code_cell(code) for code in CELLS["nbconvert"].split("# ---\n")])
    nbformat.write(notebook, tmp_path / "given.ipynb")
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--allow-errors"]
    subprocess.run(
        [*command, "given.ipynb", "--output", "done.ipynb"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ROOT},
        check=True,
    )
    trained, drawn, failed = nbformat.read(tmp_path / "done.ipynb", 4).cells
    assert [one["text"] for one in trained.outputs if one.output_type == "stream"] == ["rank 0\n"]
    assert trained.outputs[-1]["data"]["text/plain"] == "5"
    assert "image/png" in drawn.outputs[0]["data"]
    assert (failed.outputs[-1]["ename"], failed.outputs[-1]["evalue"]) == ("ZeroDivisionError", "division by zero")
