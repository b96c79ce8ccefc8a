"""Texts for the user while a call runs: about ranks that are late, wait for others, hang, or cannot be left yet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set

from ...engines.contract import Ranks
from ...errors import RankStuck, RankTimeout, text_of
from ...notebook.shell import shell
from ...system.free_memory import lack_of_address_space
from ...system.limits import lack_of_threads
from ...wire.protocol import Finishing
from . import stacks
from .group import Group

#: Seconds after which the cell shows where ranks are that have received a call and not begun it.
LONG_START = 30.0
#: The cell shows that ranks waited for others if a call took more than these seconds and waited more than this share.
LONG_CALL, MUCH_WAITING = 10.0, 0.2
#: Seconds that the end of an import may take before the cell shows that the stop button waits for it.
_LONG_END = 0.5


def not_started(ranks: Ranks) -> str:
    """Return the notice about ranks that have not started after `LONG_START` seconds; an empty text if they have."""
    starting = ranks.starting()
    end = "If it never ends, stop the call: later calls do without"
    return starting and f"no ranks after {LONG_START:g} s: {starting}. {end}"


class Notices:
    """The notices of one call. Its cell gets each of them once."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._late = self._finishing = False

    def late(self, seconds: float, pending: Collection[int], begun: Set[int]) -> None:
        """Show the stacks of ranks that have not begun the call after `LONG_START` seconds. Shown once.

        Args:
            seconds: The seconds since the beginning of the call.
            pending: The ranks that have not answered.
            begun: The ranks that have begun the call.
        """
        if self._late or seconds < LONG_START:
            return
        ranks, cell = self._group.ranks, self._group.relay.cell
        if said := not_started(ranks):
            self._late = True
            cell.notice(said)
        late = {rank for rank in pending if rank not in begun and ranks.pids[rank] is not None}
        if late:
            self._late = True
            taken = stacks.take(ranks, late)
            where = stacks.report({rank: taken[rank] for rank in sorted(late)})
            cell.notice(f"not begun after {LONG_START:g} s: {where}")

    def finishing(self, rank: int, message: Finishing) -> None:
        """Show that the stop waits for an uninterruptible step of a rank."""
        if message.seconds > _LONG_END and not self._finishing:
            self._finishing = True
            self._group.relay.cell.notice(f"rank {rank} {message.what} first; stop once more to kill the ranks at once")

    def hang(self, reason: object) -> None:
        """Show why the ranks can never go on."""
        self._group.relay.cell.notice(f"{reason}. The stop button ends the call; on_hang='raise' would have ended it")

    def failed(self, rank: int, error: BaseException) -> None:
        """Show which limit a rank has reached, of address space or of threads, if its error says so."""
        ranks = self._group.ranks
        pid = ranks.pids[rank] if ranks.takes_descriptors else None  # else one of another machine
        words = f"{type(error).__name__}: {text_of(error)}"
        if lack := lack_of_address_space(words, pid) or lack_of_threads(words):
            self._group.relay.cell.notice(f"rank {rank} {lack}")

    def waited(self, seconds: float, waited: Mapping[int, float]) -> None:
        """Show that ranks of a long call waited for another rank, if they did so for much of the time.

        Args:
            seconds: The time that the call took.
            waited: By rank, the seconds of it that the rank waited for others.
        """
        shares = {rank: one / seconds for rank, one in waited.items()}
        most, least = max(shares, key=shares.__getitem__), min(shares, key=shares.__getitem__)
        if seconds > LONG_CALL and shares[most] > MUCH_WAITING and most != least:
            one = shares[least] < shares[most] / 2
            reason = f"rank {least} is the slowest" if one else "no rank is slower than the others"
            self._group.relay.cell.notice(
                f"rank {most} waited {100 * shares[most]:.0f} % of the time for other ranks, rank {least} "
                f"{100 * shares[least]:.0f} %: {reason}. session.profile shows where the time goes"
            )


def timed_out(group: Group, pending: Collection[int], timeout: float | None) -> RankTimeout:
    """Return the error of a call whose `pending` ranks have not answered within `timeout` seconds."""
    return RankTimeout(f"not done after {timeout:g} s: {stacks.report(stacks.take(group.ranks, pending))}")


def stuck(group: Group, pending: Collection[int], reason: object) -> RankStuck:
    """Return the error of a call whose `pending` ranks can never go on, with the `reason`."""
    return RankStuck(f"{reason}\n\n{stacks.report(stacks.take(group.ranks, pending))}")


def how_to_look_inside(kept: bool) -> str:
    """Return the line under a rank's traceback that names the debugger; `kept`: the rank keeps the frames."""
    opens = "%debug or post_mortem() opens" if shell() is not None else "post_mortem() opens"
    return f"{opens} a debugger there" if kept else f"with hold_on_error=True, {opens} a debugger there"
