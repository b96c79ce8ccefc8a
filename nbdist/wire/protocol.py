"""The messages between the kernel and its ranks: a class for each, with the sentence that the documentation shows.

A process of a context and a worker of `parallel_map` use the same protocol. A message is sent through a `Channel`,
alone or with a parcel or descriptors. A message without fields is an empty tuple, equal to any other: compare classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

from ..system.connections import Address
from .messages import ProcessStart, Setting, World
from .rank_memory import RankBuffer

# ------------------------------------------------------------------------------------------------------- to a rank


class Join(NamedTuple):
    """Sent, with the descriptors of the store, before a call if the rank is in no usable process group; answered by
    `Raised` and `Error` if the rank cannot join, and not answered otherwise."""

    world: World
    setting: Setting | None
    """The environment of the rank; None after the first process group, so that changes by calls stay."""
    seeds: Sequence[int] | None
    recorded: bool = False
    """True: the last descriptor is the memory in which the rank records its collectives. The rank keeps it."""


class Prepare(NamedTuple):
    """Sent before the first `Join` to each rank that waits for a launch, so that it creates the context of its GPU; not
    answered. A rank that cannot ends."""

    environ: Mapping[str, str]
    visible: str | None
    """The rank's CUDA_VISIBLE_DEVICES."""
    device: str


class Call(NamedTuple):
    """Sent, with the parcel of the function and its arguments, to each rank that runs a call; answered by `Begun`, then
    by `Done` or by `Raised` and `Error`."""

    header: bytes
    """The pickle of a `Header`."""
    seeds: Sequence[int] | None
    answers: bool
    """True if the kernel wants the value."""
    keep_frames: bool
    """True if the rank keeps the frames of a call that raises, for `Debug`."""
    place: int
    """The number of the rank among the ranks that run the call."""
    restarts: Mapping[str, str]
    """The environment variables that count restarts, as torchrun sets them."""
    number: int
    """The number of the call, counted from the start of the ranks; the node of a cluster reads it."""
    shown: bool
    """True if the cell shows the output of the rank; a node of a cluster keeps it otherwise."""
    lines: int | None
    """The number of lines after which the cell shows the last lines alone; None: it shows all."""
    check: Sequence[str] = ()
    """The checks of the function's numbers, such as "nan"."""


class Debug(NamedTuple):
    """Sent by `post_mortem` to a rank that keeps frames; answered by `Begun`, a `Prompt` for each command, `Done`."""


class Widget(NamedTuple):
    """Sent between calls when the page changes a widget of the rank; answered by `Begun` and `Done`."""

    content: dict[str, Any]
    buffers: Sequence[bytes]


class EmptyCache(NamedTuple):
    """Sent by `Session.empty_cache`, so that the rank releases unused GPU memory; answered by `Begun` and `Done`."""


class Leave(NamedTuple):
    """Sent when a call has failed or was stopped, to each rank that is done, so that it leaves the process group; not
    answered."""

    peers: Sequence[Address]
    """The addresses of the other ranks' ends of this rank's connections."""


class Copied(NamedTuple):
    """Sent as the answer to `Buffers`."""

    copied: bool
    """False: the rank sends the buffers with its answer."""


class Line(NamedTuple):
    """Sent as the answer to `Prompt`."""

    line: str | None
    """None: the end of the input."""
    refusal: str
    """The reason why input is impossible; empty if it is possible."""


class Begin(NamedTuple):
    """Sent, with the parcel of the function and the descriptor of the board, to each worker of `parallel_map` first;
    answered by `Begun`."""

    worker: int
    workers: int
    setting: Setting
    threads: int
    seeds: Sequence[int]
    header: bytes
    """The pickle of a `Header`."""


class Items(NamedTuple):
    """Sent, with the parcel of some items, to a worker of `parallel_map`; answered by `Values`, or by `Raised` and
    `Error`."""

    first: int
    """The number of the first item."""


class Descriptors(NamedTuple):
    """Sent, with descriptors, to a process of a context before `Process`; not answered."""


class Process(NamedTuple):
    """Sent, with the parcel of the `Process` object, to a process of a context; further messages depend on it."""

    setting: Setting
    start: ProcessStart
    header: bytes
    """The pickle of a `Header`."""


class Function(NamedTuple):
    """Sent, with the parcel of the function, as the answer to `FunctionWanted`."""

    header: bytes | None
    """The pickle of a `Header`. None, without a parcel: the call is over."""


class Close(NamedTuple):
    """Sent by the engine at the end of a session; the rank ends."""


# ----------------------------------------------------------------------------------------------------- from a rank


class Begun(NamedTuple):
    """Sent when a request begins: an interrupt that came earlier had no effect."""


class Raised(NamedTuple):
    """Sent as soon as a request has raised; `Error` follows when the traceback is written."""


class Finishing(NamedTuple):
    """Sent from time to time while an interrupt waits for the end of a step that cannot be interrupted, such as an
    import; not answered."""

    what: str
    """The rank's activity, such as "imports a module"."""
    seconds: float
    """For how long the interrupt has waited."""


class Done(NamedTuple):
    """Sent, with the parcel of the value if the kernel wants it, when a request has returned."""

    grouped: bool
    """True if the rank is still in its process group."""
    waited: float = 0.0
    """Seconds in which the call waited for other ranks; 0 if it waited less than a second."""


class Values(NamedTuple):
    """Sent, with the parcel of the function's values, when a worker of `parallel_map` is done with `Items`."""

    seconds: float
    """The time that the items took."""


class Error(NamedTuple):
    """Sent, with the parcel of the exception if it can be pickled, when a request has raised."""

    text: str
    """The traceback as Python prints it."""
    rendered: list[str]
    """The traceback as the notebook shows it."""
    spare: Sequence[bytes]
    """Pickles of similar exceptions, best first, for the case that the kernel cannot rebuild the exception."""
    ends: str
    """The reason why the rank ends after this message; empty if it does not end."""


class Buffers(NamedTuple):
    """Sent before `Done`, to offer the big buffers of the value, if the kernel may read the rank's memory; answered by
    `Copied`."""

    buffers: Sequence[RankBuffer]


class Prompt(NamedTuple):
    """Sent by `input()`, `getpass()` and debuggers; answered by `Line`."""

    prompt: str
    shown: str
    """Text that is shown before the prompt."""
    debugger: bool
    hidden: bool
    """True if typed text is not shown."""


class FunctionWanted(NamedTuple):
    """Sent by a worker of a context's pool that does not have a function yet; answered by `Function`."""

    number: int


class Returned(NamedTuple):
    """Sent by a worker of a context's pool that ends because it is done; not answered."""


class Notice(NamedTuple):
    """Sent by an engine, and never by a rank, with a line for the cell, such as that Ray is draining a node."""

    text: str


ToRank = (
    Join
    | Prepare
    | Call
    | Debug
    | Widget
    | EmptyCache
    | Leave
    | Copied
    | Line
    | Begin
    | Items
    | Descriptors
    | Process
    | Function
    | Close
)
FromRank = Begun | Raised | Finishing | Done | Values | Error | Buffers | Prompt | FunctionWanted | Returned | Notice
#: All messages by their names, by which a `Channel` knows them.
KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*get_args(ToRank), *get_args(FromRank))}
