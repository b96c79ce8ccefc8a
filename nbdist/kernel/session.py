"""Sessions: the ranks of one process group, which stay and run functions."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from .. import engines
from ..capture.explain import Explanation, explain
from ..capture.need import Names
from ..checks import check_choice, check_count
from ..engines.contract import EngineOptions
from ..errors import NbdistError, entry, entry_class
from .calls import futures, stacks
from .calls.arguments import OUTPUTS, check_call, check_platform
from .calls.executor import Executor, Request
from .calls.group import GRACE_TO_LEAVE
from .calls.requests import Requests, check_rank, chosen
from .calls.stopping import nothing_sent
from .calls.turns import Turns
from .cell.cell import Cell
from .cell.excerpt import LINES
from .collectives import Collectives
from .options import IDLE, KEEP, SessionOptions
from .profile.profile import Profile, profiled
from .status import Snapshot, Status

T = TypeVar("T")


@entry_class("Session")
class Session:
    """`nranks` ranks in one process group, started with the first call and kept until `close`.

    Objects that `fn` stores in the `__main__` of a rank stay there for later calls. A call that raises leaves the
    session usable: ranks that waited for one another get a new process group, in the same processes. (An object that
    uses the old group, such as a `DistributedDataParallel`, must be made again.) If that is impossible, the next call
    starts fresh ranks and says so. After the death of a rank, `restart` starts fresh ranks.

    Calls take turns, in the order in which they were made. A session without references closes itself.

    Args:
        nranks: The number of ranks, at least one.
        backend: The process group's backend, such as "gloo". None: NCCL where ranks have a GPU each (for CPU tensors
            and objects also gloo: "cpu:gloo,cuda:nccl"), gloo where they share one or have none. A mapping gives
            further arguments of `init_process_group`: `{"backend": "nccl", "timeout": 60}` ends a collective that has
            waited for 60 seconds.
        devices: "cpu", "cuda", or one device per rank: by numbers among the visible GPUs (`["cuda:0", "cuda:2"]`) or
            names as `nvidia-smi -L` has them (`["GPU-6e5f...", "GPU-8f1c..."]`, or "MIG-..."). Ranks
            may share one. None: a GPU per rank where there is any GPU at all, else CPUs.
        threads: Threads per rank. None: the notebook's OMP_NUM_THREADS, or else cores divided by ranks. "bind": the
            same, and each rank is bound to its own share of the cores, on one NUMA node where that is possible.
        timeout: Seconds that a call may take before it ends with `RankTimeout`. None: any time.
        output: The ranks whose output the cell shows: "rank0", "all" (each line with its rank), "tabs" (a column for
            each rank, the failed one first) or "none". `logs` has the rest.
        lines: The number of lines of a call's output that a cell shows. Of more output it shows the last hundred lines
            and the number of all, with a link to a file that has all. None: all lines; a page may take minutes to show
            them.
        env: Environment variables for the ranks, in addition to the notebook's. Where libraries read one while they are
            imported (TORCH_LOGS, PYTORCH_ALLOC_CONF, OMP_PROC_BIND), a fork server of its own imports them for these
            ranks, which takes some seconds once.
        seed: Seeds the ranks once, when they start. None: every call seeds them again from the notebook's own
            random state (`random`, NumPy and torch, each from its own).
        seed_ranks: Rank r is seeded with r added to every seed, so that dropout masks and augmentations differ between
            the ranks. Models that are made on each rank differ then too, until `DistributedDataParallel` or the like
            gives them rank 0's. Otherwise all ranks are seeded alike, as fastai's `set_seed` and Lightning's
            `seed_everything` do when they are called with one number.
        settings: Whether each call brings the notebook's settings: logging, warning filters, options of torch, NumPy,
            pandas and matplotlib, and the notebook's functions put into classes of libraries. A setting that a call
            changes in a rank stays changed until the notebook changes it.
        engine: The place of the ranks: "local" is this machine, "ray" the cluster that runs on it, `RayOptions` any
            other cluster, a further name an engine of another package. None: what `nbdist.use` was called with, or
            else this machine.
        start: The way in which ranks start on this machine. "forkserver": forked from a process that has imported the
            libraries. "spawn": each in a fresh interpreter, which takes seconds: for libraries that must not be
            imported before a fork, and for variables of `env` that any library reads while it is imported.
        hold_on_error: Ranks keep the frames of a call that raised, for `%debug` and `post_mortem`, until the next call.
        on_hang: The reaction to ranks that can never go on, such as a rank in a collective with another rank that has
            returned. "say": the cell shows the ranks and the reason. "raise": the call ends with `RankStuck`.
        check: "nan": the first loss, gradient or parameter that is NaN or infinite ends the call with `NotFinite`,
            which names step, module, parameter and row. "ranks": parameters, buffers and random states that must be
            alike on all ranks are compared after steps 1 and 2 and each ten steps ("ranks:100": each hundred); a
            difference ends the call with `RankMismatch`. A list has both. None: nothing is checked.
        restarts: The number of times that a call is started again, on fresh ranks, after a rank or its node was lost.
            The function finds the count in TORCHELASTIC_RESTART_COUNT, so that it can go on from its last snapshot.
        min_ranks: The number of ranks that is enough for such a restart. A cluster that has lost nodes goes on with the
            ranks that it has room for, and tries to start all of them at the next restart. None: the restart waits
            until there is room for all ranks.
        name: The name of a keeper, a process that holds the ranks. The ranks, their output and their values
            outlive the notebook's kernel: `nbdist.attach(name)` gives the session back, in any process of the same
            user on this machine, also where the ranks are on a cluster. Letters, digits, ".", "_" and "-". None: the
            ranks end with the kernel.
        idle: Seconds without a call after which such a keeper ends: a day.
        keep: Bytes that its output and values may take on the disk: a gibibyte. The oldest are dropped first; the
            values of the last call stay.

    Raises:
        TypeError, ValueError: For arguments that make no sense; `ValueError` where there are fewer GPUs than ranks.
        NotImplementedError: On Windows.

    Examples:
        >>> import torch.distributed as dist
        >>> with Session(2) as session:
        ...     print(session.run_all(dist.get_rank))
        ...     future = session.submit(dist.get_world_size)
        ...     print(future.result())
        [0, 1]
        2
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
        lines: int | None = LINES,
        env: Mapping[str, str] | None = None,
        seed: int | None = None,
        seed_ranks: bool = False,
        settings: bool = True,
        engine: str | EngineOptions | None = None,
        start: str = "forkserver",
        hold_on_error: bool = False,
        on_hang: str = "say",
        check: str | Sequence[str] | None = None,
        restarts: int = 0,
        min_ranks: int | None = None,
        name: str | None = None,
        idle: float = IDLE,
        keep: int = KEEP,
    ) -> None:
        given = {name: value for name, value in locals().items() if name not in ("self", "nranks")}
        check_platform()
        nranks = check_count(nranks, least=1, name="nranks")
        self._options = SessionOptions(**given)
        self._options.check_for(nranks)
        self._engine: Any = engines.resolve(engine, env, start)
        layout = self._options.layout(nranks, self._engine)
        executor: Any
        if name is None:
            executor = Executor(self._engine, layout, **self._options.for_executor())
        else:
            from .named import starting  # other sessions do without

            starting.check_engine(name, self._engine)
            executor, self._engine = starting.start(self._options, layout, self._engine)
        self._begin(executor)

    def _begin(self, executor: Any) -> None:
        self._executor: Executor = executor
        self._turns = Turns(executor)
        self._requests = Requests(self._engine, executor, self._options)
        weakref.finalize(self, self._requests.sent.close)

    @property
    def name(self) -> str | None:
        """The name, if the session has one."""
        return self._options.name

    @property
    def nranks(self) -> int:
        """The number of ranks; after a restart with `min_ranks=` it may be smaller than the number that was asked
        for."""
        return len(self._executor.layout.devices)

    @entry
    def run(
        self,
        fn: Callable[..., T],
        /,
        *args: Any,
        imports: str | Iterable[str] = "",
        need: Names = "",
        ranks: Iterable[int] | None = None,
        **kwargs: Any,
    ) -> T:
        """Run `fn(*args, **kwargs)` on every rank and return rank 0's value.

        Args:
            fn: A function of the notebook, of a script, or of an installed package.
            *args, **kwargs: The arguments of `fn`. `per_rank([...])` gives each rank its own.
            imports: Import statements, executed in each rank's `__main__` before `fn`.
            need: Further names of notebook variables to take along, which `fn` is not seen to use; or a mapping
                from names to values.
            ranks: The ranks that run `fn`; the lowest of them gives the value. None: all ranks. A collective of all
                ranks waits for ever if only some ranks call it.

        Raises:
            ValueError, TypeError, NameError, CaptureError: Before any rank is asked, for what cannot be sent.
            RankDied: When a rank's process ends.
            RankTimeout: When the session's timeout is over.
            RankStuck: With `on_hang="raise"`, when ranks wait for what cannot come.
            NotFinite, RankMismatch: With `check=`.
            NbdistError: When the session is closed, or a rank had died and there was no `restart`.
            BaseException: The exception of `fn`, on the rank where it raised first; the cause is that rank's traceback.
        """
        return self.call(fn, args, kwargs, imports, need, ranks=ranks)[0]  # type: ignore[no-any-return]

    @entry
    def run_all(
        self,
        fn: Callable[..., T],
        /,
        *args: Any,
        imports: str | Iterable[str] = "",
        need: Names = "",
        ranks: Iterable[int] | None = None,
        **kwargs: Any,
    ) -> list[T]:
        """Like `run`, but returns the values of all ranks, or of those in `ranks`, in their order."""
        return self.call(fn, args, kwargs, imports, need, ranks=ranks, everyone=True)

    @entry
    def profile(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        imports: str | Iterable[str] = "",
        need: Names = "",
        ranks: Iterable[int] | None = None,
        skip: int = 3,
        steps: int = 10,
        **kwargs: Any,
    ) -> Profile:
        """Run a function like `run`, with torch's profiler around some of its optimizer steps on every rank.

        A notebook shows the result as a picture of the time of each rank and step: loaders, computing, communication,
        and waiting for other ranks. `profile.save("trace.json")` writes the traces of all ranks to one file for Chrome
        or Perfetto; `profile.value` is the value of the function.

        Args:
            skip: The number of steps at the beginning that are not profiled, because the first steps also set things
                up. 0 profiles from the start of the function, and so functions without an optimizer, too.
            steps: The number of steps that are profiled then. They are slower, and each operator takes memory.
            fn, *args, imports, need, ranks, **kwargs: As for `run`.

        Raises:
            As `run`.

        Examples:
            >>> import torch
            >>> def train():
            ...     weight = torch.nn.Parameter(torch.zeros(3))
            ...     optimizer = torch.optim.SGD([weight], lr=0.1)
            ...     for _ in range(10):
            ...         optimizer.zero_grad()
            ...         weight.sum().backward()
            ...         optimizer.step()
            ...     return float(weight.sum())
            >>> with Session(2, devices="cpu") as session:
            ...     profile = session.profile(train, skip=1, steps=2)
            >>> round(profile.value, 4), len(profile.steps)
            (-3.0, 4)
        """
        check_call(fn, imports, need)
        targets = chosen(range(self.nranks) if ranks is None else ranks, self.nranks)
        options = {"imports": imports, "need": need}
        return profiled(self.call, fn, args, kwargs, ranks=targets, skip=skip, steps=steps, **options)

    @entry
    def submit(
        self,
        fn: Callable[..., T],
        /,
        *args: Any,
        imports: str | Iterable[str] = "",
        need: Names = "",
        ranks: Iterable[int] | None = None,
        **kwargs: Any,
    ) -> futures.CallFuture[T]:
        """Like `run`, but in the background: returns at once, with a `concurrent.futures.Future` of the value, which
        can also be awaited.

        The function, its arguments and the names that it needs are captured at once. Output goes to the cell that
        called this, live, even while other cells run. `cancel()` stops the call as an interrupt does.

        Raises:
            ValueError, TypeError, NameError, CaptureError: For what cannot be sent; the rest is in the future.
        """
        with nothing_sent():
            request = self._capture(fn, args, kwargs, imports, need, ranks)
        return self._turns.submit(request)

    @entry
    def call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        imports: str | Iterable[str] = "",
        need: Names = "",
        *,
        ranks: Iterable[int] | None = None,
        everyone: bool = False,
        output: str | None = None,
    ) -> list[Any]:
        """Do the work of `run` and `run_all`, with the function's arguments given separately, and with more options.

        Here the function may have parameters called `imports`, `need` or `ranks`.

        Args:
            ranks: The ranks that run `fn`. None: all ranks.
            everyone: Whether every rank's value is wanted.
            output: Like the option of the session, for this call.

        Returns:
            The values of the `ranks` in their order, or the value of the first rank alone.
        """
        return self._call(fn, args, dict(kwargs or {}), imports, need, ranks, everyone, output)

    def _call(self, *what: Any, **how: Any) -> list[Any]:
        with nothing_sent():
            request = self._capture(*what, **how)
        return self._turns.run(request)

    def _capture(self, *what: Any, **how: Any) -> Request:
        return self._requests.make(*what, **how)

    @entry
    def result(self, call: int | None = None, timeout: float | None = None) -> Any:
        """Wait for a call of a named session, from any notebook, and return its value or raise its exception.

        Args:
            call: Its number, from 1. None: the last one.
            timeout: Seconds to wait at most. None: any time.

        Returns:
            What `run` or `run_all` would have returned.

        Raises:
            NbdistError: There is no such call, its ranks were lost before its end, or the session has no name.
            TimeoutError: The call is not over after `timeout` seconds.
        """
        from .named import recorded

        return recorded.result(self._named(), call, timeout)

    @entry
    def replay(self, call: int | None = None, *, output: str | None = None, lines: int | None = LINES) -> None:
        """Show the output of a call of a named session so far, in the cell that runs.

        Args:
            call: Its number, from 1. None: the last one.
            output: As for `Session`. None: as the call was made.
            lines: As for `Session`.

        Raises:
            NbdistError: There is no such call, or the session has no name.
        """
        output = output if output is None else check_choice(output, OUTPUTS, name="output")
        from .named import recorded

        recorded.replay(self._named(), call, output, lines)

    @entry
    def stop(self) -> None:
        """Interrupt the call that runs on a named session, whoever has made it, as the stop button does.

        Its ranks get five seconds for their `finally` blocks; a second `stop` does not wait for them.
        """
        self._named().stop()

    def _named(self) -> Any:
        if self.name is None:
            raise NbdistError("only a session with a name has a journal: Session(2, name='...')")
        return self._executor

    def _follow(self) -> None:
        """Show the last call, and in the background what follows."""
        from .named import recorded

        self._turns.follow(functools.partial(recorded.show_last, self._named()))

    def logs(self, rank: int) -> str:
        """Return the output of a rank, shown or not: the last million characters since the ranks started.

        On a cluster the nodes keep it; after the end of the ranks, eight million characters of all of them are kept.
        """
        check_rank(rank, self.nranks)
        return self._executor.log(rank)

    def status(self) -> Status:
        """Return a table of the ranks: process, device, state, function, memory, and last line of output. With
        nvidia-ml-py, memory and load of the devices, too.

        In a notebook the table is updated until a running call is over.
        """
        return Status(self._look)

    @entry
    def explain(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        imports: str | Iterable[str] = "",
        need: Names = "",
        ranks: Iterable[int] | None = None,
        **kwargs: Any,
    ) -> Explanation:
        """Return what `nbdist.explain` returns for a call of `run` with the same arguments; it is the same for all
        `ranks`."""
        for rank in ranks or ():
            check_rank(rank, self.nranks)
        return explain(fn, *args, imports=imports, need=need, **kwargs)

    def stacks(self) -> str:
        """Return the place of each rank: a line for each rank, then the Python stacks. Works in any thread."""
        taken = self._executor.stacks()
        return stacks.report(taken) if taken else ""

    @entry
    def collectives(self) -> Collectives:
        """Return the last 1,000 collectives of each rank, from any thread: a notebook shows them as a picture in time,
        with the first difference between ranks marked.

        Raises:
            NbdistError: The ranks run on other machines, or have not started.
        """
        return self._executor.collectives()

    @entry
    def post_mortem(self, rank: int | None = None, commands: Iterable[str] | None = None) -> None:
        """Open pdb in a rank, on the frames in which its last call raised. `q` ends it.

        Args:
            rank: The number of the rank. None: the rank whose exception the call raised.
            commands: Debugger commands to run instead of asking for them, such as `["where", "p loss"]`.

        Raises:
            NbdistError: No rank is held: after a call that did not raise, or without `hold_on_error=True`.
        """
        self._turns.post_mortem(rank, commands)

    def is_idle(self) -> bool:
        """Return whether the ranks run and are idle."""
        return self._executor.state() == "running" and not self._turns.busy()

    @entry
    def restart(self) -> None:
        """End the ranks and start fresh ones. Works after the death of a rank, too. Objects in the old ranks are
        lost."""
        self._executor.check_open()
        self._turns.cancel_background()
        self._turns.take(lambda: self._executor.restart(Cell()))

    @entry
    def empty_cache(self) -> None:
        """Free the GPU memory that torch caches in the ranks, once they are idle.

        Memory of the ranks' variables stays, and so does a CUDA context of some hundred megabytes for each rank, until
        `close`.
        """
        self._executor.check_open()
        self._turns.take(lambda: self._executor.empty_cache(Cell()))

    def close(self) -> None:
        """Stop calls in the background and end the ranks. A closed session takes no more calls.

        The ranks get five seconds for their `atexit` functions and their open files.
        """
        self._executor.closed = True
        self._turns.cancel_background()
        self._turns.take(lambda: self._executor.end(GRACE_TO_LEAVE))
        self._requests.sent.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        layout = self._executor.layout
        devices = ", ".join(sorted(set(layout.devices)))
        return f"<nbdist.Session: {self.nranks} ranks on {devices}, {layout.backend}, {self._executor.state()}>"

    def _look(self) -> Snapshot:
        return self._executor.look(self._turns.busy())


def executor_of(session: Session) -> Executor:
    """Return the executor of a session, which holds its ranks, for other modules of nbdist, tests and benchmarks."""
    return session._executor


def call_once(session: Session, *what: Any) -> Any:
    """Make the only call of a session, with the arguments of `Session.call`, and return rank 0's value.

    A stop need not wait until the ranks are fit for another call, unless `hold_on_error` keeps them.
    """
    return session._call(*what, once=not session._options.hold_on_error)[0]
