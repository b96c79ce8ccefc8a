"""What a rank does whatever its main thread is busy with: it tells that thread's Python stack, breaks off what it
waits for in a process group, and hears that its machine will be taken away. Both ends of that.

`faulthandler` alone would do, at any moment, but it reads frames that a thread is just changing, and a rank that is
busy in Python code may die of that (python/cpython#116008; with 3.13 some asking is enough). So a thread of the rank's
own answers, which has the GIL then: the frames are at rest. Where it does not get the GIL, the main thread is in C code
that keeps it, under frames that nobody changes, and a signal lets `faulthandler` write those.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from .channel import readable
from .connections import Address
from .forking import STACK_SIGNAL

#: What is no question, but asks to abort: then the size of a list of addresses, and the list.
_ABORT = b"\0"
#: Nor is this: it tells of a preemption.
_PREEMPTION = b"\xff"
_SIZE = struct.Struct("<I")
#: A zero, which no text has; the number of the question; the length of the text that follows.
_ANSWER = struct.Struct("<ccI")
#: Seconds without an answer after which C code must have the GIL: a thread gets it from Python code in milliseconds,
#: but on a machine that has more to do than cores it waits for one of these, too.
PATIENCE = 1.0
#: The variable that is set in ranks which may be told so: those on a cluster.
NOTICES = "NBDIST_NOTICES"
#: Frames that are told of a stack, innermost first.
_MOST = 100


def ask(sock: socket.socket, number: int, insist: Callable[[], None]) -> str:
    """In the kernel: a rank's stack, as `faulthandler` writes it; empty where the rank does not answer.

    Args:
        sock: The kernel's end of the socket at which the rank answers; does not block.
        number: Of the question, from 1 to 254; not that of one just before.
        insist: Sends `STACK_SIGNAL`. Called after a while without an answer.
    """
    question = bytes([number])
    try:
        with contextlib.suppress(BlockingIOError):
            while sock.recv(1 << 16):  # what came too late for an earlier question
                pass
        sock.send(question)
        data = b""
        for insisting in (False, True):
            patience = PATIENCE
            if insisting:
                insist()
            while readable(sock.fileno(), patience):
                if not (part := sock.recv(1 << 16)):
                    return ""
                data += part
                answers, written = _sorted(data)
                if question in answers:
                    return answers[question].decode(errors="backslashreplace")
                if written:  # in pieces, and without a word at the end
                    patience = 0.05
        return _sorted(data)[1].decode(errors="backslashreplace")
    except OSError:  # the rank is gone
        return ""


def _sorted(data: bytes) -> tuple[dict[bytes, bytes], bytes]:
    """The whole answers by their questions, and what `faulthandler` has written."""
    answers, written = {}, b""
    while data:
        text, _, _ = data.partition(b"\0")
        written, data = written + text, data[len(text) :]
        if len(data) < _ANSWER.size:
            break
        _, question, size = _ANSWER.unpack_from(data)
        end = _ANSWER.size + size
        if len(data) < end:
            break
        answers[question], data = data[_ANSWER.size : end], data[end:]
    return answers, written


def ask_to_abort(sock: socket.socket, peers: Sequence[Address]) -> None:
    """In the kernel: let a rank break off what it waits for in its process groups.

    Args:
        sock: The kernel's end of the socket at which the rank answers.
        peers: The other ranks' ends of the rank's connections to them.
    """
    addresses = json.dumps(peers).encode()
    with contextlib.suppress(OSError):  # it is gone, or has not read what it was asked before
        sock.send(_ABORT + _SIZE.pack(len(addresses)) + addresses)


def tell_preemption(sock: socket.socket) -> None:
    """Tell a rank, from its engine, that a machine of the ranks will be taken away."""
    with contextlib.suppress(OSError):  # it is gone
        sock.send(_PREEMPTION)


def answer(fd: int, abort: Callable[[Sequence[Address]], None], preempted: Callable[[], None]) -> None:
    """In a rank's main thread: from now on answer at `fd`, `abort` when asked to, call `preempted` when told so; all in
    a thread."""
    faulthandler.register(STACK_SIGNAL, fd, all_threads=False)
    _thread.start_new_thread(_serve, (fd, _thread.get_ident(), abort, preempted))


def _serve(fd: int, main: int, abort: Callable[[Sequence[Address]], None], preempted: Callable[[], None]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
    with contextlib.suppress(OSError):  # the kernel is gone, or the function has closed all descriptors
        while question := os.read(fd, 1):
            if question == _ABORT:
                peers = json.loads(_read(fd, *_SIZE.unpack(_read(fd, _SIZE.size))))
                # In a thread of its own: a communicator may take its time, and stacks are still asked for.
                _thread.start_new_thread(abort, ([tuple(peer) for peer in peers],))
                continue
            if question == _PREEMPTION:
                preempted()
                continue
            text = _written(sys._current_frames().get(main)).encode(errors="backslashreplace")
            data = _ANSWER.pack(b"\0", question, len(text)) + text
            while data:
                data = data[os.write(fd, data) :]


def _read(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (part := os.read(fd, size - len(data))):
            raise OSError("the kernel is gone")
        data += part
    return data


def _written(frame: FrameType | None) -> str:
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}\n')
        frame = frame.f_back
    return "".join(lines)
