"""The notebooks run top to bottom in a real kernel, and what runs them ends cleanly whatever a cell does."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import nbformat
import psutil
import pytest
from conftest import poll
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"


@pytest.fixture(scope="module")
def execute() -> ModuleType:
    """notebooks/execute.py, which is a script and in no package."""
    spec = importlib.util.spec_from_file_location("execute", NOTEBOOKS / "execute.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def notebook(folder: Path, *cells: str) -> Path:
    path = folder / "some.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Title"), *map(new_code_cell, cells)]), path)
    return path


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_committed_without_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_fastai_collab(execute: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_SMALL", "1")
    monkeypatch.setenv("NBDIST_RANKS", "2")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shown: list[str] = []
    node, status = execute.execute(NOTEBOOKS / "01_fastai_collab.ipynb", tmp_path, shown.append)
    assert status == 0, "\n".join(shown)

    # Every model beats the mean; some by far.
    table = [line.rsplit(maxsplit=2) for line in execute.last_result(node).splitlines()[1:]]
    losses = {name: float(valid) for name, _, valid in table}
    mean = losses.pop("the mean")
    assert len(losses) == 8
    assert all(loss < 0.9 * mean for loss in losses.values()), losses
    assert losses["with weight decay"] < 0.8 * mean

    outputs = [output for cell in node.cells for output in cell.get("outputs", [])]
    data = [output.data for output in outputs if "data" in output]
    assert sum("image/png" in part for part in data) == 2
    assert sum("<table" in part.get("text/html", "") for part in data) >= 4
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "Synthetic ratings" in text

    # The learner is whole on this side: it validates to what the ranks reported.
    results = [re.search(r"\[([\d.]+)\]$", part.get("text/plain", "")) for part in data]
    (validated,) = [float(result[1]) for result in results if result]
    assert validated == pytest.approx(losses["collab_learner"], abs=2e-3)

    # Progress was shown as it went, the loss tables in it.
    assert sum(line.startswith("[") for line in shown) == sum(cell.cell_type == "code" for cell in node.cells)
    assert sum("epoch" in line and "valid_loss" in line for line in shown) == 8
    assert "<img" in (tmp_path / "01_fastai_collab.html").read_text()


@pytest.mark.slow
def test_interactive(execute: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("NBDIST_RANKS", raising=False)
    shown: list[str] = []
    node, status = execute.execute(NOTEBOOKS / "02_interactive.ipynb", tmp_path, shown.append)
    assert status == 0, "\n".join(shown)
    outputs = [output for cell in node.cells for output in cell.get("outputs", [])]
    (error,) = [output for output in outputs if output.output_type == "error"]
    assert error.ename == "ZeroDivisionError" and "rank 1 (pid" in "\n".join(error.traceback)
    data = [output.data for output in outputs if "data" in output]
    assert sum("image/png" in part for part in data) == 2
    assert sum("<td>train_on</td>" in part.get("text/html", "") for part in data) == 1
    text = "".join(output.text for output in outputs if output.output_type == "stream")
    first, last = map(float, re.search(r"loss ([\d.]+) → ([\d.]+)", text).groups())  # type: ignore[union-attr]
    assert last < 0.6 * first
    assert (
        "[rank 1] rank 1 of 2" in text and "(0, 1)" in text and "26 epochs by now" in text and "stopped: True" in text
    )
    assert "'still here: 10 epochs'" in [part.get("text/plain") for part in data]
    assert "closed" in execute.last_result(node)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_torchrec_sharding(execute: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBDIST_RANKS", "2")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    shown: list[str] = []
    node, status = execute.execute(NOTEBOOKS / "03_torchrec_sharding.ipynb", tmp_path, shown.append)
    assert status == 0, "\n".join(shown)

    # Every kind, and the planner's choice, learn the same; and more than the mean.
    outputs = [output for cell in node.cells for output in cell.get("outputs", [])]
    data = [output.data for output in outputs if "data" in output]
    (base,) = [float(m[1]) for part in data if (m := re.search(r"has a loss of ([\d.]+)", part.get("text/plain", "")))]
    table = [line.split() for line in execute.last_result(node).splitlines()[1:]]
    assert len(table) == 8
    assert all(float(loss) < 0.8 * base for _, loss, _ in table), table
    assert max(float(loss) for _, loss, _ in table) - min(float(loss) for _, loss, _ in table) < 1e-3
    assert all(float(difference) < 1e-3 for *_, difference in table)

    assert sum("image/png" in part for part in data) == 2
    assert sum(part.get("text/html", "").count("rank 1") for part in data) == 1 + 7 + 1  # the plans
    assert not any("Warning" in output.get("text", "") for output in outputs)


def test_a_failing_cell_is_shown_and_what_ran_is_kept(execute: ModuleType, tmp_path: Path) -> None:
    shown: list[str] = []
    path = notebook(tmp_path, "print('before')", "1 / 0", "print('after')")
    status = execute.execute(path, tmp_path / "out", shown.append)[1]
    assert status == 1
    assert any("ZeroDivisionError" in text for text in shown) and "    before" in shown and "    after" not in shown
    page = (tmp_path / "out" / "some.html").read_text()
    assert "ZeroDivisionError" in page and "before" in page
    assert nbformat.read(tmp_path / "out" / "some.ipynb", as_version=4).cells[1].outputs


def test_a_kernel_that_dies_is_reported(execute: ModuleType, tmp_path: Path) -> None:
    shown: list[str] = []
    status = execute.execute(notebook(tmp_path, "import os; os._exit(3)"), tmp_path / "out", shown.append)[1]
    assert status == 1 and any("died" in text for text in shown)
    assert (tmp_path / "out" / "some.html").exists()


def test_a_growing_table_is_shown_row_by_row(execute: ModuleType, tmp_path: Path) -> None:
    source = """
    from IPython.display import HTML, display
    head, one, two = "<tr><th>epoch</th></tr>", "<tr><td>0</td></tr>", "<tr><td>1</td></tr>"
    table = display(HTML(f"<table>{head}{one}</table>"), display_id=True)
    table.update(HTML(f"<table>{head}{one}{two}</table>"))
    """
    shown: list[str] = []
    assert execute.execute(notebook(tmp_path, source), tmp_path / "out", shown.append)[1] == 0
    assert [text.strip() for text in shown if text.startswith(" ")] == ["epoch", "0", "1"]


def test_overwritten_progress_is_not_shown(execute: ModuleType, tmp_path: Path) -> None:
    shown: list[str] = []
    source = r"print('10%', end='\r', flush=True); print('20%', end='\r', flush=True); print('done'); 6 * 7"
    assert execute.execute(notebook(tmp_path, source), tmp_path / "out", shown.append)[1] == 0
    assert [text for text in shown if text.startswith(" ")] == ["    done"]
    assert "42" in shown


def test_ctrl_c_ends_it_and_its_kernel(tmp_path: Path) -> None:
    path = notebook(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(60)", "print('after')")
    command = [sys.executable, str(NOTEBOOKS / "execute.py"), str(path), "--output", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("[1/2")
        kernel = int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130 and "interrupted" in rest and "after" not in rest
    assert poll(lambda: not psutil.pid_exists(kernel))
    assert "KeyboardInterrupt" in (tmp_path / "out" / "some.html").read_text()
