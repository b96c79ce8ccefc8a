"""Every row of the fault table in a real kernel: what is seen, that nothing is left, that the next call works."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import Kernel, endless, left_in_shared_memory, living, poll, ranks_of, shared_memory_names
from faults import CELLS, FAULTS, GIL_HELD, PHASES, PRELUDE, WITH_CHILDREN, Fault, Phase

from nbdist import RayOptions


@pytest.fixture(scope="module", params=["local", pytest.param("ray", marks=pytest.mark.long("clusters of Ray"))])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start a kernel for the whole table, on each engine: each row must leave it as it was."""
    engine: Any = request.param
    if engine == "ray":
        engine = RayOptions(address=request.getfixturevalue("ray_cluster").address, placement="spread")
    temporary = tempfile.mkdtemp(prefix="faults-")  # a short path, as below
    kernel = Kernel(tmp_path_factory.mktemp("faults"), env={"TMPDIR": temporary})
    try:
        kernel.ok(PRELUDE)
        kernel.ok(f"from nbdist import RayOptions, use\nuse({engine!r})")
        # At the first print of a thread ipykernel opens a descriptor, for good.
        assert kernel.ok("print(in_ddp(2, sums), in_ddp(2, sums))").text == "2.0 2.0\n"
        yield kernel
    finally:
        kernel.close()
        shutil.rmtree(temporary)


class Leftovers:
    """Resources of a kernel; none of them may grow by a failed call."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = psutil.Process(kernel.pid)
        self._fds = self._kernel.num_fds()
        self._threads = self._kernel.num_threads()
        self._names = shared_memory_names()
        self._temporary = Path(kernel.environ["TMPDIR"])

    def check(self) -> None:
        assert poll(lambda: not ranks_of()), f"left: {ranks_of()}"
        assert poll(lambda: self._kernel.num_fds() <= self._fds), f"descriptors: {self._fds} → {self._kernel.num_fds()}"
        assert self._kernel.num_threads() <= self._threads
        assert not left_in_shared_memory(self._names)
        sockets = [str(path) for name in ("pymp-*", "listener-*") for path in self._temporary.rglob(name)]
        assert not sockets


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault(fault: Fault, shared: Kernel) -> None:
    """The fault is seen; benchmarks/kernel/faults.py measures how soon."""
    leftovers = Leftovers(shared)
    result = shared.run(fault.code)
    assert result.error == fault.error, result.traceback or result.text
    seen = result.plain_traceback + result.message
    for part in fault.shows:
        assert part in seen, seen
    leftovers.check()
    assert shared.ok("print(in_ddp(2, sums))").text == "2.0\n"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel with a session of two ranks that goes through the whole table: there `in_ddp` calls it."""
    kernel = Kernel(tmp_path_factory.mktemp("live"))
    try:
        kernel.ok(PRELUDE + CELLS["a session that stays"])
        # At the first print of a thread ipykernel opens a descriptor, for good.
        assert kernel.ok("print(staying.run(sums))").text == "2.0\n"
        yield kernel
    finally:
        kernel.close()


@pytest.mark.long("each fault once more, in a live session")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_fault_in_a_live_session(fault: Fault, live: Kernel) -> None:
    """The same is seen, and `restart` gives a session like the one before."""
    fds = psutil.Process(live.pid).num_fds()
    result = live.run(fault.code)
    assert result.error == fault.live, result.traceback or result.text
    seen = result.plain_traceback + result.message
    for part in fault.shows if fault.live == fault.error else ():
        assert part in seen, seen
    assert live.ok("staying.restart()\nprint(staying.run(sums))").text == "2.0\n"
    assert poll(lambda: len(ranks_of(live.pid)) == 2), ranks_of(live.pid)
    assert poll(lambda: psutil.Process(live.pid).num_fds() <= fds), "descriptors are left"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.survives], ids=lambda fault: fault.name)
def test_a_live_session_survives(fault: Fault, live: Kernel) -> None:
    """An exception leaves nothing behind that keeps the same ranks from the next call."""
    pids = live.ok("print(staying.run_all(os.getpid))").text
    with endless(live, "GRACE_AFTER_FAILURE"):
        live.run(fault.code)
    assert live.ok("print(staying.run(sums), staying.run_all(os.getpid))").text == f"2.0 {pids}"


def of_a_killed_kernel(phase: Phase) -> Any:
    """A phase; long where the rank could run a handler, which one that holds the GIL in C code cannot."""
    marks = [pytest.mark.long("more ways for a kernel to end")] if phase.name in ("in Python code", "asleep") else []
    return pytest.param(phase, marks=marks)


def began(kernel: Kernel) -> bool:
    return (kernel.cwd / "began").exists()


@pytest.mark.parametrize("phase", PHASES, ids=lambda phase: phase.name)
def test_interrupt(phase: Phase, shared: Kernel) -> None:
    leftovers = Leftovers(shared)
    (shared.cwd / "began").unlink(missing_ok=True)
    cell = shared.start(phase.code)
    assert poll(lambda: began(shared))
    shared.interrupt()
    result = shared.finish(cell)
    assert result.error == "KeyboardInterrupt", result
    leftovers.check()
    assert shared.ok("print(in_ddp(2, sums))").text == "2.0\n"


def test_interrupt_runs_finally(shared: Kernel) -> None:
    cell = shared.start(CELLS["an interrupt runs finally"])
    shared.finish(cell, until=lambda result: "begin" in result.text)
    shared.interrupt()
    result = shared.finish(cell)
    assert result.error == "KeyboardInterrupt" and "cleaned up" in result.text


def test_interrupt_in_a_finalizer(shared: Kernel) -> None:
    """Python drops what a finalizer raises; the call ends all the same, and the ranks stay."""
    cell = shared.start(CELLS["an interrupt in a finalizer"])
    shared.finish(cell, until=lambda result: "begin" in result.text)
    shared.interrupt()
    assert "interrupted True" in shared.finish(cell).text


def test_second_interrupt_does_not_wait(shared: Kernel) -> None:
    """The time for ranks to clean up after the first interrupt has no end here."""
    leftovers = Leftovers(shared)
    cell = shared.start(CELLS["a second interrupt does not wait"])
    shared.finish(cell, until=lambda result: "begin" in result.text)
    shared.interrupt()
    shared.finish(cell, until=lambda result: "no" in result.text)
    shared.interrupt()
    assert shared.finish(cell).error == "KeyboardInterrupt"
    leftovers.check()
    assert shared.ok("print(in_ddp(2, sums))").text == "2.0\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    "phase", [*map(of_a_killed_kernel, PHASES), GIL_HELD, WITH_CHILDREN], ids=lambda phase: phase.name
)
def test_kernel_killed(phase: Phase, tmp_path: Path) -> None:
    before = shared_memory_names()
    # A short path: data loaders have sockets there, whose names may have a hundred characters.
    temporary = tempfile.mkdtemp(prefix="killed-")
    kernel = Kernel(tmp_path, env={"TMPDIR": temporary})
    try:
        kernel.ok(PRELUDE)
        kernel.start(phase.code)
        assert poll(lambda: began(kernel))
        family = psutil.Process(kernel.pid).children(recursive=True)
        assert len(family) >= 3  # the fork server and two ranks
        os.kill(kernel.pid, signal.SIGKILL)
        assert poll(lambda: not living(family)), living(family)
        assert not left_in_shared_memory(before)
        assert not [name for name in os.listdir(temporary) if "nbdist" in name or "pymp" in name]
    finally:
        kernel.close()
        shutil.rmtree(temporary)


def test_a_killed_fork_server_leaves_no_folder(tmp_path: Path) -> None:
    temporary = tempfile.mkdtemp(prefix="killed-")
    kernel = Kernel(tmp_path, env={"TMPDIR": temporary})
    try:
        kernel.ok(PRELUDE)
        assert kernel.ok("kept = Session(2)\nprint(kept.run(sums))").text == "2.0\n"
        servers = psutil.Process(kernel.pid).children()
        for server in servers:
            server.kill()
        assert poll(lambda: not living(servers))
        kernel.client.shutdown()
        assert poll(lambda: not [name for name in os.listdir(temporary) if "nbdist" in name]), os.listdir(temporary)
    finally:
        kernel.close()
        shutil.rmtree(temporary)


def test_a_disk_without_room_for_a_folder(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    kernel = Kernel(tmp_path, env={"TMPDIR": str(temporary)})
    try:
        kernel.ok(PRELUDE)
        shutil.rmtree(temporary)
        assert kernel.ok("print(in_ddp(2, sums))").text == "2.0\n"
        assert not temporary.exists()
    finally:
        kernel.close()


@pytest.mark.long("kernels with a small /dev/shm")
@pytest.mark.slow
def test_shared_memory_full(tmp_path: Path) -> None:
    """Big values do not need /dev/shm; what the user's own code puts there fails with a reason."""
    if os.geteuid() != 0 or os.system("unshare --mount true 2>/dev/null") != 0:
        pytest.skip("only root can give a kernel a small /dev/shm of its own")
    wrapper = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
    kernel = Kernel(tmp_path, wrapper=wrapper)
    try:
        kernel.ok(PRELUDE)
        kernel.ok("value = in_ddp(2, lambda x: x + 1, torch.ones(10_000_000))\nassert value.sum() == 20_000_000")
        result = kernel.run(CELLS["shared memory is full"])
        assert result.error == "RuntimeError"
        assert "bus error" in result.plain_traceback.lower() or "No space left" in result.plain_traceback
        assert kernel.ok("print(in_ddp(2, sums))").text == "2.0\n"
    finally:
        kernel.close()
