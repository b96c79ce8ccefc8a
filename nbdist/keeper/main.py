"""The entry point of a keeper's process."""

from __future__ import annotations

import os
import signal
import socket
import sys

from ..engines import forkserver, resolve
from ..system.private import listen
from ..wire.channel import Channel
from ..wire.session_folder import SessionFolder
from .keeper import Keeper


def main(fd: str) -> None:
    """Run the keeper of a session, whose name and spec are received on the socket with the descriptor `fd`."""
    if os.fork():  # the kernel must not find it among its children, which end with it
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not ignored: ranks would inherit that
    os.umask(os.umask(0o077) & 0o077)  # this user's own permissions stay, or no client could read the session's files
    channel = Channel(socket.socket(fileno=int(fd)))
    os.set_inheritable(int(fd), False)
    held: list[int] = []  # open until the end of this process
    try:
        while (received := channel.receive())[0][0] != "keep":
            (kind, *values), _, fds = received
            if kind == "hold":
                held += fds
            else:
                modules, notebook = values
                forkserver.for_notebook(notebook)
                resolve("local").warm(modules)
    except (EOFError, ConnectionError):  # the kernel has ended, and needs it no more
        return
    _, name, spec = received[0]
    folder = SessionFolder(name)
    try:
        folder.check()
        lock = folder.lock()
        _write_to(os.path.join(folder.path, "keeper.log"))
        keeper = Keeper(folder, spec)
        listening = listen(folder.socket)
    except BaseException as exc:
        channel.send(("failed", f"{type(exc).__name__}: {exc}"))
        raise
    channel.send(("ready",))
    channel.sock.close()
    keeper.serve(listening)
    forkserver.kill()
    os.close(lock)
    keeper.release_clients()
    os._exit(0)


def _write_to(path: str) -> None:
    """Redirect the output of this process and its fork server to a file, because there is no terminal."""
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
