"""Users' own tests call in_ddp under pytest, however they run it, without any configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cells import cells

ROOT = str(Path(__file__).parent.parent.parent)
CELLS = cells("integrations/cells/pytest_users.py")


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = ROOT
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


WAYS = {
    "plain": [],
    "with two workers": ["-n", "2"],
    "import mode importlib": ["--import-mode=importlib"],
}


@pytest.mark.long("other test runs")
@pytest.mark.parametrize("way", WAYS)
def test_tests_of_users_pass(tmp_path: Path, way: str) -> None:
    (tmp_path / "test_mine.py").write_text(CELLS["test_mine.py"])
    done = run_pytest(tmp_path, *WAYS[way])
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.long("other test runs")
def test_tests_in_packages_with_helpers(tmp_path: Path) -> None:
    package = tmp_path / "tests" / "unit"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").write_text("")
    (tmp_path / "tests" / "helpers.py").write_text("def double(x):\n    return 2 * x\n")
    (tmp_path / "tests" / "conftest.py").write_text("FACTOR = 5\n")
    (package / "test_mine.py").write_text(CELLS["tests/unit/test_mine.py"])
    done = run_pytest(tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_a_failure_shows_the_line_in_the_rank(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(CELLS["test_failing.py"])
    done = run_pytest(tmp_path)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
    assert "# in the rank" in done.stdout and "AssertionError: rows are missing" in done.stdout
