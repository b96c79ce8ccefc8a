"""Ranks that wait for what cannot come: each class of hang on real ranks, and what must not be called one."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import LINUX, Kernel, poll
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from nbdist import NbdistError, RankStuck, Session
from nbdist.kernel.calls import hangs
from nbdist.kernel.calls.stacks import Frame
from nbdist.kernel.calls.standings import Standing
from nbdist.kernel.calls.states import Seen, state
from nbdist.kernel.calls.verdicts import Verdict, verdict
from nbdist.kernel.session import executor_of
from nbdist.system import waits
from nbdist.wire.recording import Collective

HERE = Path(__file__).name
RANKS, OPTIONS = 3, {"devices": "cpu", "on_hang": "raise"}

pytestmark = [
    pytest.mark.skipif(not LINUX, reason="only Linux says what a process waits for"),
    pytest.mark.usefixtures("soon"),
]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times after which ranks are looked at."""
    for name, seconds in {"LOOK_EVERY": 0.1, "QUIET": 0.5, "ASK_EVERY": 0.3, "ASK_RARELY": 0.3}.items():
        monkeypatch.setattr(hangs, name, seconds)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Verdict | None]:
    """The verdicts so far."""
    found: list[Verdict | None] = []

    def note(standings: Any) -> Verdict | None:
        found.append(verdict(standings))
        return found[-1]

    monkeypatch.setattr(hangs, "verdict", note)
    return found


def line_of(fn: Callable[..., Any], number: int) -> str:
    """Return a place as a verdict names it: the line of `fn` with this number, counted from its `def` as 0."""
    return f"{HERE}:{fn.__code__.co_firstlineno + number}"


# -------------------------------------------------------------------------------------------------- classes of hangs


def one_returns() -> None:
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(3))


def unequal_batches() -> None:
    for _ in range(2 + (dist.get_rank() == 1)):
        dist.broadcast(torch.ones(2), 1)
        dist.all_reduce(torch.ones(2))
    dist.barrier()


def other_functions() -> None:
    if dist.get_rank() == 2:
        dist.barrier()
    else:
        dist.all_reduce(torch.ones(1))


def other_sizes() -> None:
    dist.all_reduce(torch.ones(2 + (dist.get_rank() == 1)))


def other_groups() -> None:
    groups = [dist.new_group([0, 1, 2]) for _ in range(2)]
    dist.all_reduce(torch.ones(1), group=groups[dist.get_rank() == 1])


def a_group_that_some_never_make() -> None:
    if dist.get_rank() == 0:
        dist.new_group([0, 1])


def all_receive() -> None:
    dist.recv(torch.ones(1), (dist.get_rank() + 1) % 3)


def waits_for_what_was_not_sent() -> None:
    if dist.get_rank() == 0:
        work = dist.irecv(torch.ones(1), 1)
        assert work is not None
        work.wait()


def objects_under_an_if() -> None:
    if dist.get_rank() == 1:
        dist.all_gather_object([None] * 3, "mine")


def steps_of_ddp() -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    for _ in range(1 + (dist.get_rank() == 0)):
        model(torch.ones(2, 3)).sum().backward()


def a_collective_beside_the_backward_pass() -> None:
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    loss = model(torch.ones(2, 3)).sum()
    if dist.get_rank() == 1:
        dist.broadcast(torch.ones(5), 1)
    else:
        loss.backward()


def the_lock_of_a_file(path: str) -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), 1)
    if dist.get_rank() < 2:
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if dist.get_rank() == 1:
                dist.send(torch.ones(1), 0)
            dist.barrier()
    dist.barrier()


def a_lock_held_by_a_thread() -> None:
    lock, held = threading.Lock(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            dist.barrier()

    if dist.get_rank() == 0:
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        lock.acquire()
    dist.all_reduce(torch.ones(1))


class Locked(Dataset[int]):
    """Rows behind a lock."""

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock

    def __len__(self) -> int:
        return 4

    def __getitem__(self, row: int) -> int:
        with self.lock:
            return row


def a_loader_whose_worker_waits_for_a_lock() -> None:
    if dist.get_rank() == 0:
        lock = threading.Lock()
        with lock:
            list(DataLoader(Locked(lock), num_workers=1, multiprocessing_context="fork"))
    dist.barrier()


def a_full_pipe() -> None:
    if dist.get_rank() == 2:
        child = subprocess.Popen([sys.executable, "-c", "print('x' * 1_000_000)"], stdout=subprocess.PIPE)
        try:
            child.wait()
        finally:
            child.kill()
            child.wait()
    dist.barrier()


def joins_a_process_before_it_reads_the_queue() -> None:
    if dist.get_rank() == 2:
        fork = multiprocessing.get_context("fork")
        items = fork.Queue()
        child = fork.Process(target=items.put, args=(bytes(1 << 20),))
        child.start()
        try:
            child.join()
        finally:
            child.kill()
            child.join()
    dist.barrier()


def other_tags() -> None:
    rank, numbers = dist.get_rank(), torch.ones(1 << 20)
    if rank == 0:
        dist.send(numbers, 1, tag=1)
    elif rank == 1:
        dist.recv(numbers, 0, tag=2)


def a_full_pipe_of_its_own() -> None:
    if dist.get_rank() == 2:
        _, write = os.pipe()
        os.write(write, bytes(1 << 20))


def awaits_a_thread() -> None:
    def meet() -> None:
        dist.barrier()

    if dist.get_rank() == 1:
        asyncio.run(asyncio.to_thread(meet))


def reads_an_empty_pipe() -> None:
    if dist.get_rank() == 1:
        read, write = os.pipe()
        os.read(read, 1)
        os.close(write)
    dist.barrier()


def reads_a_connection() -> None:
    if dist.get_rank() == 0:
        here, there = multiprocessing.Pipe()
        here.recv()
        there.close()


def reads_a_one_way_connection() -> None:
    if dist.get_rank() == 0:
        here, there = multiprocessing.Pipe(duplex=False)
        here.recv()
        there.close()


def reads_a_pair_of_sockets() -> None:
    if dist.get_rank() == 2:
        here, there = socket.socketpair()
        here.recv(1)
        there.close()
    dist.barrier()


def gets_from_an_empty_queue() -> None:
    if dist.get_rank() == 0:
        queue.Queue().get()
    dist.barrier()


def gets_from_an_empty_simple_queue() -> None:
    if dist.get_rank() == 0:
        queue.SimpleQueue().get()


def gets_from_the_queue_of_a_process() -> None:
    if dist.get_rank() == 0:
        items = multiprocessing.get_context("fork").Queue()
        items.put(1)
        items.get()
        items.get()


def waits_for_an_event() -> None:
    if dist.get_rank() == 2:
        threading.Event().wait()
    dist.all_reduce(torch.ones(1))


def waits_after_it_has_used_a_loader() -> None:
    """torch's loaders leave a handler of SIGCHLD."""
    if dist.get_rank() == 0:
        list(DataLoader(torch.ones(4), num_workers=1, multiprocessing_context="fork"))
        threading.Event().wait()


def waits_for_a_semaphore() -> None:
    if dist.get_rank() == 1:
        threading.Semaphore(0).acquire()


def takes_a_lock_twice() -> None:
    lock = threading.Lock()
    with lock:
        if dist.get_rank() == 1:
            lock.acquire()


def takes_locks_in_two_orders() -> None:
    locks, both = [threading.Lock(), threading.Lock()], threading.Barrier(2)

    def take(first: int) -> None:
        with locks[first]:
            both.wait()
            with locks[1 - first]:
                pass

    if dist.get_rank() == 1:
        threading.Thread(target=take, args=(1,), daemon=True).start()
        take(0)


def awaits_an_event() -> None:
    async def wait() -> None:
        await asyncio.Event().wait()

    if dist.get_rank() == 1:
        asyncio.run(wait())


def waits_for_a_fifo_of_a_rank_that_waits(path: str) -> None:
    if dist.get_rank() == 0:
        with open(path, "rb") as file:
            file.read(1)
    elif dist.get_rank() == 1:
        with open(path, "wb"):
            dist.recv(torch.ones(1), 0)


def gets_a_key_that_nobody_sets() -> None:
    if dist.get_rank() == 1:
        dist.distributed_c10d._get_default_store().get("mine")
    dist.barrier()


def waits_for_a_key_that_nobody_sets() -> None:
    if dist.get_rank() == 1:
        dist.PrefixStore("mine", dist.distributed_c10d._get_default_store()).wait(["one", "two"])


def polls_a_collective() -> None:
    if dist.get_rank() == 1:
        work = dist.all_reduce(torch.ones(5), async_op=True)
        assert work is not None
        while not work.is_completed():
            time.sleep(0.05)


#: What the ranks do, the class of the verdict, what is said of why it cannot end.
HANGS: list[tuple[Callable[[], None], str, list[str]]] = [
    (
        one_returns,
        "missing rank",
        [
            f"rank 0 stands in its 2nd, all_reduce of 3 float32 at {line_of(one_returns, 3)}, and rank 1 has returned "
            "after 1 collective of this group; rank 2 has returned"
        ],
    ),
    (
        unequal_batches,
        "different collectives",
        [
            f"the ranks' 5th collective is not the same on all of them: ranks 0 and 2 in barrier at "
            f"{line_of(unequal_batches, 4)}; rank 1 in broadcast of 2 float32 by rank 1 at "
            f"{line_of(unequal_batches, 2)}"
        ],
    ),
    (
        other_functions,
        "different collectives",
        [f"rank 2 in barrier at {line_of(other_functions, 2)}", f"1 float32 at {line_of(other_functions, 4)}"],
    ),
    (other_sizes, "different collectives", ["ranks 0 and 2 in all_reduce of 2 float32", "rank 1 in all_reduce of 3"]),
    (other_groups, "missing rank", ["rank 1 waits in all_reduce of 1 float32", line_of(other_groups, 2)]),
    (
        a_group_that_some_never_make,
        "missing rank in C++",
        [f"waits in new_group at {line_of(a_group_that_some_never_make, 2)}", "rank 1 has returned"],
    ),
    (all_receive, "send and recv", [f"rank 0 receives in recv of 1 float32 from rank 1 at {line_of(all_receive, 1)}"]),
    (
        waits_for_what_was_not_sent,
        "send and recv",
        [
            f"rank 0 receives in irecv of 1 float32 from rank 1 at {line_of(waits_for_what_was_not_sent, 2)}, and "
            "rank 1 has returned"
        ],
    ),
    (
        other_tags,
        "send and recv",
        [
            f"rank 0 sends in send of 1,048,576 float32 to rank 1 with tag 1 at {line_of(other_tags, 3)}",
            "rank 1 waits in",
        ],
    ),
    (objects_under_an_if, "missing rank", [f"all_gather_object of 1 int64 at {line_of(objects_under_an_if, 2)}"]),
    (
        steps_of_ddp,
        "missing rank",
        [
            f"rank 0 stands in its 5th, broadcast of 3 int32 at {line_of(steps_of_ddp, 3)}, and rank 1 has returned "
            "after 4 collectives of this group; rank 2 has returned after 4",
        ],
    ),
    (
        a_collective_beside_the_backward_pass,
        "different collectives",
        [
            f"ranks 0 and 2 in all_reduce of 4 float32 at {line_of(a_collective_beside_the_backward_pass, 6)}; "
            f"rank 1 in broadcast of 5 float32 at {line_of(a_collective_beside_the_backward_pass, 4)}",
        ],
    ),
    (
        a_lock_held_by_a_thread,
        "lock",
        ["rank 0's main thread waits for another thread of it", f"barrier at {line_of(a_lock_held_by_a_thread, 6)}"],
    ),
    (
        awaits_a_thread,
        "lock",
        ["rank 1's main thread waits for another thread of it", f"barrier at {line_of(awaits_a_thread, 2)}"],
    ),
    (a_loader_whose_worker_waits_for_a_lock, "loader", ["a worker of rank 0's data loader waits for a lock"]),
    (a_full_pipe, "full pipe", ["a pipe is full, and only rank 2 could read it"]),
    (
        joins_a_process_before_it_reads_the_queue,
        "full pipe",
        ["a pipe is full, and only rank 2 could read it"],
    ),
    (a_full_pipe_of_its_own, "full pipe", ["a pipe is full, and only rank 2 could read it"]),
    (
        reads_an_empty_pipe,
        "nothing comes",
        ["only rank 1 itself could write into the pipe, and all of"],
    ),
    (reads_a_connection, "nothing comes", ["only rank 0 itself could write into the pipe"]),
    (reads_a_one_way_connection, "nothing comes", ["only rank 0 itself could write into the pipe"]),
    (reads_a_pair_of_sockets, "nothing comes", ["only rank 2 itself could write into the pipe"]),
    (
        gets_from_an_empty_queue,
        "nothing comes",
        ["only a thread of rank 0 could release the lock"],
    ),
    (gets_from_an_empty_simple_queue, "nothing comes", ["only a thread of rank 0 could", "all of them wait"]),
    (gets_from_the_queue_of_a_process, "nothing comes", ["only rank 0 itself could write into the pipe"]),
    (waits_for_an_event, "nothing comes", ["only a thread of rank 2 could"]),
    (waits_after_it_has_used_a_loader, "nothing comes", ["only a thread of rank 0 could"]),
    (waits_for_a_semaphore, "nothing comes", ["only a thread of rank 1 could"]),
    (takes_a_lock_twice, "nothing comes", ["only a thread of rank 1 could"]),
    (takes_locks_in_two_orders, "nothing comes", ["only a thread of rank 1 could"]),
    (awaits_an_event, "nothing comes", ["only a thread of rank 1 could"]),
    (
        gets_a_key_that_nobody_sets,
        "nothing comes",
        ["no rank has set the key for which rank 1", "rank 0 waits in"],
    ),
    (waits_for_a_key_that_nobody_sets, "nothing comes", ["no rank has set the key", "rank 0 has returned"]),
    (
        polls_a_collective,
        "missing rank",
        [f"rank 1 stands in its 1st, all_reduce of 5 float32 at {line_of(polls_a_collective, 2)}, and rank 0 has"],
    ),
]
#: The lines at which these ranks wait: what the cell shows of them names it.
WAITS_AT = {
    reads_an_empty_pipe: 3,
    reads_a_connection: 3,
    reads_a_one_way_connection: 3,
    reads_a_pair_of_sockets: 3,
    gets_from_an_empty_queue: 2,
    gets_from_an_empty_simple_queue: 2,
    gets_from_the_queue_of_a_process: 5,
    waits_for_an_event: 2,
    waits_for_a_semaphore: 2,
    takes_a_lock_twice: 4,
    takes_locks_in_two_orders: 6,
    awaits_an_event: 5,
    gets_a_key_that_nobody_sets: 2,
    waits_for_a_key_that_nobody_sets: 2,
}


@pytest.mark.long("waits for one verdict after the other")
@pytest.mark.parametrize("hang", HANGS, ids=lambda hang: hang[0].__name__)
def test_a_hang_is_named(
    session: Session, asked: list[Verdict | None], hang: tuple[Callable[[], None], str, list[str]]
) -> None:
    fn, kind, words = hang
    with pytest.raises(RankStuck) as caught:
        session.run(fn)
    found = asked[-1]
    assert found is not None
    assert found.kind == kind, found
    assert all(word in found.why for word in words), found.why
    assert fn not in WAITS_AT or f" at {line_of(fn, WAITS_AT[fn])}" in found.doing, found.doing
    assert str(caught.value).startswith(f"{found}\n\n")
    assert session.run_all(dist.get_rank) == [0, 1, 2]


@pytest.mark.long("waits for one verdict after the other")
def test_a_rank_that_reads_its_flight_recorder_late(
    asked: list[Verdict | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, the third answer after the request may not have the collectives either."""
    requested: list[Any] = []
    with Session(RANKS, **OPTIONS) as session:  # type: ignore[arg-type]
        session.run(dist.barrier)
        ranks: Any = executor_of(session).group.ranks  # type: ignore[union-attr]
        read, stacks = ranks.read_flight_recorders, ranks.stacks

        def answers(which: Any) -> Any:
            if requested:
                requested.append(None)
            if len(requested) == 5:
                read(requested[0])
            return stacks(which)

        monkeypatch.setattr(ranks, "read_flight_recorders", requested.append)
        monkeypatch.setattr(ranks, "stacks", answers)
        with pytest.raises(RankStuck, match=r"rank 0 stands in its \d+th, broadcast of 3 int32"):
            session.run(steps_of_ddp)
    assert len(asked) == 1 and len(requested) >= 5


def a_lock_that_is_tried_again_and_again(path: str) -> None:
    from filelock import FileLock  # torch needs it

    if dist.get_rank() == 0:
        dist.recv(torch.ones(1), 1)
    if dist.get_rank() < 2:
        with FileLock(path):
            if dist.get_rank() == 1:
                dist.send(torch.ones(1), 0)
            dist.barrier()
    dist.barrier()


@pytest.mark.long("waits for one verdict after the other")
def test_a_lock_that_is_tried_again_and_again(session: Session, tmp_path: Path) -> None:
    with pytest.raises(RankStuck, match="waits for the lock of a file that rank 1 holds, and rank 1 waits in barrier"):
        session.run(a_lock_that_is_tried_again_and_again, str(tmp_path / "lock"))


@pytest.mark.long("waits for one verdict after the other")
def test_the_lock_of_a_file(session: Session, tmp_path: Path) -> None:
    with pytest.raises(RankStuck, match="waits for the lock of a file that rank 1 holds, and rank 1 waits in barrier"):
        session.run(the_lock_of_a_file, str(tmp_path / "lock"))


@pytest.mark.long("waits for one verdict after the other")
def test_a_fifo_of_a_rank_that_waits(session: Session, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(RankStuck, match="only rank 1 could write into the pipe that rank 0 reads, and rank 1 waits in"):
        session.run(waits_for_a_fifo_of_a_rank_that_waits, str(tmp_path / "fifo"))


def test_a_rank_that_takes_no_part(session: Session) -> None:
    with pytest.raises(RankStuck, match="rank 2 takes no part in this call after"):
        session.run(lambda: dist.all_reduce(torch.ones(1)), ranks=[0, 1])


def test_a_rank_that_was_stopped(session: Session) -> None:
    pids = session.run_all(os.getpid)

    def stop() -> None:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()

    future = session.submit(stop)
    try:
        error = future.exception()
    finally:
        with contextlib.suppress(ProcessLookupError):  # it did not leave the call, and was killed
            os.kill(pids[1], signal.SIGCONT)
    assert isinstance(error, RankStuck)
    assert "rank 1 is stopped" in str(error) and "rank 1 was stopped by a signal" in str(error)


# -------------------------------------------------------------------------------------------------- what is no hang


def compute(go: str) -> None:
    while not os.path.exists(go):
        sum(range(10_000))


def sleep(go: str) -> None:
    while not os.path.exists(go):
        time.sleep(0.05)


def wait_with_a_timeout(go: str) -> None:
    lock = threading.Lock()
    lock.acquire()
    while not os.path.exists(go):
        lock.acquire(timeout=1.0)


def wait_for_a_thread(go: str) -> None:
    done: queue.Queue[None] = queue.Queue()
    threading.Thread(target=lambda: done.put(sleep(go)), daemon=True).start()
    done.get()


def await_a_thread(go: str) -> None:
    asyncio.run(asyncio.to_thread(sleep, go))


def wait_for_a_child(go: str) -> None:
    subprocess.run([sys.executable, "-c", f"import os, time\nwhile not os.path.exists({go!r}): time.sleep(0.05)"])


def read_the_pipe_of_a_child(go: str) -> None:
    code = f"import os, time\nwhile not os.path.exists({go!r}): time.sleep(0.05)\nprint('go')"
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.read() == b"go\n"
    child.wait()


def read_a_pipe_that_a_child_keeps_open(go: str) -> None:
    read, write = os.pipe()
    code = f"import os, time\nwhile not os.path.exists({go!r}): time.sleep(0.05)"
    subprocess.Popen([sys.executable, "-c", code], pass_fds=[write])
    os.close(write)
    assert os.read(read, 1) == b""
    os.wait()


def read_a_pipe_that_a_thread_writes(go: str) -> None:
    here, there = multiprocessing.Pipe()
    threading.Thread(target=lambda: there.send(sleep(go)), daemon=True).start()
    here.recv()


def wait_for_a_timer(go: str) -> None:
    while not os.path.exists(go):
        event = threading.Event()
        threading.Timer(2.0, event.set).start()
        event.wait()


def wait_for_the_handler_of_a_signal(go: str) -> None:
    event = threading.Event()
    signal.signal(signal.SIGALRM, lambda *_: event.set())
    while not os.path.exists(go):
        event.clear()
        signal.setitimer(signal.ITIMER_REAL, 2.0)
        event.wait()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def read_a_fifo_that_others_may_open(go: str) -> None:
    os.mkfifo(go + ".fifo")
    with open(go + ".fifo", "r+b", buffering=0) as file:
        file.read(1)


def wait_for_the_lock_of_a_child(go: str) -> None:
    fork = multiprocessing.get_context("fork")
    lock, taken = fork.Lock(), fork.Event()

    def hold() -> None:
        with lock:
            taken.set()
            sleep(go)

    child = fork.Process(target=hold)
    child.start()
    taken.wait()
    lock.acquire()
    child.join()


def wait_for_a_stranger(go: str) -> None:
    """Wait for a program that connects to a socket of the rank."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(go + ".sock")
        listener.listen()
        listener.accept()


def get_a_key_that_a_thread_sets(go: str) -> None:
    store = dist.distributed_c10d._get_default_store()

    def set_later() -> None:
        sleep(go)
        store.set("later", "1")

    threading.Thread(target=set_later, daemon=True).start()
    store.get("later")


def get_a_key_with_a_limit(go: str) -> None:
    store = dist.distributed_c10d._get_default_store()
    while not os.path.exists(go):
        with contextlib.suppress(RuntimeError):
            store.wait(["never"], timedelta(seconds=2))


class Slow(Dataset[int]):
    """Rows that take their time."""

    def __init__(self, go: str) -> None:
        self.go = go

    def __len__(self) -> int:
        return 1

    def __getitem__(self, row: int) -> int:
        sleep(self.go)
        return row


def load_slowly(go: str) -> None:
    list(DataLoader(Slow(go), num_workers=2, multiprocessing_context="fork"))


def wait_for_a_strangers_lock(go: str) -> None:
    with open(go + ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def sleep_in_a_model(go: str) -> None:
    class Sleeper(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sleep(go)
            return super().forward(x)

    group = dist.new_group([1], use_local_synchronization=True)
    DistributedDataParallel(Sleeper(1, 1), process_group=group)(torch.ones(1, 1))


@pytest.mark.long("waits for one verdict after the other")
@pytest.mark.parametrize(
    "slow",
    [
        sleep,
        wait_with_a_timeout,
        wait_for_a_thread,
        await_a_thread,
        wait_for_a_child,
        load_slowly,
        wait_for_a_strangers_lock,
        sleep_in_a_model,
        read_the_pipe_of_a_child,
        read_a_pipe_that_a_child_keeps_open,
        read_a_pipe_that_a_thread_writes,
        wait_for_a_timer,
        wait_for_the_handler_of_a_signal,
        read_a_fifo_that_others_may_open,
        wait_for_the_lock_of_a_child,
        wait_for_a_stranger,
        get_a_key_with_a_limit,
        get_a_key_that_a_thread_sets,
    ],
)
def test_a_slow_rank_is_not_a_hang(
    session: Session, asked: list[Verdict | None], slow: Callable[[str], None], tmp_path: Path
) -> None:
    go = tmp_path / "go"

    def one_is_slow() -> int:
        if dist.get_rank() == 1:
            slow(str(go))
        dist.barrier()
        return 5

    with open(f"{go}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        future = session.submit(one_is_slow)
        assert poll(lambda: len(asked) >= 3 or future.done())
        go.touch()
    release(str(go))
    assert future.result() == 5
    assert set(asked) == {None}


def release(go: str) -> None:
    """Do what the ranks of the last two kinds wait for."""
    if os.path.exists(go + ".fifo"):
        Path(go + ".fifo").write_bytes(b"1")
    if os.path.exists(go + ".sock"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(go + ".sock")


def test_a_rank_that_computes_is_not_even_asked(
    session: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 1 computes. Each look finds a second more of its CPU time: on a busy machine it may get none for a while."""
    go, evidence, looks = tmp_path / "go", [], 0
    use, observe = waits.use, hangs.observe
    pid = session.run_all(os.getpid)[1]

    def look(process: int) -> waits.Use | None:
        nonlocal looks
        found = use(process)
        if process != pid or found is None:
            return found
        looks += 1
        return found._replace(seconds=found.seconds + looks)

    def ask(*what: Any) -> Any:
        evidence.append(what)
        return observe(*what)

    monkeypatch.setattr(waits, "use", look)
    monkeypatch.setattr(hangs, "observe", ask)

    def one_computes() -> None:
        if dist.get_rank() == 1:
            compute(str(go))
        dist.barrier()

    future = session.submit(one_computes)
    assert poll(lambda: looks >= 12 or future.done())
    go.touch()
    future.result()
    assert evidence == []


def test_holders_of_file_locks_are_parsed() -> None:
    text = """\
1: FLOCK  ADVISORY  WRITE 31309 fe:00:6963683 0 EOF
1: -> FLOCK  ADVISORY  WRITE 31306 fe:00:6963683 0 EOF
1:  -> FLOCK  ADVISORY  WRITE 31307 fe:00:6963683 0 EOF
2: POSIX  ADVISORY  READ 24104 fe:00:16204565 128 128
"""
    assert waits.parse_locks(text) == {31306: 31309, 31307: 31309}


# -------------------------------------------------------------------------------------------------- what comes of it


def test_by_default_the_cell_shows_a_hang_and_the_call_goes_on(
    capsys: pytest.CaptureFixture[str], asked: list[Verdict | None]
) -> None:
    with Session(2, devices="cpu") as session:
        future = session.submit(one_returns)
        assert poll(lambda: asked and asked[-1] is not None)
        said = ""

        def told() -> bool:
            nonlocal said
            said += capsys.readouterr().err
            return "The stop button ends the call" in said

        assert poll(told), said
        assert not future.done()
        future.cancel()
    said += capsys.readouterr().err
    assert said.count("nbdist: this call hangs: rank 0 waits in all_reduce of 3 float32 at") == 1
    assert "  What helps: let all ranks make the same collectives" in said


def test_stuck_ranks_are_held_for_post_mortem(capsys: pytest.CaptureFixture[str]) -> None:
    def hold() -> None:
        marker = "kept"  # noqa: F841
        if dist.get_rank() == 0:
            dist.barrier()

    with Session(2, devices="cpu", on_hang="raise", hold_on_error=True) as session:
        with pytest.raises(RankStuck, match="Stack of rank 0"):
            session.run(hold)
        session.post_mortem(rank=0, commands=["up", "up", "up", "p marker"])
        assert "'kept'" in capsys.readouterr().out


def test_a_notebook_names_the_cell(kernel: Kernel) -> None:
    kernel.ok("from nbdist import Session\nfrom nbdist.kernel.calls import hangs")
    kernel.ok("hangs.LOOK_EVERY, hangs.QUIET, hangs.ASK_EVERY = 0.1, 0.5, 0.3")
    result = kernel.run("""import torch, torch.distributed as dist
def train():
    for _ in range(2 + dist.get_rank()):
        dist.all_reduce(torch.ones(1))
with Session(2, on_hang="raise") as session:
    session.run(train)""")
    assert result.error == "RankStuck"
    assert "rank 1 stands in its 3rd, all_reduce of 1 float32 at Cell In[3], line 4, and rank 0 has" in result.message


def test_input_in_the_background_is_an_error(session: Session) -> None:
    with pytest.raises(NbdistError, match="a call in the background has no cell that can ask"):
        session.submit(lambda: input("name?") if dist.get_rank() == 0 else dist.barrier()).result()


def test_a_thread_that_wakes_for_a_moment_is_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a thread that polls is found waiting for a core; three verdicts of 60 came late by that."""
    barrier = Collective(1, "barrier", "0", [0, 1], 1, -1, "", -1, "x.py", 1, 0.0, None, True, True, False)
    own = Standing(0, "returned", begun=[barrier])
    frames = [Frame("x.py", "1", "train")]
    for states, expected in (
        ([{1: "S", 2: "R"}, {1: "S", 2: "S"}], "collective"),
        ([{1: "S", 2: "R"}, {1: "R", 2: "S"}], "collective"),
        ([{1: "S", 2: "R"}] * 20, "runs"),
        ([{1: "D", 2: "S"}] * 20, "runs"),
    ):
        looks = iter(states)
        monkeypatch.setattr(waits, "threads", lambda _, looks=looks: next(looks))
        assert state(own, Seen(-1, frames), []).state == expected, states


def test_a_rank_that_is_found_running_but_uses_no_time_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    with Session(1, devices="cpu") as session:
        session.run(int)
        watched = hangs.Hangs(executor_of(session).group, [0])
        found = []
        for state in "SRSD":
            monkeypatch.setattr(waits, "use", lambda _, state=state: waits.Use(1.0, state))
            found.append(watched._idle([0], 2.0))
        assert found == [False, True, True, False]
