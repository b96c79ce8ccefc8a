"""What runs in a rank: take its place in the world, then call after call until the kernel hangs up."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import os
import pickle
import random
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

from . import capture, cells, debugger, fastai, lending, pickling, shell, transport
from .errors import stand_ins
from .meeting import Meeting, open_store


class Place(NamedTuple):
    """Where a rank runs, in the words of torchrun, and what of the node is its own."""

    node: int
    local_rank: int
    local_world_size: int
    interface: str
    """The network interface that process groups use; empty where it is left to them."""
    threads: int
    """Threads that are its share."""
    cores: Sequence[int]
    """The cores that are its share, where ranks are bound to theirs."""


@dataclass(frozen=True)
class World:
    """A rank's place: who it is, where its process group meets, and what of the machine it may use."""

    rank: int
    world_size: int
    device: str
    """`cpu` or `cuda:N`, N counted among the visible GPUs; `cuda` is that of the rank's number on its node."""
    backend: str
    place: Place
    meeting: Meeting
    threads: int
    """Threads for the kernels of torch and BLAS."""
    cores: Sequence[int] | None = None
    """The cores that the rank is bound to; None leaves it all of them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `init_process_group`, such as the `timeout` of a collective in seconds."""

    def environ(self) -> dict[str, str]:
        """The variables that torchrun would set for this rank, and those that keep its sockets on its network."""
        place = self.place
        variables = {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(place.local_rank),
            "GROUP_RANK": str(place.node),
            "NODE_RANK": str(place.node),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(place.local_world_size),
            **self.meeting.environ(),
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": os.environ.get("MKL_NUM_THREADS", str(self.threads)),
        }
        if place.interface:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                variables[name] = os.environ.get(name, place.interface)
        return variables | (self._cpu_only() if self.device == "cpu" else {})

    def _cpu_only(self) -> dict[str, str]:
        # Accelerate (and so fastai) takes CPU ranks for single processes unless it is told; both would choose a GPU
        # that they see.
        return {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}

    def join(self, fds: Sequence[int]) -> Any:
        """Choose the device and the threads, and enter the process group, with the descriptors of its `MeetingPoint`.

        Returns the store, which lives as long as the group.
        """
        import torch
        import torch.distributed as dist

        if self.cores is not None and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self.cores)
        torch.set_num_threads(self.threads)
        options = dict(self.options)
        if "timeout" in options:
            options["timeout"] = timedelta(seconds=options["timeout"])
        if self.device.startswith("cuda"):
            device = torch.device(f"cuda:{self.place.local_rank}" if self.device == "cuda" else self.device)
            torch.cuda.set_device(device)
            if "nccl" in self.backend:
                options.setdefault("device_id", device)
        store = open_store(self.rank, self.world_size, self.meeting, fds)
        group_store = dist.PrefixStore("nbdist", store)
        dist.init_process_group(self.backend, store=group_store, rank=self.rank, world_size=self.world_size, **options)
        return store


@dataclass(frozen=True)
class Setting:
    """What of the kernel holds in its ranks."""

    environ: Mapping[str, str]
    cwd: str
    path: Sequence[str]
    argv: Sequence[str]
    lends: bool = False
    """Whether the kernel may try to read big answers out of the rank's memory."""

    def enter(self) -> None:
        os.environ.clear()
        os.environ.update(self.environ)
        os.chdir(self.cwd)
        sys.path[:] = self.path
        sys.argv[:] = self.argv


class SourceFinder(importlib.abc.MetaPathFinder):
    """Finds the modules that the kernel has loaded from places that are not on `sys.path` (pytest does so)."""

    def __init__(self) -> None:
        self.places: dict[str, tuple[str | None, list[str] | None]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.places:
            return None
        file, folders = self.places[name]
        if file is None:
            spec = importlib.machinery.ModuleSpec(name, None, is_package=True)
            spec.submodule_search_locations = folders
            return spec
        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)


def seed_everything(seeds: Sequence[int]) -> None:
    """Seed `random`, NumPy (where there is one) and torch, each from its own number."""
    import torch

    for_random, for_numpy, for_torch = seeds
    random.seed(for_random)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(for_numpy % 2**32)
    # torch.manual_seed takes three milliseconds to remember where it was called from, for a CUDA that is not there.
    seed_torch = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
    seed_torch(for_torch)


class Rank:
    """One rank: its channel to the kernel, its world, and what it remembers between calls."""

    def __init__(self, channel: transport.Channel) -> None:
        self.channel = channel
        self.finder = SourceFinder()
        self.sent: set[tuple[str, str]] = set()  # globals that the notebook has: they need not go back with a value
        self.originals: list[Any] = []  # the notebook's functions and classes, by the numbers they have there
        self._interruptible = False
        self._lends = False  # whether the kernel may read big answers out of this process's memory
        self._meeting: list[int] = []  # the descriptors of the process group's store
        self._store: Any = None
        self._hold = False  # whether to keep the frames of a call that raises
        self._held: types.TracebackType | None = None

    def serve(self) -> None:
        """Answer the kernel until it says goodbye or is gone."""
        pid = os.getpid()
        signal.signal(signal.SIGINT, self._on_interrupt)
        shell.enter()
        sys.meta_path.append(self.finder)
        handlers: dict[str, Callable[..., Any]] = {"join": self._join, "call": self._call, "debug": self._debug}
        while True:
            try:
                (request, *arguments), parcel, fds = self.channel.receive()
            except EOFError:
                return
            if request == "close":
                return
            if request == "leave":
                self._leave(*arguments)
                continue
            try:
                with self._interrupts(), fastai.device_agnostic():
                    self.channel.send(("begun",))  # an interrupt that came before this was not heard
                    answer = handlers[request](*arguments, parcel, fds)
            except BaseException as exc:
                if os.getpid() == pid:
                    self.channel.send(("raised",))  # it may take a while to tell what
                answer = self._error(exc)
            if os.getpid() != pid:  # a process that the function forked must not answer in its place
                return
            if answer is not None:
                message, parcel = answer
                sys.stdout.flush()
                sys.stderr.flush()
                self.channel.send(message, parcel)
                if parcel is not None:
                    parcel.close()
                if request == "join":  # it has failed
                    return
            del answer, parcel

    def _on_interrupt(self, signum: int, frame: types.FrameType | None) -> None:
        if self._interruptible:
            self._interruptible = False  # once: what cleans up after it must not be torn away from its work
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _interrupts(self) -> Iterator[None]:
        self._interruptible = True
        try:
            yield
        finally:
            self._interruptible = False

    def _join(
        self, world: World, setting: Setting | None, seeds: Sequence[int] | None, _parcel: None, fds: list[int]
    ) -> None:
        """Enter a process group. The `setting` comes with the first one only: what calls have changed of it stays."""
        if setting is not None:
            setting.enter()
            self._lends = setting.lends
        self._leave()
        listening = [fds.pop()] if world.rank == 0 and world.meeting.store_port else []
        for old, new in zip(self._meeting, fds, strict=False):
            # In the place of the old ones: a store that somebody still holds must not write to some other file.
            os.dup2(new, old, inheritable=False)
            os.close(new)
        self._meeting = self._meeting or fds
        os.environ.update(world.environ())
        self._store = world.join([*self._meeting, *listening])
        for fd in listening:
            os.close(fd)
        if seeds is not None:
            seed_everything(seeds)

    def _leave(self, addresses: Sequence[tuple[str, int]] = ()) -> None:
        """Leave the process group, so that ranks which wait for this one there fail now.

        `addresses` are all ranks' ends of their connections.
        """
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_initialized():
            return
        cut_off(addresses)
        group = dist.group.WORLD
        if "nccl" in dist.get_backend() and hasattr(group, "abort"):
            group.abort()  # what is still queued on the GPU will never be done
        dist.destroy_process_group()
        del group, self._store
        gc.collect()

    def _debug(self, _parcel: None, _fds: list[int]) -> tuple[tuple[Any, ...], None]:
        assert self._held is not None
        debugger.interact(self.channel, self._held)
        return ("done", True), None

    def _call(
        self,
        header: capture.Header,
        seeds: Sequence[int] | None,
        answers: bool,
        hold: bool,
        restarts: Mapping[str, str],
        parcel: transport.Parcel,
        fds: list[int],
    ) -> tuple[tuple[Any, ...], transport.Parcel | None]:
        self._hold, self._held = hold, None
        os.environ.update(restarts)
        if seeds is not None:
            seed_everything(seeds)
        self.finder.places.update(header.places)
        for name, source in header.sources.items():
            capture.keep_source(name, source)
        shell.label_cells(header.cells)
        given = capture.run_imports(header.imports, vars(shell.main)) - header.need
        pickled, buffers = parcel.open()

        def keep(key: str, namespace: dict[str, Any], name: str) -> bool:
            self.sent.add((key, name))
            return not (key == "__main__" and name in given)

        _, fn, args, kwargs, self.originals = pickling.read(pickled, buffers, originals=[], keep=keep)
        del pickled, buffers
        try:
            value = fn(*args, **kwargs)
        finally:
            shell.after_call()
        # What was written for torchrun ends with `destroy_process_group`: the next call needs another group then.
        grouped = sys.modules["torch.distributed"].is_initialized()
        return ("done", grouped), self._pack(value, self.originals, lend=True) if answers else None

    def _pack(self, value: Any, originals: list[Any], lend: bool = False) -> transport.Parcel:
        file = io.BytesIO()
        pickler = pickling.Pickler(
            file,
            skip=lambda key, name: (key, name) in self.sent,
            known={id(obj): number for number, obj in enumerate(originals)},
            to_cpu=True,
        )
        try:
            pickler.dump(value)
        except Exception as exc:
            raise capture.explain_failure(exc, {"the value that the function returned": value}) from None
        lent = lend and self._lends and self._lend([buffer.raw() for buffer in pickler.buffers])
        return transport.pack(file.getbuffer(), [] if lent else pickler.buffers)

    def _lend(self, views: Sequence[memoryview]) -> bool:
        """Let the kernel read an answer's buffers from this process's memory; whether it has."""
        if sum(view.nbytes for view in views) < lending.LEAST:
            return False
        self._interruptible = False  # the call is as good as over, and a reply must not be torn in two
        self.channel.send(("lent", [tuple(loan) for loan in lending.lend(views)]))
        while True:
            (request, *arguments), _, _ = self.channel.receive()
            if request == "taken":
                self._lends = arguments[0]
                return self._lends
            if request == "leave":
                self._leave(*arguments)
            else:  # the kernel says goodbye
                raise EOFError(f"{request} in the place of an answer")

    def _error(self, exc: BaseException) -> tuple[tuple[Any, ...], transport.Parcel | None]:
        tb = own_frames_dropped(exc)
        text = "".join(traceback.format_exception(type(exc), exc, tb))
        try:
            rendered = shell.render_traceback(exc, tb)
        except Exception:  # IPython cannot render everything, a plain traceback always can be
            rendered = []
        spare = []
        for stand_in in stand_ins(exc):
            with contextlib.suppress(Exception):
                spare.append(pickle.dumps(stand_in))
        if self._hold:
            self._held = tb
        exc.__traceback__ = None
        try:
            parcel = self._pack(exc, self.originals)
        except Exception:
            parcel = None
        return ("error", text, rendered, spare), parcel


def cut_off(addresses: Sequence[tuple[str, int]]) -> None:
    """Shut this process's connections to the other processes whose ends are at `addresses`.

    A collective waits until its peer's connection ends, and torch closes those of gloo only when nothing refers to
    the process group any more; a `DistributedDataParallel` does.
    """
    import psutil

    own = psutil.Process().net_connections("tcp")
    theirs = set(map(tuple, addresses)) - {tuple(connection.laddr) for connection in own}
    for connection in own:
        if connection.raddr and tuple(connection.raddr) in theirs and connection.fd >= 0:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as sock:
                sock.shutdown(socket.SHUT_RDWR)


def connections(pids: Iterable[int]) -> list[tuple[str, int]]:
    """The processes' own ends of their TCP connections. One that is gone has none."""
    import psutil

    found: list[tuple[str, int]] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            own = psutil.Process(pid).net_connections("tcp")
            found += [(connection.laddr.ip, connection.laddr.port) for connection in own]
    return found


def own_frames_dropped(exc: BaseException) -> types.TracebackType | None:
    """The traceback of `exc` without the rank's own frames: its loop at the beginning, an interrupt at the end."""
    tb = exc.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename in (__file__, cells.__file__) and tb.tb_next is not None:
        tb = tb.tb_next
    frame = tb
    while frame is not None and frame.tb_next is not None:
        if frame.tb_next.tb_frame.f_code.co_filename in (__file__, shell.__file__):
            frame.tb_next = None
        frame = frame.tb_next
    return tb
