"""The entry point of the fork server's process."""

from __future__ import annotations

import gc
import os
import signal
import socket

from ..rank import shell
from ..rank.main import prctl
from .memory import inflate_object_count
from .orphans import end_all
from .server import Server

_PR_SET_CHILD_SUBREAPER = 36


def main(fd: str, kind: str, kernel: str, scratch: str, state: str = "") -> None:
    """Serve on the socket whose descriptor is `fd`, for a "notebook" or a "script".

    `kernel` is a descriptor that becomes readable when the process that the server works for ends. `scratch` names a
    folder for files of the ranks' processes, which exists while there are ranks. If this server replaces another one,
    `state` is the state of that server.
    """
    prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of ranks become children of this process, so that it can end them
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray's threads block signals, and what they start inherits that
    gc.disable()  # imports take a fifth less; ranks turn it on again
    inflate_object_count(400_000)  # about as many as torch and fastai make
    control = socket.socket(fileno=int(fd))
    control.set_inheritable(False)
    if int(kernel) >= 0:
        os.set_inheritable(int(kernel), False)
    if kind == "notebook":
        shell.make()
    server = Server(control, kind, int(kernel), scratch)
    try:
        if state:
            server.restore(state)
        server.serve()
    finally:
        end_all()
        server.remove_folders()
