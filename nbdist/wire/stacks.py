"""A channel to a rank that works while its main thread is busy. A thread answers with the Python stack of the main
thread, and carries out orders, for example to abort the collectives in which the main thread waits. Both ends.

`faulthandler` alone works at any moment, but it reads frames that a thread may be changing, and can crash a rank that
runs Python code (python/cpython#116008; with 3.13 a few requests are enough). So a thread of the rank answers: while it
holds the GIL, the frames do not change. If the thread does not get the GIL, the main thread is in C code that holds it.
Then its frames do not change either, and a signal makes `faulthandler` write them.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from ..system.interrupts import deferred_interrupts
from .channel import readable
from .forking import STACK_SIGNAL

#: What is no question, but part of an order: whether it is the first one, and the last; its size; the part.
_ORDER = b"\0"
_PART = struct.Struct("<??I")
#: Bytes of a part. One that finds no room must not be cut in two: what follows would make no sense. So it goes into one
#: of Linux' buffers, and elsewhere (macOS) into the least room that a socket must have before it takes anything.
_PART_SIZE = 2048 - len(_ORDER) - _PART.size
#: A zero, which no text has; the number of the question; the length of the text that follows.
_ANSWER = struct.Struct("<ccI")
#: Seconds without an answer after which C code must have the GIL: a thread gets it from Python code in milliseconds,
#: but on a machine that has more to do than cores it waits for one of these, too.
PATIENCE = 1.0
#: Seconds that an order waits for a rank that takes none: C code has its GIL, or it is stopped.
_PATIENCE_TO_ORDER = 1.0
#: The end of the file with the function `acquire` of the package `filelock`.
FILELOCK = os.path.join("filelock", "_api.py")
#: Frames of a stack that are sent, innermost first.
_MOST = 100


def ask(sock: socket.socket, number: int, send_signal: Callable[[], None]) -> str:
    """Return, in the kernel, a rank's stack in the format of `faulthandler`; empty without an answer.

    Args:
        sock: The kernel's end of the socket at which the rank answers. It does not block.
        number: The number of the question, from 1 to 255, different from the last one.
        send_signal: A function that sends `STACK_SIGNAL` to the rank. It is called after `PATIENCE` seconds without an
            answer.
    """
    question = bytes([number])
    try:
        with contextlib.suppress(BlockingIOError):
            while sock.recv(1 << 16):  # what came too late for an earlier question
                pass
        sock.send(question)
        data = b""
        for signaling in (False, True):
            patience = PATIENCE
            if signaling:
                send_signal()
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
    """Return the complete answers, by the numbers of their questions, and the output of `faulthandler`."""
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


@deferred_interrupts()
def order(sock: socket.socket, what: str, *arguments: Any) -> bool:
    """Give a rank an order, in the kernel, and return whether it has received it. Only one thread at a time may do so.

    Args:
        sock: The kernel's end of the socket at which the rank answers.
        what, arguments: The name of one of the actions given to `answer`, and its arguments.
    """
    data = pickle.dumps((what, arguments))
    deadline = time.monotonic() + _PATIENCE_TO_ORDER
    for start in range(0, len(data), _PART_SIZE):
        part = data[start : start + _PART_SIZE]
        rest = memoryview(_ORDER + _PART.pack(start == 0, start + len(part) == len(data), len(part)) + part)
        while rest:
            try:
                rest = rest[sock.send(rest) :]
            except BlockingIOError:
                if not _writable(sock, deadline - time.monotonic()):
                    return False
            except OSError:  # it is gone
                return False
    return True


def _writable(sock: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    return seconds > 0 and bool(poll.poll(seconds * 1000))


def answer(fd: int, actions: Mapping[str, Callable[..., None]]) -> None:
    """Start, in a rank's main thread, the thread that answers at `fd` and carries out orders.

    Args:
        fd: The rank's end of the socket.
        actions: The actions that can be ordered, by name. They must return at once, so that requests for stacks are
            still answered.
    """
    faulthandler.register(STACK_SIGNAL, fd, all_threads=False)
    _thread.start_new_thread(serve, (fd, _thread.get_ident(), actions))


def serve(fd: int, main: int, actions: Mapping[str, Callable[..., None]]) -> None:
    """Send, in a thread, the stack of the thread `main`, and carry out orders, until the kernel ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
    order = bytearray()
    with contextlib.suppress(OSError):  # the kernel is gone, or the function has closed all descriptors
        while question := os.read(fd, 1):
            if question == _ORDER:
                first, last, size = _PART.unpack(read(fd, _PART.size))
                if first:
                    order.clear()
                order += read(fd, size)
                if last:
                    what, arguments = pickle.loads(order)
                    actions[what](*arguments)
                continue
            text = _written(sys._current_frames().get(main)).encode(errors="backslashreplace")
            data = _ANSWER.pack(b"\0", question, len(text)) + text
            while data:
                data = data[os.write(fd, data) :]


def read(fd: int, size: int) -> bytes:
    """Read `size` bytes, in any number of pieces. Raises `OSError` if they do not arrive."""
    data = b""
    while len(data) < size:
        if not (part := os.read(fd, size - len(data))):
            raise OSError("the kernel is gone")
        data += part
    return data


def _written(frame: FrameType | None) -> str:
    lines: list[str] = []
    while frame is not None and len(lines) < _MOST:
        code = frame.f_code
        lock = _filelock(frame) if code.co_filename.endswith(FILELOCK) and code.co_name == "acquire" else ""
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}{lock}\n')
        frame = frame.f_back
    return "".join(lines)


def _filelock(frame: FrameType) -> str:
    """Return the end of a function's name that names the lock of the package `filelock` for which the function waits;
    empty if the wait has a limit. The function tries again and again, so the system does not know that it waits.
    """
    with contextlib.suppress(Exception):  # another version of the package
        if frame.f_locals["timeout"] < 0 and frame.f_locals["blocking"] is not False:
            return f" of {frame.f_locals['self'].lock_file}"
    return ""
