"""Where ranks come from. An engine starts them and says how they end; everything else is the same for all engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .options import RayOptions

if TYPE_CHECKING:
    from ..meeting import Meeting
    from ..transport import Channel
    from ..worker import Place, Setting


class Exit(NamedTuple):
    """A rank's process is gone: its wait status is an exit code, minus a signal, or None where nobody knows."""

    rank: int
    status: int | None
    reason: str = ""
    """Why nobody knows, such as a lost node."""


class MeetingPoint(Protocol):
    """A store that is open for one process group."""

    @property
    def meeting(self) -> Meeting:
        """What ranks are told of it."""

    def fds(self, rank: int) -> list[int]:
        """The descriptors that a rank has to be given from here."""

    def close(self) -> None:
        """Give up this process's part. The ranks keep theirs."""


class Ranks(Protocol):
    """The ranks of one session, as the kernel holds them. All of its descriptors can be selected on."""

    pids: list[int | None]
    """By rank; None as long as the process has not been heard of."""
    exits_fd: int
    """Readable when `exits()` has something to say."""
    patience: float
    """Seconds that it may take until the loss of a rank is noticed."""

    @property
    def channels(self) -> Sequence[Channel]:
        """By rank: messages to and from `worker.Rank`."""

    @property
    def outputs(self) -> Sequence[tuple[int, int]]:
        """By rank: descriptors to read what the rank writes to its standard output and standard error."""

    @property
    def places(self) -> Sequence[Place]:
        """By rank."""

    def inherited(self) -> Mapping[str, str]:
        """Those of the notebook's environment variables that hold in the ranks, too."""

    def setting(self, rank: int, environ: Mapping[str, str]) -> Setting:
        """What a rank finds around it, `environ` above all."""

    def meet(self) -> MeetingPoint:
        """Open a store for a new process group."""

    def exits(self) -> list[Exit]:
        """The ranks that ended since the last call. Does not wait."""

    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to a rank's process, if it still lives."""

    def addresses(self) -> list[tuple[str, int]]:
        """The ranks' own ends of their TCP connections: what a rank that leaves the others must cut itself off from."""

    def stack(self, rank: int) -> str:
        """The Python stacks of all threads of a rank, as `faulthandler` writes them, wherever the rank is."""

    def memory(self, rank: int) -> int | None:
        """Bytes of memory that only this rank has; None where that is not known."""

    def close(self, grace: float = 0.0) -> None:
        """Let the ranks leave, kill after `grace` seconds those that have not, with everything that they started,
        and give up all descriptors."""


class Engine(Protocol):
    """A way to start ranks."""

    def devices(self, nranks: int, devices: str | Sequence[str] | None) -> list[str]:
        """A device for each rank, as `worker.World` has it. Raises `ValueError` for what there is not."""

    def start(self, world_size: int, notice: Callable[[str], None]) -> Ranks:
        """Start `world_size` ranks that wait for their first message. Tells by `notice` what it has to wait for."""

    def warm(self, modules: Iterable[str]) -> None:
        """Get ready to start ranks that will import `modules`, beside torch. Returns at once."""


_default: str | RayOptions = "local"


def use(engine: str | RayOptions) -> None:
    """Let all later calls of this notebook run there: `in_ddp`, sessions that name no engine, `%ddp`.

    Args:
        engine: "local" for this machine, "ray" for the cluster that runs on it (`ray start`, or RAY_ADDRESS), or
            `RayOptions(...)`.

    Raises:
        ValueError: For an engine that there is not.
        NbdistError: Where Ray is not installed.
    """
    global _default
    resolve(engine)
    _default = engine


def resolve(engine: str | RayOptions | None) -> Engine:
    """The engine of that name or with these options; None: the one in use."""
    engine = _default if engine is None else engine
    if engine == "local":
        from . import local

        return local.LocalEngine()
    if engine == "ray":
        engine = RayOptions(address="auto")
    if isinstance(engine, RayOptions):
        from . import ray

        return ray.RayEngine(engine)
    raise ValueError(f"engine={engine!r} is not known; there are 'local', 'ray' and nbdist.RayOptions(...)")
