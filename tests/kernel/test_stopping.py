"""Messages after a stopped call or a mistake: what happened and where, without nbdist's insides."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from cells import cells
from conftest import NUMBERS_CELLS, Kernel, Result, poll

from nbdist import Session, in_ddp
from nbdist.deaths import NO_GPU
from nbdist.errors import NbdistError
from nbdist.kernel.calls import executor
from nbdist.kernel.calls.group import Group
from nbdist.kernel.calls.leaving import Leaving
from nbdist.kernel.calls.stopping import ranks_named
from nbdist.kernel.calls.waiting import Waiting
from nbdist.rank import gpu_state
from nbdist.system.interrupts import interruptible
from nbdist.wire.protocol import Call, ToRank

ROOT = str(Path(__file__).parent.parent.parent)
CELLS = cells("kernel/cells/stopping.py")
FIRST_CELL = "import asyncio, sys, time, torch.distributed as dist\nfrom nbdist import Session, in_ddp"


def is_short(result: Result) -> bool:
    """Return whether a traceback shows the user's own lines alone."""
    return len(result.plain_traceback.splitlines()) < 12 and f"{ROOT}/nbdist" not in result.plain_traceback


def stopped(kernel: Kernel, code: str, begun: int = 2, presses: int = 1) -> Result:
    """Return the output of a cell stopped when `begun` files `begun*` were there; a file `pressed` is there then."""
    for file in [*kernel.cwd.glob("begun*"), *kernel.cwd.glob("pressed")]:
        file.unlink()
    cell = kernel.start(code)
    assert poll(lambda: len(list(kernel.cwd.glob("begun*"))) == begun)
    kernel.interrupt()
    (kernel.cwd / "pressed").touch()
    for _ in range(presses - 1):
        time.sleep(0.5)  # two signals at once are one
        kernel.interrupt()
    return kernel.finish(cell)


# --------------------------------------------------------------------------------------------------- the stop button


def test_a_rank_that_does_not_end_a_call_is_shown_in_three_lines(notebook: Kernel) -> None:
    result = stopped(notebook, CELLS["a rank that does not leave"])
    assert result.error == "KeyboardInterrupt" and is_short(result), result.traceback
    what, where, lost = result.message.splitlines()
    assert what == "stopped; rank 1 did not leave the call and had to be killed:"
    assert where.startswith("rank 1 is in stubborn at ") and where.endswith(("line 4", "line 5", ":4", ":5"))
    assert f"Cell In[{result.number}]" in where or not NUMBERS_CELLS
    assert lost == "The values that earlier calls left in the ranks are lost; the next call starts fresh ranks."


def test_a_second_press_says_the_same(notebook: Kernel) -> None:
    notebook.ok("session = Session(2)\nsession.run(int)")
    # The file is made by C code that goes on: no press can come between two steps of Python.
    result = stopped(notebook, CELLS["ranks in C code"], presses=2)
    assert result.error == "KeyboardInterrupt" and is_short(result), result.traceback
    assert "ranks 0 and 1 did not leave the call and had to be killed" in result.message
    assert "in holds_the_gil at" in result.message
    assert "fresh ranks" in notebook.ok("session.run(int)").text
    notebook.ok("session.close()")


def pressing(pid: int) -> None:
    """In ranks: one of them presses the stop button of the kernel that waits for them."""
    if dist.get_rank() == 0:
        os.kill(pid, signal.SIGINT)
    time.sleep(1000)


def test_a_press_between_two_steps_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Example: a second press while the ranks are asked to leave, which may take a while where there are many."""

    def pressed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("nbdist.kernel.calls.leaving.Leaving.ask", pressed)
    with Session(2) as session:
        session.run(int)
        with pytest.raises(KeyboardInterrupt, match="ranks 0 and 1 did not leave the call and had to be killed"):
            session.run(pressing, os.getpid())
        assert session.run(int) == 0


def test_a_rank_that_started_after_the_press_is_not_said_to_be_in_the_function(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ask = Leaving.ask

    def early(self: Leaving) -> None:
        """Ask as if the kernel did not know rank 1 yet."""
        pids: Any = self._ranks.pids
        pid, pids[1] = pids[1], None
        ask(self)
        pids[1] = pid

    monkeypatch.setattr(Leaving, "ask", early)
    with Session(2) as session:
        session.run(int)
        with pytest.raises(KeyboardInterrupt, match=r"^stopped before rank 1 had started\.\nThe values"):
            session.run(pressing, os.getpid())
        assert session.run(int) == 0
        assert "fresh ranks: the last call was stopped before rank 1 had started, and" in capfd.readouterr().err


def loses_its_gpu(pid: int) -> None:
    """In ranks: rank 1 has a CUDA error of the kind after which its process is of no use, and the button is pressed."""
    if dist.get_rank() == 1:
        gpu_state.lost = lambda: True  # in this process only
    dist.barrier()
    pressing(pid)


def test_a_rank_that_ends_after_its_answer_is_not_said_to_be_in_the_function(capfd: pytest.CaptureFixture[str]) -> None:
    with Session(2) as session:
        with pytest.raises(KeyboardInterrupt, match=f"^stopped; rank 1 {NO_GPU}\nThe values"):
            session.run(loses_its_gpu, os.getpid())
        assert session.run(int) == 0
        assert f"fresh ranks: rank 1 {NO_GPU}, and" in capfd.readouterr().err


def test_a_press_while_ranks_are_killed_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: Any) -> None:
        raise KeyboardInterrupt

    with Session(2) as session:
        pids = session.run_all(os.getpid)
        with monkeypatch.context() as patch:
            patch.setattr("nbdist.kernel.calls.leaving.Leaving.ask", pressed)
            patch.setattr("nbdist.kernel.cell.comms.Comms.close", pressed)
            with pytest.raises(KeyboardInterrupt, match="ranks 0 and 1 did not leave the call and had to be killed"):
                session.run(pressing, os.getpid())
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert session.run(int) == 0


def test_a_press_while_a_call_that_was_not_sent_is_given_up_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with Session(2) as session:
        pids = session.run_all(os.getpid)
        with monkeypatch.context() as patch:
            patch.setattr("nbdist.kernel.calls.group.Group.send", pressed)
            patch.setattr("nbdist.kernel.cell.comms.Comms.close", pressed)
            with pytest.raises(KeyboardInterrupt, match="stopped while the ranks were started or given the call"):
                session.run(int)
        assert not any(psutil.pid_exists(pid) for pid in pids)
        assert session.run(int) == 0


def test_a_press_while_a_call_is_sent_costs_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Group.send

    def pressed(self: Group, rank: int, message: ToRank, **parts: Any) -> None:
        send(self, rank, message, **parts)
        if isinstance(message, Call) and rank == 0:
            os.kill(os.getpid(), signal.SIGINT)

    with Session(2) as session:
        pids = session.run_all(os.getpid)
        with monkeypatch.context() as patch:
            patch.setattr(Group, "send", pressed)
            with pytest.raises(KeyboardInterrupt):
                session.run(time.sleep, 1000)
        assert session.run_all(os.getpid) == pids


def test_a_press_right_before_a_call_is_sent_costs_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def pressed() -> Iterator[None]:
        raise KeyboardInterrupt
        yield

    with Session(2) as session:
        pids = session.run_all(os.getpid)
        with monkeypatch.context() as patch:
            patch.setattr("nbdist.kernel.calls.executor.deferred_handlers", pressed)
            with pytest.raises(KeyboardInterrupt):
                session.run(int)
        assert session.run_all(os.getpid) == pids


def test_presses_at_any_moment_cost_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdist.kernel.calls.ending.GRACE_AFTER_INTERRUPT", 1e6)  # on a busy machine they need longer
    draw = random.Random(0)

    def work(sort: int) -> Any:
        dist.all_reduce(torch.ones(1))
        if sort == 0:
            time.sleep(0.02)
        return [print("line"), [str(i) for i in range(10_000)], torch.ones(200_000)][sort]

    with Session(2) as session:
        pids = session.run_all(os.getpid)
        for turn in range(60):
            press = threading.Timer(draw.random() * 0.03, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
            with pytest.raises(KeyboardInterrupt) as stop:
                press.start()
                session.run_all(work, turn % 3)
                press.join()
                time.sleep(1000)  # it came after the call
            press.join()
            assert session.run_all(os.getpid) == pids, stop.getrepr()


class Stopped:
    """An argument at which the stop button is pressed while it is captured."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


@pytest.mark.parametrize("call", ["in_ddp(2, sleep, 0)", "parallel_map(sleep, range(2))"])
def test_an_interrupt_in_another_thread_is_noticed(notebook: Kernel, call: str) -> None:
    """Python does not handle a press that comes right before the kernel waits, until the wait ends."""
    notebook.ok(CELLS["the notebook's main thread misses each press"])
    try:
        assert stopped(notebook, call).error == "KeyboardInterrupt"
    finally:
        notebook.ok("_ = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])")


@pytest.mark.parametrize("seconds", [1, pytest.param(60, marks=pytest.mark.long("a press that waits"))])
def test_a_press_while_ranks_import_leaves_no_half_of_a_module(notebook: Kernel, seconds: int) -> None:
    name = f"imported_in_{seconds}_s"
    slow_to_import(notebook.cwd / name, seconds)
    notebook.ok(f"name = {name!r}\n" + CELLS["ranks that import"])
    result = stopped(notebook, "session.run(use)")
    assert result.error == "KeyboardInterrupt", result.traceback
    assert seconds == 1 or "imports a module first; stop once more" in result.text
    assert notebook.ok("print(session.run_all(os.getpid) == pids)").text == "True\n"
    if seconds < 30:  # it is whole; what takes longer than a stop may take is broken off
        assert notebook.ok("print(session.run_all(use))").text == "[True, True]\n"
    notebook.ok("session.close()")
    if seconds > 1:  # ranks that end anyway need not stay whole
        slow_to_import(
            notebook.cwd / "imported_forever", 1000, "import nbdist.rank.interrupts as its\nits._MOST = 1e6\n"
        )
        notebook.ok("name = 'imported_forever'")
        result = stopped(notebook, "in_ddp(2, use)")
        assert result.error == "KeyboardInterrupt" and "imports a module" not in result.text


def slow_to_import(package: Path, seconds: int, first: str = "") -> None:
    """Make a package whose import goes on for so long after a press."""
    package.mkdir()
    (package / "part.py").write_text("here = True\n")
    (package / "__init__.py").write_text(f"{first}seconds = {seconds}\n" + CELLS["slow to import"])


def test_a_stop_before_the_call_is_sent_loses_nothing() -> None:
    says = "^stopped before any rank had got the call: nothing is lost$"
    with pytest.raises(KeyboardInterrupt, match=says):
        in_ddp(2, print, Stopped())
    with Session(2) as session:
        pids = session.run_all(os.getpid)
        for call in (session.run, session.submit):
            with pytest.raises(KeyboardInterrupt, match=says):
                call(print, Stopped())
        assert session.run_all(os.getpid) == pids


@pytest.mark.parametrize("seconds", [0.0, pytest.param(0.7, marks=pytest.mark.slow)])
def test_a_stop_of_the_first_call_while_its_ranks_start(tmp_path: Path, seconds: float) -> None:
    kernel = Kernel(tmp_path)
    try:
        kernel.ok("import nbdist.kernel.launch")
        result = stopped(kernel, "open('begun', 'w').close()\nnbdist.in_ddp(2, __import__('time').sleep, 1000)", 1)
        assert result.error == "KeyboardInterrupt" and is_short(result), result.traceback
        assert kernel.ok("print(nbdist.in_ddp(2, max, 2, 3))").text == "3\n"
    finally:
        kernel.close()


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([2, 0], "ranks 0 and 2"), ([0, 1, 2], "ranks 0, 1 and 2"), (range(9), "9 ranks")],
)
def test_ranks_by_name(ranks: Any, text: str) -> None:
    assert ranks_named(ranks) == text


# --------------------------------------------------------------------------------------------------------- mistakes


def test_a_cell_with_a_syntax_error(notebook: Kernel) -> None:
    notebook.ok("%load_ext nbdist\n%reload_ext nbdist\n%ddp start 1 --devices cpu")
    result = notebook.run("%%ddp --output all\nx = 1\ny = = 2")
    assert result.error == "SyntaxError" and len(result.plain_traceback.splitlines()) < 7
    assert "y = = 2" in result.plain_traceback and "line 3" in result.plain_traceback
    if NUMBERS_CELLS:
        assert f"Cell In[{result.number}], line 3" in result.plain_traceback
    assert notebook.run("%%ddp\nreturn 1").error == "SyntaxError"
    assert notebook.run("%%ddp\nx").error == "NameError", "nothing of the first cell was run"
    assert notebook.ok("%%ddp\nimport asyncio\nawait asyncio.sleep(0, 'slept')").text == "'slept'\n"
    if notebook.run("files = !echo one").error is None:  # IPython 7 itself cannot, on Python 3.12 and later
        assert notebook.ok("%%ddp\nfiles = !echo one\n%pwd\nfiles").text == "['one']\n"
    notebook.ok("%unload_ext nbdist")


async def later() -> int:
    return 1


def rows() -> Iterator[int]:
    yield 1


class Callable:
    async def __call__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (later, "later is a coroutine function: .*lambda: asyncio.run"),
        (functools.partial(later), "later is a coroutine function"),
        (Callable(), "Callable is a coroutine function"),
        (rows, "rows is a generator function.*lambda: list"),
    ],
)
@pytest.mark.parametrize("ngpus", [0, 2])
def test_functions_that_return_before_they_run(fn: Any, says: str, ngpus: int) -> None:
    with pytest.raises(TypeError, match=says):
        in_ddp(ngpus, fn)


def test_the_advice_of_the_message_works() -> None:
    assert in_ddp(1, lambda: asyncio.run(later())) == 1 and in_ddp(1, lambda: list(rows())) == [1]
    assert isinstance(in_ddp(1, Callable), Callable), "a class is called as any function"


def test_an_exit_names_rank_and_line(notebook: Kernel) -> None:
    result = notebook.run(CELLS["an exit"])
    place = f"Cell In[{result.number}], line 3"
    assert result.error == "SystemExit"
    assert re.search(rf"rank 1 \(pid \d+\) called sys.exit\(3\) in leaves at .*{re.escape(place)}\n", result.text)


# ------------------------------------------------------------------------------------------------ without a notebook


def test_a_plain_traceback_has_one_frame_of_nbdist(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(CELLS["a script"])
    environ = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environ)
    assert done.stdout.splitlines() == ["['<module>', '<lambda>', 'nbdist']"] * 4, done.stdout + done.stderr


@pytest.mark.long("other test runs")
def test_a_failing_test_shows_its_own_lines(tmp_path: Path) -> None:
    file = tmp_path / "test_theirs.py"
    file.write_text(CELLS["test_theirs.py"])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(file)]
    environ = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert "LookupError: boom" in done.stdout and 'raise LookupError("boom")' in done.stdout
    assert "nbdist/errors.py" not in done.stdout and "nbdist/kernel" not in done.stdout, done.stdout


def test_a_defect_keeps_its_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdist.kernel.calls.requests.draw_seeds", lambda: 1 / 0)
    with Session(1) as session, pytest.raises(ZeroDivisionError) as caught:
        session.run(int)
    assert "_capture" in [entry.name for entry in caught.traceback]


# ------------------------------------------------------------------------- waits that ended with the kernel alone


@pytest.mark.parametrize("wait", ["run", "result", "map"])
def test_the_stop_button_in_a_cell_with_await(notebook: Kernel, wait: str) -> None:
    result = stopped(notebook, CELLS[f"await and {wait}"], begun=1 if wait == "result" else 2)
    assert result.error in ("KeyboardInterrupt", "CancelledError"), result
    assert notebook.run("print(in_ddp(2, lambda: 5))").text == "5\n"


def signal_when_begun(folder: Path, signum: int) -> threading.Thread:
    """Send this process a signal when two ranks have made their files."""

    def send() -> None:
        poll(lambda: len(list(folder.glob("begun*"))) == 2)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_an_interrupt_under_asyncio_run_stops_the_call(session: Session, tmp_path: Path) -> None:
    def endless() -> None:
        (tmp_path / f"begun{dist.get_rank()}").touch()
        time.sleep(1000)

    async def main() -> None:
        session.run(endless)

    thread = signal_when_begun(tmp_path, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    thread.join()
    assert session.run(lambda: 5) == 5


def test_the_handler_of_an_interrupt_is_as_before() -> None:
    handler = signal.getsignal(signal.SIGINT)
    for own in (handler, lambda *_: None):
        signal.signal(signal.SIGINT, own)
        try:
            with interruptible():
                assert signal.getsignal(signal.SIGINT) is own
            assert signal.getsignal(signal.SIGINT) is own
        finally:
            signal.signal(signal.SIGINT, handler)


def test_awaiting_a_call_that_raises_stop_iteration_ends(session: Session) -> None:
    async def main(fn: Any) -> Any:
        return await session.submit(fn)

    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        asyncio.run(main(lambda: next(iter([]))))
    assert isinstance(caught.value.__cause__, StopIteration)
    with pytest.raises(KeyError):
        asyncio.run(main(lambda: {}[1]))
    assert asyncio.run(main(lambda: 5)) == 5


def test_a_task_that_is_cancelled_cancels_the_call_that_it_awaits(session: Session, tmp_path: Path) -> None:
    def endless() -> None:
        (tmp_path / "begun").touch()
        time.sleep(1000)

    async def main() -> None:
        future = session.submit(endless)
        task = asyncio.ensure_future(future)
        await asyncio.sleep(0)  # the task begins to wait
        while not (tmp_path / "begun").exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(poll, future.cancelled)
        with pytest.raises(asyncio.CancelledError):
            await future

    asyncio.run(main())
    assert session.run(lambda: 5) == 5


class Lazy:
    """Asks for its state where it is pickled, or for its value where it is rebuilt."""

    def __init__(self, session: Session | None) -> None:
        self.session = session

    def __getstate__(self) -> dict[str, Any]:
        return {"value": self.session and self.session.run(max, 3, 4)}


def test_a_session_that_is_used_while_it_captures_says_so(session: Session) -> None:
    lazy = Lazy(session)
    for call in (session.run, session.submit):
        with pytest.raises(NbdistError, match=r"`__getstate__`.*pass its value"):
            call(lambda: lazy.value)
    assert session.run(lambda: 5) == 5


def train_until_stopped(folder: Path) -> None:
    """Write a file at the beginning and one in the `finally` block, each with the rank's number."""
    try:
        (folder / f"begun{dist.get_rank()}").touch()
        time.sleep(1000)
    finally:
        (folder / f"saved{dist.get_rank()}").touch()


@pytest.mark.parametrize("place", ["sending", "waiting"])
def test_an_exception_before_the_wait_lets_ranks_clean_up(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The ranks have begun before the kernel waits, and the user's handler raises there."""

    def get_signal_once() -> None:
        if not (tmp_path / "raised").exists():
            assert poll(lambda: len(list(tmp_path.glob("begun*"))) == 2)
            (tmp_path / "raised").touch()
            signal.raise_signal(signal.SIGUSR1)

    class Late(Waiting):
        def __init__(self, *args: Any, **options: Any) -> None:
            get_signal_once()
            super().__init__(*args, **options)

    def send(group: Group, rank: int, message: ToRank, **parts: Any) -> None:
        send_to_rank(group, rank, message, **parts)
        if isinstance(message, Call) and rank == 1:
            get_signal_once()

    def late(*_: Any) -> None:
        raise TimeoutError("the user's")

    pids = session.run_all(os.getpid)
    send_to_rank = Group.send
    if place == "sending":
        monkeypatch.setattr(Group, "send", send)
    else:
        monkeypatch.setattr(executor, "Waiting", Late)
    before = signal.signal(signal.SIGUSR1, late)
    try:
        with pytest.raises(TimeoutError, match="the user's"):
            session.run(train_until_stopped, tmp_path)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(list(tmp_path.glob("saved*"))) == 2
    assert session.run_all(os.getpid) == pids


def test_an_interrupt_leaves_gradients_switched_on(session: Session) -> None:
    """The interrupt may come when `torch.no_grad()` has switched them off, and its block has not begun."""

    def interrupted() -> None:
        torch._C._set_grad_enabled(False)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.run(interrupted)
    assert session.run_all(torch.is_grad_enabled) == [True, True]


@pytest.mark.parametrize("uses_session", [False, True])
def test_an_exception_of_a_signal_handler_lets_ranks_clean_up(
    session: Session, tmp_path: Path, uses_session: bool
) -> None:
    def late(*_: Any) -> None:
        if uses_session:
            session.run(lambda: 1)
        raise TimeoutError("the user's")

    pids = session.run_all(os.getpid)
    before = signal.signal(signal.SIGUSR1, late)
    thread = signal_when_begun(tmp_path, signal.SIGUSR1)
    error, text = (NbdistError, "or from a signal handler") if uses_session else (TimeoutError, "the user's")
    try:
        with pytest.raises(error, match=text):
            session.run(train_until_stopped, tmp_path)
    finally:
        thread.join()
        signal.signal(signal.SIGUSR1, before)
    assert len(list(tmp_path.glob("saved*"))) == 2
    assert session.run_all(os.getpid) == pids


def test_a_timer_that_raises_again_and_again_lets_ranks_clean_up(session: Session, tmp_path: Path) -> None:
    """Its later exceptions come while the ranks clean up, which wait for them."""
    ticks: list[int] = []

    def late(*_: Any) -> None:
        ticks.append(len(ticks))
        raise TimeoutError(f"tick {ticks[-1]}")

    def timer() -> None:
        poll(lambda: len(list(tmp_path.glob("begun*"))) == 2)
        for number in range(4):
            os.kill(os.getpid(), signal.SIGUSR1)  # the signal of a timer is pytest's
            poll(lambda number=number: len(ticks) > number)
        (tmp_path / "ticked").touch()

    def train() -> None:
        try:
            (tmp_path / f"begun{dist.get_rank()}").touch()
            time.sleep(1000)
        finally:
            assert poll((tmp_path / "ticked").exists)
            (tmp_path / f"saved{dist.get_rank()}").touch()

    pids = session.run_all(os.getpid)
    before = signal.signal(signal.SIGUSR1, late)
    thread = threading.Thread(target=timer)
    thread.start()
    try:
        with pytest.raises(TimeoutError, match="tick 0"):
            session.run(train)
    finally:
        thread.join()
        assert signal.signal(signal.SIGUSR1, before) is late
    assert len(ticks) == 4 and len(list(tmp_path.glob("saved*"))) == 2
    assert session.run_all(os.getpid) == pids


class Interrupter:
    """Interrupts a call at the function number `wanted` that it calls after it was sent, or where it waits for events.

    Attributes: `place`, the name of the function.
    """

    def __init__(self, wanted: int) -> None:
        self._left, self._deferred, self.place = wanted, 0, ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_name
        self._deferred += (name, event) == ("deferred_handlers", "return")  # where it begins, and where it ends
        if event == "call" and self._deferred == 2:
            self._left -= 1
            if self._left < 0 or name == "select":
                sys.setprofile(None)
                self.place = name
                signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_an_interrupt_where_the_wait_begins_kills_no_rank() -> None:
    places: list[str] = []
    with Session(1, devices="cpu") as session:
        pid = session.run(os.getpid)
        while "select" not in places:
            interrupter = Interrupter(len(places))
            try:
                with pytest.raises(KeyboardInterrupt):
                    sys.setprofile(interrupter)
                    session.run(time.sleep, 1000)
            finally:
                sys.setprofile(None)
            places.append(interrupter.place)
            assert session.run(os.getpid) == pid, f"killed after an interrupt in {places[-1]}"
    assert {"_wait_for", "wait", "_run"} <= set(places)
