"""pdb in a rank, its commands typed in the notebook. Both ends of the conversation are here."""

from __future__ import annotations

import io
import pdb
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from . import transport


class Prompt:
    """In the kernel: the next line for the debugger of a rank, typed by the user or from a list of commands."""

    def __init__(self, rank: int, commands: Iterable[str] | None) -> None:
        self._prompt = f"(rank {rank}) "
        self._commands: Iterator[str] | None = None if commands is None else iter(commands)

    def __call__(self) -> str:
        try:
            if self._commands is None:
                return input(self._prompt)
            line = next(self._commands, "quit")
        except (EOFError, KeyboardInterrupt):
            return "quit"
        print(f"{self._prompt}{line}")
        return line


class _Keyboard(io.TextIOBase):
    """In the rank: asks the kernel for a line."""

    def __init__(self, channel: transport.Channel) -> None:
        self._channel = channel

    def readline(self, size: int | None = -1, /) -> str:  # type: ignore[override]
        sys.stdout.flush()
        self._channel.send(("prompt",))
        message, _, _ = self._channel.receive()
        return f"{message[1]}\n"


def interact(channel: transport.Channel, tb: types.TracebackType) -> None:
    """In the rank: let the user look at the frames of a traceback, until `quit`."""
    keyboard: Any = _Keyboard(channel)
    shell = pdb.Pdb(stdin=keyboard, stdout=sys.stdout, nosigint=True)
    shell.prompt = ""  # the kernel has one
    shell.reset()
    shell.interaction(None, tb)
