"""A folder that is replaced is there at any moment, whatever kills or interrupts the one that replaces it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from cells import cells

from nbdist.recsys.etl import Workflow
from nbdist.recsys.io import disk, folders

OLD, NEW = pl.DataFrame({"user": [1, 2]}), pl.DataFrame({"user": [3, 4, 5]})

#: Replaces a folder and kills itself at one of the renames; "plainly": on a file system that cannot exchange folders.
SCRIPT = cells("recsys/io/cells/folders.py")["kills itself at a rename"]


def write(frame: pl.DataFrame, folder: Path, overwrite: bool = False) -> None:
    workflow = Workflow().fit(frame, progress=False)
    workflow.write(frame, folder, num_files=1, shuffle=False, overwrite=overwrite, progress=False)


def read(folder: Path) -> list[int]:
    return pl.read_parquet(folder / "part-00000.parquet")["user"].to_list()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["by exchange", "plainly"])
def test_killed_at_any_rename(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "out"
    for number in itertools.count(1):
        if folder.exists():
            write(OLD, folder, overwrite=True)
        else:
            write(OLD, folder)
        command = [sys.executable, "-c", SCRIPT, str(folder), how, str(number)]
        done = subprocess.run(command, env={**os.environ, "PYTHONPATH": os.getcwd()})
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
        if how == "plainly" and not folder.exists():
            with pytest.raises(FileExistsError, match="already exists"):  # brought back, and kept
                write(NEW, folder)
        assert read(folder) == [1, 2]
    assert read(folder) == [3, 4, 5] and os.listdir(tmp_path) == ["out"]
    assert number == (1 if how == "by exchange" else 3), "every rename was the last one once"


def test_interrupted_between_two_renames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "out"
    write(OLD, folder)
    rename, calls = Path.rename, []

    def interrupted(self: Path, target: Path) -> Path:
        calls.append(self.name)
        if calls == ["out", "whole"]:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(folders, "exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(NEW, folder, overwrite=True)
    assert read(folder) == [1, 2] and os.listdir(tmp_path) == ["out"]


@pytest.mark.skipif(sys.platform != "linux", reason="some systems and file systems cannot")
def test_two_folders_change_places(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"in {name}").touch()
    assert disk.exchange(tmp_path / "a", tmp_path / "b")
    assert os.listdir(tmp_path / "a") == ["in b"] and os.listdir(tmp_path / "b") == ["in a"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        disk.exchange(tmp_path / "a", tmp_path / "nowhere")
