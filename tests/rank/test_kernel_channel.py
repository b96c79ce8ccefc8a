"""The rank's end of its channel to the kernel, which handles `Leave` whatever the rank waits for."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from nbdist.rank.call import Caller
from nbdist.rank.interrupts import Interrupts
from nbdist.rank.kernel_channel import KernelChannel
from nbdist.rank.keyboard import Keyboard
from nbdist.rank.outcome import Outcomes
from nbdist.wire.channel import Channel
from nbdist.wire.protocol import Close, Copied, Leave, Line, Prompt

np = pytest.importorskip("numpy")


class FakeMembership:
    """Keeps in mind what it was asked to leave."""

    def __init__(self) -> None:
        self.left: list[Any] = []

    def leave(self, peers: Any) -> None:
        self.left.append(peers)


@pytest.fixture
def membership() -> FakeMembership:
    return FakeMembership()


@pytest.fixture
def ends(membership: Any) -> Iterator[tuple[Channel, KernelChannel]]:
    kernel, rank = socket.socketpair()
    with kernel, rank:
        yield Channel(kernel), KernelChannel(rank, membership)


def test_a_rank_that_waits_for_a_request_leaves(ends: Any, membership: FakeMembership) -> None:
    kernel, rank = ends
    kernel.send(Leave([("127.0.0.1", 1)]))
    kernel.send(Close())
    assert rank.receive() == (Close(), None, []) and membership.left == [[("127.0.0.1", 1)]]


def test_a_rank_that_waits_for_a_line_leaves(ends: Any, membership: FakeMembership) -> None:
    kernel, rank = ends
    kernel.send(Leave([]))
    kernel.send(Line("typed", ""))
    assert Keyboard(rank).ask("? ") == "typed" and membership.left == [[]]
    assert kernel.receive()[0] == Prompt("? ", "", False, False)


def test_a_rank_whose_answer_is_copied_leaves(ends: Any, membership: FakeMembership) -> None:
    kernel, rank = ends
    outcomes = Outcomes(rank, Caller(), Interrupts())
    outcomes.reads_memory = True
    kernel.send(Leave([]))
    kernel.send(Copied(False))
    message, parcel = outcomes.value(np.zeros(2_000_000), grouped=True, wanted=True, waited=0.0, instead={})
    parcel.close()
    assert membership.left == [[]] and not outcomes.reads_memory
    (buffer,) = kernel.receive()[0].buffers
    assert buffer.size == 16_000_000 and message.grouped


@pytest.mark.parametrize("goodbye", [Close(), None])
def test_a_kernel_that_goes_gives_no_line(ends: Any, goodbye: Close | None) -> None:
    kernel, rank = ends
    if goodbye is None:
        kernel.sock.shutdown(socket.SHUT_WR)
    else:
        kernel.send(goodbye)
    with pytest.raises(EOFError):
        Keyboard(rank).ask("? ")


def test_an_unexpected_message_is_named_in_the_error(ends: Any) -> None:
    kernel, rank = ends
    kernel.send(Copied(True))
    with pytest.raises(EOFError, match="Copied instead of a line"):
        Keyboard(rank).ask("? ")
