"""`replay_step`, which runs one step of a recorded training again, in the kernel."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet  # another class than the builtin one in Python 3.10
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..capture.foreign import name_of
from ..capture.need import Names, given_names
from ..capture.per_rank import for_each_rank, own
from ..checks import check_count, check_path
from ..errors import NbdistError, entry
from ..fastai.patches import patched
from ..rank.member import Beside, Way, cpu_world, member, run_beside, run_to, run_to_in_rank
from ..replay.target import Reached, Target
from ..wire.rendezvous import Rendezvous
from .calls.arguments import check_call, check_platform, check_takes
from .calls.requests import check_rank
from .in_kernel import breakpoints
from .session import Session, executor_of

#: Seconds that the kernel waits in a collective for the ranks, and that the ranks wait for the kernel, where the user
#: may be debugging.
_PATIENCE, _LONG_PATIENCE = 300, 30 * 86400
#: Seconds that the kernel, after a failure of its own, waits for the failure of a rank that may have caused it.
_SOON = 5.0


@dataclass(frozen=True)
class ReplayedStep:
    """The result of a step that was run again."""

    step: int
    """The number of the step, from 1."""
    rank: int
    """The number of the rank."""
    same: bool | None
    """True if the step gave the recorded result, bit for bit. None if there is nothing to compare, because the recorded
    step or this one did not end."""

    def __repr__(self) -> str:
        result = {
            True: "the result is the recorded one, bit for bit",
            False: "the result is not the recorded one",
            None: "there is no recorded result to compare with",
        }
        return f"step {self.step} of rank {self.rank}: {result[self.same]}"


@entry
def replay_step(
    folder: str | os.PathLike[str],
    fn: Callable[..., Any],
    /,
    *args: Any,
    step: int,
    rank: int = 0,
    imports: str | Iterable[str] = "",
    need: Names = "",
    **kwargs: Any,
) -> ReplayedStep:
    """Run one step of a recorded training again, in this process, as one of the ranks ran it.

    The snapshots of a recording are pickles, and reading a pickle can run code: use only recordings of your own.

    The step runs in the notebook, so `%debug`, `breakpoint()` and `print` work in it. The other ranks are started
    again, on CPUs: they train from the last snapshot before the step, and take part in the step's collectives. This
    process runs the function from its beginning to the first step of the training, jumps to the recorded state before
    the wanted step, and leaves the function after it. You may add prints and breakpoints to the function. If you change
    its computation, the step changes, too.

    Args:
        folder: The folder of the recording.
        fn: The function that was recorded. It calls `fit(..., record=folder)`, or uses `RecordSteps(folder)` or
            `Recording(folder, ...)`.
        *args: The positional arguments of the recorded call.
        step: The number of the step, from 1. Steps are counted over all epochs.
        rank: The number of the rank.
        imports: As for `in_ddp`.
        need: As for `in_ddp`.
        **kwargs: The keyword arguments of the recorded call.

    Returns:
        The step, and whether its result equals the recorded one. If not, there is also a warning.

    Raises:
        FileNotFoundError: There is no recording in the folder.
        TypeError, ValueError: The step or the rank was not recorded, or an argument is invalid for `in_ddp`.
        NbdistError: The function ended before the step, or the notebook is in a process group of its own.
        BaseException: The step has raised this exception.

    Examples:
        >>> import torch
        >>> from nbdist import Recording, in_ddp, replay_step
        >>> def train():
        ...     model = torch.nn.Linear(2, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     recording = Recording("steps", model, optimizer)
        ...     for batch in recording.steps(torch.randn(4, 8, 2)):
        ...         optimizer.zero_grad()
        ...         model(batch).square().mean().backward()
        ...         optimizer.step()
        >>> in_ddp.options(devices="cpu")(1, train)
        >>> replay_step("steps", train, step=3)
        step 3 of rank 0: the result is the recorded one, bit for bit
    """
    check_platform()
    check_path(folder, name="folder", usage="replay_step(folder, fn, *args, step=...)")
    block, names = check_call(fn, imports, need)
    check_takes(fn, args, kwargs, ("imports", "need"))
    recording = _Recording(Path(os.path.abspath(folder)), step, rank)
    for_each_rank(args, kwargs, recording.size)
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        raise NbdistError("this process has a process group of its own: call dist.destroy_process_group() first")
    what = (fn, *args), kwargs, block, names
    with tempfile.TemporaryDirectory(prefix="nbdist-replay-") as scratch, contextlib.ExitStack() as stack:
        stack.enter_context(_as_before())
        session = None
        if recording.size > 1 or recording.snapshot < step - 1:
            options: dict[str, Any] = {"devices": "cpu", "threads": recording.threads, "output": "none"}
            session = stack.enter_context(Session(recording.size, **options))
            executor_of(session).on_hang = None  # ranks will wait for a user who debugs
        start = recording.go_to_step(session, Path(scratch), what)
        with given_names(block, names), patched(), breakpoints():
            reached = recording.last_step(session, Path(scratch), start, what)
    if reached is None:
        raise _ended(fn, step)
    if reached.same is False:
        warnings.warn(
            f"the result of step {step} of rank {rank} is not the recorded one: the code, the data, the number of "
            f"threads or the versions have changed (recorded with torch {recording.torch}), or the step depends on a "
            "value outside the objects of the recording, as with `enumerate`: use `recording.number` in its place",
            stacklevel=3,
        )
    return ReplayedStep(step, rank, reached.same)


class _Recording:
    """A recording, and the run from one of its snapshots to a step.

    Args:
        folder: The folder of the recording.
        step: The number of the step.
        rank: The number of the rank.

    Raises:
        FileNotFoundError, TypeError, ValueError: As for `replay_step`.
    """

    def __init__(self, folder: Path, step: int, rank: int) -> None:
        if not (folder / "rank-0.json").exists():
            raise FileNotFoundError(
                f"{folder} has no recording: record a training with fit(..., record=folder), RecordSteps(folder) or "
                "Recording(folder, ...)"
            )
        from ..replay import log  # imports torch

        self.size: int = log.about(folder, 0)["world_size"]
        check_rank(rank, self.size, of="recording")
        recorded = log.steps_of(folder, rank)
        if check_count(step, least=1, name="step") > recorded + 1:
            raise ValueError(f"step must be 1 to {recorded + 1}, got {step}: rank {rank} has recorded {recorded} steps")
        about = [log.about(folder, one) for one in range(self.size)]
        self.threads, self.torch = about[rank]["threads"], about[rank]["torch"]
        before = [one for one in log.snapshots_of(folder, range(self.size)) if one < step]
        if not before:
            raise ValueError(f"{folder} has no snapshot before step {step}: the ranks ended before they kept one")
        self.snapshot = before[-1]
        self._folder, self._step, self._rank = folder, step, rank
        self._seeds = [one["seeds"] for one in about]

    def _way(self, start: Path, end: Path | None) -> Way:
        return Way(Target(str(self._folder), self._step, str(start), str(end or "")), self._seeds)

    def go_to_step(self, session: Session | None, scratch: Path, what: tuple[Any, ...]) -> Path:
        """Make all ranks train up to the step, and return the folder with their snapshot of the state before it."""
        start, end = scratch / "start", scratch / "end"
        start.mkdir()
        (start / f"step-{self.snapshot}").symlink_to(self._folder / f"step-{self.snapshot}")
        if session is None or self.snapshot == self._step - 1:
            return start
        args, *rest = what
        if not all(session.call(run_to_in_rank, (self._way(start, end), *args), *rest, everyone=True)):
            raise _ended(args[0], self._step)
        return end

    def last_step(self, session: Session | None, scratch: Path, start: Path, what: tuple[Any, ...]) -> Reached | None:
        """Run the step in this process, together with the other ranks."""
        import torch.distributed as dist

        way, file = self._way(start, None), str(scratch / "store")
        (fn, *args), kwargs, block, names = what
        given = for_each_rank(tuple(args), kwargs, self.size)
        own_args, own_kwargs = (
            [own(one, self._rank) for one in given[0]],
            {k: own(v, self._rank) for k, v in given[1].items()},
        )
        with contextlib.closing(Rendezvous()) as rendezvous:
            beside = Beside(self._rank, file, self.threads, rendezvous.address, _LONG_PATIENCE)
            others = None
            if session is not None and self.size > 1:
                request = session._capture(run_beside, (beside, way, fn, *args), kwargs, block, names, None)
                others = session._turns.submit(request)
            world = cpu_world(self._rank, self.size, self.threads, rendezvous.address, _PATIENCE)
            with member(world, lambda: dist.FileStore(file, self.size)):
                try:
                    return run_to(way, self._rank, fn, own_args, own_kwargs)
                except Exception as error:
                    raise error from _failure(others)


def _failure(others: Future[Any] | None) -> BaseException | None:
    """Return the exception of a rank, if one has failed: the kernel fails in a collective that a rank has left."""
    with contextlib.suppress(NotYet):
        return None if others is None else others.exception(_SOON)
    return None


def _ended(fn: Any, step: int) -> NbdistError:
    return NbdistError(
        f"{name_of(fn)} ended before step {step} of the recording: give the function that was recorded, with the "
        "arguments of that call"
    )


@contextlib.contextmanager
def _as_before() -> Iterator[None]:
    """Restore the notebook's random states at the end of the `with` block."""
    from ..replay.random_states import random_state, set_random_state

    before = random_state()
    try:
        yield
    finally:
        set_random_state(before)
