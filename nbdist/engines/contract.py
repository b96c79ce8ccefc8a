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
from .origin import Origin

#: Takes what a rank has written: the rank, 0 (standard output) or 1 (standard error), the bytes; no bytes at the end.
OnOutput = Callable[[int, int, bytes], None]


def drop(rank: int, which: int, data: bytes) -> None:
    """Ignore output of a rank."""


class Exit(NamedTuple):
    """The end of a rank's process. Its status is an exit code, or minus the number of a signal, or None if it is
    unknown."""

    rank: int
    status: int | None
    reason: str = ""
    """The reason why the end is unknown, such as a lost node."""


class OpenRendezvous(Protocol):
    """An open store for one process group."""

    @property
    def address(self) -> RendezvousAddress:
        """The address of the store, for the ranks."""

    def fds(self, rank: int) -> list[int]:
        """The descriptors of this process that must be sent to a rank."""

    def close(self) -> None:
        """Close the descriptors of this process. The descriptors of the ranks stay open."""


class ListenerFactory(Protocol):
    """A function that returns a listener for the events of ranks."""

    def __call__(
        self,
        *,
        on_output: OnOutput,
        on_message: Callable[[int, FromRank, Parcel | None], None],
        on_exit: Callable[[Exit], None],
        pause: float,
    ) -> Listening: ...


class Listening(Protocol):
    """A listener that waits for events of ranks and passes them on: see `listening.Listener`."""

    def watch(self, fd: Any, action: Callable[[], None]) -> None:
        """Call `action` whenever a descriptor is readable."""

    def select(self, seconds: float) -> None:
        """Pass on all events that have arrived; without any, wait at most `seconds` for the first one."""

    def close(self) -> None:
        """Stop passing on events."""


class Ranks(Protocol):
    """The ranks of one session, from the view of the kernel."""

    takes_descriptors: bool
    """True if `send` can give a rank descriptors of this process, such as descriptors of shared memory."""
    patience: float
    """The longest time until the loss of a rank is noticed, in seconds."""

    @property
    def pids(self) -> Sequence[int | None]:
        """Return process numbers by rank; None until the process has been reported."""

    @property
    def slots(self) -> Sequence[Slot]:
        """Return the place of each rank in its node, in the order of the ranks."""

    def send(self, rank: int, message: ToRank, parcel: Parcel | None = None, fds: Iterable[int] = ()) -> None:
        """Send a message to a rank (`rank.loop.Rank`). Raises `ConnectionError` if the rank is known to be dead."""

    def limit_sending(self, seconds: float) -> None:
        """Make `send` raise `BlockingIOError` if a rank reads nothing for this number of seconds, on an engine whose
        `send` waits for ranks."""

    def together(self) -> AbstractContextManager[None]:
        """Collect messages and signals in a `with` block, and send them in few messages at its end."""

    def drain(self, rank: int, on_output: OnOutput) -> None:
        """Pass on all output of a rank so far. Works without a listener."""

    @property
    def listen(self) -> ListenerFactory:
        """A function that makes a listener for the messages, the output and the ends of the ranks."""

    def logs(self, ranks: Sequence[int], most: int) -> Mapping[int, str]:
        """Return the last output, about `most` characters, of each of the `ranks`, if the engine keeps output that no
        cell shows. After `close`, the output of all known ranks is returned."""

    def cut_output(self, call: int) -> None:
        """Pass on only the last lines of the output of a call from now on. The call is given by its number."""

    def inherited(self) -> Mapping[str, str]:
        """Return the environment variables of the notebook that hold in the ranks, too."""

    def setting(self, rank: int, environ: Mapping[str, str]) -> Setting:
        """Return the environment, working folder and search path for a rank, with the variables of `environ`."""

    def rendezvous(self) -> OpenRendezvous:
        """Open a store for a new process group. Raises `NbdistError` if that fails; `exits` may show the cause."""

    def exits(self) -> list[Exit]:
        """Return the ranks that have ended since the last call. Waits at most a moment for their exit statuses."""

    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to the process of a rank, if it still lives."""

    def abort(self, rank: int, group: int, peers: Sequence[Address]) -> None:
        """Abort the collectives in which a rank waits, if the rank is still in the group with the number `group` (see
        `World`). `peers` are the other ranks' ends of its connections."""

    def deliver_widget_event(self, rank: int, content: dict[str, Any], buffers: Sequence[bytes]) -> bool:
        """Pass a change of a widget in the page to the rank at once, even while the rank is busy. Works in any thread.

        Returns False if the rank is known not to have received it.
        """

    def connections(self) -> list[list[Connection]]:
        """Return the TCP connections of each rank, so that a rank which leaves the others can close them."""

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the stack of each rank's main thread as `faulthandler` prints it; empty without an answer."""

    def read_flight_recorders(self, ranks: Sequence[int]) -> None:
        """Make ranks read torch's flight recorder. Their next answers to `stacks` have its collectives, in a line that
        begins with `wire.recording.FLIGHT`. Only asked for where `Recording` works."""

    def starting(self) -> str:
        """Return why ranks have not started yet, in words; empty if all have, or if the reason is not known."""

    def memory(self, ranks: Sequence[int]) -> dict[int, int | None]:
        """Return the bytes of private memory of the given ranks; None for a rank whose memory is not known."""

    def close(self, grace: float = 0.0, on_output: OnOutput = drop) -> None:
        """Ask the ranks to exit, kill those that run after `grace` seconds, with all their processes, and close all
        descriptors. Output in this time goes to `on_output`, if the engine can read it."""


class Engine(Protocol):
    """A way to start ranks."""

    local: bool
    """True if the ranks are processes of this machine, which share its cores with the notebook."""
    origin: Callable[[], Origin]
    """Returns the state of the process that the ranks work for: `origin.here`. A keeper replaces it. An engine for
    named sessions must have it, `lend`, `borrow` and `release`."""

    def devices(self, nranks: int, devices: str | Sequence[str] | None) -> list[str]:
        """Return a device for each rank, as in `wire.messages.World`. Raises `ValueError` for devices that do not
        exist."""

    def start(self, world_size: int, notice: Callable[[str], None], least: int | None = None) -> Ranks:
        """Start `world_size` ranks that wait for their first message. Calls `notice` with the reason for a long wait.

        With `least`, fewer ranks may start: as many as fit, but at least `least`.
        """

    def start_workers(self, count: int, modules: Iterable[str], notice: Callable[[str], None]) -> Ranks:
        """Start processes that will be in no process group, and import `modules`: the workers of `parallel_map`."""

    def warm(self, modules: Iterable[str]) -> None:
        """Prepare to start ranks that will import `modules` and torch. Returns at once."""

    def idle(self, seconds: float) -> None:
        """Keep the processes of `warm` on this machine for this number of seconds while they are not used."""

    def lend(self) -> tuple[Mapping[str, str], Sequence[int]]:
        """Return variables and descriptors by which another process starts ranks on the same machines. The variables
        give access. The descriptors keep the machines reserved after the end of this process, as long as another
        process holds them.
        """

    def borrow(self, variables: Mapping[str, str]) -> None:
        """Use the variables that `lend` of another process has returned."""

    def release(self) -> None:
        """Release what this process keeps for the next ranks, such as reserved resources."""


class EngineOptions(Protocol):
    """Options of an engine, such as `RayOptions`: they can be given instead of the name of an engine."""

    @property
    def engine(self) -> str:
        """The name of the engine that takes these options."""


class MakeEngine(Protocol):
    """A function that makes an engine. An entry point in the group `nbdist.engines` refers to it."""

    def __call__(self, options: Any, env: Mapping[str, str] | None, start: str) -> Engine:
        """Make an engine.

        Args:
            options: The object that the user has given in place of the name; None: the name alone.
            env: Environment variables for the ranks.
            start: The way to start ranks: "forkserver" or "spawn".

        Raises:
            ValueError: The engine cannot start ranks like this.
        """
