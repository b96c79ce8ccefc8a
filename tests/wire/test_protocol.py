"""The messages between the kernel and its ranks."""

from __future__ import annotations

import inspect
import os
import pickle
import socket
from typing import Any, get_args

import pytest

from nbdist.wire.channel import Channel
from nbdist.wire.protocol import KINDS, Done, FromRank, ToRank


@pytest.mark.parametrize("name", KINDS)
def test_a_message_arrives_as_what_it_is(name: str) -> None:
    kind = KINDS[name]
    message = kind(*map(str, range(len(kind._fields))))
    ours, theirs = map(Channel, socket.socketpair())
    with ours.sock, theirs.sock:
        ours.send(message)
        received, parcel, fds = theirs.receive()
    assert type(received) is kind and received == message and parcel is None and fds == []


def test_a_plain_tuple_stays_one() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    with ours.sock, theirs.sock:
        ours.send(("answer", 1))
        assert type(theirs.receive()[0]) is tuple


def test_each_message_has_its_own_name_and_its_sentence() -> None:
    kinds: list[Any] = [*get_args(ToRank), *get_args(FromRank)]
    assert len(kinds) == len(KINDS) and "tuple" not in KINDS
    for kind in kinds:
        sentence = inspect.getdoc(kind) or ""
        assert sentence.startswith("Sent") and sentence.endswith("."), kind


def test_a_message_is_as_small_as_a_tuple() -> None:
    """A pickle of the object itself would name its class by module, which is looked up again for each message."""
    sent: list[bytes] = []

    class Socket:
        def fileno(self) -> int:
            return -1

        def setblocking(self, flag: bool) -> None: ...

    channel = Channel(Socket())  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "send_fds", lambda sock, parts, fds: sent.extend(parts) or sum(map(len, parts)))
        channel.send(Done(True))
    assert b"nbdist" not in sent[1] and pickle.loads(sent[1]) == ("Done", (True, 0.0), None)


def test_a_channel_blocks_although_new_sockets_of_the_notebook_have_a_timeout() -> None:
    socket.setdefaulttimeout(0.05)
    try:
        ours, theirs = socket.socketpair()
    finally:
        socket.setdefaulttimeout(None)
    with ours, socket.socket(fileno=theirs.detach()) as other:  # as a rank opens it, which has no such timeout
        for channel in (Channel(ours), Channel(other)):
            assert channel.sock.gettimeout() is None and os.get_blocking(channel.fileno())
