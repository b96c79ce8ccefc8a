"""Messages about a call that was stopped, and about a rank that called `sys.exit`."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from ...engines.contract import Ranks
from ...errors import RemoteTraceback
from ...notebook.shell import cell_numbers
from . import stacks

#: The number of ranks up to which each is named.
_MOST = 8
_LOST = "The values that earlier calls left in the ranks are lost; the next call starts fresh ranks."


@contextlib.contextmanager
def nothing_sent() -> Iterator[None]:
    """Guard the work before a call is sent: an interrupt here affects no rank, and its text says so."""
    try:
        yield
    except KeyboardInterrupt:
        raise early_stop(killed=False) from None


def early_stop(killed: bool) -> KeyboardInterrupt:
    """Return the exception for a call that was stopped before all ranks had received it; `killed`: the ranks were
    ended.
    """
    if not killed:
        return KeyboardInterrupt("stopped before any rank had got the call: nothing is lost")
    return KeyboardInterrupt(f"stopped while the ranks were started or given the call: they were killed.\n{_LOST}")


def late_stop(head: Mapping[str, Any] | None) -> KeyboardInterrupt:
    """Return the exception for an action of a named session that had ended when the keeper was asked to stop it.

    `head`: the head of the first record of the action. None: the value of a call came before that record.
    """
    if head is None or head["action"] == "call":
        return KeyboardInterrupt("stopped after the call had ended: result() gives its value")
    return KeyboardInterrupt(f"stopped after {head['what']} had ended")


def unanswered_stop(
    ranks: Ranks, pending: Iterable[int], unstarted: Container[int], ended: Mapping[int, str]
) -> KeyboardInterrupt:
    """Return the exception for a stopped call after which ranks will be killed.

    Args:
        ranks: The ranks of the session. They still live, so that their stacks can be fetched.
        pending: The ranks that cannot take another call; may be empty.
        unstarted: The ranks that had not started when the others were asked to end the call. They may run by now.
        ended: The reasons of ranks that have answered and end by themselves, by rank.
    """
    stuck = sorted(pending)
    if not stuck:
        return KeyboardInterrupt("stopped")
    left = [rank for rank in stuck if rank not in ended and rank not in unstarted]
    never = [rank for rank in stuck if rank not in ended and rank in unstarted]
    if never == stuck:
        return KeyboardInterrupt(f"stopped before {ranks_named(never)} had started.\n{_LOST}")
    places = ["is at an unknown place"] * len(left)
    with contextlib.suppress(KeyboardInterrupt):  # a further interrupt ends the wait for stacks, too
        taken = stacks.take(ranks, left[:_MOST]) if left else {}
        places = [stacks.describe(taken[rank]) for rank in left[:_MOST]]
    about = [f"rank {rank} {place}" for rank, place in zip(left[:_MOST], places, strict=False)]
    about += [f"rank {rank} {ended[rank]}" for rank in stuck if rank in ended][:_MOST]
    if never:
        about.append(f"{ranks_named(never)} had not started")
    what = f"{ranks_named(left)} did not leave the call and had to be killed:\n" if left else ""
    return KeyboardInterrupt(f"stopped; {what}{'; '.join(about)}\n{_LOST}")


def ranks_named(ranks: Iterable[int]) -> str:
    """Return a text for some ranks, such as "rank 3", "ranks 0 and 2", "20 ranks"."""
    numbers = sorted(ranks)
    if len(numbers) > _MOST:
        return f"{len(numbers)} ranks"
    *most, last = map(str, numbers)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


def describe_exit(error: SystemExit) -> str:
    """Return a notice about the rank that called `sys.exit`, and where: the notebook shows only the exit code."""
    cause = error.__cause__
    if not isinstance(cause, RemoteTraceback):
        return f"left by sys.exit({error.code!r})"
    place = stacks.raised_at(cause.text)
    where = "" if place is None else f" in {place.name} at {place.place(cell_numbers())}"
    return f"rank {cause.rank} (pid {cause.pid}) called sys.exit({error.code!r}){where}"
