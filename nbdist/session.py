"""Ranks that stay: a session holds the ranks of one process group and runs functions on them."""

from __future__ import annotations

import contextlib
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from . import affinity, capture, engines, meeting, relay, stacks, supervise, transport, worker
from .engines import local
from .errors import NbdistError
from .explanation import Explanation, explain

T = TypeVar("T")

_OUTPUTS = ("rank0", "all", "none")


class Session:
    """`nranks` ranks in one process group, started with the first call and kept until `close`.

    A call that fails, is interrupted or takes too long ends the ranks; the next call starts fresh ones.

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
        engine: Where the ranks run; "local" is this machine.

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
        engine: str = "local",
    ) -> None:
        check_platform()
        check_count(nranks, least=1, name="nranks")
        if threads not in (None, "bind"):
            check_count(threads, least=1, name="threads")
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout={timeout!r}: a number of seconds above 0, or None")
        if output not in _OUTPUTS:
            raise ValueError(f"output={output!r}: one of {', '.join(map(repr, _OUTPUTS))}")
        self.nranks = nranks
        self._engine = engines.resolve(engine)
        self._devices = choose_devices(nranks, devices)
        self._group = {"backend": backend} if isinstance(backend, str) else dict(backend or {})
        self._group.setdefault("backend", "nccl" if self._devices[0].startswith("cuda") else "gloo")
        self._threads = threads
        self._timeout = timeout
        self._output = output
        self._env = dict(env or {})
        self._seed = seed
        self._ranks: engines.Ranks | None = None
        self._relay: relay.Relay | None = None
        self._finalizer: weakref.finalize[..., Session] | None = None
        self._closed = False
        self._shelf = transport.Shelf()
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
            BaseException: What `fn` raised, on the rank where it raised first; the cause is that rank's traceback.
        """
        return self._call(fn, args, kwargs, imports, need, everyone=False)[0]  # type: ignore[no-any-return]

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
        return self._call(fn, args, kwargs, imports, need, everyone=True)

    def logs(self, rank: int) -> str:
        """What a rank has written, shown or not: the last million characters since the ranks started."""
        return self._relay.logs[rank].text() if self._relay is not None else ""

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
        return "" if self._ranks is None else stacks.report(stacks.take(self._ranks))

    def close(self) -> None:
        """End the ranks. A closed session takes no more calls."""
        self._closed = True
        self._end(grace=2.0)
        self._shelf.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._ranks is not None else "not started"
        devices = ", ".join(sorted(set(self._devices)))
        return f"<nbdist.Session: {self.nranks} ranks on {devices}, {self._group['backend']}, {state}>"

    def _call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        imports: Any,
        need: Any,
        everyone: bool,
    ) -> list[Any]:
        if self._closed:
            raise NbdistError("this session is closed; make a new one")
        block, names = check_call(fn, imports, need)
        call = capture.capture_call(fn, args, kwargs, block, names, self._shelf)
        try:
            with contextlib.closing(call.parcel):
                self._engine.warm(["torch", "torch.distributed", *capture.modules_named(block), *sorted(call.modules)])
                ranks, output = self._start()
                seeds = draw_seeds() if self._seed is None else None
                for rank, channel in enumerate(ranks.channels):
                    answers = everyone or rank == 0
                    # A rank that died meanwhile is noticed when its answer is waited for.
                    with contextlib.suppress(ConnectionError):
                        channel.send(("call", call.header, seeds, answers), call.parcel)
            return supervise.Waiting(ranks, output, self._timeout, call.originals).wait()
        except BaseException:
            self._end(grace=0.0)
            raise

    def _start(self) -> tuple[engines.Ranks, relay.Relay]:
        if self._ranks is not None and self._relay is not None:
            return self._ranks, self._relay
        ranks = self._ranks = self._engine.start(self.nranks)
        output = self._relay = relay.Relay(ranks.outputs, self._output)
        self._finalizer = weakref.finalize(self, ranks.close)
        setting = worker.Setting.of_this_process(self._env)
        seeds = None if self._seed is None else (self._seed,) * 3
        cores = affinity.usable_cores()
        bound = affinity.shares(cores, affinity.numa_nodes(), self.nranks) if self._threads == "bind" else None
        asked = setting.environ.get("OMP_NUM_THREADS", "").partition(",")[
            0
        ]  # a list has a number for each nesting level
        threads = int(asked) if asked.isdigit() else max(1, len(cores) // self.nranks)
        if isinstance(self._threads, int):
            threads = self._threads
        with contextlib.closing(meeting.MeetingPoint()) as meeting_point:
            for rank, channel in enumerate(ranks.channels):
                world = worker.World(
                    rank=rank,
                    world_size=self.nranks,
                    device=self._devices[rank],
                    backend=self._group["backend"],
                    options={name: value for name, value in self._group.items() if name != "backend"},
                    master_port=meeting_point.port,
                    threads=threads,
                    cores=None if bound is None else bound[rank],
                )
                with contextlib.suppress(ConnectionError):
                    channel.send(("join", world, setting, seeds), fds=meeting_point.fds(rank))
        return ranks, output

    def _end(self, grace: float) -> None:
        if self._ranks is not None:
            ranks, self._ranks = self._ranks, None
            if self._finalizer is not None:
                self._finalizer.detach()
            ranks.close(grace)


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


def choose_devices(nranks: int, devices: str | Sequence[str] | None) -> list[str]:
    """A device for each rank. Raises `ValueError` where there are not enough."""
    if devices == "cpu":
        return ["cpu"] * nranks
    if devices is not None and not isinstance(devices, str):
        if len(devices) != nranks:
            raise ValueError(f"devices={list(devices)!r} names {len(devices)} devices for {nranks} ranks")
        return [str(device) for device in devices]
    if devices not in (None, "cuda"):
        raise ValueError(f"devices={devices!r}: 'cpu', 'cuda', or a list with one device for each rank")
    gpus = local.visible_gpus()
    if gpus == 0 and devices is None:
        return ["cpu"] * nranks
    if nranks > gpus:
        raise ValueError(
            f"{nranks} ranks want a GPU each, but {gpus} GPU{'s are' if gpus != 1 else ' is'} visible. Ask for "
            f'{gpus or 1} or fewer, or for CPU ranks: Session({nranks}, devices="cpu").run(fn, ...)'
        )
    return [f"cuda:{rank}" for rank in range(nranks)]


def draw_seeds() -> tuple[int, int, int]:
    """Seeds for `random`, NumPy and torch, each drawn from the notebook's own state of that library."""
    for_random = random.getrandbits(63)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    for_numpy = for_random if numpy is None else int(numpy.random.randint(0, 2**31 - 1))
    for_torch = for_random if torch is None else int(torch.empty((), dtype=torch.int64).random_().item())
    return for_random, for_numpy, for_torch
