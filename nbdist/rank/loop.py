"""The loop of a rank: it answers the kernel's requests, one after the other, until the kernel closes the connection."""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import types
from collections.abc import Sequence

from ..deaths import NO_GPU, NO_GROUP
from ..fastai.patches import patched
from ..notebook.rank_widgets import handle_comm_message
from ..system.connections import Address
from ..system.processes import redirect_to_devnull, register_after_fork
from ..wire import protocol
from ..wire.channel import Channel
from ..wire.parcel import Parcel
from ..wire.recording import Recorder
from . import cells, frameworks, gpu_state, process, shell, streams
from .call import Caller
from .debugger import Debugger
from .interrupts import Interrupts, kept_grad_mode
from .items import Mapper
from .kernel_channel import KernelChannel
from .keyboard import Keyboard
from .outcome import Answer, Outcomes, own_frames_dropped
from .recorder import CollectiveRecorder
from .sharded import whole
from .stores import name_awaited_keys
from .world import Membership, abort, adopt, destroy_in_background, enter_setting, process_groups, seed_everything


class Rank:
    """A rank: its channel to the kernel, its process group, and its state between calls."""

    def __init__(self, channel: Channel) -> None:
        self._membership = Membership()
        self._channel = KernelChannel(channel.sock, self._membership)
        self._interrupts = Interrupts(lambda what, seconds: self._channel.send(protocol.Finishing(what, seconds)))
        self._keyboard = Keyboard(self._channel)
        self._debugger = Debugger(self._keyboard)
        self._caller = Caller()
        self._outcomes = Outcomes(self._channel, self._caller, self._interrupts)
        self._mapper = Mapper(self._caller)
        self._recorder: CollectiveRecorder | None = None
        self._descriptors: list[int] = []
        """Descriptors that a process of a context gets in addition to its own."""
        self._keep_frames = False
        self._frames: types.TracebackType | None = None
        """Frames of the call that has raised, for the debugger."""

    def after_fork(self) -> None:
        """Give up the connections of the rank in a process that the function forks: it must not act for the rank."""
        redirect_to_devnull(self._channel.fileno())

    def abort(self, group: int, peers: Sequence[Address]) -> None:
        """Abort, in another thread and after an interrupt, the collectives in which the main thread waits.

        On a busy machine the interrupt may act late. Collectives of the next process group are not aborted.
        """
        block, groups = self._interrupts.block, process_groups()
        if group == self._membership.number:  # so these are of it, too
            self._interrupts.resend(block)
            _thread.start_new_thread(abort, (groups, peers))  # a communicator may take its time

    def serve(self) -> int:
        """Answer the kernel until it closes the session or ends, or run a process of a context. Returns the exit
        code."""
        pid = os.getpid()
        register_after_fork(self)
        self._interrupts.install()
        shell.enter()
        self._keyboard.install()
        self._debugger.install()
        cells.debugger = self._debugger
        self._caller.install()
        frameworks.install()
        while True:
            try:
                request, parcel, fds = self._channel.receive()
            except EOFError:
                return 0
            match request:
                case protocol.Close():
                    return 0
                case protocol.Line():  # an interrupt came before the answer to a question
                    pass
                case protocol.Descriptors():
                    self._descriptors += fds
                case protocol.Prepare(environ, visible, device):
                    adopt(environ)
                    gpu_state.prepare(visible, device)
                case protocol.Process():
                    assert parcel is not None
                    self._keyboard.refusal = "a process has no cell that could ask"
                    return process.run(self._channel, self._caller, request, parcel, self._descriptors)
                case _:
                    if not self._serve(request, parcel, fds, pid):
                        return 0

    def _serve(self, request: protocol.ToRank, parcel: Parcel | None, fds: list[int], pid: int) -> bool:
        """Answer one request, and return whether the rank goes on. `pid` is the rank's own process: a fork of it
        must not answer.
        """
        ends = ""  # why the rank does, after its answer
        # A rank that is interrupted while it joins would be lost. The others may have begun the call by then, and
        # failed: it begins, too, and is interrupted there.
        joins = isinstance(request, protocol.Join)
        allowed = contextlib.nullcontext() if joins else self._interrupts.allowed()
        try:
            with kept_grad_mode(), patched(), allowed:
                if not joins and not isinstance(request, protocol.Items):  # a board says when items are over
                    self._channel.send(protocol.Begun())  # an interrupt that came before this was not handled
                answer = self._do(request, parcel, fds)
        except BaseException as exc:
            if os.getpid() == pid:
                self._channel.send(protocol.Raised())  # it may take a while to say what
            if joins:
                ends = NO_GROUP
            elif isinstance(request, protocol.Call) and gpu_state.lost():
                ends = NO_GPU
            answer = self._error(exc, ends)
        finally:
            if parcel is not None:  # of a call that has failed, or was interrupted, before it was opened
                parcel.close()
        if os.getpid() != pid:  # a process that the function forked must not answer in its place
            return False
        if answer is not None:
            message, parcel = answer
            streams.flush()
            self._channel.send(message, parcel)
            if parcel is not None:
                parcel.close()
        if isinstance(request, protocol.Call) and not ends:
            gpu_state.collect_garbage()
        return not ends

    def _do(self, request: protocol.ToRank, parcel: Parcel | None, fds: list[int]) -> Answer | None:
        """Carry out a request."""
        match request:
            case protocol.Join():
                self._join(request, fds)
                return None
            case protocol.Call():
                assert parcel is not None
                return self._call(request, parcel)
            case protocol.Debug():
                assert self._frames is not None
                self._debugger.post_mortem(self._frames)
            case protocol.EmptyCache():
                gpu_state.empty_cache()
            case protocol.Widget(content, buffers):  # between calls
                handle_comm_message(content, buffers)
                shell.after_call()
            case protocol.Begin():
                assert parcel is not None
                self._mapper.begin(request, parcel, fds)
                return None
            case protocol.Items(first):
                assert parcel is not None
                self._keyboard.refusal = "a worker of a pool has no cell that could ask"
                return self._outcomes.items(*self._mapper.run(first, parcel))
            case _:
                raise AssertionError(f"{type(request).__name__} is no request")
        return protocol.Done(grouped=True), None

    def _join(self, request: protocol.Join, fds: list[int]) -> None:
        """Join a process group."""
        if request.setting is not None:
            enter_setting(request.setting)
            self._outcomes.reads_memory = request.setting.reads_memory
        memory = fds.pop() if request.recorded else None
        self._membership.join(request.world, fds)
        if memory is not None:
            self._recorder = CollectiveRecorder(Recorder(memory, request.world.rank))
            self._recorder.install()
            name_awaited_keys()
        elif self._recorder is not None:
            self._recorder.joined()
        if request.seeds is not None:
            seed_everything(request.seeds)

    def _call(self, request: protocol.Call, parcel: Parcel) -> Answer:
        frameworks.default_group.begin_call()
        self._keep_frames = request.keep_frames
        if self._frames is not None:
            frames, self._frames = [self._frames], None
            destroy_in_background(frames)
        self._membership.restore_environ()
        before = _waited()
        value = self._caller.run(request, parcel)
        gpu_state.finish(process_groups())
        instead = whole(value, request.answers)
        waited = _waited() - before
        # What was written for torchrun may end the group, or leave one of its own: the next call needs another then.
        return self._outcomes.value(value, self._membership.is_in(), request.answers, waited, instead)

    def _error(self, exc: BaseException, ends: str) -> Answer:
        tb = own_frames_dropped(exc)
        if self._keep_frames:
            self._frames = tb
        return self._outcomes.error(exc, tb, ends)


def _waited() -> float:
    """Return the seconds in which this process has waited for other ranks; only nbdist's own collectives are
    counted."""
    collectives = sys.modules.get("nbdist.shm.collectives")
    return 0.0 if collectives is None else float(collectives.waited)
