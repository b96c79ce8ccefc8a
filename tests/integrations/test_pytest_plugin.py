"""The fixtures `ddp` and `ddp_module`, as users' tests use them."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cells import cells
from test_pytest_users import run_pytest

from nbdist.integrations import pytest as plugin
from nbdist.integrations.pytest import Launcher

pytestmark = pytest.mark.slow

CELLS = cells("integrations/cells/pytest_plugin.py")


def sums() -> float:
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def test_the_fixture_here(ddp: Launcher) -> None:
    assert ddp(2, sums) == 2.0 and ddp.run_all(3, sums) == [3.0] * 3
    assert ddp(1, lambda: dist.get_backend()) == "gloo"


@pytest.mark.long("other test runs")
@pytest.mark.parametrize("fixture, tests", [(plugin.ddp, 1), (plugin.ddp_module, 2)], ids=["ddp", "ddp_module"])
def test_the_examples_in_docstrings_run(tmp_path: Path, fixture: object, tests: int) -> None:
    shown = doctest.DocTestParser().get_examples(inspect.getdoc(fixture) or "")
    (tmp_path / "test_mine.py").write_text("".join(example.source for example in shown))
    done = run_pytest(tmp_path)
    assert done.returncode == 0 and f"{tests} passed" in done.stdout, done.stdout + done.stderr


def run(folder: Path, tests: str, *arguments: str) -> tuple[int, str]:
    (folder / "test_mine.py").write_text(CELLS["common"] + tests)
    done = run_pytest(folder, *arguments)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long("other test runs")
def test_calls_share_nothing(tmp_path: Path) -> None:
    status, out = run(tmp_path, CELLS["calls share nothing"])
    assert status == 0 and "2 passed" in out, out


def test_a_module_shares_its_ranks_until_a_test_fails(tmp_path: Path) -> None:
    status, out = run(tmp_path, CELLS["a module shares its ranks"])
    assert status == 1 and "4 passed" in out and "2 failed" in out, out


@pytest.mark.long("other test runs")
def test_a_failure_shows_what_its_rank_has_written(tmp_path: Path) -> None:
    status, out = run(tmp_path, "def test_it(ddp):\n    ddp(2, fails)\n")
    assert status == 1, out
    assert "Captured output of rank 1 call" in out and "words of rank 1" in out and "words of rank 0" in out
    assert "AssertionError: not on this one" in out and "on rank 1 (pid" in out


def test_pytest_imports_neither_torch_nor_ipython(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(CELLS["nothing heavy is imported"])
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
