"""The thread pools of a rank's libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from conftest import LINUX

from nbdist import Session
from nbdist.rank.threads import number

pytestmark = pytest.mark.skipif(not LINUX, reason="a thread's own CPU time is read from /proc")


def thread_times() -> dict[str, float]:
    """CPU seconds of each thread of this process, by its number."""
    times = {}
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        times[task.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return times


def working_threads() -> int:
    """Return how many threads work on a product of two NumPy matrices."""
    import numpy as np

    a = np.random.default_rng(0).random((700, 700))
    before, spent = thread_times(), [0.0]
    while sum(spent) < 0.6:
        a @ a
        spent = [seconds - before.get(task, 0.0) for task, seconds in thread_times().items()]
    return sum(seconds > 0.06 for seconds in spent)


def sizes() -> dict[str, int]:
    from threadpoolctl import threadpool_info

    return {pool["internal_api"]: pool["num_threads"] for pool in threadpool_info()}


@pytest.mark.parametrize(
    ("asked", "found"), [("3", 3), ("5,2", 5), ("0", 7), ("-1", 7), ("many", 7), ("", 7), (None, 7)]
)
def test_a_variable_that_libraries_ignore_sets_no_number(asked: str | None, found: int) -> None:
    assert number({} if asked is None else {"OMP_NUM_THREADS": asked}, "OMP_NUM_THREADS", 7) == found


@pytest.mark.parametrize(
    ("threads", "env", "working"),
    [(2, {}, 2), (1, {}, 1), (None, {"OMP_NUM_THREADS": "2"}, 2), (2, {"OPENBLAS_NUM_THREADS": "1"}, 1)],
    ids=["threads", "one", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"],
)
def test_numpy_works_with_as_many_threads_as_said(threads: int | None, env: Mapping[str, str], working: int) -> None:
    with Session(1, threads=threads, env=env) as session:
        assert session.run(working_threads) == working


def test_all_pools_have_the_share() -> None:
    with Session(2, threads=3) as session:
        for found in session.run_all(sizes, imports="import sklearn.linear_model, scipy.linalg"):
            assert found["openblas"] == found["openmp"] == 3
        assert session.run(torch.get_num_threads) == 3


def test_libraries_that_a_rank_loads_itself_find_the_share() -> None:
    def elsewhere() -> str:
        code = "import numpy, threadpoolctl; print({p['num_threads'] for p in threadpoolctl.threadpool_info()})"
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    with Session(1, threads=2) as session:
        assert session.run(elsewhere) == "{2}\n"


def test_the_function_in_the_notebook_itself_leaves_its_pools_alone() -> None:
    before = sizes()
    from nbdist import in_ddp

    assert in_ddp(0, sizes) == before == sizes()


def compiling() -> tuple[str, int]:
    import torch._inductor.config as config

    return os.environ["TORCHINDUCTOR_COMPILE_THREADS"], config.compile_threads


def test_ranks_compile_with_their_share_of_the_cores() -> None:
    """torch would start up to 32 processes in each rank, and has read their number where the server has loaded it."""
    with Session(2, threads=3) as session:
        assert session.run_all(compiling) == [("3", 3)] * 2
    with Session(2, threads=3, env={"TORCHINDUCTOR_COMPILE_THREADS": "5"}) as session:
        assert session.run_all(compiling) == [("5", 5)] * 2
