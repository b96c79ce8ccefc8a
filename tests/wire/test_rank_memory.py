"""Big answers are read out of the rank's memory, and come all the same where that is not allowed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nbdist import RankDied, Session
from nbdist.wire import rank_memory

pytestmark = pytest.mark.skipif(not rank_memory.POSSIBLE, reason="only Linux can read another process's memory")

MANY = rank_memory.LEAST // 8  # the smallest number of float64 that the kernel reads from the rank's memory


@pytest.fixture
def fetch() -> Iterator[mock.Mock]:
    with mock.patch.object(rank_memory, "copy", wraps=rank_memory.copy) as fetch:
        yield fetch


@given(st.lists(st.binary(max_size=200), min_size=1), st.integers(1, 300))
def test_copies_of_any_buffers(contents: list[bytes], piece: int) -> None:
    views = [memoryview(data) for data in contents]
    with mock.patch.object(rank_memory, "_PIECE", piece):
        found = rank_memory.copy(os.getpid(), rank_memory.locate(views))
    assert [bytes(view) for view in found] == contents
    for view in found:
        assert np.frombuffer(view, dtype=np.uint8).ctypes.data % 64 == 0 or not view.nbytes


def test_keeping_one_array_of_an_answer_frees_the_rest(session: Session) -> None:
    curve, weights = session.run(lambda: (np.ones(5000), np.ones(MANY)))
    assert memory_behind(curve) < 50_000 and memory_behind(weights) == weights.nbytes


def memory_behind(array: Any) -> int:
    """Bytes of the memory that an array keeps."""
    while isinstance(array, np.ndarray):
        array = array.base
    return len(memoryview(array).obj)


def test_an_answer_that_does_not_fit_is_refused_by_both(session: Session) -> None:
    pids = session.run_all(os.getpid)

    def too_much() -> Any:
        from nbdist.system import free_memory

        free_memory.memory_limits = lambda: [free_memory.Limit("the container", 100 << 20, 50 << 20)]
        return np.ones(8 * MANY)

    def enough() -> Any:
        import importlib

        from nbdist.system import free_memory

        importlib.reload(free_memory)
        return np.ones(8 * MANY)

    with (
        mock.patch.object(rank_memory, "copy", side_effect=MemoryError),
        pytest.raises(MemoryError, match=r"the value that the function returned: 67 MB .* 52 MB are free"),
    ):
        session.run(too_much)
    with mock.patch.object(rank_memory, "copy", wraps=rank_memory.copy) as copy:
        assert session.run(enough).sum() == 8 * MANY
        assert copy.called, "it is offered again"
    assert session.run_all(os.getpid) == pids


def test_no_memory_of_processes_that_are_gone() -> None:
    with pytest.raises(ProcessLookupError):
        rank_memory.copy(2**22 + 1, [rank_memory.RankBuffer(0, 1)])
    with pytest.raises(OSError, match="Bad address"):
        rank_memory.copy(os.getpid(), [rank_memory.RankBuffer(0, 1)])


def answer(scale: int = 1) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    array = np.arange(scale * MANY, dtype=np.float64) + rank
    weight = torch.full((scale * MANY,), float(rank)).requires_grad_()
    return {"array": array, "same": array, "weight": weight, "rank": rank}


def check(found: Sequence[dict[str, Any]]) -> None:
    for rank, value in enumerate(found):
        assert value["rank"] == rank and value["same"] is value["array"]
        np.testing.assert_array_equal(value["array"], np.arange(MANY, dtype=np.float64) + rank)
        assert value["weight"].requires_grad and value["weight"].eq(rank).all()
        value["array"][0] = -1.0  # one's own, and writable


def test_answers_of_all_ranks(session: Session, fetch: mock.Mock) -> None:
    check(session.run_all(answer))
    assert fetch.call_count == 2


def test_small_answers_are_sent(session: Session, fetch: mock.Mock) -> None:
    assert session.run(lambda: np.ones(1000)).sum() == 1000
    assert not fetch.called


def test_buffers_are_sent_where_memory_cannot_be_read(fetch: mock.Mock) -> None:
    fetch.side_effect = PermissionError(1, "Operation not permitted")
    with Session(2) as session:
        check(session.run_all(answer))
        check(session.run_all(answer))
    assert fetch.call_count == 2


def test_a_rank_that_dies_meanwhile(session: Session, fetch: mock.Mock) -> None:
    def die(pid: int, loans: Sequence[rank_memory.RankBuffer]) -> list[memoryview]:
        os.kill(pid, signal.SIGKILL)
        raise ProcessLookupError

    fetch.side_effect = die
    with pytest.raises(RankDied, match="SIGKILL"):
        session.run(answer)
    fetch.side_effect = None
    session.restart()
    check([session.run(answer)])


def test_an_interrupt_meanwhile(session: Session, fetch: mock.Mock) -> None:
    pids = session.run_all(os.getpid)
    fetch.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        session.run(answer)
    fetch.side_effect = None
    check(session.run_all(answer))
    assert session.run_all(os.getpid) == pids
