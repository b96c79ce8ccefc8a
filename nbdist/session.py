"""Ranks that stay: a session holds the ranks of one process group and runs functions on them."""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from . import capture, debugger, engines, futures, relay, stacks, supervise, transport
from .engines.options import RayOptions
from .errors import NbdistError, RankDied
from .explanation import Explanation, explain
from .group import Group, Layout
from .status import Snapshot, Status, look

T = TypeVar("T")

_OUTPUTS = ("rank0", "all", "none")


@dataclass(frozen=True)
class _Request:
    """A call that has been captured, and how it is to be carried out."""

    call: capture.Call
    seeds: tuple[int, int, int] | None
    targets: Sequence[int]
    everyone: bool
    """Whether all ranks are to answer with their values, or only the first of the targets."""
    output: str
    what: str


class Session:
    """`nranks` ranks in one process group, started with the first call and kept until `close`.

    What `fn` leaves in the `__main__` of a rank stays there for later calls. A call that raises leaves the session
    usable: where ranks waited for one another, a new process group is made of the same processes (whatever holds the
    old one, such as a `DistributedDataParallel`, has to be made anew). Where that cannot be, fresh ranks are started
    with the next call, which says so. After a rank has died, `restart` starts fresh ranks.

    Calls take turns, in the order in which they were made. A session that is no longer referred to closes itself.

    Args:
        nranks: How many ranks, at least one.
        backend: Of the process group, such as "gloo". None: NCCL where ranks have GPUs, gloo where they do not. A
            mapping gives further arguments of `init_process_group`: `{"backend": "nccl", "timeout": 60}` ends a
            collective that has waited for 60 seconds.
        devices: "cpu", "cuda", or one device per rank (`["cuda:0", "cuda:2"]`). None: a GPU per rank where there
            is any GPU at all, else CPUs.
        threads: Threads per rank. None: the notebook's OMP_NUM_THREADS, or else cores divided by ranks. "bind": the
            same, and each rank is bound to its own share of the cores, on one NUMA node where that is possible.
        timeout: Seconds that a call may take before it ends with `RankTimeout`. None: any time.
        output: Whose output the cell shows: "rank0", "all" or "none". `logs` has the rest.
        env: Environment variables for the ranks, beside those of the notebook.
        seed: Seeds the ranks once, when they start. None: every call seeds them anew from the notebook's own
            random state (`random`, NumPy and torch, each from its own).
        engine: Where the ranks run: "local" is this machine, "ray" the cluster that runs on it, `RayOptions` any
            other. None: what `nbdist.use` said, or else this machine.
        hold_on_error: Ranks keep the frames of a call that raised, for `post_mortem`, until the next call.
        restarts: How often a call is started again, on fresh ranks, after a rank or its node was lost. It finds the
            count in TORCHELASTIC_RESTART_COUNT, so that it can go on from its last snapshot.

    Raises:
        TypeError, ValueError: For arguments that make no sense; `ValueError` where there are fewer GPUs than ranks.
        NotImplementedError: On Windows.
    """

    def __init__(
        self,
        nranks: int,
        *,
        backend: str | Mapping[str, Any] | None = None,
        devices: str | Sequence[str] | None = None,
        threads: int | str | None = None,
        timeout: float | None = None,
        output: str = "rank0",
        env: Mapping[str, str] | None = None,
        seed: int | None = None,
        engine: str | RayOptions | None = None,
        hold_on_error: bool = False,
        restarts: int = 0,
    ) -> None:
        check_platform()
        check_count(nranks, least=1, name="nranks")
        check_count(restarts, least=0, name="restarts")
        if threads not in (None, "bind"):
            check_count(threads, least=1, name="threads")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: a number of seconds above 0, or None")
        self._output = check_output(output)
        self.nranks = nranks
        self._engine = engines.resolve(engine)
        chosen = self._engine.devices(nranks, devices)
        options = {"backend": backend} if isinstance(backend, str) else dict(backend or {})
        name = options.pop("backend", None) or ("nccl" if chosen[0].startswith("cuda") else "gloo")
        self._layout = Layout(chosen, name, options, threads, dict(env or {}), seed)
        self._timeout = timeout
        self._hold, self._restarts = hold_on_error, restarts
        self._group: Group | None = None
        self._logs: list[relay.Log] = []  # of the ranks that there are, or were last
        self._dead = ""  # why calls are refused until `restart`
        self._lost = ""  # why the next call has fresh ranks
        self._closed = False
        self._turns = futures.Turns()
        self._background: weakref.WeakSet[futures.CallFuture[Any]] = weakref.WeakSet()
        self._shelf = transport.Shelf()
        self._capturing = threading.Lock()
        weakref.finalize(self, self._shelf.close)

    def run(
        self,
        fn: Callable[..., T],
        /,
        *args: Any,
        imports: str | Iterable[str] = "",
        need: capture.Names = "",
        **kwargs: Any,
    ) -> T:
        """Run `fn(*args, **kwargs)` on every rank and return rank 0's value.

        Args:
            fn: A function of the notebook, of a script, or of an installed package.
            imports: Import statements, executed in each rank's `__main__` before `fn`.
            need: Names of notebook variables to take along beside those that `fn` is seen to use; or a mapping
                from names to values.

        Raises:
            ValueError, TypeError, NameError, CaptureError: Before any rank is asked, for what cannot be sent.
            RankDied: When a rank's process ends.
            RankTimeout: When the session's timeout is over.
            NbdistError: When the session is closed, or a rank had died and there was no `restart`.
            BaseException: What `fn` raised, on the rank where it raised first; the cause is that rank's traceback.
        """
        return self.call(fn, args, kwargs, imports, need)[0]  # type: ignore[no-any-return]

    def run_all(
        self,
        fn: Callable[..., T],
        /,
        *args: Any,
        imports: str | Iterable[str] = "",
        need: capture.Names = "",
        **kwargs: Any,
    ) -> list[T]:
        """Like `run`, but returns the values of all ranks, in the order of the ranks."""
        return self.call(fn, args, kwargs, imports, need, everyone=True)

    def submit(
        self,
        fn: Callable[..., T],
        /,
        *args: Any,
        imports: str | Iterable[str] = "",
        need: capture.Names = "",
        **kwargs: Any,
    ) -> futures.CallFuture[T]:
        """Like `run`, but in the background: returns at once, with a `concurrent.futures.Future` of the value.

        The function, its arguments and the names it needs are taken as they are now. Output goes to the cell that
        called this, live, whatever the notebook does meanwhile. `cancel()` stops the call as an interrupt does.

        Raises:
            ValueError, TypeError, NameError, CaptureError: For what cannot be sent; the rest is in the future.
        """
        request = self._capture(fn, args, kwargs, imports, need)
        cell = relay.Cell(background=True)
        call = functools.partial(self._carry_out_first, request, cell)
        future: futures.CallFuture[T] = futures.in_background(call, request.call.parcel, self._turns, request.what)
        self._background.add(future)
        return future

    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        imports: str | Iterable[str] = "",
        need: capture.Names = "",
        *,
        ranks: Iterable[int] | None = None,
        everyone: bool = False,
        output: str | None = None,
    ) -> list[Any]:
        """What `run` and `run_all` are made of: with the function's arguments apart, and more to choose from.

        Args:
            ranks: Who runs `fn`. None: all ranks.
            everyone: Whether every rank's value is wanted.
            output: Like that of the session, for this call.

        Returns:
            The values of the `ranks` in their order, or that of the first of them alone.
        """
        request = self._capture(fn, args, dict(kwargs or {}), imports, need, ranks, everyone, output)
        with contextlib.closing(request.call.parcel), self._turns.taken(self._turns.draw()):
            return self._carry_out(request, relay.Cell())

    def logs(self, rank: int) -> str:
        """What a rank has written, shown or not: the last million characters since the ranks started."""
        self._check_rank(rank)
        return self._logs[rank].text() if self._logs else ""

    def status(self) -> Status:
        """A table of the ranks: process, device, state, what each runs, memory, and its last line of output.

        In a notebook the table follows a running call until that is over.
        """
        return Status(self._look)

    def explain(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        imports: str | Iterable[str] = "",
        need: capture.Names = "",
        **kwargs: Any,
    ) -> Explanation:
        """What a call of `run` with the same arguments would send: see `nbdist.explain`."""
        return explain(fn, *args, imports=imports, need=need, **kwargs)

    def stacks(self) -> str:
        """Where each rank is right now: a line for each, then their Python stacks. May be asked from any thread."""
        group = self._group
        return "" if group is None else stacks.report(stacks.take(group.ranks))

    def post_mortem(self, rank: int | None = None, commands: Iterable[str] | None = None) -> None:
        """Open pdb in a rank, on the frames in which its last call raised. `q` ends it.

        Args:
            rank: Which one. None: the rank whose exception the call raised.
            commands: Debugger commands to run instead of asking for them, such as `["where", "p loss"]`.

        Raises:
            NbdistError: Where no rank is held: after a call that did not raise, or without `hold_on_error=True`.
        """
        with self._turns.taken(self._turns.draw()):
            group, held = self._group, self.held()
            if group is None or not held:
                raise NbdistError(
                    "no rank is held: post_mortem() follows a call that raised in a rank, in a session with "
                    "hold_on_error=True, before any other call"
                )
            rank = held[0] if rank is None else rank
            if rank not in held:
                raise ValueError(f"rank {rank} has not raised; held: {', '.join(map(str, held))}")
            group.relay.begin(relay.Cell(), "rank0", rank)
            group.send(rank, "debug")
            prompt = debugger.Prompt(rank, commands)
            self._wait_for(group, supervise.Waiting(group, [rank], "post_mortem", prompt=prompt))

    def held(self) -> list[int]:
        """The ranks that `post_mortem` can look into, first the one whose exception the last call raised."""
        return list(self._group.raised) if self._hold and self._group is not None else []

    def restart(self) -> None:
        """End the ranks and start fresh ones, also after a rank has died. What calls left in the old ones is lost."""
        self._check_open()
        self._cancel_background()
        with self._turns.taken(self._turns.draw()):
            self._end(grace=0.0)
            self._dead = self._lost = ""
            self._ready(relay.Cell()).join()

    def close(self) -> None:
        """Stop what runs in the background and end the ranks. A closed session takes no more calls."""
        self._closed = True
        self._cancel_background()
        with self._turns.taken(self._turns.draw()):
            self._end(grace=2.0)
        self._shelf.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        devices = ", ".join(sorted(set(self._layout.devices)))
        return f"<nbdist.Session: {self.nranks} ranks on {devices}, {self._layout.backend}, {self._state()}>"

    def _state(self) -> str:
        if self._closed:
            return "closed"
        if self._dead:
            return f"{self._dead}; restart() starts fresh ranks"
        return "not started" if self._group is None else "running"

    def _look(self) -> Snapshot:
        return look(self._state(), self._layout.devices, self._group, self._turns.busy())

    def _check_open(self) -> None:
        if self._closed:
            raise NbdistError("this session is closed; make a new one")

    def _check_rank(self, rank: Any) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int):
            raise TypeError(f"a rank is a whole number, not {rank!r}")
        if not 0 <= rank < self.nranks:
            raise ValueError(f"there is no rank {rank}: this session has ranks 0 to {self.nranks - 1}")

    def _cancel_background(self) -> None:
        for future in list(self._background):
            future.cancel()

    def _capture(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        imports: Any,
        need: Any,
        ranks: Iterable[int] | None = None,
        everyone: bool = False,
        output: str | None = None,
    ) -> _Request:
        self._check_open()
        block, names = check_call(fn, imports, need)
        targets = list(range(self.nranks) if ranks is None else ranks)
        for rank in targets:
            self._check_rank(rank)
        if not targets:
            raise ValueError("ranks= names no rank")
        output = self._output if output is None else check_output(output)
        with self._capturing:
            call = capture.capture_call(fn, args, kwargs, block, names, self._shelf)
        self._engine.warm([*capture.modules_named(block), *sorted(call.modules)])
        seeds = draw_seeds() if self._layout.seed is None else None
        return _Request(call, seeds, sorted(set(targets)), everyone, output, getattr(fn, "__name__", type(fn).__name__))

    def _carry_out_first(self, request: _Request, cell: relay.Cell, stop: futures.Stop) -> Any:
        return self._carry_out(request, cell, stop)[0]

    def _carry_out(self, request: _Request, cell: relay.Cell, stop: futures.Stop | None = None) -> list[Any]:
        """Do a call in its turn, and again after a rank was lost."""
        for count in range(self._restarts):
            try:
                return self._attempt(request, cell, stop, count)
            except RankDied as died:
                if not self._dead:  # the function itself raised it
                    raise
                self._dead = ""
                why = str(died).partition("\n")[0]
                cell.notice(
                    f"{why}. Starting again on fresh ranks ({count + 1} of {self._restarts} restarts); what earlier "
                    f"calls left in the old ones is lost"
                )
        return self._attempt(request, cell, stop, self._restarts)

    def _attempt(self, request: _Request, cell: relay.Cell, stop: futures.Stop | None, count: int) -> list[Any]:
        """Send a call to its ranks and wait for their answers."""
        self._check_open()
        call = request.call
        restarts = {"TORCHELASTIC_RESTART_COUNT": str(count), "TORCHELASTIC_MAX_RESTARTS": str(self._restarts)}
        try:
            group = self._ready(cell)
            first = request.targets[0]
            group.relay.begin(cell, request.output, first)
            if self._lost:
                cell.notice(f"fresh ranks: {self._lost}, and what earlier calls left in them is lost")
                self._lost = ""
            group.join()
            group.raised.clear()
            for rank in request.targets:
                answers = request.everyone or rank == first
                message = "call", call.header, request.seeds, answers, self._hold, restarts
                group.send(rank, *message, parcel=call.parcel)
            waiting = supervise.Waiting(
                group, request.targets, request.what, timeout=self._timeout, originals=call.originals, stop=stop
            )
        except BaseException:  # they may have got half of it
            if self._group is not None:
                self._lost = "the last call was broken off while it was sent to the ranks"
            self._end(grace=0.0)
            raise
        values = self._wait_for(group, waiting)
        return values if request.everyone else values[:1]

    def _wait_for(self, group: Group, waiting: supervise.Waiting) -> list[Any]:
        try:
            return waiting.wait()
        except BaseException:
            if waiting.pending:
                who = " and ".join(f"rank {rank}" for rank in sorted(waiting.pending))
                self._lost = f"{who} did not leave the last call"
                self._end(grace=0.0)
            raise
        finally:
            if group.dead:
                self._dead = group.dead
                self._end(grace=0.0)

    def _ready(self, cell: relay.Cell) -> Group:
        """The running ranks, started if there are none.

        Raises `RankDied` when it finds that one has died, and `NbdistError` from then on until `restart`.
        """
        if self._dead:
            raise NbdistError(
                f"the session has lost its ranks: {self._dead}. restart() starts fresh ones; what earlier calls left "
                f"in them is lost"
            )
        deaths = [] if self._group is None else [self._group.bury(exit) for exit in self._group.ranks.exits()]
        if self._group is not None and deaths:
            self._dead = self._group.dead
            self._end(grace=0.0)
            raise deaths[0]
        if self._group is None:
            self._group = Group(self._engine, self._layout, cell)
            self._logs = self._group.relay.logs
        return self._group

    def _end(self, grace: float) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.end(grace)


def check_platform() -> None:
    """Raise `NotImplementedError` where ranks cannot be forked."""
    if sys.platform == "win32":
        raise NotImplementedError(
            "nbdist forks its ranks, which Windows cannot do. It runs on Linux, under WSL 2, and on macOS (CPU ranks)."
        )


def check_count(value: Any, *, least: int, name: str) -> None:
    """Raise `TypeError` or `ValueError` unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r} ({type(value).__name__})")
    if value < least:
        raise ValueError(f"{name}={value}: at least {least}")


def check_call(fn: Any, imports: Any, need: Any) -> tuple[str, dict[str, Any]]:
    """The import block as one string, and the needed names with their values; raises for what makes no sense."""
    if not callable(fn):
        raise TypeError(f"the function to run is not callable: {fn!r}")
    block = capture.parse_imports(imports)
    return block, capture.resolve_need(need, fn)


def check_output(output: Any) -> str:
    """Raise `ValueError` for what `output=` does not take."""
    if output not in _OUTPUTS:
        raise ValueError(f"output={output!r}: one of {', '.join(map(repr, _OUTPUTS))}")
    return str(output)


def draw_seeds() -> tuple[int, int, int]:
    """Seeds for `random`, NumPy and torch, each drawn from the notebook's own state of that library."""
    for_random = random.getrandbits(63)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    for_numpy = for_random if numpy is None else int(numpy.random.randint(0, 2**31 - 1))
    for_torch = for_random if torch is None else int(torch.empty((), dtype=torch.int64).random_().item())
    return for_random, for_numpy, for_torch
