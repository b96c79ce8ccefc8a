"""Sessions on this machine, beyond what test_engines.py holds all engines to: the background, post mortem, growth."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import importlib
import os
import signal
import threading
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from calls import boom, on, remember, sums
from conftest import open_fds, poll

from nbdist import CaptureError, NbdistError, Session, in_ddp, post_mortem
from nbdist.kernel.calls.executor import Executor
from nbdist.system.connections import sockets
from nbdist.wire.parcel import Parcel


def test_a_session_dropped_after_a_call_in_the_background() -> None:
    dropped = Session(1)
    pid = dropped.submit(os.getpid).result()
    del dropped
    assert poll(lambda: gc.collect() is not None and not psutil.pid_exists(pid))


def test_a_call_that_ends_the_process_group_costs_the_next_one_nothing(session: Session) -> None:
    before = session.run_all(remember, 1)
    session.run(dist.destroy_process_group)
    assert session.run(sums) == 2.0 and [kept[:-1] for kept in session.run_all(remember, 2)] == before
    session.call(lambda: dist.destroy_process_group(), ranks=[1])
    assert session.run(sums) == 2.0


def test_a_rank_that_dies_after_its_answer(tmp_path: Path) -> None:
    def there(name: str) -> bool:
        while not (tmp_path / name).exists():
            time.sleep(0.01)
        return True

    def dies_later() -> None:
        (tmp_path / f"begun-{dist.get_rank()}").touch()
        on(1, threading.Thread(target=lambda: there("answered") and os._exit(4)).start, lambda: there("died"))

    def answered() -> bool:
        rank_0, rank_1 = str(session.status()).splitlines()[-2:]
        return (tmp_path / "begun-1").exists() and "running" in rank_0 and "idle" in rank_1

    with Session(2) as session:
        pids = session.run_all(os.getpid)
        call = session.submit(dies_later)
        assert poll(answered)
        (tmp_path / "answered").touch()
        assert poll(lambda: not psutil.pid_exists(pids[1]))
        (tmp_path / "died").touch()
        call.result()
        with pytest.raises(NbdistError, match=r"rank 1 .* exit code 4"):
            session.run(sums)


def test_restart_gives_fresh_ranks(session: Session) -> None:
    before = session.run_all(remember, 1)
    session.restart()
    after = session.run_all(remember, 2)
    assert [kept[1:] for kept in after] == [[2], [2]] and not {k[0] for k in before} & {k[0] for k in after}


def test_what_changes_before_the_first_call_of_fresh_ranks_reaches_them(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session.restart()
    monkeypatch.setenv("AFTER_RESTART", "1")
    monkeypatch.chdir(tmp_path)
    assert session.run(lambda: (os.getenv("AFTER_RESTART"), os.getcwd())) == ("1", str(tmp_path))
    monkeypatch.delenv("AFTER_RESTART")
    assert session.run(os.getenv, "AFTER_RESTART") is None


# --------------------------------------------------------------------------------------------------- the background


def test_submit_gives_a_future(session: Session) -> None:
    called: list[Any] = []
    future = session.submit(lambda x: sums() + x, 3)
    future.add_done_callback(called.append)
    assert future.result() == 5.0 and future.done() and not future.cancelled() and future.exception() is None
    assert poll(lambda: called == [future])
    again: list[float] = []
    session.submit(sums).add_done_callback(lambda done: again.append(done.result() + session.run(sums)))
    assert poll(lambda: again == [4.0])
    failing = session.submit(boom)
    assert isinstance(failing.exception(), ValueError)
    with pytest.raises(ValueError, match="boom") as caught:
        failing.result()
    assert "rank " in str(caught.value.__cause__)
    assert session.run(sums) == 2.0
    done, _ = concurrent.futures.wait([session.submit(sums), session.submit(sums)])
    assert [f.result() for f in done] == [2.0, 2.0]


def test_submit_raises_at_once_for_a_call_that_cannot_be_sent(session: Session) -> None:
    with pytest.raises(CaptureError):
        session.submit(print, (i for i in ()))
    with pytest.raises(NameError, match="no_such"):
        session.submit(sums, need="no_such")


def test_calls_take_turns_and_see_values_as_they_were(session: Session) -> None:
    big = torch.zeros(1 << 20)

    def slow(value: torch.Tensor) -> float:
        time.sleep(0.05)
        return float(value[0])

    futures = []
    for number in range(5):
        big.fill_(number)
        futures.append(session.submit(slow, big))
    big.fill_(-1)
    assert session.run(slow, big) == -1.0 and all(future.done() for future in futures)
    assert [future.result() for future in futures] == [0.0, 1.0, 2.0, 3.0, 4.0]


def waits_for(folder: str) -> str:
    """Leaves a file when it begins and one when it is stopped."""
    begun = os.path.join(folder, f"begun-{dist.get_rank()}")
    try:
        open(begun, "w").close()
        time.sleep(1000)
    finally:
        open(begun.replace("begun", "cleaned"), "w").close()
    return "done"


def names(folder: Any, start: str) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name.startswith(start))


def test_close_stops_the_background(tmp_path: Any) -> None:
    with Session(2) as own:
        future = own.submit(waits_for, str(tmp_path))
        waiting = own.submit(sums)
        assert poll(lambda: len(names(tmp_path, "begun")) == 2)
    assert future.cancelled() and waiting.cancelled() and len(names(tmp_path, "cleaned")) == 2


def test_restart_stops_the_background(session: Session, tmp_path: Any) -> None:
    future = session.submit(waits_for, str(tmp_path))
    assert poll(lambda: len(names(tmp_path, "begun")) == 2)
    session.restart()
    assert future.cancelled() and session.run(sums) == 2.0


def test_two_sessions_work_at_the_same_time(session: Session, tmp_path: Path) -> None:
    def waits() -> float:
        while not (tmp_path / "other").exists():
            time.sleep(0.01)
        return sums()

    with Session(3) as other:
        slow = session.submit(waits)
        assert other.run(sums) == 3.0
        (tmp_path / "other").touch()
        assert slow.result() == 2.0


# ------------------------------------------------------------------------------------------------------------ status


def test_status(session: Session) -> None:
    pids = session.run_all(os.getpid)
    session.run(lambda: print("epoch 3\nloss 0.25"))
    text = str(session.status())
    head, *rows = text.splitlines()[1:]
    assert head.split()[:4] == ["rank", "pid", "device", "state"]
    for rank, row in enumerate(rows):
        assert row.split()[:4] == [str(rank), str(pids[rank]), "cpu", "idle"] and row.endswith("loss 0.25")
        assert "MB" in row
        assert row.index("loss 0.25") == head.index(head.split("  ")[-1].strip()), "columns are aligned"
    future = session.submit(time.sleep, 1000)
    assert poll(lambda: str(session.status()).count("running  sleep") == 2), session.status()
    assert "<td>running</td><td>sleep</td>" in session.status()._repr_html_()
    future.cancel()
    assert poll(future.done) and poll(lambda: "running  sleep" not in str(session.status()))


def test_status_before_the_ranks_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    with Session(2) as session:
        assert "not started" in str(session.status())
        monkeypatch.setattr(Executor, "empty_cache", lambda *args: seen.append(session.status().look()))
        session.empty_cache()  # takes its turn, and starts nothing
        assert seen[0].busy and "starting" in seen[0].title


def open_connections() -> int:
    """Return the number of this process's TCP connections that neither end has closed."""
    return [one.status for one in sockets(psutil.Process())].count(psutil.CONN_ESTABLISHED)


def test_a_failure_while_another_rank_joins_leaves_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbdist.kernel.calls.ending.GRACE_TO_BEGIN", 10_000.0)  # as long as it takes here

    def slow_to_join() -> None:
        real = dist.init_process_group

        def join(*args: Any, **kwargs: Any) -> None:
            real(*args, **kwargs)
            connected = open_connections()
            time.sleep(1.5)  # it is not given a core
            if open_connections() != connected:  # as the real function raises when it has not yet come to its end
                raise RuntimeError("Connection closed by peer")

        if dist.get_rank() == 1:
            dist.init_process_group = join
        dist.destroy_process_group()

    def fails_at_once() -> None:
        on(0, boom)

    with Session(2) as own:
        pids = own.run_all(os.getpid)
        own.run(slow_to_join)  # the next call has another process group
        with pytest.raises(ValueError):
            own.run(fails_at_once)
        assert own.run_all(os.getpid) == pids and own.run(sums) == 2.0


def test_a_process_group_that_somebody_keeps_beyond_its_end() -> None:
    """Models and held frames keep one. Its store must not take the next one's file for its own when it goes at last."""

    def keep() -> None:
        import __main__

        __main__.kept = dist.group.WORLD
        store = dist.distributed_c10d._get_default_store()
        store.set("odd", "1234567")
        store.get("odd")  # it has read to where no record of the next file begins
        dist.destroy_process_group()

    def drop() -> None:
        import gc

        import __main__

        for _ in range(5):
            dist.new_group()
        dist.barrier()
        del __main__.kept
        gc.collect()

    with Session(2) as own:
        for _ in range(3):
            own.run(keep)
            own.run(drop)
            assert own.run(sums) == 2.0


# ------------------------------------------------------------------------------------------------------- post mortem


def fails_with(number: int) -> None:
    local = number * 2
    on(1, lambda: local / (number - number))


def test_post_mortem_looks_into_the_frames_of_the_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with Session(2, devices="cpu", hold_on_error=True) as own:  # whose memory is their own
        before = own.run_all(remember, 1)
        with pytest.raises(ZeroDivisionError):
            own.run(fails_with, 21)
        capsys.readouterr()
        own.post_mortem(commands=["up", "up", "p local, number", "print(number + 1)", "no_such", "q"])
        out = capsys.readouterr().out
        assert "(42, 21)" in out and "\n22\n" in out and "NameError" in out and "(rank 1) p local" in out
        own.post_mortem(1, commands=["where"])
        assert "fails_with(21" not in out and "in fails_with" in capsys.readouterr().out.replace(
            "fails_with()", "in fails_with"
        )
        assert own.run(sums) == 2.0 and [kept[:2] for kept in own.run_all(remember, 2)] == before
        with pytest.raises(NbdistError, match="no rank is held"):
            own.post_mortem(commands=[])


def test_post_mortem_of_another_rank(capsys: pytest.CaptureFixture[str]) -> None:
    with Session(2, hold_on_error=True) as own:
        with pytest.raises(ZeroDivisionError):
            own.run(lambda: 1 / (dist.get_rank() * 0))
        own.post_mortem(0, commands=["p 'rank', dist.get_rank"])
        assert "(rank 0) p 'rank'" in capsys.readouterr().out
        with pytest.raises(ValueError, match=r"rank must be one of the held ranks, .*got 5"):
            own.post_mortem(5, commands=[])


def test_post_mortem_needs_a_held_rank() -> None:
    with Session(1) as session:
        with pytest.raises(ValueError):
            session.run(boom)
        with pytest.raises(NbdistError, match="hold_on_error=True"):
            session.post_mortem(commands=[])
    with pytest.raises(NbdistError, match="hold_on_error=True"):
        post_mortem(commands=[])


def test_post_mortem_after_in_ddp(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError):
        in_ddp.options(hold_on_error=True)(2, fails_with, 4)
    post_mortem(commands=["up", "up", "p local"])
    assert "\n8\n" in capsys.readouterr().out
    with pytest.raises(NbdistError, match="no rank is held"):
        post_mortem(commands=[])
    with pytest.raises(ZeroDivisionError):
        in_ddp.options(hold_on_error=True)(2, fails_with, 4)
    assert in_ddp(2, sums) == 2.0, "the next call lets the held ranks go"


def test_a_rank_that_imports_meanwhile_does_not_cost_the_one_that_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "imported_slowly.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(1.5)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def fails(number: int) -> None:
        if dist.get_rank() == 0:
            importlib.import_module("imported_slowly")
            dist.barrier()
        while not Path("begun").exists():
            time.sleep(0.01)
        number / (number - number)

    with pytest.raises(ZeroDivisionError):
        in_ddp.options(hold_on_error=True)(2, fails, 4)
    post_mortem(commands=["p number * 2"])
    assert "\n8\n" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------------- growth


@pytest.mark.long("a thousand calls")
def test_a_thousand_calls_with_failures_leave_nothing(session: Session) -> None:
    def work(number: int, data: torch.Tensor) -> float:
        if number % 50 == 0:
            on(number // 50 % 2, boom)
        return sums() + float(data[0])

    def look() -> tuple[int, int, list[tuple[int, int, int]]]:
        me = psutil.Process()
        ranks = session.run_all(lambda: (psutil.Process().memory_full_info().uss, psutil.Process().num_fds(), 0))
        return open_fds(), len(me.children(recursive=True)), ranks

    data, before = torch.zeros(1 << 19), None
    for number in range(1, 1101):
        data[0] = number
        try:
            assert session.run(work, number, data) == 2.0 + number
        except ValueError:
            assert number % 50 == 0
        if number == 100:  # what is imported and allocated once is there
            before = look()
    after = look()
    assert before is not None
    assert after[0] <= before[0] and after[1] == before[1]
    for (memory, _, _), (memory_before, _, _) in zip(after[2], before[2], strict=True):
        assert memory < memory_before + 10e6
    most = [fds + 2 for _, fds, _ in before[2]]
    # gloo closes its sockets a little later
    assert poll(lambda: all(fds <= bound for (_, fds, _), bound in zip(look()[2], most, strict=True))), session.run_all(
        lambda: sorted(os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if fd.is_symlink())
    )


def test_calls_that_fail_before_their_data_is_read_leave_no_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure of another rank interrupts such imports."""
    (tmp_path / "only_in_notebooks.py").write_text('import os\nassert "RANK" not in os.environ\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    data = torch.zeros(1 << 19)

    def fds_after_failing() -> list[int]:
        with pytest.raises(AssertionError):
            session.run(lambda: float(data[0]), imports="import only_in_notebooks")
        return session.run_all(open_fds)

    with Session(2) as session:
        before = fds_after_failing()  # what the first failure opens for good is there
        after = [fds_after_failing() for _ in range(6)][-1]
    assert all(now <= then + 2 for now, then in zip(after, before, strict=True)), "gloo closes sockets a little later"


# --------------------------------------------------------------------------------------------------- turns are not lost


class Interrupted(BaseException):
    """The exception of the signal handler: like KeyboardInterrupt, and not to be mistaken for the one of pytest."""


def test_an_interrupt_at_any_moment_gives_the_turn_back(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(1)
    request = SimpleNamespace(call=SimpleNamespace(parcel=Parcel(b"", [], [])))
    monkeypatch.setattr(session, "_capture", lambda *args: request)
    monkeypatch.setattr(Executor, "carry_out", lambda *args: [1])

    def interrupt(signum: int, frame: Any) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    interrupted, random = 0, Random(0)
    try:
        for _ in range(5_000):
            with contextlib.suppress(Interrupted):
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 60e-6))
                    session.call(sums)
                    time.sleep(0.001)
                except Interrupted:
                    interrupted += 1
            assert not session.status().look().busy, f"lost after {interrupted} interrupts"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 2_000


def test_a_thread_that_cannot_start(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    assert session.run(sums) == 2.0
    fds = open_fds()

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start"):
        patch.setattr(threading.Thread, "start", fail)
        session.submit(sums)
    assert open_fds() == fds
    ahead = session.submit(sums)
    assert session.run(sums) == 2.0 and ahead.result() == 2.0


def test_calls_of_many_threads_take_turns(session: Session) -> None:
    numbers = range(1000, 1020)
    futures = [session.submit(remember, number) for number in numbers]
    futures[7].cancel()
    _, *remembered = session.run(remember, 1020)
    assert all(future.done() or poll(future.done) for future in futures)
    expected = [number for number in (*numbers, 1020) if number != 1007]
    assert [number for number in remembered if number >= 1000 and number != 1007] == expected


def test_the_next_call_does_not_get_the_answer_of_an_interrupted_one(
    session: Session, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """An interrupt may come between the sending of a call and the waiting for it."""
    before = session.run_all(os.getpid)

    def torn(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Executor, "_wait_for", torn)
        session.run(time.sleep, 1)
    assert session.run(lambda: 5) == 5 and "fresh ranks" in capfd.readouterr().err
    assert set(session.run_all(os.getpid)).isdisjoint(before)


def test_a_call_cancelled_while_its_ranks_start_is_not_answered_by_the_next() -> None:
    for delay in (0.0, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05):
        with Session(2) as own:
            future = own.submit(lambda: time.sleep(1000))
            time.sleep(delay)
            future.cancel()
            for number in range(3):
                assert own.run_all(lambda number=number: (number, dist.get_rank())) == [(number, 0), (number, 1)]
