"""The notebook's keyboard in a rank: `input()`, `getpass()` and standard input are lines that the kernel asks for."""

from __future__ import annotations

import builtins
import getpass
import io
import os
import sys
import threading
from typing import Any

from ..errors import NbdistError
from ..postponing import postponed_interrupts
from ..wire.channel import Channel, readable
from .world import Membership

_builtin_input = builtins.input


class Keyboard:
    """Asks the kernel for lines, from the rank's main thread."""

    def __init__(self, channel: Channel, membership: Membership) -> None:
        self._channel, self._membership, self._pid = channel, membership, os.getpid()
        self.stdin = _StandardInput(self)
        self.refusal = ""
        """Why the kernel would not answer; empty where it does."""

    def install(self) -> None:
        """Be what `input()`, `getpass()` and `sys.stdin` read from."""
        sys.stdin = sys.__stdin__ = self.stdin  # type: ignore[misc,assignment]
        builtins.input = self._input
        getpass.getpass = self._getpass

    def ask(self, prompt: str, shown: str = "", debugger: bool = False, hidden: bool = False) -> str:
        """The line that the user types, maybe hidden, at a prompt, after he was shown a text.

        Raises `EOFError` at the end of the input, and `NbdistError` where nobody can type.
        """
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            raise NbdistError("only the main thread of a rank can ask for input, no other thread or process of it")
        if self.refusal:
            raise _refused(self.refusal)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._channel.send(("prompt", prompt, shown, debugger, hidden))
        while True:
            request, *arguments = self._receive()
            if request == "line":
                line, refusal = arguments
                if refusal:
                    raise _refused(refusal)
                if line is None:
                    raise EOFError
                return str(line)
            if request != "leave":  # the kernel says goodbye
                raise EOFError(f"{request} in the place of a line")
            self._membership.leave(*arguments)

    def _receive(self) -> tuple[Any, ...]:
        """The kernel's next message. An interrupt may come before it, and not in the middle."""
        while not readable(self._channel, 3600.0):
            pass
        with postponed_interrupts():
            return self._channel.receive()[0]

    def _input(self, prompt: Any = "", /) -> str:
        # A function may read from something else for a while.
        return self.ask(str(prompt)) if sys.stdin is self.stdin else _builtin_input(prompt)

    def _getpass(self, prompt: Any = "Password: ", stream: Any = None, **_: Any) -> str:
        return self.ask(str(prompt), hidden=True)


def _refused(why: str) -> NbdistError:
    return NbdistError(
        f"input(), getpass() or breakpoint() in a rank, and {why}. in_ddp(0, ...) runs the function in the notebook "
        f"itself; hold_on_error=True and post_mortem() look into a failure afterwards."
    )


class _StandardInput(io.TextIOBase):
    """Standard input of a rank."""

    def __init__(self, keyboard: Keyboard) -> None:
        self._keyboard = keyboard

    def readable(self) -> bool:
        return True

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        try:
            return self._keyboard.ask("") + "\n"
        except EOFError:
            return ""

    def read(self, size: int | None = -1, /) -> str:
        return "".join(iter(self.readline, ""))

    def fileno(self) -> int:
        return 0
