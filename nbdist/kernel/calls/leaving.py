"""Messages and signals that make ranks leave a call which has failed or was stopped."""

from __future__ import annotations

import functools
import signal

from ...system.connections import Address, between
from ...wire import protocol
from .ending import Ending
from .group import Group


class Leaving:
    """The steps by which ranks leave a call, and their process group.

    Args:
        group: The ranks of the session.
        ending: The state of the call; each step is noted there.
        pending: The ranks that have not answered. From here on, it and the other sets are shared with the caller.
        begun: The ranks that have begun the call.
        unfit: The ranks that are not waited for any more, and cannot take another call.

    Attributes:
        incomplete: Whether a rank has died or could not join, or the call is out of time: ranks that still join the
            process group are not waited for.
        unstarted: The ranks that had not started when the others were asked to leave. They are among the unfit ones.
    """

    def __init__(self, group: Group, ending: Ending, pending: set[int], begun: set[int], unfit: set[int]) -> None:
        self._group, self._ranks, self._ending = group, group.ranks, ending
        self._pending, self._begun, self._unfit = pending, begun, unfit
        self.incomplete = False
        self.unstarted: set[int] = set()

    def ask(self) -> None:
        """Interrupt the ranks that have not answered, and let the others leave the process group."""
        self._group.leave()
        with self._ranks.together():
            for rank in list(self._pending):
                if self._ranks.pids[rank] is None:  # not started, so there is nothing to wait for
                    self._pending.discard(rank)
                    self.unstarted.add(rank)
                    self._unfit.add(rank)  # the call was sent to it, and it may still begin
                else:
                    self._ranks.signal(rank, signal.SIGINT)
        self.go_on()
        self._ending.asked_to_leave(all_begun=self._all_begun())

    def begun(self) -> None:
        """Go on after a rank has begun the call and was interrupted."""
        self._ending.begun(self._all_begun())
        self.go_on()

    def go_on(self) -> None:
        """Abort the group after a failure, or after an interrupt once a rank is done, as soon as no rank joins it."""
        due = self._ending.at_once or len(self._pending) < len(self._ranks.pids)
        if due and self._all_begun():
            self.abort()

    def dismiss(self, rank: int) -> None:
        """Make a rank that is done leave the process group, so that ranks that wait for it there fail and leave too."""
        if self._ending.aborted:
            self._group.send(rank, protocol.Leave(self._peers[rank]))
        else:
            self.go_on()

    def abort(self) -> None:
        """Once, let ranks that are done leave the group, and abort the collectives in which the others wait.

        A rank that still joins the group is lost: a group without one of its ranks cannot be joined.
        """
        if not self._ending.aborted:
            self._ending.aborted = True
            with self._ranks.together():
                for rank in range(len(self._ranks.pids)):
                    if rank not in self._pending:
                        self._group.send(rank, protocol.Leave(self._peers[rank]))
                for rank in self._pending:
                    self._ranks.abort(rank, self._group.number, self._peers[rank])
            # The time counts from here: finding the connections of many ranks takes long.
            self._ending.was_aborted(all_begun=self._pending <= self._begun)

    def _all_begun(self) -> bool:
        return self.incomplete or self._pending <= self._begun

    @functools.cached_property
    def _peers(self) -> list[list[Address]]:
        """The connections of each rank to others, by rank: the addresses of the other ends."""
        return between(self._ranks.connections())
