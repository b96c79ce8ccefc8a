"""The contract of an engine: it starts ranks and reports how they end. Everything else is the same for all engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from ..system.connections import Address, Connection
from ..wire.messages import Setting, Slot
from ..wire.parcel import Parcel
from ..wire.protocol import FromRank, ToRank
from ..wire.rendezvous import RendezvousAddress

#: Takes what a rank has written: the rank, 0 (standard output) or 1 (standard error), the bytes; no bytes at the end.
OnOutput = Callable[[int, int, bytes], None]


def drop(rank: int, which: int, data: bytes) -> None:
    """Ignore what a rank has written."""


class Exit(NamedTuple):
    """The end of a rank's process: its status is an exit code, minus a signal, or None where it is unknown."""

    rank: int
    status: int | None
    reason: str = ""
    """The reason why the end is unknown, such as a lost node."""


class OpenRendezvous(Protocol):
    """A store that is open for one process group."""

    @property
    def address(self) -> RendezvousAddress:
        """The address of the store, for the ranks."""

    def fds(self, rank: int) -> list[int]:
        """The descriptors that a rank has to be given from here."""

    def close(self) -> None:
        """Give up this process's part. The ranks keep theirs."""


class Hearer(Protocol):
    """Takes what ranks do."""

    def __call__(
        self,
        *,
        on_output: OnOutput,
        on_message: Callable[[int, FromRank, Parcel | None], None],
        on_exit: Callable[[Exit], None],
        pause: float,
    ) -> Listening: ...


class Listening(Protocol):
    """Waits for all that comes from ranks, and passes it on: see `listening.Listener`."""

    def watch(self, fd: Any, action: Callable[[], None]) -> None:
        """Do something whenever there is something to read at a descriptor."""

    def select(self, seconds: float) -> None:
        """Pass on what there is, or the first event that comes within a number of seconds."""

    def close(self) -> None:
        """Pass on no more."""


class Ranks(Protocol):
    """The ranks of one session, as the kernel holds them."""

    takes_descriptors: bool
    """True if `send` can give a rank descriptors of this process, such as descriptors of shared memory."""
    patience: float
    """Seconds that it may take until the loss of a rank is noticed."""

    @property
    def pids(self) -> Sequence[int | None]:
        """Process numbers by rank; None until the process has been reported."""

    @property
    def slots(self) -> Sequence[Slot]:
        """By rank."""

    def send(self, rank: int, message: ToRank, parcel: Parcel | None = None, fds: Iterable[int] = ()) -> None:
        """Send a message to `rank.loop.Rank`. Raises `ConnectionError` where it is known that the rank is gone."""

    def together(self) -> AbstractContextManager[None]:
        """Messages and signals within go on their way at its end, as few of them as can be."""

    def drain(self, rank: int, on_output: OnOutput) -> None:
        """Pass on all that a rank has written so far. No listener is needed."""

    @property
    def listen(self) -> Hearer:
        """Gives what waits for all that ranks say and write, and for their ends."""

    def logs(self, ranks: Sequence[int], most: int) -> Mapping[int, str]:
        """Return the last text, of about `most` characters, that each of these ranks has written, where the engine does
        not pass all of it on: it keeps what no cell shows."""

    def cut_output(self, call: int) -> None:
        """Pass on no more of the output of a call, by its number, than the last lines now and then."""

    def inherited(self) -> Mapping[str, str]:
        """Return the environment variables of the notebook that hold in the ranks, too."""

    def setting(self, rank: int, environ: Mapping[str, str]) -> Setting:
        """Return the surroundings of a rank, `environ` above all."""

    def rendezvous(self) -> OpenRendezvous:
        """Open a store for a new process group. Raises `NbdistError` where that cannot be; then `exits` may say why."""

    def exits(self) -> list[Exit]:
        """The ranks that ended since the last call. Waits a moment at most, for how they have."""

    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to a rank's process, if it still lives."""

    def abort(self, rank: int, group: int, peers: Sequence[Address]) -> None:
        """Abort what a rank waits for in its process groups, if it is still in the group with the number `group` (see
        `World`). `peers` are the other ranks' ends of its connections."""

    def tell_widget(self, rank: int, content: dict[str, Any], buffers: Sequence[bytes]) -> bool:
        """Pass a change of a widget in the page to the rank at once, whatever the rank does; return whether the rank
        has it, as far as is known. From any thread."""

    def connections(self) -> list[list[Connection]]:
        """Return the TCP connections of each rank, so that a rank which leaves the others can close them."""

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """The Python stack of each rank's main thread, as `faulthandler` writes it; empty where it does not answer."""

    def starting(self) -> str:
        """Return why ranks have not started yet, in words; empty if all have, or if the reason is not known."""

    def memory(self, ranks: Sequence[int]) -> dict[int, int | None]:
        """Bytes of memory that each of these ranks has for itself; None where that is not known."""

    def close(self, grace: float = 0.0, on_output: OnOutput = drop) -> None:
        """Ask the ranks to leave, kill after `grace` seconds those that have not, with everything that they started,
        and give up all descriptors. What ranks write meanwhile goes to `on_output`, as far as the engine can."""


class Engine(Protocol):
    """A way to start ranks."""

    local: bool
    """True if the ranks are processes of this machine, which share its cores with the notebook."""

    def devices(self, nranks: int, devices: str | Sequence[str] | None) -> list[str]:
        """A device for each rank, as `wire.messages.World` has it. Raises `ValueError` for what there is not."""

    def start(self, world_size: int, notice: Callable[[str], None], least: int | None = None) -> Ranks:
        """Start `world_size` ranks that wait for their first message. Calls `notice` with what it has to wait for.

        With `least`, there may be fewer: as many as there is room for, but not less than that.
        """

    def start_workers(self, count: int, modules: Iterable[str], notice: Callable[[str], None]) -> Ranks:
        """Start processes that will be in no process group, and import `modules`: the workers of `parallel_map`."""

    def warm(self, modules: Iterable[str]) -> None:
        """Get ready to start ranks that will import `modules` and torch. Returns at once."""

    def idle(self, seconds: float) -> None:
        """Keep what `warm` has started on this machine for so long while nothing uses it."""


class EngineOptions(Protocol):
    """Options of an engine, such as `RayOptions`: they can be given wherever the name of an engine can."""

    @property
    def engine(self) -> str:
        """The name of the engine that takes these options."""


class MakeEngine(Protocol):
    """A function that makes an engine: what an entry point in the group `nbdist.engines` names."""

    def __call__(self, options: Any, env: Mapping[str, str] | None, start: str) -> Engine:
        """Make an engine.

        Args:
            options: What the user has given in place of the name; None: the name alone.
            env: Environment variables for the ranks.
            start: How ranks start: "forkserver" or "spawn".

        Raises:
            ValueError: The engine cannot start ranks like this.
        """
