"""What a rank's debugger is told: lines typed by the user, or given beforehand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Prompt:
    """The next line for the debugger of a rank, typed by the user or from a list of commands."""

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
