"""Errors of a call, as users see them.

Exception
└── NbdistError base of all errors that nbdist itself raises
    ├── CaptureError     something that the call needs cannot be pickled
    ├── NotFinite        a loss, gradient or parameter is NaN or infinite
    ├── RankDied         a rank's process ended without an answer
    ├── RankMismatch a value that must be equal on all ranks is not
    ├── RankStuck ranks of a call wait for something that will never happen
    ├── RankTimeout      a call took longer than its `timeout`
    └── WorkerDied       a worker of a pool, or of `parallel_map`, ended without an answer

An exception that the user's function raises in a rank is none of these. It keeps its own type, and its cause is a
`RemoteTraceback` (the rank's traceback as text).
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from .checks import explain_arguments
from .deaths import describe_status
from .notebook.shell import cell_numbers, fails_at_cause_of_exit, forget_shown_traceback
from .system.interrupts import kept_interrupts

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_PACKAGE = os.path.dirname(__file__) + os.sep
#: What can lie between the user's code and a call: nbdist itself, `Future.result`, IPython's running of magics (which
#: before 8.0 goes through functions that the package `decorator` makes).
_BETWEEN = re.compile(
    rf"{re.escape(os.path.dirname(__file__))}/|/concurrent/futures/|/IPython/|/decorator[./]|<decorator-gen-"
)


class NbdistError(Exception):
    """Base class of all errors that nbdist itself raises.

    Examples:
        >>> from nbdist import Session
        >>> session = Session(2)
        >>> session.close()
        >>> session.run(print)
        Traceback (most recent call last):
        nbdist.errors.NbdistError: this session is closed; make a new one
    """

    def _render_traceback_(self) -> list[str]:  # IPython asks for it
        return render(self)


class CaptureError(NbdistError):
    """Something that a call needs cannot be pickled; the message names the variable and the path inside it.

    Attributes: `value`, the function's value if only a part of it cannot be sent or rebuilt, with an `Absent` in the
    place of this part; otherwise None.

    Examples:
        >>> from nbdist import in_ddp
        >>> data = {"rows": (row for row in range(3))}
        >>> def count():
        ...     return len(list(data["rows"]))
        >>> in_ddp(2, count)
        Traceback (most recent call last):
        nbdist.errors.CaptureError: data['rows'] cannot be sent between the notebook and the ranks: it is of type ...
    """

    value: Any = None

    def with_value(self, value: Any) -> CaptureError:
        """Store the readable parts of a function's value in the error, and mention them in its text. None: there
        are none.
        """
        if value is None:
            return self
        said = (
            f"{self}\nAll else that the function returned is the `value` of this error (`sys.last_value.value` in the "
            f"next cell), with an object that says why in the place of what is missing."
        )
        error = type(self)(said)
        error.value = value
        return error


class NotFinite(NbdistError):
    """A loss, a gradient or a parameter is NaN or infinite; raised with `check="nan"`, before the step is taken.

    Attributes: `step`, the step of the optimizer, from 1 (for a parameter: the step whose update made it so); `rank`;
    `kind` ("loss", "gradient" or "parameter"); `op`, the operation, such as "log"; `module`, the path of the module in
    the model; `parameter`, the name of the parameter; `rows`, the numbers of the rows in the batch; `values`, a dict
    from column to value for each of these rows. An attribute is empty if its value is unknown.

    Examples:
        >>> import torch
        >>> from nbdist import in_ddp
        >>> def train():
        ...     weight = torch.nn.Parameter(torch.zeros(1))
        ...     optimizer = torch.optim.SGD([weight], lr=0.1)
        ...     for _ in range(3):
        ...         weight.log().sum().backward()
        ...         optimizer.step()
        >>> in_ddp.options(check="nan")(2, train)
        Traceback (most recent call last):
        nbdist.errors.NotFinite: the loss of step 1 is -inf on rank ...: the result of log is not finite...
    """

    def __init__(
        self,
        text: str,
        *,
        step: int = 0,
        rank: int = 0,
        kind: str = "",
        op: str = "",
        module: str = "",
        parameter: str = "",
        rows: Sequence[int] = (),
        values: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.step, self.rank, self.kind, self.op = step, rank, kind, op
        self.module, self.parameter, self.rows, self.values = module, parameter, list(rows), list(values)
        super().__init__(text)


class RankDied(NbdistError):
    """A rank's process ended before it answered.

    Attributes: `rank`, `pid`, `status` (exit code, or minus the number of the signal that killed it), `reason` (what
    has ended together with the rank, such as its node; otherwise empty).

    Examples:
        >>> import os
        >>> from nbdist import in_ddp
        >>> in_ddp(2, os._exit, 3)
        Traceback (most recent call last):
        nbdist.errors.RankDied: rank ... (pid ...) left with exit code 3 before its function returned
    """

    def __init__(self, rank: int, pid: int | None, status: int | None, output: str = "", reason: str = "") -> None:
        self.rank, self.pid, self.status, self.output, self.reason = rank, pid, status, output, reason
        who = f"rank {rank}" if pid is None else f"rank {rank} (pid {pid})"
        message = f"{who} {reason or describe_status(status)}"
        if output:
            message += f"\nLast output of rank {rank}:\n{output.rstrip()}"
        super().__init__(message)

    def __reduce__(self) -> tuple[type[RankDied], tuple[int, int | None, int | None, str, str]]:
        return RankDied, (self.rank, self.pid, self.status, self.output, self.reason)


class RankMismatch(NbdistError):
    """A value that must be equal on all ranks is not, or all ranks train on the same rows; see `check="ranks"`.

    Attributes: `step`, the step of the optimizer, from 1; `tensor`, the name of the parameter or buffer, or "rows";
    `ranks`, the ranks that differ from most others, or that have the same rows.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from nbdist import in_ddp
        >>> def train():
        ...     model = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     model(torch.ones(1, 1) * dist.get_rank()).sum().backward()
        ...     optimizer.step()
        >>> in_ddp.options(check="ranks")(2, train)
        Traceback (most recent call last):
        nbdist.errors.RankMismatch: after step 1, parameter `weight` is not the same on all ranks: ...
    """

    def __init__(self, text: str, *, step: int = 0, tensor: str = "", ranks: Sequence[int] = ()) -> None:
        self.step, self.tensor, self.ranks = step, tensor, list(ranks)
        super().__init__(text)


class RankStuck(NbdistError):
    """The ranks of a call can never go on, for example because one waits in a collective that another has left out.

    Raised with `on_hang="raise"`. The text describes what each rank does, why the call cannot end and what helps, and
    has the stacks of all ranks.

    Examples:
        >>> from nbdist import Session
        >>> def train():
        ...     import torch.distributed as dist
        ...     if dist.get_rank() == 0:
        ...         dist.barrier()
        >>> with Session(2, on_hang="raise") as session:
        ...     session.run(train)
        Traceback (most recent call last):
        nbdist.errors.RankStuck: this call hangs: rank 0 waits in barrier ...
    """


class RankTimeout(NbdistError, TimeoutError):
    """A call took longer than its timeout; its ranks were ended.

    Examples:
        >>> import time
        >>> from nbdist import Session
        >>> with Session(2, timeout=0.5) as session:
        ...     session.run(time.sleep, 60)
        Traceback (most recent call last):
        nbdist.errors.RankTimeout: not done after 0.5 s: rank 0 ...
    """


class WorkerDied(NbdistError):
    """A worker of a pool, or of `parallel_map`, ended before it answered.

    Attributes:
        name: The name of the worker.
        pid: The process id of the worker.
        status: The exit code of the worker, or minus the number of the signal that killed it.
        doing: The item that the worker was processing, if known.
        reason: The reason why the worker could not be started.

    Examples:
        >>> import os
        >>> from nbdist import parallel_map
        >>> parallel_map(os._exit, [3], progress=False)
        Traceback (most recent call last):
        nbdist.errors.WorkerDied: worker 0 (pid ...) left with exit code 3 before its function returned, at item 0 (3)
    """

    def __init__(
        self, name: str, pid: int | None, status: int | None, output: str = "", doing: str = "", reason: str = ""
    ) -> None:
        self.name, self.pid, self.status, self.output, self.doing, self.reason = (
            name,
            pid,
            status,
            output,
            doing,
            reason,
        )
        who = name if pid is None else f"{name} (pid {pid})"
        message = f"{who} {reason or describe_status(status)}"
        if doing:
            message += f", {doing}"
        if output:
            message += f"\nIts last output:\n{output.rstrip()}"
        super().__init__(message)

    def __reduce__(self) -> tuple[type[WorkerDied], tuple[Any, ...]]:
        return WorkerDied, (self.name, self.pid, self.status, self.output, self.doing, self.reason)


class RemoteTraceback(Exception):
    """The traceback of an exception in a rank, as text. It occurs only as the cause of that exception.

    Attributes: `rank`, `pid`, `text` (as Python prints it), `rendered` (as the notebook shows it, if there is one),
    `others` (a line for each other rank that failed by itself), `who` (the name of the rank for users), `where` (the
    rank's task, if known), `hints` (possible remedies), `inside` (how to look at its frames).
    """

    def __init__(self, rank: int, pid: int | None, text: str, rendered: Sequence[str] = ()) -> None:
        self.rank, self.pid, self.text, self.rendered = rank, pid, text, list(rendered)
        self.others: list[str] = []
        self.hints: list[str] = []
        self.inside = ""
        self.who, self.where = f"rank {rank}", ""
        self.unread: Any = None  # the exception as bytes, in a process that passes it on
        super().__init__(rank, pid, text)

    def __str__(self) -> str:
        head = f"on {self.who} (pid {self.pid}){self.where}"
        return "\n".join([f"{head}\n\n{self.text.rstrip()}", *self.others, *self.hints])


def entry(fn: F, name: str = "") -> F:
    """Decorate a public function: tracebacks show one frame for all frames of nbdist.

    If `fn` does not take the arguments, the error names the arguments that it takes. `name` is the function's name in
    this error, by default its own.
    """

    @functools.wraps(fn)
    def nbdist(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        try:
            with kept_interrupts():
                return fn(*args, **kwargs)
        except BaseException as exc:
            if isinstance(exc, TypeError) and exc.__traceback__ is not None and exc.__traceback__.tb_next is None:
                what = explain_arguments(fn, kwargs, name or fn.__name__)
                exc.args = (what if "has no argument" in what else f"{exc}; {what}",)
            if not _is_meant(exc):
                raise
            let_notebook_render(exc)
            if isinstance(exc, SystemExit) and fails_at_cause_of_exit():
                exc.__cause__ = None  # a notice has said which rank has left, and where
            raise exc.with_traceback(None)  # noqa: B904 (up to 3.10 `raise` alone has the old traceback)

    return nbdist  # type: ignore[return-value]


def entry_class(name: str) -> Callable[[type[T]], type[T]]:
    """Decorate a public class as `entry` decorates functions; `name` is its name in errors."""

    def decorate(cls: type[T]) -> type[T]:
        cls.__init__ = entry(cls.__init__, name)  # type: ignore[method-assign]
        return cls

    return decorate


def _is_meant(exc: BaseException) -> bool:
    """Return whether a traceback needs no frames of nbdist: for a rank's exception, an interrupt, or an error that
    nbdist raises on purpose.

    Any other exception may be a defect of nbdist, or of the user's code, such as a `__reduce__`: its frames are shown.
    """
    if isinstance(exc, (NbdistError, KeyboardInterrupt)) or isinstance(exc.__cause__, RemoteTraceback):
        return True
    innermost = traceback.extract_tb(exc.__traceback__)[-1]
    raised = innermost.filename.startswith(_PACKAGE) and (innermost.line or "").startswith("raise ")
    return raised or innermost.filename == __file__  # called with arguments that it does not take


def let_notebook_render(exc: BaseException) -> None:
    """Make the notebook show `exc` as `render` does, without nbdist's frames."""
    with contextlib.suppress(AttributeError):  # a class with slots
        exc._render_traceback_ = functools.partial(render, exc)  # type: ignore[attr-defined]


def render(exc: BaseException) -> list[str]:
    """Return the text of an exception from a rank for the notebook: the line of the call, then the rank's traceback."""
    drop_last_frames(exc.__traceback__, _PACKAGE)  # `%debug` starts in the user's code
    forget_shown_traceback()
    site = _call_site(exc.__traceback__)
    remote = exc.__cause__
    if not isinstance(remote, RemoteTraceback):
        return [*site, "".join(traceback.format_exception_only(type(exc), exc)).rstrip()]
    inside = f" ({remote.inside})" if remote.inside else ""
    title = f"{remote.who} (pid {remote.pid}) raised {type(exc).__name__}{remote.where}{inside}"
    return [*site, title, *(remote.rendered or [remote.text.rstrip()]), *remote.others, *remote.hints]


def drop_last_frames(tb: types.TracebackType | None, folder: str) -> None:
    """Remove the frames of files in a folder from the end of a traceback, unless it has no other frames."""
    last = None
    while tb is not None:
        if not tb.tb_frame.f_code.co_filename.startswith(folder):
            last = tb
        tb = tb.tb_next
    if last is not None:
        last.tb_next = None


def _call_site(tb: types.TracebackType | None) -> list[str]:
    """Return the innermost frame outside nbdist, with its callers, as a traceback shows it."""
    frames = [f for f in traceback.extract_tb(tb) if not _BETWEEN.search(f.filename)]
    if not frames or (frames[-1].line or "").startswith("get_ipython().run_cell_magic("):  # the rank's traceback has it
        return []
    frame, numbers = frames[-1], cell_numbers()
    number = numbers.get(frame.filename)
    place = f"File {frame.filename}:{frame.lineno}" if number is None else f"Cell In[{number}], line {frame.lineno}"
    return [f"{place}\n----> {frame.lineno} {frame.line}\n"]


def summary(exc: BaseException) -> str:
    """Describe an exception in one line: the rank that raised it, its type, and the first line of its text."""
    remote = exc.__cause__
    who = f"rank {remote.rank} (pid {remote.pid}) raised " if isinstance(remote, RemoteTraceback) else ""
    return f"{who}{type(exc).__name__}: {text_of(exc).partition(chr(10))[0]}"


def text_of(exc: BaseException) -> str:
    """Return `str(exc)`, or a substitute if `__str__` raises."""
    try:
        return str(exc)
    except (Exception, SystemExit):
        return "<its str() raises>"


def stand_ins(exc: BaseException) -> list[BaseException]:
    """Return substitutes for an exception that cannot be pickled or rebuilt, the most similar first: one of its type
    without its attributes, then its base types, with its name and text."""
    text = f"{type(exc).__qualname__}: {text_of(exc)}"
    found: list[BaseException] = []
    for base in type(exc).__mro__:
        if issubclass(base, BaseException) and base.__module__ != "__main__":
            try:
                found.append(base(*exc.args) if base is type(exc) else base(text))
            except (Exception, SystemExit):  # one that takes other arguments, such as UnicodeDecodeError
                continue
    return found
