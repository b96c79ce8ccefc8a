"""The process of a rank, from the fork to the end."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import NoReturn

from ..system.private import make_folder
from ..system.scratch import make_held
from ..wire import stacks
from ..wire.channel import Channel
from ..wire.forking import BREAK_OFF, RankDescriptors
from . import flight, leaving, preemption, streams, widgets
from .loop import Rank

PDEATHSIG = 1


def prctl(option: int, argument: int) -> None:
    """Call Linux' `prctl`; do nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, argument, 0, 0, 0)


def main(server: int, fds: RankDescriptors, scratch: str, of_server: Iterable[int]) -> NoReturn:
    """Become a rank, in the fork, and end as one.

    Args:
        server: The pid of the fork server.
        fds: The descriptors that connect the rank with the kernel.
        scratch: A folder in which this rank has a folder until its end; "": it has none.
        of_server: Descriptors that only the server may hold; the rank closes them.
    """
    status, pid = 1, os.getpid()
    try:
        os.setsid()  # an interrupt of the notebook's process group is passed on by the kernel, in order
        prctl(PDEATHSIG, signal.SIGKILL)
        _be_killed_first()
        if os.getppid() != server:
            os._exit(1)
        leaving.disarm()
        gc.enable()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(BREAK_OFF, signal.SIG_DFL)
        for fd in of_server:
            with contextlib.suppress(OSError):
                os.close(fd)
        os.dup2(fds.stdout, 1)
        os.dup2(fds.stderr, 2)
        os.close(fds.stdout)
        os.close(fds.stderr)
        streams.writer.keep()
        if scratch:
            _keep_sockets_in(os.path.join(scratch, str(pid)))
        faulthandler.enable(2)  # a crash in compiled code leaves its Python stack among the rank's last words
        rank = Rank(Channel(socket.socket(fileno=fds.channel)))
        actions: dict[str, Callable[..., None]] = {"abort": rank.abort, "flight": flight.read}
        actions |= {"widget": widgets.receive, "preemption": preemption.announce}
        stacks.answer(fds.stacks, actions, flight.text)
        code = rank.serve()
        if os.getpid() == pid:  # no process that the function has forked
            leaving.leave()
        status = code
    except BaseException:
        traceback.print_exc()
    finally:
        streams.flush()
        os._exit(status)


def _be_killed_first() -> None:
    """Make the system kill this process and its children before the notebook, which has the data, when memory runs out.

    Among several ranks the system kills the largest.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:  # Linux alone has it
        file.write("1000")


def _keep_sockets_in(folder: str) -> None:
    """Keep the sockets of multiprocessing, for loader workers for example, in this folder: killed processes would leave
    them in /tmp."""
    with contextlib.suppress(OSError):  # a full disk
        if not os.path.isdir(parent := os.path.dirname(folder)):  # a system may empty /tmp now and then
            with contextlib.suppress(OSError):  # another rank makes it right now
                make_held(parent)
        make_folder(folder)
        vars(multiprocessing.current_process())["_config"]["tempdir"] = folder
