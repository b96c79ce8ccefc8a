"""`nbdist.context`: what `multiprocess` and `multiprocessing` make of processes from the warm server."""

from __future__ import annotations

import concurrent.futures
import concurrent.futures.process
import contextlib
import functools
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from cells import cells
from conftest import Cell, Deadly, Kernel, living, open_fds, poll

import nbdist
from nbdist import CaptureError, NbdistError, WorkerDied
from nbdist.kernel.pools.pool import WarmPool
from nbdist.kernel.pools.processes import process_reader

CELLS = cells("kernel/cells/contexts.py")
PACKAGES = ["multiprocess", "multiprocessing"]


@pytest.fixture(params=PACKAGES)
def ctx(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A context, of whose processes and semaphores nothing is left after the test."""
    yield nbdist.context(request.param)
    assert poll(lambda: not process_reader.processes()), process_reader.processes()
    gc.collect()
    assert poll(lambda: not _semaphores()), _semaphores()


@pytest.fixture(autouse=True)
def nothing_waits_for_the_garbage_collector() -> Iterator[None]:
    """Collect garbage, such as the workers of a loader that an exception's frames refer to."""
    yield
    gc.collect()


def _semaphores() -> list[str]:
    """Return the semaphores of this process: names do not show the owner, but mappings do."""
    with open("/proc/self/maps") as file:
        return [line.split()[-1] for line in file if "/dev/shm/sem.mp-" in line]


def in_both(one: tuple[str, ...], cases: list[tuple[str, ...]]) -> list[Any]:
    """Cases with `multiprocess`, whose pools lose workers by the same code: all but `one` are long."""
    long = pytest.mark.long("more workers lost with multiprocess")
    return [pytest.param("multiprocess", *case, marks=[] if case == one else [long]) for case in cases]


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def test_unknown_package() -> None:
    with pytest.raises(ValueError, match="package must be one of 'multiprocess', 'multiprocessing', got 'billiard'"):
        nbdist.context("billiard")


def test_without_multiprocess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NbdistError, match=r'pip install "nbdist\[multiprocess\]"'):
        nbdist.context()


def test_by_name(ctx: Any) -> None:
    package = sys.modules[type(ctx).__bases__[-1].__module__.partition(".")[0]]
    assert package.get_context("nbdist") is ctx
    assert ctx.get_start_method() == "nbdist"


def test_process(ctx: Any, capfd: pytest.CaptureFixture[str]) -> None:
    process = ctx.Process(target=lambda word: print("hello", word), args=("there",))
    process.start()
    assert process.is_alive() or process.exitcode == 0
    process.join()
    assert process.exitcode == 0 and "hello there" in capfd.readouterr().out
    assert process not in ctx.active_children()
    process.close()


@pytest.mark.parametrize(
    "end, exitcode",
    [(lambda: os._exit(3), 3), (lambda: sys.exit(4), 4), (lambda: os.kill(os.getpid(), signal.SIGKILL), -9)],
)
def test_exit_code(end: Callable[[], Any], exitcode: int) -> None:
    process = nbdist.context("multiprocessing").Process(target=end)
    process.start()
    process.join()
    assert process.exitcode == exitcode


def test_terminate(ctx: Any) -> None:
    process = ctx.Process(target=time.sleep, args=(1000,))
    process.start()
    assert process.join(0.1) is None and process.exitcode is None
    process.terminate()
    process.join()
    assert process.exitcode == -signal.SIGTERM


def test_subclass_of_the_notebook(ctx: Any) -> None:
    class Mine(ctx.Process):  # type: ignore[misc,name-defined]
        def __init__(self, queue: Any) -> None:
            super().__init__()
            self.queue = queue

        def run(self) -> None:
            self.queue.put(Point(5))

    queue = ctx.Queue()
    process = Mine(queue)
    process.start()
    assert type(queue.get()) is Point
    process.join()


def test_synchronisation(ctx: Any) -> None:
    parts = {
        **{"lock": ctx.Lock(), "semaphore": ctx.Semaphore(2), "condition": ctx.Condition(), "barrier": ctx.Barrier(2)},
        **{"event": ctx.Event(), "value": ctx.Value("i", 1), "array": ctx.Array("d", 2), "simple": ctx.SimpleQueue()},
    }
    ours, theirs = ctx.Pipe()

    def work(parts: dict[str, Any], pipe: Any) -> None:
        with parts["lock"], parts["semaphore"], parts["condition"]:
            parts["value"].value += 1
            parts["array"][1] = 2.5
        parts["simple"].put(lambda: Point(7))
        pipe.send({"point": Point(8), "received": pipe.recv().x})
        parts["barrier"].wait()
        parts["event"].wait()

    process = ctx.Process(target=work, args=(parts, theirs))
    process.start()
    ours.send(Point(6))
    answer = ours.recv()
    assert type(answer["point"]) is Point and answer["received"] == 6
    assert parts["simple"].get()().x == 7
    parts["barrier"].wait()
    parts["event"].set()
    process.join()
    assert (process.exitcode, parts["value"].value, list(parts["array"])) == (0, 2, [0.0, 2.5])


def test_manager_and_shared_memory(ctx: Any) -> None:
    from multiprocessing import shared_memory

    def fill(shared: Any, name: str) -> None:
        shared["points"] = [Point(1)]
        memory = shared_memory.SharedMemory(name, **({"track": False} if sys.version_info >= (3, 13) else {}))
        memory.buf[0] = 9
        memory.close()

    memory = shared_memory.SharedMemory(create=True, size=16)
    try:
        with ctx.Manager() as manager:
            shared = manager.dict()
            process = ctx.Process(target=fill, args=(shared, memory.name))
            process.start()
            process.join()
            assert process.exitcode == 0 and type(shared["points"][0]) is Point and memory.buf[0] == 9
    finally:
        memory.close()
        memory.unlink()


def test_processes_of_processes(ctx: Any) -> None:
    def outer(queue: Any) -> None:
        process = ctx.Process(target=queue.put, args=(ctx.get_start_method(),))
        process.start()
        process.join()
        with ctx.Pool(1) as pool:
            queue.put(pool.map(len, ["abc"]))

    queue = ctx.Queue()
    process = ctx.Process(target=outer, args=(queue,))
    process.start()
    assert [queue.get(), queue.get()] == ["fork", [3]]
    process.join()


def test_queues_in_processes_of_processes(ctx: Any) -> None:
    def outer(queue: Any) -> None:
        queue.put("outer")  # its thread runs when the process is forked
        process = ctx.Process(target=queue.put, args=("inner",))
        process.start()
        process.join()

    queue = ctx.Queue()
    process = ctx.Process(target=outer, args=(queue,))
    process.start()
    assert {queue.get(), queue.get()} == {"outer", "inner"}
    process.join()


def test_the_notebook_is_the_parent_process(ctx: Any) -> None:
    with ctx.Pool(1) as pool:
        assert pool.apply(lambda: ctx.parent_process().pid) == os.getpid()
        assert pool.apply(lambda: ctx.parent_process().is_alive())


def test_an_object_that_cannot_be_sent_to_a_process_is_named(ctx: Any) -> None:
    rows = (row for row in range(3))
    with pytest.raises(CaptureError, match="rows"):
        ctx.Process(target=lambda: list(rows)).start()
    with ctx.Pool(1) as pool:
        with pytest.raises(CaptureError, match="rows"):
            pool.map(lambda i: list(rows), range(2))
        with pytest.raises(CaptureError, match="generator"):
            pool.map(len, [rows])
        with pytest.raises(Exception, match="generator"):
            pool.apply(lambda: (row for row in range(3)))
        assert pool.map(abs, [-1]) == [1]


def test_reducers_that_the_user_has_registered_with_dill() -> None:
    dill = pytest.importorskip("dill")
    ctx = nbdist.context("multiprocess")

    class Handle:
        def __init__(self, number: int) -> None:
            self.number, self.lock = number, iter([])  # the iterator says that it did not travel as it is

    @dill.register(Handle)
    def save_handle(pickler: Any, handle: Any) -> None:
        pickler.save_reduce(Handle, (handle.number + 100,), obj=handle)

    try:
        with ctx.Pool(1) as pool:
            assert pool.apply(lambda handle: handle.number, (Handle(1),)) == 101
            assert pool.apply(lambda: Handle(2)).number == 102
    finally:
        del dill.Pickler.dispatch[Handle]


# -------------------------------------------------------------------------------------------------------------- pools


def test_a_pool_runs_functions_of_the_notebook(ctx: Any) -> None:
    scale = 10

    def scaled(point: Point) -> Point:
        return Point(scale * point.x)

    points = [Point(i) for i in range(7)]
    with ctx.Pool(2) as pool:
        for values in (
            pool.map(scaled, points),
            list(pool.imap(scaled, points)),
            list(pool.imap(scaled, points, chunksize=3)),
            sorted(pool.imap_unordered(scaled, points), key=lambda point: point.x),
            pool.starmap(scaled, [(point,) for point in points]),
            pool.map_async(scaled, points).get(),
            [pool.apply(scaled, (point,)) for point in points],
        ):
            assert [(type(value), value.x) for value in values] == [(Point, 10 * i) for i in range(7)]
        scale = 20
        assert pool.map(scaled, points)[1].x == 20, "what has changed is seen by the next call"
        seen: list[Any] = []
        pool.apply_async(scaled, (Point(2),), callback=seen.append).wait()
        assert seen[0].x == 40


def test_pool_of_short_lives(ctx: Any) -> None:
    with ctx.Pool(2, maxtasksperchild=2) as pool:
        pids = pool.map(lambda i: os.getpid(), range(20), chunksize=1)
    assert len(set(pids)) >= 5


def test_initializer(ctx: Any) -> None:
    def begin(value: int) -> None:
        global _begun
        _begun = value

    with ctx.Pool(2, begin, (7,)) as pool:
        assert pool.map(lambda i: _begun + i, range(3)) == [7, 8, 9]


_begun = 0


def test_exception_of_a_task(ctx: Any) -> None:
    class Mine(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} and {b}")
            self.a = a

    def fail(i: int) -> None:
        raise Mine(i, 2)

    with ctx.Pool(2) as pool:
        with pytest.raises(Mine, match="3 and 2") as caught:
            pool.map(fail, [3])
        assert caught.value.a == 3 and "raise Mine(i, 2)" in str(caught.value.__cause__)
        assert pool.map(abs, [-1]) == [1]


ENDS: dict[str, Callable[[], Any]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashed": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "_exit(0)": lambda: os._exit(0),
    "sys.exit(0)": lambda: sys.exit(0),
}
CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "map": lambda pool, fn: pool.map(fn, range(8)),
    "imap": lambda pool, fn: list(pool.imap(fn, range(8))),
    "imap in chunks": lambda pool, fn: list(pool.imap(fn, range(8), chunksize=2)),
    "imap_unordered": lambda pool, fn: list(pool.imap_unordered(fn, range(8))),
    "map_async": lambda pool, fn: pool.map_async(fn, range(8), chunksize=1).get(),
    "apply": lambda pool, fn: [pool.apply(fn, (i,)) for i in range(8)],
}


LOSSES = [*(("killed", call) for call in CALLS), *((how, "map") for how in ENDS if how != "killed")]


@pytest.mark.parametrize(
    "ctx, how, call",
    [*(("multiprocessing", *loss) for loss in LOSSES), *in_both(("killed", "map"), LOSSES)],
    indirect=["ctx"],
)
def test_lost_worker(ctx: Any, how: str, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest's keeps the frames of the library's thread that was to start another worker, and was ended by SystemExit.
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)

    def work(i: int) -> int:
        if i == 3:
            end()
        return i

    end = ENDS[how]
    fds = open_fds()
    with ctx.Pool(2) as pool:
        with pytest.raises(WorkerDied, match=r"NbdistPoolWorker-\d+ \(pid \d+\)") as caught:
            CALLS[call](pool, work)
        assert caught.value.status == {"killed": -9, "crashed": -11}.get(how, 0)
        with pytest.raises(WorkerDied):
            pool.map(abs, range(3))
    with ctx.Pool(2) as pool:
        assert pool.map(abs, range(3)) == [0, 1, 2]
    del pool, caught
    gc.collect()
    assert poll(lambda: open_fds() <= fds + 3), "but for the library's tracker, and the interrupts' pipe"


PHASES = ["starting", "in the initializer", "idle, holding the lock", "in a task", "while a result is sent", "closing"]


@pytest.mark.parametrize(
    "ctx, phase",
    [*(("multiprocessing", phase) for phase in PHASES), *in_both(("in a task",), [(phase,) for phase in PHASES])],
    indirect=["ctx"],
)
def test_worker_killed_in_each_phase(ctx: Any, phase: str) -> None:
    def work(i: int) -> Any:
        if phase in ("in a task", "closing"):
            time.sleep(1000)
        return b"x" * 50_000_000 if phase == "while a result is sent" else i

    def begin(*args: Any) -> None:
        if phase == "in the initializer":
            time.sleep(1000)

    pool = ctx.Pool(2, begin, (Deadly("read"),) if phase == "starting" else ())
    with contextlib.ExitStack() as stack:  # entering the pool raises what a dead worker does
        stack.callback(pool.terminate)
        workers = [] if phase == "starting" else list(pool._pool)
        if phase == "while a result is sent":
            pool._outqueue._wlock.acquire()  # so that they are at it, and stay there
        call = functools.partial(pool.map, work, range(4))
        if phase == "idle, holding the lock":
            assert call() == [0, 1, 2, 3]
        elif phase != "starting":
            call = pool.map_async(work, range(4), chunksize=1).get
        if phase == "closing":
            pool.close()
        time.sleep(0.3 if workers else 0.0)
        for worker in workers[: 1 if phase != "idle, holding the lock" else 2]:
            os.kill(worker.pid, signal.SIGKILL)  # not by the library, which would know
        with pytest.raises(WorkerDied, match="SIGKILL"):
            call()
        if phase == "closing":
            pool.join()
        assert poll(lambda: not any(worker.is_alive() for worker in workers))


def test_a_task_that_a_dead_worker_does_not_read_is_lost_with_it(ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with ctx.Pool(1) as pool:
        assert pool.map(abs, [-1]) == [1]
        heard, on_exit, reader = threading.Event(), pool._on_exit, pool._inqueue._reader
        close = reader.close
        monkeypatch.setattr(pool, "_on_exit", lambda running: [heard.wait(), on_exit(running)])
        monkeypatch.setattr(reader, "close", lambda: [close(), time.sleep(0.3)])  # its thread is not given a core
        os.kill(pool._pool[0].pid, signal.SIGKILL)
        result = pool.map_async(len, [b"x" * 1_000_000])  # more than the pipe takes
        heard.set()
        with pytest.raises(WorkerDied, match="SIGKILL"):
            result.get()


def test_failing_initializer_is_no_endless_loop(ctx: Any, capfd: pytest.CaptureFixture[str]) -> None:
    def begin() -> None:
        raise ValueError("no model")

    with pytest.raises(WorkerDied, match="exit code 1") as caught, ctx.Pool(2, begin) as pool:
        pool.map(abs, range(3))
    assert "ValueError: no model" in str(caught.value)


def test_a_worker_may_end_before_the_pool_is_made(ctx: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def begin() -> None:
        raise ValueError("no model")

    def start_and_wait(pool: Any) -> None:
        super(WarmPool, pool)._repopulate_pool()  # type: ignore[misc]
        assert poll(lambda: pool._early)

    monkeypatch.setattr(WarmPool, "_repopulate_pool", start_and_wait, raising=False)
    pool = ctx.Pool(1, begin)
    with pytest.raises(WorkerDied, match="ValueError: no model"):
        pool.map(abs, range(3))
    pool.terminate()
    pool.join()


def test_big_data_are_shared(ctx: Any, tmp_path: Path) -> None:
    table = np.ones(30_000_000)  # 240 MB

    def memory(i: int) -> tuple[float, int]:
        total = float(table.sum())
        (tmp_path / str(i)).touch()
        while len(os.listdir(tmp_path)) < 3:  # each worker gets one; what one alone had read would count as its own
            time.sleep(0.01)
        return total, psutil.Process().memory_full_info().uss

    with ctx.Pool(3) as pool:
        found = pool.map(memory, range(3), chunksize=1)
    assert all(total == len(table) for total, _ in found)
    assert max(uss for _, uss in found) < 200e6, "no worker has a copy of its own"


def test_random_numbers(ctx: Any) -> None:
    def draw(i: int) -> tuple[float, float]:
        time.sleep(0.2)  # so that each worker gets one
        return random.random(), float(np.random.rand())

    state = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    with ctx.Pool(2) as pool:
        first, second = pool.map(draw, range(2), chunksize=1)
    assert first[0] != second[0] and first[1] != second[1]
    assert state[:2] == (random.getstate(), np.random.get_state()[2]), "the notebook's own is as it was"
    assert torch.equal(state[2], torch.get_rng_state())


def test_temporary_folders_are_removed(tmp_path: Any) -> None:
    """Whoever is killed: the libraries' sockets lie there."""
    for end in ("", "os.kill(os.getpid(), signal.SIGKILL)"):
        command = [sys.executable, "-c", CELLS["temporary files"] + end]
        env = {**os.environ, "TMPDIR": str(tmp_path)}
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert "1 True" in done.stdout, done
        assert poll(lambda: not list(tmp_path.iterdir())), list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------- those who take a context


def test_executor() -> None:
    scale = 3
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=nbdist.context("multiprocessing")) as executor:
        points = list(executor.map(lambda point: Point(scale * point.x), [Point(1), Point(2)]))
        assert [(type(point), point.x) for point in points] == [(Point, 3), (Point, 6)]
        with pytest.raises(concurrent.futures.process.BrokenProcessPool):
            executor.submit(os._exit, 1).result()


class Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, at: int = -1, end: Callable[[], Any] = list) -> None:
        self.at, self.end = at, end

    def __len__(self) -> int:
        return 400

    def __getitem__(self, i: int) -> torch.Tensor:
        if i == self.at:
            self.end()
        return torch.full((100,), float(i))


def loader(rows: Rows, **options: Any) -> torch.utils.data.DataLoader[Any]:
    context = nbdist.context("multiprocessing")
    return torch.utils.data.DataLoader(rows, batch_size=10, num_workers=2, multiprocessing_context=context, **options)


def test_data_loader() -> None:
    batches = list(loader(Rows()))
    assert torch.cat(batches)[:, 0].tolist() == list(range(400))


def test_data_loader_whose_workers_stay() -> None:
    batches = loader(Rows(), persistent_workers=True)
    assert [len(list(batches)) for _ in range(2)] == [40, 40]
    del batches
    gc.collect()


@pytest.mark.parametrize("at", [0, 200], ids=["before it has sent anything", "later"])
def test_data_loader_loses_a_worker(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader is notified; torch itself looks after five seconds, and here it does not."""
    look = torch.utils.data.dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(look, "__defaults__", (10_000.0,))  # its `timeout`
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(loader(Rows(at, lambda: os.kill(os.getpid(), signal.SIGKILL))))


def test_data_loader_raises() -> None:
    batches: Any = iter(loader(Rows(200, lambda: 1 / 0)))
    with pytest.raises(ZeroDivisionError, match="in __getitem__"):
        list(batches)
    batches._shutdown_workers()  # the garbage collector would take torch ten seconds for this, with any start method


# ---------------------------------------------------------------------------------------------------------- a notebook

POOL = CELLS["a context"]


def test_in_a_notebook(cell: Cell) -> None:
    cell(POOL)
    result = cell(CELLS["a pool"])
    assert result.text.index("at 3") < result.text.index("[0, 3, 6, 9]")


def test_lines_of_processes_that_print_at_once_stay_whole(cell: Cell) -> None:
    cell(POOL)
    result = cell(CELLS["lines that take long"])
    assert sorted(result.text.splitlines()) == [f"at {i} again {i}" for i in range(4)]


def test_output_goes_to_the_cell_that_calls(notebook: Kernel) -> None:
    notebook.ok(POOL + "pool = ctx.Pool(1)")
    assert "first" in notebook.ok("pool.map(print, ['first'])").text
    assert "second" in notebook.ok("pool.map(print, ['second'])").text
    assert "third" in notebook.ok("p = ctx.Process(target=print, args=('third',)); p.start(); p.join()").text
    notebook.ok("from IPython.display import HTML, display\ndef show(x):\n    display(HTML('<b>x</b>'))")
    result = notebook.ok("pool.map(show, [1]);")
    assert [output["data"]["text/html"] for output in result.outputs if "data" in output] == ["<b>x</b>"]
    notebook.ok("pool.terminate()")


STOPPED = {
    "a pool": "with ctx.Pool(2) as pool: pool.map(slow, range(4))",
    "a process": "p = ctx.Process(target=slow, args=(1,)); p.start(); p.join()",
    "a queue": "q = ctx.Queue(); p = ctx.Process(target=slow, args=(1,)); p.start(); q.get()",
    # With two tasks, and both begun: to its workers an interrupt is a result, after which they take the next task.
    "an executor": """
        from concurrent.futures import ProcessPoolExecutor
        with ProcessPoolExecutor(2, mp_context=nbdist.context("multiprocessing")) as executor:
            list(executor.map(slow, range(2)))
    """,
    "parallel_map": "nbdist.parallel_map(slow, range(4), 2)",
}


NO_PROCESSES = "from nbdist.kernel.pools.processes import process_reader as p; assert not p.processes(), p.processes()"


@pytest.mark.parametrize("what", STOPPED)
def test_the_stop_button(notebook: Kernel, what: str) -> None:
    notebook.ok(POOL + "def slow(i):\n    print('begun', flush=True)\n    time.sleep(1000)")
    message = notebook.start(dedent(STOPPED[what]))
    begun = 2 if what == "an executor" else 1
    notebook.finish(message, until=lambda result: result.text.count("begun") >= begun)
    notebook.interrupt()
    result = notebook.finish(message)
    assert result.error == "KeyboardInterrupt", result
    assert poll(lambda: notebook.run(NO_PROCESSES).error is None)
    assert "[1, 2]" in notebook.ok("with ctx.Pool(2) as pool: print(pool.map(abs, [-1, -2]))").text


def test_the_stop_button_just_before_a_wait(notebook: Kernel) -> None:
    """Python handles no signal that comes between its last bytecode and a system call that waits. So it is here, where
    other threads take the signal."""
    notebook.ok(POOL + CELLS["interrupts that others take"])
    message = notebook.start("with others_take_interrupts(): p = ctx.Process(target=late); p.start(); p.join()")
    notebook.finish(message, until=lambda result: "begun" in result.text)
    notebook.interrupt()
    assert notebook.finish(message).error == "KeyboardInterrupt"
    assert poll(lambda: notebook.run(NO_PROCESSES).error is None)


def test_the_stop_button_leaves_idle_pools_alone(notebook: Kernel) -> None:
    notebook.ok(POOL + "pool = ctx.Pool(2); pool.map(abs, range(4))")
    message = notebook.start("print('begun'); time.sleep(1000)")
    notebook.finish(message, until=lambda result: "begun" in result.text)
    notebook.interrupt()
    assert notebook.finish(message).error == "KeyboardInterrupt"
    assert "[1, 2]" in notebook.ok("print(pool.map(abs, [-1, -2])); pool.terminate()").text


def test_an_interrupt_of_a_fork_is_its_own(ctx: Any) -> None:
    process = ctx.Process(target=time.sleep, args=(1000,))
    process.start()
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGINT, lambda signum, frame: os._exit(0))
        signal.raise_signal(signal.SIGINT)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    process.join(0.5)
    assert process.exitcode is None
    process.kill()
    process.join()


def test_pools_of_joblib_send_what_cells_define(kernel: Kernel) -> None:
    pytest.importorskip("joblib")
    assert kernel.ok(CELLS["pools of joblib"]).text == "[9, 18] True [7.0]\n"


def test_processes_end_with_the_kernel(kernel: Kernel) -> None:
    kernel.ok(POOL + "pool = ctx.Pool(2)\np = ctx.Process(target=time.sleep, args=(1000,)); p.start()")
    pids = [psutil.Process(int(pid)) for pid in kernel.ok("print(p.pid, *[w.pid for w in pool._pool])").text.split()]
    assert len(living(pids)) == 3
    psutil.Process(kernel.pid).kill()
    assert poll(lambda: not living(pids))


def test_after_threads_in_the_kernel(cell: Cell) -> None:
    cell(POOL)
    cell("import torch; torch.set_num_threads(2); a = torch.ones(1000, 1000); a @ a")
    text = cell("with ctx.Pool(2) as pool: print(pool.map(lambda i: float((a @ a)[0, 0]) + i, range(2)))").text
    assert "[1000.0, 1001.0]" in text


def test_loader_with_cuda_live_in_the_kernel(cell: Cell) -> None:
    """Without a GPU, as far as that goes: what torch knows of a live CUDA is set, a fork would be a bad one, as torch
    calls it, and a thread holds a lock that a fork would find locked forever, as threads of CUDA's driver do."""
    cell(POOL)
    cell(CELLS["CUDA live in the kernel"])
    text = cell(CELLS["a loader with it"]).text
    assert "[[0, 0, 0], [0, 0, 0], [0, 0, 0], [0, 0, 0]] 2" in text and "[False, False]" in text


@pytest.mark.started
@pytest.mark.parametrize("first", ["", "import multiprocess.util, multiprocessing.util\n"])
def test_script_ends_with_its_processes(tmp_path: Any, first: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(first + CELLS["a script that ends before its process"])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["end of script", "worked"] and not done.stderr, done
