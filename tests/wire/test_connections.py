"""The connections of processes, found from outside and cut from inside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nbdist.system.connections import Connection, between, connections, cut_off

Pair = tuple[socket.socket, socket.socket]


def connected(family: int, host: str) -> Pair:
    with socket.socket(family) as listening:
        try:
            listening.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} on this machine")
        listening.listen()
        client = socket.create_connection(listening.getsockname()[:2])
        return client, listening.accept()[0]


@pytest.fixture(params=[(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")], ids=["IPv4", "IPv6"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    client, server = connected(*request.param)
    with client, server:
        yield client, server


def ends(sock: socket.socket) -> Connection:
    return Connection(sock.getsockname()[:2], sock.getpeername()[:2])


def test_all_connections_of_all_processes_are_found(pair: Pair) -> None:
    client, server = pair
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=[server.fileno()], **pipes) as other:  # type: ignore[call-overload]
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
        theirs = ends(server)
        server.close()
        gone, mine, none, its = connections([2**22 + 1, os.getpid(), None, other.pid])
        assert gone == none == [] and ends(client) in mine and its == [theirs]
        assert between([its, [ends(client)], []]) == [[theirs.peer], [ends(client).peer], []]
        other.stdin.close()  # type: ignore[union-attr]


def test_connections_to_others_and_to_itself_are_left_out() -> None:
    a, b, c, d, web = [("127.0.0.1", port) for port in (1, 2, 3, 4, 443)]
    first = [Connection(a, b), Connection(c, web), Connection(d, d)]
    assert between([first, [Connection(b, a)]]) == [[b], [a]]


def test_connections_are_cut_where_no_descriptor_is_left(pair: Pair) -> None:
    client, server = pair
    taken: list[int] = []
    with pytest.raises(OSError, match="Too many open files"):
        while True:
            taken.append(os.dup(0))
    try:
        cut_off([ends(client).peer])
    finally:
        for fd in taken:
            os.close(fd)
    assert server.recv(1) == b""


def test_only_the_connections_to_peers_are_cut(pair: Pair) -> None:
    client, server = pair
    others = connected(socket.AF_INET, "127.0.0.1")
    with others[0], others[1]:
        cut_off([list(ends(client).peer)])  # type: ignore[list-item]  # as it comes out of a message
        assert server.recv(1) == b""
        others[0].sendall(b"!")
        assert others[1].recv(1) == b"!"
