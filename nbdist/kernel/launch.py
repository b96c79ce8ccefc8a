"""`in_ddp`, which runs a function on ranks, and `warm`, which prepares the first call."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from .. import engines
from ..capture.imports import modules_named, parse_imports
from ..capture.need import Names, given_names
from ..capture.per_rank import for_each_rank, own
from ..checks import check_count, check_flag, check_number, shown
from ..devices import choose_backend, choose_devices
from ..errors import NbdistError, entry, entry_class
from ..fastai.patches import patched
from ..rank import world as rank_world
from ..rank.own_groups import OwnGroups
from ..wire.messages import Slot, World
from ..wire.rendezvous import INTERFACE_VARIABLES, LOOPBACK_INTERFACE, Rendezvous, open_store
from .calls.arguments import check_call, check_platform
from .calls.stopping import nothing_sent
from .options import SessionOptions
from .session import Session, call_once, executor_of

T = TypeVar("T")

_held_sessions: list[Session] = []  # the session of the last `in_ddp` that raised, if it was to be held


@entry_class("in_ddp.options")
@dataclass(frozen=True, kw_only=True, eq=False)
class Launcher(SessionOptions):
    """`in_ddp` for one call with all options of a `Session`: `in_ddp.options(...)(ngpus, fn, ...)`.

    All arguments after `fn` belong to the function, even those with the names `imports` or `need`. These two options
    are described at `in_ddp`, the others at `Session`. With `hold_on_error=True`, the ranks of a call that has raised
    stay for `post_mortem`, until that or the next call. With no ranks (`ngpus=0`) the function runs in this process,
    and only `imports` and `need` are used.

    Raises:
        TypeError, ValueError: For options that make no sense.

    Examples:
        >>> import torch
        >>> in_ddp.options(devices="cpu", threads=1, timeout=60)(2, torch.get_num_threads)
        1
    """

    imports: str | Iterable[str] = ""
    need: Names = ""

    @entry
    def __call__(self, ngpus: int, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run `fn(*args, **kwargs)` on `ngpus` ranks, as `in_ddp` does."""
        return _launch(self, ngpus, fn, args, kwargs)


class _InDdp(Protocol):
    """The type of `in_ddp`: a function with the attribute `options`."""

    options: type[Launcher]

    def __call__(
        self,
        ngpus: int,
        fn: Callable[..., T],
        /,
        *args: Any,
        imports: str | Iterable[str] = "",
        need: Names = "",
        **kwargs: Any,
    ) -> T: ...


def _with_options(fn: Any) -> _InDdp:
    fn.options = Launcher
    return fn  # type: ignore[no-any-return]


@_with_options
@entry
def in_ddp(
    ngpus: int,
    fn: Callable[..., T],
    /,
    *args: Any,
    imports: str | Iterable[str] = "",
    need: Names = "",
    **kwargs: Any,
) -> T:
    """Run `fn(*args, **kwargs)` on `ngpus` ranks under `torch.distributed` and return rank 0's value.

    Each rank is a fresh process. Its device is chosen, its process group is initialized (NCCL on GPUs, gloo on a
    machine without GPUs), torchrun's environment variables are set, and all ranks have the same seed, drawn from the
    notebook's random state. Functions, classes and variables of the notebook that `fn` uses are sent with it.

    `in_ddp.options(...)(ngpus, fn, ...)` takes all options of a `Session` for one call, and leaves all arguments to
    `fn`, `imports` and `need` included.

    Args:
        ngpus: The number of ranks. 0 runs `fn` in this process, in a group of one, for `%debug` and breakpoints.
        fn: The function to run, from the notebook, a script or a package.
        *args: The positional arguments of `fn`. `per_rank([...])` gives each rank its own.
        imports: Import statements (one string or a list), executed in each rank's `__main__` before `fn`. Names
            that they give are not captured.
        need: Further names of notebook variables to take along: a string, a list, or a mapping name → value.
        **kwargs: The keyword arguments of `fn`.

    Returns:
        What `fn` returned on rank 0, its CUDA tensors on the CPU.

    Raises:
        TypeError, ValueError, NameError, CaptureError: Before any rank starts, for arguments that make no sense, too
            few GPUs, unknown names, and objects that cannot be pickled.
        RankDied: When a rank's process ends without an answer.
        BaseException: The exception of `fn`, on the rank where it raised first; the cause is that rank's traceback.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> def total(x):
        ...     t = torch.tensor([x])
        ...     dist.all_reduce(t)
        ...     return t.item()
        >>> in_ddp(2, total, 1.5)
        3.0
    """
    return _launch(Launcher(imports=imports, need=need), ngpus, fn, args, kwargs)


def _launch(own: Launcher, ngpus: int, fn: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    check_platform()
    if callable(ngpus):
        raise TypeError(
            f"ngpus must be an integer, got {shown(ngpus)}: the number of ranks comes first, in_ddp(2, train, ...)"
        )
    ngpus = check_count(ngpus, least=0, name="ngpus")
    if ngpus == 0:
        return _in_kernel(fn, args, kwargs, own.imports, own.need)
    _close_held()
    options = {field.name: getattr(own, field.name) for field in fields(SessionOptions)}
    with contextlib.ExitStack() as stack:
        with nothing_sent():
            session = stack.enter_context(Session(ngpus, **options))
        try:
            return call_once(session, fn, args, kwargs, own.imports, own.need)  # type: ignore[no-any-return]
        except BaseException:
            if executor_of(session).raised():
                _held_sessions.append(session)
                stack.pop_all()  # it stays open
            raise


@entry
def post_mortem(rank: int | None = None, commands: Iterable[str] | None = None) -> None:
    """Open pdb in a rank of the `in_ddp.options(hold_on_error=True)(...)` that has just raised; then end its ranks.

    Args:
        rank: The number of the rank. None: the rank whose exception the call raised.
        commands: Debugger commands to run instead of asking for them, such as `["where", "p loss"]`.

    Raises:
        NbdistError: No rank is held.

    Examples:
        >>> def divide(x):
        ...     return 1 / x
        >>> in_ddp.options(hold_on_error=True)(2, divide, 0)
        Traceback (most recent call last):
        ZeroDivisionError: division by zero
        >>> post_mortem(commands=["p x"])
        > <...>(2)divide()
        -> return 1 / x
        (rank ...) p x
        0
        (rank ...) quit
    """
    if not _held_sessions:
        raise NbdistError(
            "no rank is held: post_mortem() follows an in_ddp.options(hold_on_error=True)(...) that raised in a rank. "
            "A session has a post_mortem() of its own."
        )
    try:
        _held_sessions[-1].post_mortem(rank, commands)
    finally:
        _close_held()


def _close_held() -> None:
    while _held_sessions:
        _held_sessions.pop().close()


@entry
def warm(imports: str | Iterable[str] = "", *, idle: float | None = None, named: bool = False) -> None:
    """Start the fork server in the background, with torch and the modules of `imports` loaded. Returns at once.

    Your own modules (not installed ones) are imported by the ranks, so that they see your edits. The same holds for
    modules that start threads or CUDA when they are imported.

    Args:
        imports: Import statements, as for `in_ddp`.
        idle: Seconds after which the server ends when nothing uses it; half an hour by default. The next call starts a
            new one.
        named: Whether to start, instead, a keeper with its own fork server, for the next session with a `name`.

    Examples:
        >>> warm("from fastai.collab import *")
    """
    check_platform()
    modules = modules_named(parse_imports(imports))
    if idle is not None:
        check_number(idle, above=0, name="idle", unit="seconds")
    check_flag(named, name="named")
    if named:
        from .named import starting

        starting.warm(modules)
        return
    engine = engines.resolve(None)
    engine.warm(modules)
    if idle is not None:
        engine.idle(idle)


def _in_kernel(fn: Callable[..., T], args: Any, kwargs: Any, imports: Any, need: Any) -> T:
    block, names = check_call(fn, imports, need)
    args, kwargs = for_each_rank(args, kwargs, 1)
    args, kwargs = [own(value, 0) for value in args], {name: own(value, 0) for name, value in kwargs.items()}
    with given_names(block, names), _group_of_one(), patched(), _breakpoints():
        return fn(*args, **kwargs)


@contextlib.contextmanager
def _breakpoints() -> Iterator[None]:
    """Make `breakpoint()` open pdb. In a kernel it opens the front end's debugger by default, and without one it does
    nothing."""
    hook, debugpy = sys.breakpointhook, sys.modules.get("debugpy")
    if debugpy is not None and not debugpy.is_client_connected():
        sys.breakpointhook = sys.__breakpointhook__
    try:
        yield
    finally:
        sys.breakpointhook = hook


@contextlib.contextmanager
def _group_of_one() -> Iterator[None]:
    """Enter a process group of this process alone, with the environment of a rank; restore both afterwards."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():  # the user's own: it is as good
        yield
        return
    device = choose_devices(1, None)[0]
    if device != "cpu":  # the one that the notebook works with
        device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else device
    environ, own_groups = dict(os.environ), OwnGroups()
    with contextlib.closing(Rendezvous()) as rendezvous:
        world = World(
            rank=0,
            world_size=1,
            device=device,
            visible="" if device == "cpu" else None,
            backend=choose_backend([device], None)[0],
            slot=Slot(0, 0, 1, LOOPBACK_INTERFACE, torch.get_num_threads(), ()),
            rendezvous=rendezvous.address,
            threads=torch.get_num_threads(),
        )
        for name in INTERFACE_VARIABLES:  # the group has no other process to connect to
            os.environ.pop(name, None)
        os.environ.update(rank_world.environ(world))
        try:
            store = open_store(0, 1, rendezvous.address, ())
            own_groups.install()
            group = rank_world.join(world, store)
            own_groups.enter(world, store)
            yield
        finally:
            own_groups.uninstall()
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.clear()
            os.environ.update(environ)
    del group, store, own_groups
