"""Starts the keeper of a named session, or finds the one that there is."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any

from ...engines import in_use
from ...engines.contract import Engine
from ...engines.origin import here
from ...errors import NbdistError
from ...notebook.shell import kernel_shell
from ...system import interpreter
from ...system.processes import redirect_to_devnull, register_after_fork
from ...wire.channel import Channel
from ...wire.session_folder import SessionFolder
from ..calls.group import Layout
from ..options import SessionOptions
from .executor import KeeperEngine, NamedExecutor
from .spec import Spec

#: Descriptors in one message: the system takes 253.
_FDS = 99


def check_engine(name: str, engine: Any) -> None:
    """Raise `ValueError` for an engine that cannot start ranks for another process than its own."""
    if not hasattr(engine, "origin"):
        raise ValueError(
            f"name must be None for ranks of {type(engine).__name__}, got {name!r}: it has no `origin`, which an "
            f"engine needs for ranks that outlive the notebook (see nbdist.engines.contract)"
        )


def start(options: SessionOptions, layout: Layout, engine: Engine) -> tuple[NamedExecutor, KeeperEngine]:
    """Start a keeper for a session with these options, and return what stands for its executor and engine here.

    Raises:
        NbdistError: There is a session of this name, or its keeper could not start.
    """
    assert options.name is not None
    variables, lent = engine.lend()
    spec = Spec(
        layout=layout,
        env=dict(options.env or {}),
        start=options.start,
        keep=options.keep,
        idle=options.idle,
        engine=in_use() if options.engine is None else options.engine,
        opened_by=variables,
        origin=here(),
        executor=options.for_executor(),
        options=dict(vars(options)),
    )
    folder = SessionFolder(options.name)
    _start_keeper(folder, spec, lent)
    executor = NamedExecutor(folder, spec)
    return executor, KeeperEngine(executor.connection.send)


def find(folder: SessionFolder) -> tuple[SessionOptions, NamedExecutor, KeeperEngine]:
    """Return the options of the session of a folder, and its executor and engine; the keeper may have ended."""
    about = folder.about()
    layout = Layout(about.get("devices", ["cpu"]), "gloo", {}, None, {}, None)
    spec = Spec(layout, {}, "forkserver", 0, 0.0, "local", {}, None, SessionOptions().for_executor(), {})
    executor = NamedExecutor(folder, spec)
    if not folder.other_version():
        with contextlib.suppress(NbdistError):
            spec = executor.connection.ask("spec")
            executor.use(spec)
    return SessionOptions(**{"name": folder.name, **spec.options}), executor, KeeperEngine(executor.connection.send)


class _NewKeeper:
    """A keeper's process that does not know yet which session is its own. It ends with this process until then."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with contextlib.closing(theirs):
            self._process = interpreter.start(
                "nbdist.keeper.main", str(theirs.fileno()), env={}, pass_fds=[theirs.fileno()]
            )
        self._channel = Channel(ours)
        register_after_fork(self)

    def after_fork(self) -> None:
        """In a child of this process: the keeper is not its own."""
        redirect_to_devnull(self._channel.fileno())

    def warm(self, modules: Sequence[str]) -> None:
        """Have its fork server import modules, and torch."""
        self._channel.send(("warm", list(modules), kernel_shell() is not None))

    def keep(self, name: str, spec: Spec, lent: Sequence[int]) -> None:
        """Have it keep a session, and hold the descriptors `lent`. Raises `NbdistError` where it cannot, `OSError` or
        `EOFError` where it is gone."""
        self._process.wait()  # it has forked the keeper
        with contextlib.closing(self._channel.sock):
            for start in range(0, len(lent), _FDS):
                self._channel.send(("hold",), fds=lent[start : start + _FDS])
            self._channel.send(("keep", name, spec))
            (kind, *why), _, _ = self._channel.receive()
        if kind != "ready":
            raise NbdistError(f"the keeper of the session {name!r} could not start: {why[0]}")


_ready: list[_NewKeeper] = []
"""A keeper for the next session with a name."""


def warm(modules: Sequence[str]) -> None:
    """Have a keeper ready for the next session with a name, with torch and these modules imported. Returns at once."""
    if not _ready:
        _ready.append(_NewKeeper())
    try:
        _ready[0].warm(modules)
    except ConnectionError:  # it was killed
        _ready[:] = [_NewKeeper()]
        _ready[0].warm(modules)


def _start_keeper(folder: SessionFolder, spec: Spec, lent: Sequence[int]) -> None:
    """Start the keeper of a session. Raises `NbdistError` where there is a session of this name."""
    try:
        folder.make()
    except FileExistsError:
        known = f"nbdist.attach({folder.name!r}) gives it, and its close() ends it"
        raise NbdistError(f"there is a session {folder.name!r} already: {known}") from None
    try:
        if _ready:
            with contextlib.suppress(EOFError, ConnectionError):  # it was killed
                _ready.pop().keep(folder.name, spec, lent)
                return
        _NewKeeper().keep(folder.name, spec, lent)
    except BaseException as exc:
        folder.remove()
        if isinstance(exc, (EOFError, ConnectionError)):
            raise NbdistError(f"the keeper of the session {folder.name!r} ended while it started") from None
        raise
