"""The notebook's keyboard in a rank: `input()`, `getpass()` and standard input request lines from the kernel."""

from __future__ import annotations

import builtins
import getpass
import io
import os
import sys
import threading
from typing import Any

from ..errors import NbdistError
from ..wire import protocol
from .kernel_channel import KernelChannel

_builtin_input = builtins.input


class Keyboard:
    """A reader of lines from the kernel, for the rank's main thread."""

    def __init__(self, channel: KernelChannel) -> None:
        self._channel, self._pid = channel, os.getpid()
        self.stdin = _StandardInput(self)
        self.refusal = ""
        """The reason why the kernel would refuse to answer; empty if it answers."""

    def install(self) -> None:
        """Install this object for `input()`, `getpass()` and `sys.stdin`."""
        sys.stdin = sys.__stdin__ = self.stdin  # type: ignore[misc,assignment]
        builtins.input = self._input
        getpass.getpass = self._getpass

    def ask(self, prompt: str, shown: str = "", debugger: bool = False, hidden: bool = False) -> str:
        """Return the line that the user types at a prompt, after a text was shown; `hidden` lines are not displayed.

        Raises `EOFError` at the end of the input, and `NbdistError` if input is not possible.
        """
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            raise NbdistError("only the main thread of a rank can ask for input, no other thread or process of it")
        if self.refusal:
            raise _refused(self.refusal)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._channel.send(protocol.Prompt(prompt, shown, debugger, hidden))
        answer, _, _ = self._channel.receive(interruptible=True)
        if not isinstance(answer, protocol.Line):  # the kernel says goodbye
            raise EOFError(f"{type(answer).__name__} instead of a line")
        if answer.refusal:
            raise _refused(answer.refusal)
        if answer.line is None:
            raise EOFError
        return answer.line

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
