"""The last collectives of all ranks, as a table and a picture, with the first difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import poll

from nbdist import NbdistError, Session
from nbdist.kernel.collectives import Collectives
from nbdist.wire.recording import Collective

RANKS, OPTIONS = 3, {"devices": "cpu"}


def one(place: int, kind: str = "all_reduce", **about: Any) -> Collective:
    """A collective of all ranks that takes 10 ms of each second."""
    fields: dict[str, Any] = {
        "number": place,
        "kind": kind,
        "group": "0",
        "ranks": [0, 1],
        "place_in_group": place,
        "elements": 1000,
        "dtype": "float32",
        "peer": -1,
        "file": "/home/me/train.py",
        "line": 7,
        "begin": float(place),
        "end": place + 0.01,
        "waits": False,
        "main_thread": True,
        "raised": False,
    }
    return Collective(**{**fields, **about})


def test_ranks_that_do_the_same() -> None:
    found = Collectives({0: [one(1), one(2)], 1: [one(1), one(2, end=2.5)]}, now=3.0)
    assert found.difference is None and found.hint() == ""
    lines = repr(found).splitlines()
    assert len(lines) == 3 and lines[0].split() == ["number", "rank", "0", "rank", "1"]
    assert lines[2].split(maxsplit=1)[0] == "2" and "500 ms" in lines[2], lines
    assert found._repr_html_().count("<rect") == 4 and "the first that differs" not in found._repr_html_()


def test_the_first_difference_is_marked() -> None:
    mine = [one(number) for number in range(1, 60)]
    others = [one(number, "barrier" if number >= 10 else "all_reduce", elements=-1) for number in range(1, 60)]
    others[:9] = mine[:9]
    found = Collectives({0: mine, 1: others}, now=99.0)
    assert found.difference is not None and found.difference.number == 10 and not found.difference.missing
    said = "collective 10 of the group is the first that differs: rank 0 in all_reduce of 1,000 float32 at train.py:7; "
    assert found.hint() == f"{said}rank 1 in barrier at train.py:7"
    lines = repr(found).splitlines()
    assert lines[1] == "... 39 earlier" and lines[2].endswith("<- the first difference") and len(lines) == 23
    assert found._repr_html_().count('stroke="#d55e00"') == 2 and "the first that differs" in found._repr_html_()


def test_a_rank_that_has_not_come() -> None:
    found = Collectives({0: [one(1), one(2, waits=True, end=None)], 1: [one(1)]}, now=5.0)
    assert found.difference is not None and (found.difference.number, found.difference.missing) == (2, [1])
    assert "waits for 3.00 s" in repr(found) and "rank 1 not yet" in found.hint()


def test_what_has_no_number_is_in_the_picture() -> None:
    sends = Collectives({0: [one(0, "send", number=1)], 1: []}, now=2.0)
    assert sends.difference is None and sends._repr_html_().count("<rect") == 1
    assert "no collectives" in repr(Collectives({0: [], 1: []}, 0.0))
    assert "no collectives" in Collectives({0: [], 1: []}, 0.0)._repr_html_()


def test_of_a_session(session: Session) -> None:
    def steps() -> None:
        for _ in range(3):
            dist.all_reduce(torch.ones(1000))
        if dist.get_rank() == 1:
            dist.barrier()
        else:
            dist.broadcast(torch.ones(2), 0)

    future = session.submit(steps)
    found = Collectives({}, 0.0)

    def differs() -> bool:
        nonlocal found
        if session.is_idle() or session._executor.group is None:
            return False
        found = session.collectives()
        return found.difference is not None and len(found.difference.by_rank) == 3

    assert poll(differs)
    assert found.difference is not None and found.difference.number == 4
    assert "rank 1 in barrier at test_collectives.py:" in found.hint()
    future.cancel()
    assert poll(future.done)


def test_without_ranks() -> None:
    with Session(2, devices="cpu") as own, pytest.raises(NbdistError, match="the ranks have not started yet"):
        own.collectives()
