"""The outcome of a call, a value or an exception, for the kernel."""

from __future__ import annotations

import bdb
import builtins
import contextlib
import os
import pickle
import traceback
import types
from collections.abc import Mapping, Sequence
from typing import Any

from ..capture import imports
from ..capture.big_data import OUT_OF_BAND
from ..capture.depth import with_large_stack
from ..capture.diagnosis import explain_failure
from ..capture.partial import absent_parts
from ..capture.pickler import Pickler, dumps_plain
from ..capture.steps import Named
from ..errors import NbdistError, drop_last_frames, stand_ins, text_of
from ..system.free_memory import MeasuredFile
from ..wire import protocol, rank_memory
from ..wire.cache import KEPT
from ..wire.parcel import Parcel, pack
from . import shell
from .call import Caller
from .interrupts import Interrupts
from .kernel_channel import KernelChannel

#: A message, and a parcel that goes with it.
Answer = tuple[protocol.FromRank, Parcel | None]

#: What the methods of somebody else's exception may raise.
_ANY = (Exception, SystemExit)

#: Groups of exceptions, which Python has since 3.11.
_Group: Any = getattr(builtins, "BaseExceptionGroup", None)

_VALUES = "the list of what the function returned for the items"

#: Whose frames are no user's: a debugger may be open when an interrupt comes.
_CHECKS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "numerics", "")
_OWN = (os.path.dirname(__file__) + os.sep, imports.__file__, bdb.__file__)


class Outcomes:
    """Maker of answers from the results of requests."""

    def __init__(self, channel: KernelChannel, caller: Caller, interrupts: Interrupts) -> None:
        self._channel, self._caller, self._interrupts = channel, caller, interrupts
        self.reads_memory = False
        """True if the kernel may read big answers out of this process's memory."""
        self._absent: dict[int, Any] = {}
        """Replacements for parts of a value that cannot be sent, by their ids, until the error has gone."""

    def value(self, value: Any, grouped: bool, wanted: bool, waited: float, instead: Mapping[int, Any]) -> Answer:
        """Return the answer of a call that has returned.

        Args:
            value: The value that the function returned.
            grouped: Whether the process group is still up after the function.
            wanted: Whether the kernel wants the value.
            instead: Replacements of parts of the value, by their ids.
            waited: The seconds for which the rank waited for others. Less than one second is not reported.
        """
        parcel = self._pack(value, self._caller.originals, offer=True, instead=instead) if wanted else None
        return protocol.Done(grouped, waited if waited > 1.0 else 0.0), parcel

    def items(self, seconds: float, values: list[Any]) -> Answer:
        """Return the answer of a worker: the time of its items, and their values."""
        return protocol.Values(seconds), self._pack(values, self._caller.originals, least=KEPT, what=_VALUES)

    def error(self, exc: BaseException, tb: types.TracebackType | None, ends: str) -> Answer:
        """Return the answer of a request that has raised. `exc` loses its traceback.

        Args:
            exc: The exception of the function.
            tb: The part of the traceback to show.
            ends: The reason why the rank ends after this; empty if it does not.
        """
        spare = []
        for stand_in in stand_ins(exc):
            with contextlib.suppress(*_ANY):
                spare.append(pickle.dumps(stand_in))
        text, rendered = _plain(exc, tb), _rendered(exc, tb)
        exc.__traceback__ = None
        absent, self._absent = self._absent, {}
        return protocol.Error(text, rendered, spare, ends), self._pack_error(exc, absent)

    def _pack_error(self, exc: BaseException, absent: Mapping[int, Any]) -> Parcel | None:
        """Return the parcel of an exception. In a group, substitutes replace members that cannot be pickled.

        None if no parcel can be made.
        """
        with contextlib.suppress(*_ANY):
            return self._pack(exc, self._caller.originals, instead=absent, rest=False)
        if _Group is not None and isinstance(exc, _Group):
            with contextlib.suppress(*_ANY):
                return self._pack(self._with_stand_ins(exc), self._caller.originals)
        return None

    def _with_stand_ins(self, exc: BaseException) -> BaseException:
        """Return a substitute for a member of an exception group: an exception that can be pickled, or a group of
        such exceptions.
        """
        if isinstance(exc, _Group):
            members: Any = getattr(exc, "exceptions", ())
            derived: BaseException = _Group.derive(exc, [self._with_stand_ins(member) for member in members])
            return derived
        for one in (exc, *stand_ins(exc)):
            with contextlib.suppress(*_ANY):
                self._pack(one, self._caller.originals).close()
                return one
        return NbdistError(f"an exception that cannot be sent: {type(exc).__qualname__}: {text_of(exc)}")

    def _pack(
        self,
        value: Any,
        originals: Sequence[Any],
        offer: bool = False,
        least: int = OUT_OF_BAND,
        what: str = "the value that the function returned",
        instead: Mapping[int, Any] | None = None,
        rest: bool = True,
    ) -> Parcel:
        plain = dumps_plain(value)
        if plain is not None:
            return pack(plain, [], what=what)

        def write() -> Pickler:
            pickler = Pickler(
                MeasuredFile(what),
                skip=lambda key, name: (key, name) in self._caller.sent,
                known={id(obj): number for number, obj in enumerate(originals)},
                to_cpu=True,
                least=least,
                instead=instead,
            )
            pickler.dump(Named(what, value))
            return pickler

        try:
            pickler = with_large_stack(write)
        except Exception as exc:
            error = explain_failure(exc, {what: value})
            if isinstance(error, MemoryError):
                raise error from None
            if rest:
                self._absent = absent_parts(value, what, instead or {}, to_cpu=True)
            raise error.with_value(value if self._absent else None) from None
        views = [buffer.raw() for buffer in pickler.buffers] if offer and self.reads_memory else []
        if sum(view.nbytes for view in views) < rank_memory.LEAST:
            return pack(pickler.file.getbuffer(), pickler.buffers, what=what)
        copied = self._offer(views)
        parcel = pack(pickler.file.getbuffer(), [] if copied else pickler.buffers, what=what)
        self.reads_memory = copied  # else it may not; for what does not fit in the kernel does not fit here either
        return parcel

    def _offer(self, views: Sequence[memoryview]) -> bool:
        """Offer an answer's buffers to the kernel, which can copy them from this process's memory. Return whether the
        kernel has copied them.
        """
        self._interrupts.refuse()  # the call is as good as over, and a reply must not be torn in two
        self._channel.send(protocol.Buffers(rank_memory.locate(views)))
        answer, _, _ = self._channel.receive()
        if not isinstance(answer, protocol.Copied):  # the kernel says goodbye
            raise EOFError(f"{type(answer).__name__} instead of an answer")
        return answer.copied


def _plain(exc: BaseException, tb: types.TracebackType | None) -> str:
    """Return the traceback as Python prints it, without the exception's own text if that raises."""
    try:
        return "".join(traceback.format_exception(type(exc), exc, tb))
    except _ANY:
        return "".join(["Traceback (most recent call last):\n", *traceback.format_tb(tb), type(exc).__qualname__])


def _rendered(exc: BaseException, tb: types.TracebackType | None) -> list[str]:
    """Return the traceback as the notebook shows it, if possible: IPython cannot render every traceback."""
    try:
        return [str(line) for line in shell.render_traceback(exc, tb)]
    except _ANY:
        return []


def own_frames_dropped(exc: BaseException) -> types.TracebackType | None:
    """Remove the rank's own frames from the traceback of `exc`: its loop at the start, an interrupt at the end."""
    tb = exc.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename.startswith(_OWN):
        if tb.tb_next is None and not isinstance(exc, NbdistError):  # it may be a defect of ours
            break
        tb = tb.tb_next
    frame = tb
    while frame is not None and frame.tb_next is not None:
        if frame.tb_next.tb_frame.f_code.co_filename.startswith(_OWN):
            frame.tb_next = None
        frame = frame.tb_next
    drop_last_frames(tb, _CHECKS)  # the user's line that the checks of numbers were called from stays
    return tb
