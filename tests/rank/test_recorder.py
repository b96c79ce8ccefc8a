"""Notes of the collectives of a rank, and what stays as it was."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nbdist import Session
from nbdist.kernel.calls.standings import Standing
from nbdist.kernel.session import executor_of
from nbdist.rank.recorder import CollectiveRecorder
from nbdist.recsys import ranks
from nbdist.system.source_files import package_of
from nbdist.wire.recording import Collective

HERE = Path(__file__).name


def noted(session: Session, rank: int = 0) -> list[Collective]:
    group = executor_of(session).group
    assert group is not None and group.recording is not None
    return group.recording.read(rank)


def several() -> None:
    x, rank = torch.ones(4), dist.get_rank()
    dist.broadcast(x, 1)
    dist.all_gather([torch.ones(4)] * 2, x)
    dist.all_gather_object([None] * 2, "x")
    work = dist.all_reduce(x.long(), async_op=True)
    assert work is not None
    work.wait()
    if rank == 0:
        dist.send(x, 1)
    else:
        dist.recv(x)
    for request in dist.batch_isend_irecv([dist.P2POp(dist.isend if rank else dist.irecv, x, 1 - rank)]):
        request.wait()
    dist.barrier()


def test_collectives_are_recorded_with_their_lines(session: Session) -> None:
    before = len(noted(session)) if executor_of(session).group else 0
    session.run(several)
    lines = [several.__code__.co_firstlineno + line for line in (2, 3, 4, 4, 5, 9, 12, 14)]
    own = noted(session)[before:]
    assert [(one.what(), one.peer) for one in own] == [
        ("broadcast of 4 float32", 1),
        ("all_gather of 4 float32", -1),
        ("all_gather_object of 1 int64", -1),
        (own[3].what(), -1),
        ("all_reduce of 4 int64", -1),
        ("send of 4 float32", 1),
        ("recv of 4 float32", 1),
        ("barrier", -1),
    ]
    assert [one.line for one in own] == lines
    assert {os.path.basename(one.file) for one in own} == {HERE}
    assert all(one.end is not None and not one.waits and one.main_thread and not one.raised for one in own)
    other = noted(session, 1)[-3]
    assert (other.kind, other.peer) == ("recv", -1)


def in_a_library() -> None:
    ranks.barrier()
    ranks.all_gather([1, 2])
    dist.barrier()


def test_collectives_in_a_library_are_recorded_with_the_line_that_called_it(session: Session) -> None:
    session.run(in_a_library)
    *_, first, second, third, own = [one for one in noted(session) if one.file.endswith(HERE)]
    lines = [in_a_library.__code__.co_firstlineno + line for line in (1, 2, 2, 3)]
    assert [one.line for one in (first, second, third, own)] == lines
    assert [one.library for one in (first, second, third, own)] == [
        "barrier of nbdist",
        "all_gather of nbdist",
        "all_gather of nbdist",
        "",
    ]
    standing = Standing(0, "collective", begun=[first], places={first.number: "train.py:3"})
    assert standing.calls(first) == "barrier (in barrier of nbdist) at train.py:3"


def test_the_package_of_a_file() -> None:
    assert package_of(torch.nn.functional.__file__) == "torch"
    assert package_of(pytest.__file__) == "pytest"
    assert package_of(os.__file__) == "os"
    assert package_of(ranks.__file__) == "nbdist"


def test_numbers_in_groups_restart_after_a_failure(session: Session) -> None:
    def fails() -> None:
        if dist.get_rank() == 1:
            raise ValueError("boom")
        dist.barrier()

    with pytest.raises(ValueError, match="boom"):
        session.run(fails)
    session.run(lambda: dist.all_reduce(torch.ones(1)))
    assert [(one.kind, one.place_in_group) for one in noted(session)] == [("all_reduce", 1)]


def test_torch_compile_sees_what_it_knows(session: Session) -> None:
    def compiled() -> Any:
        @torch.compile(backend="eager", fullgraph=True)
        def total(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x)
            return x + 1

        return total(torch.ones(2)).tolist()

    assert session.run_all(compiled) == [[3.0, 3.0]] * 2


def test_a_function_of_torch_is_the_same_in_a_rank(session: Session) -> None:
    assert session.run(lambda: dist.all_reduce) is dist.all_reduce


def test_a_process_that_a_rank_forks_notes_nothing(session: Session) -> None:
    def forks() -> int:
        (own,) = [one for one in gc.get_objects() if type(one) is CollectiveRecorder]
        pid = os.fork()
        if pid == 0:
            os._exit(0 if own._recorder is None else 1)
        return os.waitpid(pid, 0)[1] if own._recorder is not None else -1

    assert session.run_all(forks) == [0, 0]
