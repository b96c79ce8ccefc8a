"""The start of a named session's keeper, or the connection to a keeper that already runs."""

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
from ...system.processes import open_standard_descriptors, redirect_to_devnull, register_after_fork
from ...wire.channel import Channel
from ...wire.session_folder import SessionFolder
from ..calls.group import Layout
from ..options import SessionOptions
from .connection import Connection
from .executor import KeeperEngine, NamedExecutor
from .spec import Spec

#: Descriptors in one message: the system takes 253.
_FDS = 99


def check_engine(name: str, engine: Any) -> None:
    """Raise `ValueError` for an engine that can start ranks only for its own process."""
    if not hasattr(engine, "origin"):
        raise ValueError(
            f"name must be None for ranks of {type(engine).__name__}, got {name!r}: the engine has no `origin`, which "
            f"ranks that outlive the notebook need (see nbdist.engines.contract)"
        )


def start(options: SessionOptions, layout: Layout, engine: Engine) -> tuple[NamedExecutor, KeeperEngine]:
    """Start a keeper for a session with these options, and return the executor and the engine of the session in this
    process.

    Raises:
        NbdistError: A session with this name exists, or its keeper could not start.
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
    try:
        executor = NamedExecutor(folder, spec)
    except BaseException:  # an interrupt: the caller gets no session, and makes it again by the same name
        Connection(folder).end_keeper()
        raise
    return executor, KeeperEngine(executor.connection.send)


def find(folder: SessionFolder) -> tuple[SessionOptions, NamedExecutor, KeeperEngine]:
    """Return the options, the executor and the engine of a folder's session, whose keeper may have ended."""
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
    """The process of a keeper that has no session yet. Until it gets one, it ends with this process."""

    def __init__(self) -> None:
        open_standard_descriptors()
        ours, theirs = socket.socketpair()
        with contextlib.closing(theirs):
            self._process = interpreter.start(
                "nbdist.keeper.main", str(theirs.fileno()), env={}, pass_fds=[theirs.fileno()]
            )
        self._channel = Channel(ours)
        register_after_fork(self)

    def after_fork(self) -> None:
        """Forget the keeper in a child of this process: it belongs to the parent."""
        redirect_to_devnull(self._channel.fileno())

    def warm(self, modules: Sequence[str]) -> None:
        """Make the keeper's fork server import modules, and torch."""
        self._channel.send(("warm", list(modules), kernel_shell() is not None))

    def keep(self, name: str, spec: Spec, lent: Sequence[int]) -> None:
        """Make the keeper hold a session, and the descriptors `lent`. Raises `NbdistError` if it cannot, and `OSError`
        or `EOFError` if it has ended."""
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
    """Prepare a keeper for the next session with a name, with torch and these modules imported. Returns at once."""
    if not _ready:
        _ready.append(_NewKeeper())
    try:
        _ready[0].warm(modules)
    except ConnectionError:  # it was killed
        _ready[:] = [_NewKeeper()]
        _ready[0].warm(modules)


def _start_keeper(folder: SessionFolder, spec: Spec, lent: Sequence[int]) -> None:
    """Start the keeper of a session. Raises `NbdistError` if a session with this name exists."""
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
