"""`in_ddp`, which runs a function on ranks, and `warm`, which prepares the first call."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar

from .. import engines
from ..capture.imports import modules_named, parse_imports
from ..capture.need import Names
from ..checks import check_count, check_flag, check_number, shown
from ..devices import count_gpus, place_ranks
from ..engines import warm_ranks
from ..errors import NbdistError, entry, entry_class
from .calls.arguments import check_platform, checks_named
from .calls.group import Layout
from .calls.stopping import nothing_sent
from .in_kernel import run_in_kernel
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
    and only `imports`, `need` and `check` are used.

    Raises:
        TypeError, ValueError: An option is invalid.

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
        *args: The positional arguments of `fn`. `per_rank([...])` gives each rank a value of its own.
        imports: Import statements (one string or a list), executed in each rank's `__main__` before `fn`. Names that
            they define are not captured.
        need: Further names of notebook variables to send: a string, a list, or a mapping name → value.
        **kwargs: The keyword arguments of `fn`.

    Returns:
        The value of `fn` on rank 0, with its CUDA tensors on the CPU.

    Raises:
        TypeError, ValueError, NameError, CaptureError: Before any rank starts: an argument is invalid, there are too
            few GPUs, a name is unknown, or an object cannot be pickled.
        RankDied: A rank's process has ended without an answer.
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
        found: T = run_in_kernel(fn, args, kwargs, own.imports, own.need, checks_named(own.check))
        return found
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
    """Open pdb in a rank of the last `in_ddp.options(hold_on_error=True)(...)`, which raised an exception. Afterwards,
    end its ranks.

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
def warm(
    imports: str | Iterable[str] = "",
    *,
    idle: float | None = None,
    named: bool = False,
    gpus: bool | int = False,
) -> None:
    """Start the fork server in the background, with torch and the modules of `imports` loaded. Returns at once.

    Your own modules (not installed ones) are imported by the ranks, so that they see your edits. The same holds for
    modules that start threads or CUDA when they are imported.

    Args:
        imports: Import statements, as for `in_ddp`.
        idle: The number of seconds without use after which the server ends; half an hour by default. The next call
            starts a new one.
        named: Whether to start, instead, a keeper with its own fork server, for the next session with a `name`.
        gpus: Whether to start, in addition, a rank for each visible GPU. Each of these ranks creates the context of its
            GPU and waits. The next `in_ddp` or `Session` with this number of ranks takes these ranks, and others wait
            after its end. A number starts ranks for that number of GPUs. Each waiting rank uses some hundred MB of its
            GPU. The ranks end after `idle` seconds without use.

    Raises:
        TypeError, ValueError: An argument is invalid, or there are too few GPUs for `gpus`.

    Examples:
        >>> warm("from fastai.collab import *")
    """
    check_platform()
    modules = modules_named(parse_imports(imports))
    if idle is not None:
        check_number(idle, above=0, name="idle", unit="seconds")
    check_flag(named, name="named")
    layout = _layout_to_warm(gpus) if gpus else None
    if named:
        if layout is not None:
            raise ValueError("gpus must be False with named=True, got both: call warm once for each")
        from .named import starting

        starting.warm(modules)
        return
    engine = engines.resolve(None)
    local = None if layout is None else warm_ranks.require_local(engine)
    engine.warm(modules)
    if idle is not None:
        engine.idle(idle)
    if layout is not None and local is not None:
        places = place_ranks(layout.devices, layout.visible)
        warm_ranks.start(local, places, warm_ranks.IDLE if idle is None else idle)


def _layout_to_warm(gpus: bool | int) -> Layout:
    """Return the layout of the ranks that `warm(gpus=...)` starts."""
    if not isinstance(gpus, bool):
        check_count(gpus, least=0, name="gpus")
    found, are_visible = count_gpus(os.environ)
    count = found if gpus is True else gpus
    if not 0 < count <= found:
        most = f"at most {found}" if found else "False without a GPU"
        raise ValueError(f"gpus must be {most}, got {gpus}: {are_visible}")
    return SessionOptions(devices="cuda").layout(count, engines.resolve(None))
