"""Named sessions: calls, output and state through a keeper, and what only these sessions can do."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from cells import cells
from conftest import Kernel, living, poll, typed

import nbdist
from nbdist import NbdistError, NotFinite, RankDied, RankTimeout, Session, attach, sessions
from nbdist.kernel.cell.cell import Cell
from nbdist.kernel.named import starting
from nbdist.kernel.named.connection import Connection, Wakeup
from nbdist.kernel.named.executor import NamedExecutor
from nbdist.kernel.named.recorded import _find
from nbdist.kernel.named.replaying import Replayer
from nbdist.kernel.named.spec import Answer
from nbdist.kernel.named.terminal import main
from nbdist.kernel.session import executor_of
from nbdist.system import interpreter
from nbdist.wire.session_folder import SessionFolder, base, names

CELLS = cells("kernel/cells/named.py")


def keeper_of(name: str) -> psutil.Process:
    """The process of a session's keeper."""
    return psutil.Process(SessionFolder(name).about()["pid"])


def family(name: str) -> list[psutil.Process]:
    """The keeper, its fork server and its ranks."""
    keeper = keeper_of(name)
    return [keeper, *keeper.children(recursive=True)]


@pytest.fixture(scope="module", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of its own for the sessions of this file. No keeper may be left in it."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(folder))
        yield folder
        for name in names():
            with contextlib.suppress(Exception):
                attach(name).close()
        assert names() == []


@pytest.fixture(scope="module")
def kept() -> Iterator[Session]:
    with Session(2, name="kept", devices="cpu", timeout=500) as session:
        yield session


@pytest.fixture
def ended() -> Iterator[Callable[[str], None]]:
    """Kills a keeper. All that it had started must be gone."""
    processes: list[psutil.Process] = []

    def kill(name: str) -> None:
        processes.extend(family(name))
        processes[0].kill()
        assert poll(lambda: not SessionFolder(name).alive())

    yield kill
    assert poll(lambda: not living(processes)), f"outlived their keeper: {living(processes)}"


def says_so_and_waits() -> None:
    """Print a line, before which the journal has the beginning of the call."""
    print("waits")
    time.sleep(1000)


def rank_and_argument(x: Any) -> tuple[int, Any]:
    import torch.distributed as dist

    print("rank", dist.get_rank(), "has", x)
    return dist.get_rank(), x


def print_when(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)
    print("the last line")


class Pair:
    def __init__(self, a: int, b: int) -> None:
        self.a, self.b = a, b


# ------------------------------------------------------------------------------------------------------------- calls


def test_calls_and_their_output(kept: Session, capsys: pytest.CaptureFixture[str]) -> None:
    assert kept.run(rank_and_argument, 5) == (0, 5)
    assert capsys.readouterr().out == "rank 0 has 5\n"
    assert kept.run_all(rank_and_argument, nbdist.per_rank([5, 6])) == [(0, 5), (1, 6)]
    assert kept.run(rank_and_argument, 7, ranks=[1]) == (1, 7)
    assert kept.call(rank_and_argument, (8,), output="all") == [(0, 8)]
    assert sorted(capsys.readouterr().out.splitlines()[-2:]) == ["[rank 0] rank 0 has 8", "[rank 1] rank 1 has 8"]
    assert "rank 1 has 6" in kept.logs(1)
    assert kept.name == "kept" and "2 ranks on cpu, gloo, running" in repr(kept)


def test_a_session_is_not_busy_after_a_call(kept: Session) -> None:
    """Also while the keeper still writes the outcome to the journal."""

    def fail() -> None:
        raise ValueError

    for _ in range(100):
        with pytest.raises(ValueError):
            kept.run(fail)
        assert "running" in repr(kept)


def test_values_are_this_process_own_objects(kept: Session) -> None:
    """Also big ones, which can be changed, and instances of classes that were sent by value."""

    class Local:
        pass

    numpy = pytest.importorskip("numpy")
    data = numpy.arange(1 << 20)
    found = kept.run(lambda: (data * 2, Local()))
    assert type(found[1]) is Local and (found[0] == data * 2).all()
    found[0][0] = 5
    assert (kept.result()[0] == data * 2).all(), "as it was returned"


def test_a_short_call_is_answered_first_and_then_written(kept: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[Answer] = []
    answer = Replayer.answer
    monkeypatch.setattr(Replayer, "answer", lambda self, one: answered.append(one) or answer(self, one))
    for number in range(50):
        assert kept.run(abs, number) == number
        assert kept.result() == number
    assert kept.run_all(rank_and_argument, 3) == [(0, 3), (1, 3)]
    assert poll(lambda: kept.run(abs, 1) == 1 and answered), "on a busy machine many calls are long, and not all"


def test_an_exception(kept: Session) -> None:
    class Own(ValueError):
        pass

    def fail() -> None:
        raise Own("boom")

    with pytest.raises(Own, match="boom") as raised:
        kept.run(fail)
    remote: Any = raised.value.__cause__
    assert "test_named.py" in remote.text and remote.rank in (0, 1) and len(remote.others) <= 1
    with pytest.raises(Own, match="boom"):
        kept.result()
    assert kept.run(int) == 0, "the ranks are usable"


def test_a_library_that_the_keeper_does_not_import(kept: Session) -> None:
    """The type of an exception need not be known there."""
    with pytest.raises(json.JSONDecodeError, match="Expecting value"):
        kept.run(json.loads, "")


def test_collectives(kept: Session) -> None:
    kept.run(lambda: [dist.barrier() for _ in range(3)])
    found = kept.collectives()
    assert sorted(found.by_rank) == [0, 1] and found.difference is None
    assert [one.kind for one in found.by_rank[1]][-3:] == ["barrier"] * 3


@pytest.mark.long("more ends of keepers")
def test_numbers_are_checked() -> None:
    def step() -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters())
        model(torch.full((1, 1), math.nan)).sum().backward()
        optimizer.step()

    with Session(1, name="checked", devices="cpu", check="nan") as session:
        with pytest.raises(NotFinite, match="rank 0"):
            session.run(step)
        with pytest.raises(NotFinite):
            session.result()


def test_in_the_background(kept: Session) -> None:
    futures = [kept.submit(rank_and_argument, number) for number in range(3)]
    assert [future.result() for future in futures] == [(0, 0), (0, 1), (0, 2)]
    endless = kept.submit(time.sleep, 1000)
    waits = kept.submit(rank_and_argument, 3)
    assert poll(lambda: "sleep" in str(kept.status()))
    assert waits.cancel()
    endless.cancel()
    assert poll(endless.done) and endless.cancelled() and waits.cancelled()
    assert kept.run(int) == 0


def sleep_and_clean_up(folder: Path) -> None:
    try:
        (folder / f"begun{dist.get_rank()}").touch()
        time.sleep(1000)
    finally:
        print("cleaned up", folder)


def interrupt_when_begun(folder: Path) -> None:
    """Press the stop button when both ranks are in `sleep_and_clean_up`."""
    assert poll(lambda: len(list(folder.iterdir())) == 2)
    os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_reaches_the_ranks(kept: Session, tmp_path: Path) -> None:
    thread = threading.Thread(target=interrupt_when_begun, args=[tmp_path])
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        kept.run(sleep_and_clean_up, tmp_path)
    thread.join()
    assert all(f"cleaned up {tmp_path}" in kept.logs(rank) for rank in (0, 1))
    assert kept.run(int) == 0


@pytest.mark.parametrize("step", [(Connection, "send"), (NamedExecutor, "follow")], ids=["send", "follow"])
def test_an_interrupt_before_the_wait_stops_the_call(
    kept: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: tuple[type, str]
) -> None:
    """Interrupt the call of a cell after its ranks have begun, and before the cell waits for them."""
    original = getattr(*step)

    def pressed(self: Any, *values: Any, **parts: Any) -> None:
        monkeypatch.undo()
        if step[1] == "send":
            original(self, *values, **parts)
        interrupt_when_begun(tmp_path)

    kept.run(int)
    monkeypatch.setattr(*step, pressed)
    with pytest.raises(KeyboardInterrupt):
        kept.run(sleep_and_clean_up, tmp_path)
    assert all(f"cleaned up {tmp_path}" in kept.logs(rank) for rank in (0, 1))
    assert kept.run(int) == 0


def test_an_interrupt_after_the_end_of_an_action_is_raised(kept: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    send, state = Connection.send, executor_of(kept).state

    def pressed(self: Connection, *message: Any, **parts: Any) -> None:
        send(self, *message, **parts)
        if message[0] == "action":
            monkeypatch.undo()
            assert poll(lambda: state() == "running")
            os.kill(os.getpid(), signal.SIGINT)

    kept.run(int)
    for action, text in (
        (lambda: kept.run(lambda: 2), r"^stopped after the call had ended: result\(\) gives its value$"),
        (kept.restart, "^stopped after restart had ended$"),
    ):
        monkeypatch.setattr(Connection, "send", pressed)
        with pytest.raises(KeyboardInterrupt, match=text):
            action()
    assert kept.result() == 2
    assert kept.run(int) == 0


def test_an_interrupt_while_a_session_is_made_or_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(NamedExecutor, "__init__", pressed)
    with pytest.raises(KeyboardInterrupt):
        Session(1, name="again", devices="cpu")
    session = Session(1, name="again", devices="cpu")
    assert session.run(int) == 0
    monkeypatch.setattr(Wakeup, "close", pressed)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    session.close()
    assert "again" not in names()


def test_what_the_notebook_has_set_holds_in_fresh_ranks(kept: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_TEST", "1")
    monkeypatch.chdir("/")
    kept.restart()
    assert kept.run(lambda: (os.environ.get("OF_TEST"), os.getcwd(), sys.argv)) == ("1", "/", sys.argv)
    assert kept.run(lambda: os.environ.get("PYTHONPATH")) == os.environ.get("PYTHONPATH")


def die_on_rank_1() -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def test_a_rank_that_dies(kept: Session) -> None:
    with pytest.raises(RankDied, match=r"rank 1 .*SIGKILL"):
        kept.run(die_on_rank_1)
    with pytest.raises(NbdistError, match="restart"):
        kept.run(int)
    kept.restart()
    assert kept.run(int) == 0


@pytest.mark.slow
def test_a_timeout_is_the_keepers() -> None:
    timeout = pytest.raises(RankTimeout, match=r"not done after 0.5 s: rank 0")
    with Session(1, name="timeout", devices="cpu", timeout=0.5) as session, timeout:
        session.run(time.sleep, 1000)


@pytest.mark.slow
def test_a_debugger_in_a_rank(capsys: pytest.CaptureFixture[str]) -> None:
    def divide(x: int) -> float:
        return 1 / x

    with Session(1, name="debugged", devices="cpu", hold_on_error=True) as session:
        with pytest.raises(ZeroDivisionError):
            session.run(divide, 0)
        session.post_mortem(commands=["p x + 41"])
        assert "(rank 0) p x + 41\n41\n(rank 0) quit\n" in capsys.readouterr().out
        attach("debugged").post_mortem(commands=["p x + 42"])
        assert "(rank 0) p x + 42\n42\n" in capsys.readouterr().out
        session.run(int)
        with pytest.raises(NbdistError, match="no rank is held"):
            session.post_mortem()


@pytest.mark.slow
def test_a_keeper_that_was_ready() -> None:
    nbdist.warm("import decimal", named=True)
    nbdist.warm(named=True)
    (ready,) = starting._ready
    with Session(1, name="ready", devices="cpu") as session:
        assert not starting._ready
        assert session.run(lambda: "decimal" in sys.modules)
        nbdist.warm(named=True)
        assert starting._ready != [ready]
        pid = starting._ready[0]._process.pid
        assert poll(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
        starting._ready[0]._channel.sock.close()
        starting._ready.clear()
    with pytest.raises(TypeError, match="named must be True or False"):
        nbdist.warm(named=1)  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_call_of_in_ddp() -> None:
    seen = nbdist.in_ddp.options(name="once", devices="cpu")(2, lambda: sys.argv[:0])
    assert seen == [] and "once" not in names()


# ---------------------------------------------------------------------------------------------------- only these


@pytest.mark.slow
def test_results_and_replays_by_number(capsys: pytest.CaptureFixture[str]) -> None:
    with Session(1, name="numbered", devices="cpu") as session:
        with pytest.raises(NbdistError, match="there is no call in the journal of the session 'numbered'"):
            session.result()
        for number in range(3):
            session.run(rank_and_argument, number)
        shown = capsys.readouterr().out
        assert session.result() == (0, 2) and session.result(1) == (0, 0)
        assert capsys.readouterr().out == ""
        for number in (1, 2, 3):
            session.replay(number)
        assert capsys.readouterr().out == shown
        session.replay(2, output="none")
        assert capsys.readouterr().out == ""
        with pytest.raises(NbdistError, match="there is no call number 4"):
            session.replay(4)
        with pytest.raises(ValueError, match="output must be one of"):
            session.replay(output="some")
        future = session.submit(time.sleep, 1000)
        assert poll(lambda: _find(SessionFolder("numbered").path, None)[1]["number"] == 4), "the call is in the journal"
        with pytest.raises(TimeoutError, match=r"the call of sleep is not over after 0.01 s"):
            session.result(timeout=0.01)
        session.stop()
        assert poll(future.done)
        with pytest.raises(KeyboardInterrupt):
            session.result()


def test_only_named_sessions_have_a_journal() -> None:
    with Session(1) as session:
        for method in (session.result, session.replay, session.stop):
            with pytest.raises(NbdistError, match="only a session with a name has a journal"):
                method()
        assert session.name is None


def test_two_clients_of_one_session(kept: Session, capsys: pytest.CaptureFixture[str]) -> None:
    kept.run(rank_and_argument, "first")
    capsys.readouterr()
    other = attach("kept")
    assert capsys.readouterr().out == "rank 0 has first\n", "it shows the last call"
    assert other.nranks == 2 and other.run(rank_and_argument, "other") == (0, "other")
    assert kept.result() == (0, "other")
    assert kept.run(rank_and_argument, 1) == (0, 1)


def test_the_value_comes_after_the_output(
    kept: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`result()` returns when the thread that shows the call, of `attach` or of `submit`, has shown all of it."""
    show = Cell.text

    def show_slowly(*args: Any) -> None:
        time.sleep(0.2)
        show(*args)

    monkeypatch.setattr(Cell, "text", show_slowly)
    for number, begin in enumerate((lambda: attach("kept"), lambda: kept)):
        go = tmp_path / f"go {number}"
        future = kept.submit(print_when, go)
        assert poll(lambda: "print_when" in str(kept.status()))
        session = begin()
        capsys.readouterr()
        go.touch()
        session.result()
        assert "the last line" in capsys.readouterr().out
        future.result()


def test_the_list(kept: Session) -> None:
    kept.run(print, "a last line")
    table = sessions()
    (one,) = [one for one in table if one.name == "kept"]
    assert (one.ranks, one.state, one.line) == (2, "idle", "a last line") and one.memory > 0 and one.age > 0
    assert re.search(r"^kept +\d+:\d\d +2 +idle +\S+ MB +a last line$", repr(table), re.MULTILINE), repr(table)
    assert "<td" in table._repr_html_()


@pytest.mark.slow
def test_close_ends_all_and_removes_the_folder() -> None:
    session = Session(2, name="closed", devices="cpu")
    session.run(int)
    session.submit(time.sleep, 1000)
    processes = family("closed")
    session.close()
    assert not os.path.exists(SessionFolder("closed").path)
    assert poll(lambda: not living(processes)), "no keeper, fork server or rank is left"
    assert "closed" in repr(session)
    with pytest.raises(NbdistError, match="the session 'closed' is closed; make a new one"):
        session.run(int)
    with pytest.raises(NbdistError, match="there is no session 'closed'"):
        attach("closed")
    session.close()


@pytest.mark.long("more ends of keepers")
def test_idle_sessions_end() -> None:
    """And leave an outcome that was not taken."""
    taken = Session(1, name="taken", idle=4, devices="cpu")
    keepers = [keeper_of("taken")]
    taken.run(int)
    left = Session(1, name="left", idle=4, devices="cpu")
    keepers.append(keeper_of("left"))
    future = left.submit(lambda: (time.sleep(2), 3))
    assert poll(lambda: str(left.status()).startswith("1 rank, running"))
    executor_of(left).connection.close()  # type: ignore[attr-defined]
    assert poll(future.done) and poll(lambda: not living(keepers))
    with pytest.raises(NbdistError, match="the session 'taken' is closed"):
        taken.run(int)
    assert "taken" not in names()
    assert [one.state for one in sessions() if one.name == "left"] == ["ended: no call for 4 s (idle=)"]
    again = attach("left")
    assert again.result() == (None, 3)
    again.close()


@pytest.mark.long("more ends of keepers")
def test_a_keeper_whose_folder_is_removed_ends() -> None:
    Session(1, name="removed", devices="cpu").run(int)
    processes = family("removed")
    shutil.rmtree(SessionFolder("removed").path)
    assert poll(lambda: not living(processes))


def test_a_name_is_taken_once(kept: Session) -> None:
    with pytest.raises(NbdistError, match=r"there is a session 'kept' already: nbdist.attach\('kept'\) gives it"):
        Session(2, name="kept")
    assert kept.run(int) == 0


@pytest.mark.parametrize("name", ["", ".", "..", "../up", "a/b", "-a", "a" * 65, "a b", "é", "a\0", ".hidden", "a\n"])
def test_names_cannot_leave_the_folder(name: str) -> None:
    for make in (lambda: Session(2, name=name), lambda: attach(name)):
        with pytest.raises(ValueError, match="name must be up to 64 letters, digits"):
            make()


def test_options_that_make_no_sense() -> None:
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"name": 3}, TypeError, "name must be a string, got"),
        ({"name": "a", "idle": 0}, ValueError, "idle must be a finite number of seconds above 0, got 0"),
        ({"name": "a", "keep": 5}, ValueError, "keep must be at least 1048576, got 5"),
        ({"name": "a", "engine": "nowhere"}, ValueError, "engine must be one of 'local', 'ray'"),
    ]
    for options, error, text in wrong:
        with pytest.raises(error, match=text):
            Session(2, **options)
    assert "a" not in names()


def test_a_keeper_that_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "command", lambda *_: [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(NbdistError, match="the keeper of the session 'failing' ended while it started"):
        Session(1, name="failing", devices="cpu")
    assert "failing" not in names()


def test_other_users_do_not_get_in(kept: Session) -> None:
    folder = Path(SessionFolder("kept").path)
    assert {path.stat().st_mode & 0o077 for path in [folder, *folder.iterdir()]} == {0}
    os.chmod(base(), 0o755)
    try:
        with pytest.raises(PermissionError, match="must have mode 0700, got 0755"):
            attach("kept")
    finally:
        os.chmod(base(), 0o700)


# ------------------------------------------------------------------------------------------- keepers that have ended


@pytest.mark.slow
def test_a_killed_keeper(ended: Callable[[str], None], capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(2, name="killed", devices="cpu")
    assert session.run(rank_and_argument, 3) == (0, 3)
    future = session.submit(says_so_and_waits)
    assert poll(lambda: "waits" in session.logs(0))
    ended("killed")
    with pytest.raises(NbdistError, match="the session 'killed' has no ranks any more: its keeper has ended"):
        future.result()
    (one,) = [one for one in sessions() if one.name == "killed"]
    assert one.state == "ended: its keeper was killed" and one.ranks == 2
    again = attach("killed")
    capsys.readouterr()
    again.replay(1)
    assert capsys.readouterr().out == "rank 0 has 3\n"
    assert again.result(1) == (0, 3)
    with pytest.raises(NbdistError, match="has no ranks any more"):
        again.result()
    with pytest.raises(NbdistError, match="has no ranks any more"):
        again.run(int)
    assert again.logs(0) == "waits\n"
    assert str(again.status()).startswith("the session 'killed' has no ranks any more")
    again.close()
    assert "killed" not in names()


def test_a_session_is_closed_whose_keeper_was_killed(ended: Callable[[str], None]) -> None:
    session = Session(1, name="closed", devices="cpu")
    ended("closed")
    session.close()
    assert "closed" not in names()


@pytest.mark.long("more ends of keepers")
def test_a_machine_that_was_restarted(ended: Callable[[str], None]) -> None:
    Session(1, name="before", devices="cpu").run(rank_and_argument, 1)
    ended("before")
    edit("before", boot="another")
    assert [one.state for one in sessions() if one.name == "before"] == ["ended with its machine, which was restarted"]
    session = attach("before")
    assert session.result() == (0, 1)
    with pytest.raises(NbdistError, match="has no ranks any more: its machine was restarted"):
        session.run(int)
    session.close()


@pytest.mark.long("more ends of keepers")
def test_a_terminated_keeper_says_so(ended: Callable[[str], None]) -> None:
    session = Session(1, name="ended", devices="cpu")
    session.run(rank_and_argument, 1)
    processes = family("ended")
    processes[0].terminate()
    assert poll(lambda: not living(processes))
    assert [one.state for one in sessions() if one.name == "ended"] == ["ended: its keeper got SIGTERM"]
    attach("ended").close()


def edit(session: str, /, **changed: Any) -> None:
    """Change what a session's keeper has written of itself."""
    path = Path(SessionFolder(session).path) / "session.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))


def test_another_version_is_refused_and_can_read_the_journal(kept: Session, capsys: pytest.CaptureFixture[str]) -> None:
    kept.run(rank_and_argument, 3)
    about = SessionFolder("kept").about()
    for changed in ({"nbdist": "0.0.1"}, {"python": "3.9"}):
        edit("kept", **changed)
        try:
            with pytest.raises(
                NbdistError, match=r"'kept' was made with nbdist .* on Python .*: attach to it with the same version"
            ):
                attach("kept")
            capsys.readouterr()
            assert main(["replay", "kept"]) == 0
            assert capsys.readouterr().out == "rank 0 has 3\n"
            assert "made with nbdist" in repr(sessions())
        finally:
            edit("kept", **about)
    edit("kept", host="elsewhere")
    try:
        with pytest.raises(NbdistError, match="'kept' is on another machine: attach to it on elsewhere"):
            attach("kept")
    finally:
        edit("kept", **about)
    assert attach("kept").run(int) == 0


# ---------------------------------------------------------------------------------------------------------- a terminal


def test_the_command_line(kept: Session, capsys: pytest.CaptureFixture[str]) -> None:
    kept.run(rank_and_argument, 3)
    capsys.readouterr()
    assert main(["attach", "kept"]) == 0
    assert capsys.readouterr().out == "rank 0 has 3\n"
    assert main(["sessions"]) == 0
    assert "kept" in capsys.readouterr().out
    with pytest.raises(ZeroDivisionError):
        kept.run(lambda: 1 // 0)
    assert main(["attach", "kept"]) == 1
    assert "the call has failed: on rank" in capsys.readouterr().err
    assert main(["attach", "nothing"]) == 1
    assert "nbdist: there is no session 'nothing'. Sessions with a name: 'kept'" in capsys.readouterr().err
    future = kept.submit(time.sleep, 1000)
    assert poll(lambda: str(kept.status()).startswith("2 ranks, running"))
    assert main(["stop", "kept"]) == 0
    assert poll(future.done)
    Session(1, name="terminal", devices="cpu")
    assert main(["close", "terminal"]) == 0
    assert "terminal" not in names()


# --------------------------------------------------------------------------------------------------- a real notebook


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [False, True])
def test_a_notebook_that_is_killed_or_restarted(restarts: bool, kernel: Kernel, tmp_path: Path) -> None:
    """Jupyter interrupts a kernel before it restarts it: the call goes on all the same.

    Its class is read by another kernel in which no cell has defined it; bars, plots and tables are replayed.
    """
    kernel.ok(CELLS["training"])
    message = kernel.start(CELLS["the call"])
    shown = kernel.finish(message, until=lambda result: "step 3" in result.text)
    if restarts:
        kernel.manager.restart_kernel(now=False)
    else:
        os.kill(kernel.pid, signal.SIGKILL)
    second = Kernel(tmp_path)
    try:
        attached = second.ok("import nbdist\nsession = nbdist.attach('notebook')\nvalue = session.result()")
        steps = re.findall(r"step \d+", attached.text)
        assert steps == [f"step {step}" for step in range(20)] and "step 3" in shown.text
        assert second.ok("print(type(value).__name__, value.steps)").text == "Trained 20\n"
        replayed = second.ok("session.replay()")
        assert re.findall(r"step \d+", replayed.text) == steps
        kinds = [output["kind"] for output in replayed.outputs]
        assert "display_data" in kinds and "'bar: 20'" in replayed.text
        assert any("<b>table</b>" in str(output.get("data")) for output in replayed.outputs)
        second.ok("session.close()")
    finally:
        second.close()


@pytest.mark.slow
def test_what_a_rank_asks_is_typed(kernel: Kernel) -> None:
    kernel.ok("from nbdist import Session\nsession = Session(1, name='asking', devices='cpu')")
    prompts, text = typed(kernel, "print(session.run(lambda: input('how many? ')))", "7")
    assert prompts == ["(rank 0) how many? "] and text.endswith("7\n")
    prompts, text = typed(kernel, "session.submit(lambda: input('how many? ')).result()")
    assert prompts == [] and "a call in the background has no cell that can ask" in text
    kernel.ok("session.close()")


@pytest.mark.slow
def test_the_magics(kernel: Kernel) -> None:
    kernel.ok("%load_ext nbdist\n%ddp start 2 --devices cpu --name magic")
    kernel.ok("%%ddp\nkept_there = 5")
    kernel.ok("get_ipython().magics_manager.registry['DdpMagics'].session = None")
    assert "magic" in kernel.ok("%ddp sessions").text
    assert "2 ranks" in kernel.ok("%ddp attach magic").text
    assert kernel.ok("%%ddp\nkept_there + 1").text.strip() == "6"
    kernel.ok("%ddp stop")
    assert "magic" not in kernel.ok("%ddp sessions").text
