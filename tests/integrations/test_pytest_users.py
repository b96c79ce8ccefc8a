"""Users' own tests call in_ddp under pytest, however they run it, without any configuration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parent.parent.parent)

TESTS = """
import pytest
import torch
import torch.distributed as dist
from nbdist import Session, in_ddp

NUMBER = 2.0

class Broken(Exception):
    pass

def all_reduce_of_ones():
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()

def check(number):
    assert number == NUMBER, "not the number"
    return number

def broken():
    raise Broken("on purpose")

def test_a_function_of_the_module():
    assert in_ddp(2, all_reduce_of_ones) == 2.0

def test_a_function_of_the_test():
    factor = 3
    def nested():
        return all_reduce_of_ones() * factor
    assert in_ddp(2, nested) == 6.0
    assert in_ddp(2, lambda: check(all_reduce_of_ones())) == 2.0

def test_a_failing_assert():
    with pytest.raises(AssertionError, match="not the number"):
        in_ddp(2, check, 3.0)
    def nested():
        got = [1, 2]
        assert got == [1, 3]
    with pytest.raises(AssertionError) as caught:
        in_ddp(2, nested)
    assert "[1, 2] == [1, 3]" in str(caught.value)

def test_an_exception_of_the_module():
    with pytest.raises(Broken, match="on purpose"):
        in_ddp(2, broken)

@pytest.fixture(scope="module")
def session():
    with Session(2) as session:
        yield session

@pytest.mark.parametrize("number", [2.0, 3.0])
def test_a_shared_session(session, number):
    assert session.run_all(lambda: all_reduce_of_ones() + number) == [2.0 + number] * 2
"""
FAILING = """
from nbdist import in_ddp

def fn(rows):
    assert len(rows) == 3, "rows are missing"  # in the rank

def test_that_fails():
    in_ddp(2, fn, [1, 2])
"""


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


@pytest.mark.slow
@pytest.mark.parametrize(
    "way", ["plain", *(pytest.param(way, marks=pytest.mark.long("other test runs")) for way in list(WAYS)[1:])]
)
def test_tests_of_users_pass(tmp_path: Path, way: str) -> None:
    (tmp_path / "test_mine.py").write_text(TESTS)
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
    (package / "test_mine.py").write_text(
        "from nbdist import in_ddp\n"
        "from ..helpers import double\n"
        "from tests import conftest\n"
        "def fn():\n    return double(conftest.FACTOR)\n"
        "class TestClass:\n"
        "    def method(self, x):\n        return double(x)\n"
        "    def test(self):\n        assert in_ddp(2, fn) == 10 and in_ddp(1, self.method, 4) == 8\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def test_a_failure_shows_the_line_in_the_rank(tmp_path: Path) -> None:
    (tmp_path / "test_failing.py").write_text(FAILING)
    done = run_pytest(tmp_path)
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
    assert "# in the rank" in done.stdout and "AssertionError: rows are missing" in done.stdout
