"""The pytest fixtures `ddp` and `ddp_module`: run a function of a test on several CPU ranks.

    def test_sum(ddp):
        assert ddp(2, all_reduce_of_ones) == 2.0

pytest loads this file in every environment with nbdist, so it imports nbdist only when a test uses a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from ..kernel.session import Session

T = TypeVar("T")


class Launcher:
    """The value of the fixtures: `ddp(nranks, fn, *args, **kwargs)`, with `imports=` and `need=` as for `in_ddp`."""

    def __init__(self, shared: bool) -> None:
        self.node: Any = None
        """The test that runs. If a call raises, the report of the test gets the output of the ranks."""
        self._shared = shared
        self._sessions: dict[int, Session] = {}

    def __call__(self, nranks: int, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Run `fn(*args, **kwargs)` on `nranks` ranks with gloo; return rank 0's value, or raise the exception of a
        rank."""
        return self._run(nranks, lambda session: session.run(fn, *args, **kwargs))  # type: ignore[no-any-return]

    def run_all(self, nranks: int, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> list[T]:
        """Run `fn(*args, **kwargs)` like a call of this object, but return the values of all ranks, in order."""
        return self._run(nranks, lambda session: session.run_all(fn, *args, **kwargs))  # type: ignore[no-any-return]

    def _run(self, nranks: int, action: Callable[[Session], Any]) -> Any:
        from ..kernel.session import Session

        if nranks not in self._sessions:
            self._sessions[nranks] = Session(nranks, devices="cpu")
        session = self._sessions[nranks]
        try:
            value = action(session)
        except BaseException:
            for rank in range(1, nranks):  # what rank 0 writes, pytest has captured already
                if session.logs(rank):
                    self.node.add_report_section("call", f"output of rank {rank}", session.logs(rank))
            self.close(nranks)  # the next call must not find what this one left
            raise
        if not self._shared:
            self.close(nranks)
        return value

    def close(self, *nranks: int) -> None:
        """End the ranks of the given sessions, or of all sessions."""
        for count in nranks or list(self._sessions):
            self._sessions.pop(count).close()


@pytest.fixture
def ddp(request: pytest.FixtureRequest) -> Launcher:
    """Run a function on fresh ranks, once or several times: `ddp(2, fn, *args)` returns rank 0's value.

    Examples:
        >>> import torch
        >>> import torch.distributed as dist
        >>> def sum_of_ones():
        ...     total = torch.ones(())
        ...     dist.all_reduce(total)
        ...     return total.item()
        >>> def test_all_reduce(ddp):
        ...     assert ddp(2, sum_of_ones) == 2.0
    """
    launcher = Launcher(shared=False)
    launcher.node = request.node
    return launcher


@pytest.fixture(scope="module")
def _ddp_of_module() -> Iterator[Launcher]:
    launcher = Launcher(shared=True)
    yield launcher
    launcher.close()


@pytest.fixture
def ddp_module(request: pytest.FixtureRequest, _ddp_of_module: Launcher) -> Launcher:
    """Run functions like `ddp`, but keep the ranks and the objects in their `__main__` for all tests of a module, until
    one fails.

    Examples:
        >>> import os
        >>> pids = []
        >>> def test_first(ddp_module):
        ...     pids.append(ddp_module(2, os.getpid))
        >>> def test_second(ddp_module):
        ...     assert pids == [ddp_module(2, os.getpid)]  # the same rank
    """
    _ddp_of_module.node = request.node
    return _ddp_of_module
