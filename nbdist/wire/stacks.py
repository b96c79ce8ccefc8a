"""A channel to a rank that works while its main thread is busy. A thread answers with the Python stacks of the main
thread and of the others, and carries out orders, for example to abort the collectives in which the main thread waits.
Both ends.

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
import threading
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
#: The ends of two files: of `filelock`, with its function `acquire`; of nbdist, with the waits for keys of a store.
FILELOCK, STORE = os.path.join("filelock", "_api.py"), os.path.join("rank", "stores.py")
#: Frames of the main thread's stack that are sent, innermost first; frames of each other thread, and such threads.
_MOST, _MOST_OF_OTHERS, _MOST_THREADS = 100, 10, 100


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


def answer(fd: int, actions: Mapping[str, Callable[..., None]], more: Callable[[], str] = str) -> None:
    """Start, in a rank's main thread, the thread that answers at `fd` and carries out orders.

    Args:
        fd: The rank's end of the socket.
        actions: The actions that can be ordered, by name. They must return at once, so that requests for stacks are
            still answered.
        more: Returns further lines for each answer.
    """
    faulthandler.register(STACK_SIGNAL, fd, all_threads=False)
    _thread.start_new_thread(serve, (fd, _thread.get_ident(), actions, more))


def serve(fd: int, main: int, actions: Mapping[str, Callable[..., None]], more: Callable[[], str] = str) -> None:
    """Send, in a thread, the stack of the thread `main` and more, and carry out orders, until the kernel ends."""
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
            text = (_of_all_threads(main) + more()).encode(errors="backslashreplace")
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


def _of_all_threads(main: int) -> str:
    """Return the stack of the thread `main`, then the stacks of the other threads, each with the thread's number in the
    system, or -1 if the number is not known.
    """
    frames = sys._current_frames()
    own = _thread.get_ident()
    numbers = {ident: one.native_id for ident, one in list(getattr(threading, "_active", {}).items())}
    numbers[own] = _thread.get_native_id()
    text = _written(frames.pop(main, None), _MOST)
    for ident, frame in list(frames.items())[:_MOST_THREADS]:
        text += f"Thread {numbers.get(ident) or -1} (most recent call first):\n{_written(frame, _MOST_OF_OTHERS)}"
    return text


def _written(frame: FrameType | None, most: int) -> str:
    lines: list[str] = []
    while frame is not None and len(lines) < most:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}{_awaited(frame)}\n')
        frame = frame.f_back
    return "".join(lines)


def _awaited(frame: FrameType) -> str:
    """Return the end of a function's name that names what the function waits for: the lock of the package `filelock`,
    or the key of a store; empty if the wait has a limit. `filelock` tries again and again, and so do some stores, so
    the system does not know that they wait.
    """
    code = frame.f_code
    with contextlib.suppress(Exception):  # another version of the package
        if code.co_filename.endswith(FILELOCK) and code.co_name == "acquire":
            if frame.f_locals["timeout"] < 0 and frame.f_locals["blocking"] is not False:
                return f" of {frame.f_locals['self'].lock_file}"
        elif code.co_filename.endswith(STORE) and (keys := frame.f_locals["awaited"]()):
            return f" of {keys}"
    return ""
