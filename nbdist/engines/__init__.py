"""Where ranks come from. An engine starts them and says how they end; everything else is the same for all engines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from ..transport import Channel


class Exit(NamedTuple):
    """A rank's process is gone: its wait status is an exit code, minus a signal, or None where nobody knows."""

    rank: int
    status: int | None


class Ranks(Protocol):
    """The ranks of one session, as the kernel holds them. All of its descriptors can be selected on."""

    pids: list[int | None]
    """By rank; None as long as the process has not been heard of."""
    exits_fd: int
    """Readable when `exits()` has something to say."""

    @property
    def channels(self) -> Sequence[Channel]:
        """By rank: messages to and from `worker.Rank`."""

    @property
    def outputs(self) -> Sequence[tuple[int, int]]:
        """By rank: descriptors to read what the rank writes to its standard output and standard error."""

    def exits(self) -> list[Exit]:
        """The ranks that ended since the last call. Does not wait."""

    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to a rank's process, if it still lives."""

    def stack(self, rank: int) -> str:
        """The Python stacks of all threads of a rank, as `faulthandler` writes them, wherever the rank is."""

    def memory(self, rank: int) -> int | None:
        """Bytes of memory that only this rank has; None where that is not known."""

    def close(self, grace: float = 0.0) -> None:
        """Let the ranks leave, kill after `grace` seconds those that have not, with everything that they started,
        and give up all descriptors."""


class Engine(Protocol):
    """A way to start ranks."""

    def start(self, world_size: int) -> Ranks:
        """Start `world_size` ranks that wait for their first message."""

    def warm(self, modules: Iterable[str]) -> None:
        """Get ready to start ranks that will import `modules`. Returns at once."""


def resolve(engine: str) -> Engine:
    """The engine of that name."""
    if engine == "local":
        from . import local

        return local.LocalEngine()
    raise ValueError(f"engine={engine!r} is not known; there is 'local'")
