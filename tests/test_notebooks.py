"""The notebooks run top to bottom in a real kernel, and what runs them ends cleanly whatever a cell does."""

from __future__ import annotations

import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import nbformat
import psutil
import pytest
from conftest import poll, site_packages
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from nbdist.recsys.triton import serving

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"
EXECUTED = ROOT / "build" / "notebooks"


def script(name: str) -> ModuleType:
    """A script of notebooks/, which is no package."""
    spec = importlib.util.spec_from_file_location(name, NOTEBOOKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def execute() -> ModuleType:
    return script("execute")


class Executed:
    """A notebook of ours that ran to its end on 2 ranks, with small data: what its reader sees.

    It is left in build/notebooks/, where the documentation takes it from.
    """

    def __init__(self, execute: ModuleType, name: str, folder: Path) -> None:
        self.shown: list[str] = []
        self.node, status = execute.execute(NOTEBOOKS / f"{name}.ipynb", folder, self.shown.append)
        assert status == 0, "\n".join(self.shown)
        EXECUTED.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / f"{name}.ipynb", EXECUTED)
        self.outputs = [output for cell in self.node.cells for output in cell.get("outputs", [])]
        self.data = [output.data for output in self.outputs if "data" in output]
        self.text = "".join(output.text for output in self.outputs if output.output_type == "stream")
        self.values = [part.get("text/plain", "") for part in self.data]
        self.plots = sum("image/png" in part for part in self.data)
        self.result: str = execute.last_result(self.node)
        assert "Warning" not in self.text

    def tables(self, *words: str) -> int:
        """Return how many displays hold an HTML table with these words in it."""
        pages = [part.get("text/html", "") for part in self.data]
        return sum("<table" in page and all(word in page for word in words) for page in pages)


Run = Callable[[str], Executed]


@pytest.fixture
def run(execute: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    small = {"NBDIST_SMALL": "1", "NBDIST_MOVIELENS": "small", "NBDIST_RANKS": "2", "PYTHONPATH": site_packages()}
    for name, value in small.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NBDIST_RAY_ADDRESS", raising=False)
    return lambda name: Executed(execute, name, tmp_path)


def notebook(folder: Path, *cells: str) -> Path:
    path = folder / "some.ipynb"
    nbformat.write(new_notebook(cells=[new_markdown_cell("# Title"), *map(new_code_cell, cells)]), path)
    return path


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_committed_without_outputs(path: Path) -> None:
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_badges_are_those_of_the_repository(path: Path) -> None:
    """None are there as long as pyproject.toml names no repository."""
    pytest.importorskip("nox", reason="what reads pyproject.toml is not in every environment of `make matrix`")
    badges = script("badges")
    title = nbformat.read(path, as_version=4).cells[0].source
    assert title == badges.with_badges(title, path.stem, badges.repository())
    assert "badge.svg" in title or not badges.repository()
    there = badges.with_badges(title, path.stem, "someone/nbdist")
    assert f"(https://colab.research.google.com/github/someone/nbdist/blob/main/notebooks/{path.name})" in there
    assert f"=https://github.com/someone/nbdist/blob/main/notebooks/{path.name})" in there
    assert badges.with_badges(there, path.stem, badges.repository()) == title
    assert there.partition("\n")[0] == title.partition("\n")[0] and there.endswith(title.partition("\n")[2])


@pytest.mark.long("notebooks")
def test_the_first_cell_installs_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment without nbdist, from the clone that the notebook lies in; the kernel goes on with it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    [packages] = (tmp_path / "venv").glob("lib/python3*/site-packages")
    # All that is installed here, pip too; but not by way of .pth files, and so not nbdist.
    (packages / "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "nbdist").symlink_to(ROOT / "nbdist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    cells = nbformat.read(NOTEBOOKS / "01_fastai_collab.ipynb", as_version=4).cells
    first = next(cell.source for cell in cells if cell.cell_type == "code")
    then = "import nbdist\nprint('from', nbdist.__file__, nbdist.in_ddp(2, lambda: 'ran'))"
    monkeypatch.setenv("JUPYTER_PATH", str(Path(sys.prefix) / "share" / "jupyter"))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = "import importlib.util\nprint(importlib.util.find_spec('nbdist'))"
    path = notebook(tmp_path / "notebooks", before, first, then)
    command = [tmp_path / "venv/bin/python", NOTEBOOKS / "execute.py", path, "--output", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    shown = done.stdout + done.stderr
    assert "    None\n" in shown and f"    from {packages / 'nbdist' / '__init__.py'} ran" in shown, shown
    assert "GPU" in done.stdout and "rror" not in shown
    assert not list(packages.glob("torch-*")), "another torch than the one that is there"


@pytest.mark.long("notebooks")
def test_fastai_collab(run: Run, tmp_path: Path) -> None:
    done = run("01_fastai_collab")

    # Every model beats the mean; some by far.
    table = [line.rsplit(maxsplit=2) for line in done.result.splitlines()[1:]]
    losses = {name: float(valid) for name, _, valid in table}
    mean = losses.pop("the mean")
    assert len(losses) == 9
    assert all(loss < 0.9 * mean for loss in losses.values()), losses
    assert losses["with weight decay"] < 0.8 * mean

    assert done.plots == 2 and done.tables() >= 4
    assert "Synthetic ratings" in done.text

    # The learner is whole on this side: it validates to what the ranks reported.
    results = [re.search(r"\[([\d.]+)\]$", value) for value in done.values]
    (validated,) = [float(result[1]) for result in results if result]
    assert validated == pytest.approx(losses["collab_learner"], abs=2e-3)

    # Progress was shown as it went, the loss tables in it.
    shown = done.shown
    assert sum(line.startswith("[") for line in shown) == sum(cell.cell_type == "code" for cell in done.node.cells)
    assert sum("epoch" in line and "valid_loss" in line for line in shown) == 9
    assert "<img" in (tmp_path / "01_fastai_collab.html").read_text()


@pytest.mark.long("notebooks")
def test_interactive(run: Run) -> None:
    done = run("02_interactive")
    (error,) = [output for output in done.outputs if output.output_type == "error"]
    assert error.ename == "ZeroDivisionError" and "rank 1 (pid" in "\n".join(error.traceback)
    assert done.plots == 2 and done.tables("<th>state</th>") == 2
    first, last = map(float, re.search(r"loss ([\d.]+) → ([\d.]+)", done.text).groups())  # type: ignore[union-attr]
    assert last < 0.6 * first
    for words in ("[rank 1] rank 1 of 2", "(0, 1)", "26 epochs by now", "stopped: True"):
        assert words in done.text
    assert "'still here: 10 epochs'" in done.values
    assert "closed" in done.result


@pytest.mark.long("notebooks")
def test_torchrec_sharding(run: Run) -> None:
    done = run("03_torchrec_sharding")

    # Every kind, and the planner's choice, learn the same; and more than the mean.
    (base,) = [float(found[1]) for value in done.values if (found := re.search(r"has a loss of ([\d.]+)", value))]
    table = [line.split() for line in done.result.splitlines()[1:]]
    assert len(table) == 8
    losses = [float(loss) for _, loss, _ in table]
    assert max(losses) < 0.8 * base and max(losses) - min(losses) < 1e-3, table
    assert all(float(difference) < 1e-4 for *_, difference in table), table

    assert done.plots == 2
    assert sum(part.get("text/html", "").count("rank 1") for part in done.data) == 1 + 7 + 1  # the plans


@pytest.mark.long("notebooks")
def test_movielens_pipeline(run: Run) -> None:
    done = run("04_movielens_pipeline")
    assert "Synthetic ratings, NOT MovieLens" in done.text and done.text.count("8 files") == 1
    (base,) = map(float, re.findall(r"^ranking by the movie alone has an AUC of ([\d.]+)", done.text, re.MULTILINE))
    rows = [line.split() for line in done.result.splitlines()[2:]]
    epochs, train, valid, auc, speed = zip(*(map(float, row) for row in rows), strict=True)
    assert epochs == (1, 2, 3, 4) and min(speed) > 0
    assert train[0] > train[-1] and valid[0] > valid[-1], "it learns"
    assert auc[-1] > base + 0.02, "who rates tells more than which movie"
    assert done.plots == 2


@pytest.mark.long("notebooks")
@pytest.mark.skipif(not serving.exists_for_this_machine(), reason="no Triton server for this machine")
def test_ctr_triton(run: Run) -> None:
    done = run("05_ctr_triton")

    # The model knows who likes what, which the regression cannot.
    auc, baseline = map(float, re.findall(r"AUC ([\d.]+), logistic regression ([\d.]+)", done.text)[0])
    assert baseline > 0.6 and auc > baseline + 0.03
    # An unknown user is no stranger one than the known are, and gets their average prediction.
    unknown, known, low, high, correlation = map(
        float,
        re.findall(
            r"unknown user ([\d.]+), known users ([\d.]+) on average \(from ([\d.]+) to ([\d.]+)\); .* ([\d.]+)",
            done.text,
        )[0],
    )
    assert low < unknown < high and abs(unknown - known) < 0.15 and correlation > 0.8
    # It is served as it is in the notebook.
    table = [line.rsplit(maxsplit=2) for line in done.result.splitlines()[1:]]
    assert [name for name, *_ in table] == [
        f"{protocol}, {how}" for protocol in ("http", "grpc") for how in ("a batch of 4,003", "one by one")
    ]
    assert all(float(difference) < 1e-5 for _, difference, _ in table)


@pytest.mark.long("notebooks")
def test_multislot(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBDIST_RANKS")
    done = run("06_multislot")

    # Chance on random labels, and much better on labels that can be learned: the summary is in the last cell.
    names, *lines = [line.split() for line in done.result.splitlines()]
    assert names == ["loss", "valid_loss", "auc", "samples/s"]
    results = {name: [float(value) for value in values] for name, *values in lines}
    assert results["random"][0] == pytest.approx(0.693, abs=0.02) and abs(results["random"][2] - 0.5) < 0.05
    assert results["planted"][1] < 0.6 and results["planted"][2] > 0.8

    assert done.plots == 2 + 1, "each run's own plot, and the last one"
    assert done.tables("rank 7", "row_wise") == 1, "the plan"


@pytest.mark.long("notebooks")
def test_cluster(run: Run) -> None:
    done = run("07_cluster")
    (places,) = [value for value in done.values if "NODE_RANK" in value]
    assert [row.split()[2] for row in places.splitlines()[1:]] == ["0", "1"]  # a rank on each node
    (said,) = [
        re.findall(r"loss of ([\d.]+), .* has ([\d.]+)", value)[0] for value in done.values if "reported" in value
    ]
    assert float(said[0]) == pytest.approx(float(said[1]), abs=2e-3)
    losses = [float(one) for one in re.search(r"by epoch: (.*)", done.text).group(1).split(", ")]  # type: ignore[union-attr]
    assert losses[-1] < losses[0] and "EmbeddingBagCollection of 655360 numbers, back here" in done.text
    assert "'resumed at epoch 2'" in done.values and "exit code 1" in done.text and "1 of 1 restarts" in done.text

    # What runs there is what runs on one machine: the cells of the other notebooks.
    own = [cell.source for cell in done.node.cells]
    for name, begins in {
        "01_fastai_collab": ['warnings.filterwarnings("ignore", message="Synthetic', "def train_collab"],
        "03_torchrec_sharding": ["SIZES =", "class TwoTower"],
    }.items():
        cells = [cell.source for cell in nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4).cells]
        for begin in begins:
            (original,) = [source for source in cells if source.startswith(begin)]
            assert original.partition("\nset_seed")[0] in "\n".join(own), begin


@pytest.mark.long("notebooks")
@pytest.mark.skipif(not serving.exists_for_this_machine(), reason="no Triton server for this machine")
def test_ten_movies(run: Run) -> None:
    done = run("08_ten_movies")
    assert "Synthetic ratings, NOT MovieLens" in done.text
    # Ten each, asked by raw ids, none that the user has seen.
    assert done.tables("movie", "chance", "title") == 3 and "seen before: 0" in done.text
    # The next day: codes stay, new movies are recommended.
    grown = re.findall(r"(\w+): (\d+) codes, now (\d+); those of yesterday kept: True", done.text)
    assert [name for name, *_ in grown] == ["user", "movie", "genres"]
    assert all(int(now) > int(before) for name, before, now in grown if name != "genres")
    (share,) = map(float, re.findall(r"new movies among the tens of all users: ([\d.]+)%", done.text))
    assert share > 0
    auc, new_auc = map(float, re.findall(r"AUC of the click model ([\d.]+) yesterday, ([\d.]+) today", done.text)[0])
    assert min(auc, new_auc) > 0.6
    table = re.findall(r"^(\w+, .*?) +([\d.]+) +([\d.]+)$", done.result, re.MULTILINE)
    found = {name: (float(before), float(now)) for name, before, now in table}
    who = ("users of yesterday", "new users")
    assert set(found) == {f"{what}, {one}" for what in ("towers", "popularity") for one in who}
    assert min(found["towers, users of yesterday"]) > 2 * 10 / 400, "by chance it were 10 of 400 movies"


@pytest.mark.long("notebooks")
@pytest.mark.skipif(not serving.exists_for_this_machine(), reason="no Triton server for this machine")
def test_next_movie(run: Run) -> None:
    done = run("09_next_movie")
    assert "NOT MovieLens" in done.text and done.tables("user", "history", "named") == 1
    lines = re.findall(r"^(.*?) +([\d.]+) +([\d.]+) +([\d.]+)$", done.result, re.MULTILINE)
    found = {name: float(first) for name, first, *_ in lines}
    assert set(found) == {"SASRec", "what came after the last movie", "popularity"}
    # The last two movies determine the next one, and the last one alone leaves two.
    assert found["SASRec"] > 0.85 and found["what came after the last movie"] < 0.7 and found["popularity"] < 0.2
    (difference,) = re.findall(r"vectors from those of this notebook: (\S+)", done.text)
    assert float(difference) < 1e-4


@pytest.mark.long("notebooks")
def test_from_a_log(run: Run) -> None:
    done = run("10_from_a_log")
    assert "NOT MovieLens" in done.text and "is chosen: ndcg@10" in done.text and done.plots == 3
    assert "the same weights: True" in done.text
    assert "rated before: 0" in done.text and "the same ten: True" in done.text
    (score, count, total) = re.findall(r"score ([\d.-]+), contributions of (\d+) movies: ([\d.-]+)", done.text)[0]
    assert float(score) == pytest.approx(float(total), abs=2e-4) and int(count) > 0
    grown = re.findall(r"(users|movies): (\d+), now (\d+)", done.text)
    assert [name for name, *_ in grown] == ["users", "movies"] and all(int(a) < int(b) for _, a, b in grown)
    assert done.tables("contribution", "title") == 1 and done.tables("ndcg@10", "popularity") == 1


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


@pytest.mark.long("notebooks")
def test_ctrl_c_ends_it_and_its_kernel(tmp_path: Path) -> None:
    path = notebook(tmp_path, "import os, time; print(os.getpid(), flush=True); time.sleep(1000)", "print('after')")
    command = [sys.executable, str(NOTEBOOKS / "execute.py"), str(path), "--output", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("[1/2")
            kernel = int(process.stdout.readline())
            process.send_signal(signal.SIGINT)
            rest = process.stdout.read()
            assert process.wait() == 130 and "interrupted" in rest and "after" not in rest
        finally:
            process.kill()
    assert poll(lambda: not psutil.pid_exists(kernel))
    assert "KeyboardInterrupt" in (tmp_path / "out" / "some.html").read_text()
