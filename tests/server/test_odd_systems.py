"""Systems of other kinds: long folders, full disks, projects with names of the standard library, strict sandboxes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from cells import cells

from nbdist import Session
from nbdist.engines import forkserver
from nbdist.kernel.cell.cell import Cell
from nbdist.system.search_path import search_path, shadowed, standard_first

CELLS = cells("server/cells/odd_systems.py")


def run(code: str, folder: Path, env: dict[str, str] | None = None, **how: Any) -> str:
    """Run a script and return what it prints."""
    (folder / "script.py").write_text(code)
    environ = {**os.environ, **(env or {})}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, **how
    )
    assert done.returncode == 0
    return done.stdout


def test_sockets_in_a_long_temporary_folder(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        folder = os.path.join(base, "x" * (63 - len(base)))
        os.mkdir(folder)
        assert run(CELLS["sockets in a rank"], tmp_path, {"TMPDIR": folder}) == "(2, 800.0)\n"


@pytest.mark.parametrize("length", [20, 64, 90, 200])
def test_the_ranks_folder_leaves_room_for_the_names_of_sockets(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        folder = os.path.join(base, "x" * max(1, length - len(base) - 1))
        os.mkdir(folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        name = forkserver._name_scratch()
    assert name and len(name) + len("/4194304/listener-12345678") <= 103
    assert name.startswith(folder) == (length == 20)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_server_that_cannot_say_anything(tmp_path: Path) -> None:
    """The server reports on standard error that a module starts threads when it is imported."""
    (tmp_path / "noisy_module.py").write_text(cells("server/cells/server.py")["a module that starts a thread"])
    with open("/dev/full", "w") as full:
        assert run(CELLS["a server that imports a module of the folder"], tmp_path, stderr=full) == "5\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_standard_error_ends_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def complain() -> int:
        print("a warning", file=sys.stderr)
        return 5

    with open("/dev/full", "w") as full, Session(1) as session:
        monkeypatch.setattr(sys, "stderr", full)
        Cell().notice("something")
        assert session.run(complain) == 5
        monkeypatch.undo()
        assert "a warning" in session.logs(0)
        with contextlib.suppress(OSError):
            full.close()


@pytest.mark.parametrize(
    "name, said",
    [
        ("a project with names of the standard library", "done\n"),
        ("a module of the notebook's own that has a name of the standard library", "own own\n"),
    ],
)
@pytest.mark.started
def test_names_of_the_standard_library(name: str, said: str, tmp_path: Path) -> None:
    assert run(CELLS[name], tmp_path) == said


def test_a_search_path_for_another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", ["", Path("no text"), *sys.path, "relative"])
    monkeypatch.chdir(tmp_path)
    assert search_path()[0] == str(tmp_path) and "relative" in search_path() and Path("no text") not in search_path()
    first = standard_first(search_path())
    assert first[0].startswith(os.path.dirname(os.__file__)) or first[0].endswith(".zip")
    assert sorted(first) == sorted(search_path())
    (tmp_path / "queue.py").touch()
    (tmp_path / "shelve").mkdir()
    assert shadowed(search_path()) == ["queue"] + ["shelve"] * ("shelve" in sys.modules)
