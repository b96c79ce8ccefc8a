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

    Objects that `fn` stores in the `__main__` of a rank stay there for later calls. After a call that raised, the
    session can still be used: ranks that waited for one another get a new process group, in the same processes. (An
    object that uses the old group, such as a `DistributedDataParallel`, must be made again.) If a new group is
    impossible, the next call starts fresh ranks and says so. After the death of a rank, `restart` starts fresh ranks.

    Calls take turns, in the order in which they were made. A session closes when the last reference to it is deleted.

    Args:
        nranks: The number of ranks, at least one.
        backend: The process group's backend, such as "gloo". None: NCCL if each rank has a GPU of its own (with gloo
            for CPU tensors and objects: "cpu:gloo,cuda:nccl"), otherwise gloo. A mapping gives further arguments of
            `init_process_group`: `{"backend": "nccl", "timeout": 60}` ends a collective that has waited for 60 seconds.
        devices: "cpu", "cuda", or a list with one device for each rank: numbers of visible GPUs (`["cuda:0",
            "cuda:2"]`) or names as `nvidia-smi -L` prints them (`["GPU-6e5f...", "GPU-8f1c..."]`, or "MIG-..."). Ranks
            may share a GPU. None: a GPU for each rank if the machine has any GPU, otherwise CPUs.
        threads: The number of threads of each rank. None: the notebook's OMP_NUM_THREADS, otherwise the number of cores
            divided by the number of ranks. "bind": the same, and each rank is bound to its own share of the cores, on
            one NUMA node if possible.
        timeout: The number of seconds after which a call ends with `RankTimeout`. None: no limit.
        output: The ranks whose output the cell shows: "rank0", "all" (each line with its rank), "tabs" (a column for
            each rank, the failed rank first) or "none". `logs` returns the output of any rank.
        lines: The number of lines of a call's output that a cell shows in full. If there are more, the cell shows the
            last hundred lines and the number of all, with a link to a file with all lines. None: all lines; a page may
            take minutes to show them.
        env: Environment variables for the ranks, in addition to the notebook's. If a library reads one of them at its
            import (TORCH_LOGS, PYTORCH_ALLOC_CONF, OMP_PROC_BIND), these ranks get a fork server of their own, which
            takes some seconds once.
        seed: The seed of the ranks, set once when they start. None: every call seeds the ranks again, from the
            notebook's random states (`random`, NumPy and torch, each from its own).
        seed_ranks: Whether to add the number of the rank to its seeds, so that dropout masks and augmentations differ
            between the ranks. Then models that are made on each rank also differ, until for example
            `DistributedDataParallel` copies rank 0's. Otherwise all ranks have the same seeds, as after fastai's
            `set_seed` or Lightning's `seed_everything` with one number.
        settings: Whether each call brings the notebook's settings: logging, warning filters, options of torch, NumPy,
            pandas and matplotlib, and the notebook's functions put into classes of libraries. A setting that a call
            changes in a rank stays changed until the notebook changes it.
        engine: The engine that starts the ranks: "local" on this machine, "ray" on the cluster that runs on it,
            `RayOptions` on any other cluster; or the name of another package's engine. None: the engine of the last
            `nbdist.use`, otherwise this machine.
        start: The way to start ranks on this machine. "forkserver": forked from a process that has imported the
            libraries. "spawn": each in a fresh interpreter, which takes seconds. Use it for libraries that must not be
            imported before a fork, and for variables of `env` that any library reads at its import.
        hold_on_error: Whether ranks keep the frames of a call that raised, for `%debug` and `post_mortem`, until the
            next call.
        on_hang: The reaction to ranks that can never go on, for example because one waits in a collective while another
            has returned. "say": the cell shows the ranks and the reason. "raise": the call ends with `RankStuck`.
        check: The checks of a training's numbers. "nan": the first loss, gradient or parameter that is NaN or infinite
            ends the call with `NotFinite`, which names step, module, parameter and row. "ranks": parameters, buffers
            and random states that must be equal on all ranks are compared after steps 1 and 2 and then after every ten
            steps ("ranks:100": every hundred); a difference ends the call with `RankMismatch`. A list makes both
            checks. None: no check.
        restarts: The number of times that a call is started again, on fresh ranks, after the loss of a rank or its
            node. The function finds the number of restarts in TORCHELASTIC_RESTART_COUNT, so that it can continue from
            its last snapshot.
        min_ranks: The smallest number of ranks for such a restart. A cluster that has lost nodes continues with the
            ranks that it has room for, and tries to start all of them at the next restart. None: the restart waits
            until there is room for all ranks.
        name: The name of a session whose ranks outlive the notebook's kernel, with their output and values: a separate
            process, the keeper, holds them. `nbdist.attach(name)` returns the session in any process of the same user
            on this machine, also if the ranks are on a cluster. Letters, digits, ".", "_" and "-". None: the ranks end
            with the kernel.
        idle: The number of seconds without a call after which the keeper of a named session ends; a day by default.
        keep: The largest size of the output and values of a named session on the disk, in bytes; a gibibyte by default.
            The oldest are dropped first; the values of the last call stay.

    Raises:
        TypeError, ValueError: An argument is invalid, or there are fewer GPUs than ranks.
        NotImplementedError: The system is Windows.

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
        """The number of ranks. After a restart with `min_ranks=` it may be smaller than the number that was asked
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
            *args, **kwargs: The arguments of `fn`. `per_rank([...])` gives each rank a value of its own.
            imports: Import statements, executed in each rank's `__main__` before `fn`.
            need: Further names of notebook variables to send, although `fn` does not seem to use them; or a mapping
                from names to values.
            ranks: The ranks that run `fn`. The value of the lowest of them is returned. None: all ranks. A collective
                of all ranks waits forever if only some ranks call it.

        Raises:
            ValueError, TypeError, NameError, CaptureError: Before any rank runs: an argument is invalid or cannot be
                sent.
            RankDied: A rank's process has ended.
            RankTimeout: The call took longer than the session's timeout.
            RankStuck: With `on_hang="raise"`: the ranks can never go on.
            NotFinite, RankMismatch: With `check=`: a check has failed.
            NbdistError: The session is closed, or a rank has died and `restart` was not called.
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
            skip: The number of steps at the beginning that are not profiled, because the first steps include
                preparations. 0: the profile begins with the function, and also works for functions without an
                optimizer.
            steps: The number of steps that are profiled after those. Profiled steps are slower, and each operator takes
                memory.
            fn, *args, imports, need, ranks, **kwargs: As for `run`.

        Raises:
            The exceptions of `run`.

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
        called `submit`, live, even while other cells run. `cancel()` stops the call as an interrupt does.

        Raises:
            ValueError, TypeError, NameError, CaptureError: An argument is invalid or cannot be sent. The future raises
                all other exceptions.
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

        Unlike with `run`, the function may have parameters named `imports`, `need` or `ranks`.

        Args:
            ranks: The ranks that run `fn`. None: all ranks.
            everyone: Whether the values of all ranks are returned.
            output: The option of `Session`, for this call.

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
            call: The number of the call, from 1. None: the last call.
            timeout: The longest time to wait, in seconds. None: no limit.

        Returns:
            The value that `run` or `run_all` would have returned.

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
            call: The number of the call, from 1. None: the last call.
            output: The option of `Session`. None: the option of the call.
            lines: The option of `Session`.

        Raises:
            NbdistError: There is no such call, or the session has no name.
        """
        output = output if output is None else check_choice(output, OUTPUTS, name="output")
        from .named import recorded

        recorded.replay(self._named(), call, output, lines)

    @entry
    def stop(self) -> None:
        """Interrupt the running call of a named session, as the stop button does. Any process may have made the call.

        Its ranks get five seconds for their `finally` blocks; a second `stop` does not wait for them.
        """
        self._named().stop()

    def _named(self) -> Any:
        if self.name is None:
            raise NbdistError("only a session with a name has a journal: Session(2, name='...')")
        return self._executor

    def _follow(self) -> None:
        """Show the last call, and later output in the background."""
        from .named import recorded

        self._turns.follow(functools.partial(recorded.show_last, self._named()))

    def logs(self, rank: int) -> str:
        """Return the output of a rank, including output that was not shown: the last million characters since the ranks
        started.

        On a cluster the nodes store the output. After the end of the ranks, eight million characters of all of them
        together are kept.
        """
        check_rank(rank, self.nranks)
        return self._executor.log(rank)

    def status(self) -> Status:
        """Return a table of the ranks: process, device, state, function, memory, and last line of output. If
        nvidia-ml-py is installed, it also has memory and load of the GPUs.

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
        """Return the current line of each rank, and the Python stacks. Works in any thread."""
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
            NbdistError: No rank has frames: the last call did not raise, or `hold_on_error=True` was not given.
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

    After an interrupt, this function does not wait until the ranks can take another call, except with `hold_on_error`.
    """
    return session._call(*what, once=not session._options.hold_on_error)[0]
