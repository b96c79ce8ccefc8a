"""Why a call cannot end, decided from a table of what is known of its ranks; no process is started."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from nbdist.kernel.calls.mismatches import first_difference
from nbdist.kernel.calls.standings import Standing
from nbdist.kernel.calls.verdicts import verdict
from nbdist.wire.recording import Collective


def collective(number: int, kind: str = "all_reduce", **fields: Any) -> Collective:
    given: dict[str, Any] = {
        "number": number,
        "kind": kind,
        "group": "0",
        "ranks": [0, 1],
        "place_in_group": number,
        "elements": 4,
        "dtype": "float32",
        "peer": -1,
        "file": "train.py",
        "line": number,
        "begin": 1.0,
        "end": 2.0,
        "waits": False,
        "main_thread": True,
        "raised": False,
    }
    return Collective(**{**given, **fields})


def stands(number: int, kind: str = "all_reduce", **fields: Any) -> Collective:
    return collective(number, kind, **{"waits": True, "end": None, **fields})


def waits(rank: int, *begun: Collective, state: str = "collective", **fields: Any) -> Standing:
    places = {one.number: f"train.py:{one.line}" for one in begun}
    doing = f"waits in {begun[-1].kind} at {places[begun[-1].number]}" if begun else "waits in backward at train.py:9"
    return Standing(rank, state, **{"doing": doing, "seconds": 12.0, "begun": begun, "places": places, **fields})


def returned(rank: int, *begun: Collective, state: str = "returned") -> Standing:
    return replace(waits(rank, *begun), state=state, doing="", seconds=0.0)


def awaits(rank: int, what: str, *wakers: int) -> Standing:
    doing = f"waits for its {what} at train.py:3"
    return Standing(rank, "nothing comes", doing=doing, seconds=12.0, awaits=what, wakers=frozenset(wakers))


ONE, TWO = collective(1), collective(2)
#: What is known of the ranks, the class of the verdict, and words of its reason.
HANGS: dict[str, tuple[list[Standing], str, list[str]]] = {
    "one has returned": (
        [waits(0, ONE, stands(2)), returned(1, ONE)],
        "missing rank",
        ["rank 0 stands in its 2nd, all_reduce of 4 float32 at train.py:2", "rank 1 has returned after 1 collective"],
    ),
    "one never made any": (
        [returned(0), waits(1, stands(1, "barrier", elements=-1))],
        "missing rank",
        ["rank 1 stands in its 1st, barrier at train.py:1", "rank 0 has returned after 0 collectives"],
    ),
    "one takes no part": (
        [waits(0, stands(1)), returned(1, state="absent")],
        "missing rank",
        ["rank 1 takes no part in this call"],
    ),
    "other functions": (
        [waits(0, ONE, stands(2)), waits(1, ONE, stands(2, "barrier", elements=-1, line=7))],
        "different collectives",
        ["2nd collective", "rank 0 in all_reduce of 4 float32 at train.py:2; rank 1 in barrier at train.py:7"],
    ),
    "other functions, of which one has ended": (
        [waits(0, collective(1, "broadcast"), stands(2)), waits(1, stands(1))],
        "different collectives",
        ["1st collective", "rank 0 in broadcast of 4 float32", "rank 1 in all_reduce of 4 float32"],
    ),
    "other sizes": (
        [waits(0, stands(1)), returned(1, collective(1, elements=5))],
        "different collectives",
        ["rank 0 in all_reduce of 4 float32", "rank 1 in all_reduce of 5 float32"],
    ),
    "other types": (
        [waits(0, stands(1)), waits(1, stands(1, dtype="int64"))],
        "different collectives",
        ["of 4 float32", "of 4 int64"],
    ),
    "other roots": (
        [waits(0, stands(1, "broadcast", peer=1)), waits(1, stands(1, "broadcast", peer=0))],
        "different collectives",
        ["rank 0 in broadcast of 4 float32 by rank 1", "rank 1 in broadcast of 4 float32 by rank 0"],
    ),
    "other groups": (
        [waits(0, stands(1)), waits(1, stands(1, group="7"))],
        "missing rank",
        ["rank 1 waits in all_reduce at train.py:1 after 0 collectives"],
    ),
    "a rank one step ahead, of three": (
        [
            waits(0, *(collective(n, ranks=[0, 1, 2]) for n in (1, 2)), stands(3, ranks=[0, 1, 2])),
            returned(1, *(collective(n, ranks=[0, 1, 2]) for n in (1, 2))),
            waits(2, *(collective(n, ranks=[0, 1, 2]) for n in (1, 2)), stands(3, ranks=[0, 1, 2])),
        ],
        "missing rank",
        ["rank 0 stands in its 3rd", "rank 1 has returned after 2 collectives"],
    ),
    "two receive": (
        [
            waits(0, stands(1, "recv", place_in_group=0, peer=1)),
            waits(1, stands(1, "recv", place_in_group=0, peer=0, line=5)),
        ],
        "send and recv",
        ["rank 0 receives in recv of 4 float32 from rank 1 at train.py:1", "rank 1 waits in recv at train.py:5"],
    ),
    "no rank sends": (
        [returned(0), waits(1, stands(1, "recv", place_in_group=0, peer=-1))],
        "send and recv",
        ["rank 1 receives", "rank 0 has returned"],
    ),
    "no rank receives": (
        [waits(0, stands(1, "send", place_in_group=0, peer=1)), waits(1, stands(1))],
        "send and recv",
        ["rank 0 sends in send of 4 float32 to rank 1", "rank 1 waits in all_reduce"],
    ),
    "a send and a recv with other tags": (
        [
            waits(0, stands(1, "send", place_in_group=0, peer=1, tag=1)),
            waits(1, stands(1, "recv", place_in_group=0, peer=0, tag=2)),
        ],
        "send and recv",
        ["rank 0 sends in send of 4 float32 to rank 1 with tag 1", "rank 1 waits in recv"],
    ),
    "backward, and returned": (
        [waits(0), returned(1)],
        "missing rank in C++",
        ["rank 0 waits in backward at train.py:9, for which it needs all ranks", "rank 1 has returned"],
    ),
    "backward, and another collective": (
        [waits(0), waits(1, stands(1, "barrier", elements=-1))],
        "missing rank in C++",
        ["rank 0 waits in backward", "rank 1 waits in barrier"],
    ),
    "a group that one does not make": (
        [waits(0, doing="waits in new_group at train.py:3"), waits(1, stands(1))],
        "missing rank in C++",
        ["new_group at train.py:3", "rank 1 waits in all_reduce"],
    ),
    "the lock of a file": (
        [
            waits(0, stands(1, "barrier")),
            waits(1, state="file lock", doing="waits for the lock of a file at train.py:4", holder=0),
        ],
        "file lock",
        ["rank 1 waits for the lock of a file that rank 0 holds", "rank 0 waits in barrier"],
    ),
    "a lock": (
        [waits(0, stands(1, main_thread=False), state="lock", doing="waits for a lock"), waits(1, stands(2))],
        "lock",
        ["rank 0's main thread waits for another thread of it, which stands in all_reduce of 4 float32"],
    ),
    "a loader": ([waits(0, state="loader"), waits(1, stands(1))], "loader", ["a worker of rank 0's data loader"]),
    "a pipe": ([waits(0, state="pipe"), waits(1, stands(1))], "full pipe", ["a pipe is full"]),
    "a rank alone, at a pipe": ([waits(0, state="pipe")], "full pipe", ["only rank 0 could read it"]),
    "a lock of its own": (
        [awaits(0, "lock"), returned(1)],
        "nothing comes",
        ["only a thread of rank 0 could release the lock, set the event or fill the queue, and all of them wait"],
    ),
    "a lock of its own, beside a collective on all others": (
        [awaits(0, "lock"), waits(1, stands(1, ranks=[1, 2])), waits(2, stands(1, ranks=[1, 2]))],
        "nothing comes",
        ["only a thread of rank 0"],
    ),
    "a pipe of its own": (
        [waits(0, stands(1)), awaits(1, "pipe")],
        "nothing comes",
        ["only rank 1 itself could write into the pipe"],
    ),
    "a pipe of a rank in a collective": (
        [awaits(0, "pipe", 1), waits(1, stands(1))],
        "nothing comes",
        ["only rank 1 could write into the pipe that rank 0 reads, and rank 1 waits in all_reduce at train.py:1"],
    ),
    "two ranks that read each other's pipe": (
        [awaits(0, "pipe", 1), awaits(1, "pipe", 0)],
        "nothing comes",
        ["only rank 1 could write into the pipe that rank 0 reads, and rank 1 waits for its pipe"],
    ),
    "a key": ([awaits(0, "key", 1), returned(1)], "nothing comes", ["no rank has set the key", "rank 1 has returned"]),
    "a key, on one rank alone": ([awaits(0, "key")], "nothing comes", ["there is no other rank"]),
    "backward, and the flight recorders of both": (
        [
            waits(0, flight=[ONE, stands(2, file="", line=0)]),
            replace(returned(1), flight=[ONE]),
        ],
        "missing rank",
        ["rank 0 stands in its 2nd, all_reduce of 4 float32 at train.py:9, and rank 1 has returned after 1 collective"],
    ),
    "backward, and the flight recorder of one": (
        [waits(0, flight=[ONE, stands(2)]), returned(1)],
        "missing rank in C++",
        ["rank 0 waits in backward at train.py:9, for which it needs all ranks"],
    ),
    "backward, and a broadcast, in flight recorders": (
        [waits(0, flight=[ONE, stands(2)]), waits(1, stands(7, "broadcast"), flight=[ONE, stands(2, "broadcast")])],
        "different collectives",
        ["rank 0 in all_reduce of 4 float32 at train.py:9; rank 1 in broadcast of 4 float32 at train.py:7"],
    ),
    "stopped": ([waits(0, stands(1)), waits(1, state="stopped")], "stopped", ["rank 1 was stopped by a signal"]),
}

#: What is known of ranks that may go on.
ALIVE: dict[str, list[Standing]] = {
    "all have returned": [returned(0), returned(1)],
    "one runs": [waits(0, stands(1)), waits(1, state="runs")],
    "one sleeps beside one that has returned": [waits(0, state="runs"), returned(1)],
    "the same collective on all": [waits(0, ONE, stands(2)), waits(1, ONE, stands(2))],
    "a send and its recv": [
        waits(0, stands(1, "send", place_in_group=0, peer=1)),
        waits(1, stands(1, "recv", place_in_group=0, peer=0)),
    ],
    "a send, and a recv from any": [
        waits(0, stands(1, "send", place_in_group=0, peer=1)),
        waits(1, stands(1, "recv", place_in_group=0, peer=-1)),
    ],
    "the same step of DDP on all": [waits(0), waits(1)],
    "a lock whose holder is not known": [waits(0, state="lock"), returned(1)],
    "the lock of a file that no rank of the call holds": [waits(0, state="file lock"), returned(1)],
    "the lock of a file of a rank that has returned": [returned(0), waits(1, state="file lock", holder=0)],
    "sizes that may differ": [waits(0, stands(1, "all_to_all")), waits(1, stands(1, "all_to_all", elements=9))],
    "a pipe of a rank whose collective will end": [
        awaits(0, "pipe", 1),
        waits(1, stands(1, ranks=[1, 2])),
        waits(2, stands(1, ranks=[1, 2])),
    ],
    "a pipe of a rank that reads the pipe of one whose collective will end": [
        awaits(0, "pipe", 1),
        awaits(1, "pipe", 2),
        waits(2, stands(1, ranks=[2, 3])),
        waits(3, stands(1, ranks=[2, 3])),
    ],
    "a pipe of a rank that has returned, and has a thread": [
        awaits(0, "pipe", 1),
        replace(returned(1), active=True),
    ],
    "a pipe of a rank in a collective that has a thread": [
        awaits(0, "pipe", 1),
        replace(waits(1, stands(1)), active=True),
    ],
    "a key that a thread of the rank may set": [replace(awaits(0, "key", 1), active=True), returned(1)],
    "a key that a thread of a rank that has returned may set": [awaits(0, "key", 1), replace(returned(1), active=True)],
    "a pipe of a rank in the same step of DDP as the third": [awaits(0, "pipe", 1), waits(1, state="runs"), waits(2)],
    "a rank that has begun the same, and has returned": [waits(0, stands(1)), returned(1, collective(1))],
}


@pytest.mark.parametrize("name", HANGS)
def test_a_hang_is_named(name: str) -> None:
    standings, kind, words = HANGS[name]
    found = verdict(standings)
    assert found is not None
    assert found.kind == kind
    assert all(word in found.why for word in words), found.why
    text = str(found)
    assert re.match(r"this call hangs: (rank|each of ranks) 0 ", text)
    assert len(text.splitlines()) == 3


@pytest.mark.parametrize("name", ALIVE)
def test_no_verdict_for_ranks_that_may_go_on(name: str) -> None:
    assert verdict(ALIVE[name]) is None


@pytest.mark.parametrize("name", HANGS)
def test_no_verdict_while_one_rank_runs(name: str) -> None:
    standings, _, _ = HANGS[name]
    assert verdict([*standings, waits(len(standings), state="runs")]) is None


def test_ranks_that_do_the_same_are_named_together() -> None:
    standings = [waits(rank, stands(1, ranks=range(20))) for rank in range(19)] + [returned(19)]
    found = verdict(standings)
    assert found is not None
    assert found.doing == "each of 19 ranks waits in all_reduce at train.py:1 for 12 s; rank 19 has returned"


def test_the_first_difference_is_that_of_the_lowest_number() -> None:
    own = [collective(n) for n in range(500, 1500)]
    other = [one._replace(kind="barrier") if one.number >= 1200 else one for one in own[50:]]
    found = first_difference([returned(0, *own), returned(1, *other)], "0")
    assert {rank: one.number for rank, one in found.items()} == {0: 1200, 1: 1200}
    assert first_difference([returned(0, *own), returned(1, *own[:-3])], "0") == {}
