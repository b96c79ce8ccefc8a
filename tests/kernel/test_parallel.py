"""`parallel_map`: values in order, data shared, the first failure with its item, the stop button, nothing left."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from cells import cells
from conftest import Cell, Deadly, Kernel, die, open_fds, poll, ranks_of

import nbdist
from nbdist import CaptureError, WorkerDied, parallel_map
from nbdist.engines.ray.kernel import driver_process as process
from nbdist.errors import render
from nbdist.kernel.pools import parallel_map as parallel
from nbdist.wire.channel import Channel
from nbdist.wire.protocol import Items

CELLS = cells("kernel/cells/parallel.py")


class Point:
    def __init__(self, x: int) -> None:
        self.x = x


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set no end to the time in which the other workers end after the first failure: a call must not use it up."""
    monkeypatch.setattr(parallel, "GRACE_AFTER_FAILURE", 10_000.0)


def ends_at_three(item: int) -> int:
    return next(iter([item] if item < 3 else []))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_function_that_raises_stop_iteration_loses_no_items(workers: int) -> None:
    with pytest.raises(StopIteration):
        parallel_map(ends_at_three, range(5), workers, progress=False)


def test_names_that_are_given_are_no_variables_of_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    main = vars(sys.modules["__main__"])
    monkeypatch.setitem(main, "rate", 0.01)
    monkeypatch.delitem(main, "mean", raising=False)
    look = eval("lambda item: (rate, extra, mean([item]))", main)
    given: Any = {"imports": "from statistics import mean", "need": {"rate": 0.1, "extra": 5}}
    for workers in (0, 1):
        assert parallel_map(look, [3], workers, progress=False, **given) == [(0.1, 5, 3)]
        assert main["rate"] == 0.01 and "extra" not in main and "mean" not in main


@pytest.mark.parametrize("chunk", [None, 1, 3, 1000])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_values_in_order(workers: int, chunk: int | None) -> None:
    scale = 10

    def scaled(point: Point) -> Point:
        return Point(scale * point.x)

    values = parallel_map(scaled, (Point(i) for i in range(23)), workers, chunk=chunk, progress=False)
    assert [(type(value), value.x) for value in values] == [(Point, 10 * i) for i in range(23)]


def test_no_items_and_no_workers() -> None:
    assert parallel_map(abs, []) == []
    assert parallel_map(lambda x: os.getpid(), [1, 2], workers=0) == [os.getpid()] * 2


def test_items_run_in_other_processes() -> None:
    def work(i: int) -> int:
        time.sleep(0.1)
        return os.getpid()

    pids = set(parallel_map(work, range(6), 3, progress=False))
    assert len(pids) == 3 and os.getpid() not in pids


def test_arguments_that_make_no_sense() -> None:
    wrong: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "fn must be a function", lambda: parallel_map(3, [])),  # type: ignore[arg-type]
        (TypeError, "items must be", lambda: parallel_map(abs, 3)),  # type: ignore[arg-type]
        (ValueError, "workers must be at least 0, got -1", lambda: parallel_map(abs, [1], -1)),
        (TypeError, "workers must be an integer", lambda: parallel_map(abs, [1], 1.5)),  # type: ignore[arg-type]
        (ValueError, "chunk must be at least 1, got 0", lambda: parallel_map(abs, [1], chunk=0)),
        (NameError, "got 'nowhere'", lambda: parallel_map(abs, [1], need="nowhere")),
        (ValueError, "imports must be import statements", lambda: parallel_map(abs, [1], imports="x = 1")),
        (CaptureError, r"items\[1\]", lambda: parallel_map(abs, [1, (row for row in range(3))], 1, progress=False)),
        (CaptureError, "function returned", lambda: parallel_map(lambda i: (row for row in "ab"), [1], progress=False)),
    ]
    for kind, message, call in wrong:
        with pytest.raises(kind, match=message):
            call()


def test_several_lists_as_map_takes_them() -> None:
    assert parallel_map(pow, [2, 3], [3, 2, 9], workers=2, progress=False) == [8, 9]
    assert parallel_map(lambda *xs: xs, "ab", range(2), iter([None, 5]), 1, progress=False) == [
        ("a", 0, None),
        ("b", 1, 5),
    ]
    assert parallel_map(pow, [2], [3], workers=0) == [8] and parallel_map(pow, [], [3]) == []
    with pytest.raises(CaptureError, match=r"items\[0\]"):
        parallel_map(max, [1], [(row for row in range(3))], workers=1, progress=False)
    with pytest.raises(ZeroDivisionError) as error:
        parallel_map(divmod, [1], [0], workers=1, progress=False)
    assert "at item 0 ((1, 0))" in "".join(render(error.value))


def test_a_function_of_several_arguments_brings_what_it_needs() -> None:
    def work(x: int, y: int) -> Any:
        return x * y + eval("shift", {**globals(), **vars(__import__("__main__"))})

    assert parallel_map(work, [1, 2], [3, 4], workers=1, need={"shift": 4}, progress=False) == [7, 12]


def test_imports_and_need() -> None:
    def work(x: int) -> Any:
        return eval("fractions.Fraction(x, divisor)", {**globals(), "x": x, **vars(__import__("__main__"))})

    values = parallel_map(work, [1, 2], 2, imports="import fractions", need={"divisor": 4}, progress=False)
    assert [str(value) for value in values] == ["1/4", "1/2"]


def test_first_exception(patient: None, tmp_path: Path) -> None:
    class Mine(Exception):
        pass

    def work(i: int) -> int:
        if i == 13:
            wait_for(tmp_path / "busy")
            raise Mine(f"no {i}")
        if i > 13:
            (tmp_path / "busy").touch()
            time.sleep(1000)
        return i

    with pytest.raises(Mine, match="no 13") as caught:
        parallel_map(work, range(1000), 2, progress=False)
    cause = str(caught.value.__cause__)
    assert "on worker" in cause and "at item 13 (13)" in cause and 'raise Mine(f"no {i}")' in cause


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize(
    "end, status",
    [(lambda: os.kill(os.getpid(), signal.SIGKILL), -9), (lambda: os._exit(0), 0)],
    ids=["killed", "_exit(0)"],
)
def test_lost_worker(patient: None, end: Callable[[], Any], status: int, chunk: int, tmp_path: Path) -> None:
    def work(i: int) -> int:
        if i == 13:
            wait_for(tmp_path / "busy")
            print("last words")
            end()
        if i > 14:
            (tmp_path / "busy").touch()
            time.sleep(1000)
        return i

    with pytest.raises(WorkerDied, match=r"worker \d \(pid \d+\).*at item 13 \(13\)") as caught:
        parallel_map(work, range(40), 2, chunk=chunk, progress=False)
    assert caught.value.status == status and "last words" in str(caught.value)
    assert parallel_map(abs, [-1], progress=False) == [1]


@pytest.mark.parametrize("phase", ["starting", "reading an item", "in a task", "sending its result", "idle"])
def test_worker_killed_in_each_phase(patient: None, phase: str, tmp_path: Path) -> None:
    deadly = Deadly("read")
    phases: dict[str, tuple[Callable[[Any], Any], list[Any]]] = {
        "starting": (lambda i: (deadly, i), [1, 2]),
        "reading an item": (lambda item: item, [1, deadly]),
        "in a task": (lambda i: die() if i else time.sleep(1000), [0, 1]),
        "sending its result": (lambda i: Deadly("written") if i else time.sleep(1000), [0, 1]),
        "idle": (lambda i: (tmp_path / str(i)).write_text(str(os.getpid())) if i else time.sleep(1000), [0, 1]),
    }

    def kill_idle() -> None:
        assert poll(lambda: (tmp_path / "1").exists() and (tmp_path / "1").read_text())
        time.sleep(0.2)
        os.kill(int((tmp_path / "1").read_text()), signal.SIGKILL)

    if phase == "idle":
        threading.Thread(target=kill_idle).start()
    fn, items = phases[phase]
    with pytest.raises(WorkerDied, match="SIGKILL"):
        parallel_map(fn, items, 2, progress=False)


def test_worker_killed_at_its_end() -> None:
    """All values are there: the call is as good as over."""

    def work(i: int) -> int:
        atexit.register(os.kill, os.getpid(), signal.SIGKILL)
        return i

    assert parallel_map(work, range(4), 2, progress=False) == [0, 1, 2, 3]


def test_workers_end_as_ranks_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A worker that ends writes its open files, and calls what it has registered with `atexit`."""

    def work(i: int) -> int:
        sys.kept = open(tmp_path / "rows", "w")  # type: ignore[attr-defined]  # noqa: SIM115
        sys.kept.write("a row")  # type: ignore[attr-defined]
        atexit.register(print, "the summary")
        if i:
            raise ValueError("item 1")
        return i

    for items in ([0], [1]):
        with contextlib.nullcontext() if items == [0] else pytest.raises(ValueError, match="item 1"):
            parallel_map(work, items, 1, progress=False)
        assert (tmp_path / "rows").read_text() == "a row"
        assert "the summary" in capfd.readouterr().out
        (tmp_path / "rows").unlink()


class SlowToRead:
    """Takes longer than any test in the first process that reads it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return SlowToRead.read, (self.folder,)

    @staticmethod
    def read(folder: Path) -> None:
        try:
            (folder / "reads").touch(exist_ok=False)
        except FileExistsError:
            return
        time.sleep(1000)


def test_stopped_before_a_worker_has_the_function(tmp_path: Path) -> None:
    slow = SlowToRead(tmp_path)

    def work(i: int) -> Any:
        (tmp_path / "works").touch()
        try:
            time.sleep(1000)
        finally:
            time.sleep(1)  # so that the other's answers come first
        return slow

    def stop() -> None:
        poll(lambda: len(list(tmp_path.iterdir())) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=stop).start()
    with pytest.raises(KeyboardInterrupt):
        parallel_map(work, range(8), 2, chunk=1, progress=False)


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_an_error_before_the_work_leaves_no_worker(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(count: int) -> Any:
        raise error

    gc.collect()
    gc.disable()  # it would end the workers later
    try:
        with monkeypatch.context() as patch:
            patch.setattr(parallel.Board, "create", fail)
            with pytest.raises(type(error)):
                parallel_map(abs, range(4), 2, progress=False)
        assert parallel_map(abs, [-1], 1, progress=False) == [1]  # the workers of the first call would run by now
        assert poll(lambda: not ranks_of()), f"left: {ranks_of()}"  # those killed may not have ended yet
    finally:
        gc.enable()


def test_an_interrupt_while_items_are_sent_ends_the_map_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker to which an item was counted, and that never got it, would be waited for."""

    send = Channel.send

    def pressed(self: Channel, message: Any, *parts: Any, **more: Any) -> None:
        if isinstance(message, Items):
            monkeypatch.setattr(Channel, "send", send)
            signal.raise_signal(signal.SIGINT)
        send(self, message, *parts, **more)

    monkeypatch.setattr(Channel, "send", pressed)
    monkeypatch.setattr(parallel, "GRACE_AFTER_INTERRUPT", 1e6)
    with pytest.raises(KeyboardInterrupt):
        parallel_map(time.sleep, [1000, 1000], 2, chunk=1, progress=False)


def test_sys_exit_is_an_exception() -> None:
    with pytest.raises(SystemExit):
        parallel_map(lambda i: exit(3), [1], 1, progress=False)


def test_big_data_is_shared_by_workers(tmp_path: Path) -> None:
    table = np.ones(30_000_000)  # 240 MB

    def memory(i: int) -> tuple[float, int]:
        total = float(table.sum())
        (tmp_path / str(i)).touch()
        for other in range(3):  # what one alone had read would count as its own
            wait_for(tmp_path / str(other))
        return total, psutil.Process().memory_full_info().uss

    found = parallel_map(memory, range(3), 3, progress=False)
    assert all(total == len(table) for total, _ in found)
    assert max(uss for _, uss in found) < 200e6


def test_big_items_and_values() -> None:
    items = [np.full(1_000_000, float(i)) for i in range(6)]
    values = parallel_map(lambda array: array * 2, items, 2, progress=False)
    assert all((value == 2 * item).all() for value, item in zip(values, items, strict=True))
    values[0][0] = 7  # it is the notebook's own


def test_random_numbers() -> None:
    def draw(i: int) -> tuple[float, float]:
        time.sleep(0.1)
        return random.random(), float(np.random.rand())

    def both() -> list[Any]:
        random.seed(1)
        np.random.seed(1)
        return parallel_map(draw, range(2), 2, chunk=1, progress=False)

    first = both()
    assert first[0] != first[1]
    assert sorted(first) == sorted(both())


def test_parallel_map_leaves_no_descriptors() -> None:
    parallel_map(abs, range(10), 2, progress=False)
    before = open_fds()
    for _ in range(5):
        parallel_map(lambda i: np.ones(500_000), range(4), 2, progress=False)
    assert poll(lambda: not ranks_of()) and poll(lambda: open_fds() <= before)


# ---------------------------------------------------------------------------------------------------------- a notebook


def test_in_a_notebook(cell: Cell) -> None:
    result = cell(CELLS["in a notebook"])
    lines = result.text.splitlines()
    assert sum(line.startswith("item ") for line in lines) == 6 and "[0, 3, 6, 9, 12, 15]" in lines[-1]
    assert "0/6" in result.text, "the bar, as text where there are no widgets"


def test_traceback_in_the_cell(notebook: Kernel) -> None:
    result = notebook.run(CELLS["a traceback"])
    assert result.error == "ZeroDivisionError"
    text = result.plain_traceback
    assert "raised ZeroDivisionError, at item 3 (3)" in text and "return 1 / (i - 3)" in text
    assert "nbdist/kernel" not in text


def test_stopped_workers_clean_up(notebook: Kernel) -> None:
    message = notebook.start(CELLS["workers that clean up"])
    notebook.finish(message, until=lambda result: "begun" in result.text)
    notebook.interrupt()
    result = notebook.finish(message)
    assert result.error == "KeyboardInterrupt" and "cleaned up" in result.text


def test_fastcore_parallel(cell: Cell) -> None:
    pytest.importorskip("fastcore.parallel")
    assert "[0, 5, 10, 15]" in cell(CELLS["fastcore"]).text


# ----------------------------------------------------------------------------------------------------------- a cluster


@pytest.mark.long("notebooks")
def test_workers_execute_notebooks(tmp_path: Path) -> None:
    """papermill and other programs start a kernel in each worker."""
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")

    def executed(number: int) -> str:
        cells = [nbformat.v4.new_code_cell(f"number = {number}"), nbformat.v4.new_code_cell("print(10 * number)")]
        client = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=None, iopub_timeout=600)
        return str(client.execute(cwd=str(tmp_path)).cells[-1].outputs[0]["text"])

    assert parallel_map(executed, [1, 2], 2, progress=False) == ["10\n", "20\n"]


@pytest.mark.long("clusters of Ray")
def test_parallel_map_runs_on_a_cluster(ray_cluster: Any, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    scale, table = 10, np.arange(1_000_000)

    def scaled(i: int) -> tuple[int, float, np.ndarray[Any, Any]]:
        print("item", i)
        table[0] = i  # it is this worker's own
        return scale * int(table[i]) if i else 0, random.random(), table[i : i + 500_000]

    def failing(i: int) -> None:
        raise KeyError(f"no {i}")

    def slow(i: int) -> None:
        try:
            (tmp_path / f"begun {i}").touch()
            time.sleep(1000)
        finally:
            (tmp_path / f"cleaned up {i}").touch()

    def stop() -> None:
        poll(lambda: len(list(tmp_path.glob("begun*"))) == 2)
        os.kill(os.getpid(), signal.SIGINT)

    # Each node has room for one: the third worker's tasks wait for the others' tasks.
    nbdist.use(nbdist.RayOptions(address=ray_cluster.address, cpus=3))
    try:
        with pytest.raises(ValueError, match="workers must be a number on a cluster"):
            parallel_map(scaled, range(8), progress=False)
        values = parallel_map(scaled, range(12), 3, chunk=2, progress=False)
        assert [value for value, _, _ in values] == [10 * i for i in range(12)]
        assert len({number for _, number, _ in values}) == 12, "no two workers draw the same numbers"
        assert all(part[1] == i + 1 for i, (_, _, part) in enumerate(values)), "big values come back"
        assert sorted(capfd.readouterr().out.split("item ")[1:]) == sorted(f"{i}\n" for i in range(12))
        assert table[0] == 0
        with pytest.raises(KeyError, match="no") as caught:
            parallel_map(failing, range(3), 3, chunk=1, progress=False)
        assert "at item" in str(caught.value.__cause__) and 'raise KeyError(f"no {i}")' in str(caught.value.__cause__)
        with pytest.raises(WorkerDied, match="exit code 3"):
            parallel_map(os._exit, [3, 3, 3], 3, progress=False)
        threading.Thread(target=stop).start()
        with pytest.raises(KeyboardInterrupt):
            parallel_map(slow, range(10), 3, progress=False)
        assert len(list(tmp_path.glob("cleaned up*"))) == 2 and len(list(tmp_path.glob("begun*"))) == 2
        assert parallel_map(abs, [-1, -2, -3], 3, progress=False) == [1, 2, 3]
        nbdist.context("multiprocessing")
        assert "run on this machine, not on the cluster" in capfd.readouterr().err
    finally:
        nbdist.use("local")
        process.release()
