"""The fixtures `ddp` and `ddp_module`, as users' tests use them."""

from __future__ import annotations

import doctest
import inspect
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_pytest_users import run_pytest

from nbdist.integrations import pytest as plugin
from nbdist.integrations.pytest import Launcher

pytestmark = pytest.mark.slow

COMMON = """
import os
import torch
import torch.distributed as dist

def sums():
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()

def remember():
    import __main__
    __main__.calls = getattr(__main__, "calls", 0) + 1
    return __main__.calls, os.getpid()

def fails():
    print("words of rank", dist.get_rank())
    sums()
    assert dist.get_rank() == 0, "not on this one"
    sums()
"""


def sums() -> float:
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def test_the_fixture_here(ddp: Launcher) -> None:
    assert ddp(2, sums) == 2.0 and ddp.run_all(3, sums) == [3.0] * 3
    assert ddp(1, lambda: dist.get_backend()) == "gloo"


@pytest.mark.long("other test runs")
@pytest.mark.parametrize("fixture, tests", [(plugin.ddp, 1), (plugin.ddp_module, 2)], ids=["ddp", "ddp_module"])
def test_what_the_docstrings_show(tmp_path: Path, fixture: object, tests: int) -> None:
    shown = doctest.DocTestParser().get_examples(inspect.getdoc(fixture) or "")
    (tmp_path / "test_mine.py").write_text("".join(example.source for example in shown))
    done = run_pytest(tmp_path)
    assert done.returncode == 0 and f"{tests} passed" in done.stdout, done.stdout + done.stderr


def run(folder: Path, tests: str, *arguments: str) -> tuple[int, str]:
    (folder / "test_mine.py").write_text(COMMON + tests)
    done = run_pytest(folder, *arguments)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.long("other test runs")
def test_calls_share_nothing(tmp_path: Path) -> None:
    status, out = run(
        tmp_path,
        """
def test_fresh_ranks(ddp):
    first, second = ddp(2, remember), ddp(2, remember)
    assert first[0] == second[0] == 1 and first[1] != second[1]
def test_arguments(ddp):
    assert ddp(2, pow, 2, exp=3) == 8
    assert ddp(1, lambda: value + 1, need={"value": 2.5}) == 3.5
""",
    )
    assert status == 0 and "2 passed" in out, out


def test_a_module_shares_its_ranks_until_a_test_fails(tmp_path: Path) -> None:
    status, out = run(
        tmp_path,
        """
pids = []
def test_first(ddp_module):
    assert ddp_module(2, remember)[0] == 1
    assert ddp_module(3, sums) == 3.0
def test_second(ddp_module):
    calls, pid = ddp_module(2, remember)
    pids.append(pid)
    assert calls == 2
def test_third(ddp_module):
    ddp_module(2, fails)
def test_fourth(ddp_module):
    calls, pid = ddp_module(2, remember)
    assert calls == 1 and pid not in pids
def test_killed(ddp_module):
    ddp_module(2, os._exit, 9)
def test_last(ddp_module):
    assert ddp_module(2, remember)[0] == 1
""",
    )
    assert status == 1 and "4 passed" in out and "2 failed" in out, out


def test_a_failure_shows_what_its_rank_has_written(tmp_path: Path) -> None:
    status, out = run(tmp_path, "def test_it(ddp):\n    ddp(2, fails)\n")
    assert status == 1, out
    assert "Captured output of rank 1 call" in out and "words of rank 1" in out and "words of rank 0" in out
    assert "AssertionError: not on this one" in out and "on rank 1 (pid" in out


def test_nothing_heavy_is_imported_by_pytest_itself(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        "import sys\ndef test_light():\n    assert not {'torch', 'IPython'} & set(sys.modules)\n"
    )
    done = run_pytest(tmp_path)
    assert done.returncode == 0, done.stdout
