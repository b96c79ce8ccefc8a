"""A rank's loop: what the kernel asks for, one request after the other, until it hangs up."""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import notebook
from ..fastai.patches import patched
from ..wire.channel import Channel
from ..wire.connections import Address
from ..wire.messages import Header, Setting, World
from ..wire.parcel import Parcel
from ..wire.processes import blind, forget_in_children
from . import cells, gpu_state, process, shell, streams
from .call import Caller
from .debugger import Debugger
from .interrupts import Interrupts
from .items import Mapper
from .keyboard import Keyboard
from .outcome import Answer, Outcomes, own_frames_dropped
from .world import Membership, abort, enter_setting, let_go, process_groups, seed_everything


class Rank:
    """One rank: its channel to the kernel, its process group, and what it remembers between calls."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._interrupts = Interrupts(lambda what, seconds: channel.send(("finishing", what, seconds)))
        self._membership = Membership()
        self._keyboard = Keyboard(channel, self._membership)
        self._debugger = Debugger(self._keyboard)
        self._caller = Caller()
        self._outcomes = Outcomes(channel, self._caller, self._membership, self._interrupts)
        self._mapper = Mapper(self._caller)
        self._descriptors: list[int] = []
        """Those that a process of a context is given, beside its own."""
        self._keep_frames = False
        self._frames: types.TracebackType | None = None
        """Of the call that has raised, for the debugger."""

    def after_fork(self) -> None:
        """In a process that the function forks: it must not speak for the rank, nor seem to be one."""
        blind(self._channel.fileno())

    def abort(self, group: int, peers: Sequence[Address]) -> None:
        """In another thread, after an interrupt was sent: let the main thread leave what it waits for.

        On a busy machine that may be heard late. What is done in the next process group is not broken off.
        """
        block, groups = self._interrupts.block, process_groups()
        if group == self._membership.number:  # so these are of it, too
            self._interrupts.insist(block)
            _thread.start_new_thread(abort, (groups, peers))  # a communicator may take its time

    def serve(self) -> int:
        """Answer the kernel until it says goodbye or is gone; or be a process of a context. Returns the exit code."""
        pid = os.getpid()
        forget_in_children(self)
        self._interrupts.install()
        shell.enter()
        self._keyboard.install()
        self._debugger.install()
        cells.debugger = self._debugger
        self._caller.install()
        handlers: dict[str, Callable[..., Answer | None]] = {
            "join": self._join,
            "call": self._call,
            "debug": self._debug,
            "empty_cache": self._empty_cache,
            "widget": self._widget,
            "begin": self._mapper.begin,
            "items": self._items,
        }
        while True:
            ends = ""  # why the rank does, after its answer
            try:
                (request, *arguments), parcel, fds = self._channel.receive()
            except EOFError:
                return 0
            if request == "close":
                return 0
            if request == "line":  # an interrupt came before the answer to a question
                continue
            if request == "descriptors":
                self._descriptors += fds
                continue
            if request == "process":
                setting, start, header = arguments
                assert parcel is not None
                self._keyboard.refusal = "a process has no cell that could ask"
                return process.run(self._channel, self._caller, setting, start, header, parcel, self._descriptors)
            if request == "leave":
                self._membership.leave(*arguments)
                continue
            # A rank that is interrupted while it joins would be lost. The others may have begun the call by then, and
            # failed: it begins, too, and hears the interrupt there.
            allowed = contextlib.nullcontext() if request == "join" else self._interrupts.allowed()
            try:
                with allowed, patched():
                    if request not in ("join", "items"):  # a board says when items are over
                        self._channel.send(("begun",))  # an interrupt that came before this was not heard
                    answer = handlers[request](*arguments, parcel, fds)
            except BaseException as exc:
                if os.getpid() == pid:
                    self._channel.send(("raised",))  # it may take a while to tell what
                if request == "join":
                    ends = "could not join the process group"
                elif request == "call" and gpu_state.is_lost(exc):
                    ends = "cannot use its GPU any more, after a CUDA error"
                answer = self._error(exc, ends)
            finally:
                if parcel is not None:  # of a call that has failed, or was interrupted, before it was opened
                    parcel.close()
            if os.getpid() != pid:  # a process that the function forked must not answer in its place
                return 0
            if answer is not None:
                message, parcel = answer
                streams.flush()
                self._channel.send(message, parcel)
                if parcel is not None:
                    parcel.close()
                if ends:
                    return 0
            del answer, parcel

    def _join(
        self, world: World, setting: Setting | None, seeds: Sequence[int] | None, _parcel: None, fds: list[int]
    ) -> None:
        """Enter a process group. The `setting` comes with the first one only: what calls have changed of it stays."""
        if setting is not None:
            enter_setting(setting)
            self._outcomes.reads_memory = setting.reads_memory
        self._membership.join(world, fds)
        if seeds is not None:
            seed_everything(seeds)

    def _call(
        self,
        header: Header,
        seeds: Sequence[int] | None,
        answers: bool,
        keep_frames: bool,
        place: int,
        restarts: Mapping[str, str],
        parcel: Parcel,
        _fds: list[int],
    ) -> Answer:
        self._keep_frames = keep_frames
        if self._frames is not None:
            frames, self._frames = [self._frames], None
            let_go(frames)
        before = _waited()
        value = self._caller.run(header, seeds, place, restarts, parcel)
        waited = _waited() - before
        # What was written for torchrun ends with `destroy_process_group`: the next call needs another group then.
        grouped = sys.modules["torch.distributed"].is_initialized()
        return self._outcomes.value(value, grouped, answers, waited)

    def _empty_cache(self, _parcel: None, _fds: list[int]) -> Answer:
        gpu_state.empty_cache()
        return ("done", True), None

    def _widget(self, content: dict[str, Any], buffers: Sequence[bytes], _parcel: None, _fds: list[int]) -> Answer:
        """Between calls: let a widget hear what was done to it in the page."""
        notebook.hear_comm(content, buffers)
        shell.after_call()
        return ("done", True), None

    def _debug(self, _parcel: None, _fds: list[int]) -> Answer:
        assert self._frames is not None
        self._debugger.post_mortem(self._frames)
        return ("done", True), None

    def _items(self, first: int, parcel: Parcel, _fds: list[int]) -> Answer:
        self._keyboard.refusal = "a worker of a pool has no cell that could ask"
        seconds, values = self._mapper.run(first, parcel)
        return self._outcomes.items(seconds, values)

    def _error(self, exc: BaseException, ends: str) -> Answer:
        tb = own_frames_dropped(exc)
        if self._keep_frames:
            self._frames = tb
        return self._outcomes.error(exc, tb, ends)


def _waited() -> float:
    """Seconds that this process has waited for other ranks, as far as that is counted: in nbdist's own collectives."""
    collectives = sys.modules.get("nbdist.wire.shared_collectives")
    return 0.0 if collectives is None else float(collectives.waited)
