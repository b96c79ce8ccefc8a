"""The contract of all engines: what a call promises holds wherever its ranks run."""

from __future__ import annotations

import atexit
import concurrent.futures
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from calls import boom, on, remember, sums
from clocks import CallClock
from conftest import Sessions, open_fds, poll, ranks_of

from nbdist import CaptureError, NbdistError, RankDied, RankTimeout, RayOptions, Session
from nbdist.engines.ray.kernel.driver_process import release
from nbdist.kernel.session import executor_of

Engine = str | RayOptions


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.long("clusters of Ray"))], scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An engine: this machine, or a cluster of two nodes, over which ranks are spread."""
    if request.param == "local":
        yield "local"
        return
    yield RayOptions(
        address=request.getfixturevalue("ray_cluster").address, placement="spread", cpus=0.5, linger=1000.0
    )
    release()


@pytest.fixture(scope="module")
def sessions(engine: Engine) -> Iterator[Sessions]:
    """The sessions that the tests of an engine share."""
    sessions = Sessions(engine=engine)
    yield sessions
    sessions.close()
    assert poll(lambda: not ranks_of()), f"these outlived their session: {ranks_of()}"


# ------------------------------------------------------------------------------------------------------- what ranks are


def test_ranks_stay_and_end_with_the_session(engine: Engine) -> None:
    with Session(2, engine=engine) as own:
        assert "not started" in repr(own)
        (a, _), (b, _) = own.run_all(remember, 1)
        assert own.run_all(remember, 2) == [[a, 1, 2], [b, 1, 2]] and own.run(sums) == 2.0
        assert "running" in repr(own)
        assert a != b and psutil.pid_exists(a) and psutil.pid_exists(b)
    assert not psutil.pid_exists(a) and not psutil.pid_exists(b) and "closed" in repr(own)
    for use in (lambda: own.run(remember, 3), lambda: own.submit(remember, 3), own.restart):
        with pytest.raises(NbdistError, match="closed"):
            use()
    own.close()


def test_a_session_that_is_dropped_ends_its_ranks(engine: Engine) -> None:
    dropped = Session(2, engine=engine)
    pids = dropped.run_all(os.getpid)
    del dropped
    assert poll(lambda: not any(map(psutil.pid_exists, pids)))


def test_what_ranks_print_at_their_end_is_shown(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    with Session(2, engine=engine) as own:
        own.run(atexit.register, print, "the end", "x" * 300_000, "the summary")
        assert "summary" not in capsys.readouterr().out
    assert capsys.readouterr().out.count("the summary") == 1


def test_sessions_leave_nothing_behind(engine: Engine) -> None:
    def state() -> tuple[int, int]:
        return open_fds(), psutil.Process().num_threads()

    before = set(ranks_of())
    for number in range(3):
        with Session(2, engine=engine) as own:
            assert own.run(sums) == 2.0
        assert poll(lambda: set(ranks_of()) <= before), ranks_of()
        if number == 1:
            second = state()
    assert poll(lambda: state() <= second), (second, state())


def surroundings() -> tuple[dict[str, str], list[str], list[str], str]:
    return dict(os.environ), sys.path, sys.argv, os.getcwd()


def test_environment_folder_path_and_arguments(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_JUST_NOW", "1")
    monkeypatch.syspath_prepend(tmp_path / "more")
    (tmp_path / "more").mkdir()
    with Session(3, engine=engine, env={"ONLY_IN_RANKS": "2"}) as own:
        found = own.run_all(surroundings)
    nodes = [int(env["NODE_RANK"]) for env, *_ in found]
    sizes = [nodes.count(node) for node in range(1 if engine == "local" else 2)]
    assert sorted(sizes) == ([3] if engine == "local" else [1, 2])
    places = [(node, local, size) for node, size in enumerate(sizes) for local in range(size)]
    for rank, (env, path, argv, cwd) in enumerate(found):
        assert (env["SET_JUST_NOW"], env["ONLY_IN_RANKS"]) == ("1", "2")
        assert (int(env["RANK"]), int(env["WORLD_SIZE"])) == (rank, 3)
        node, local, size = places[rank]
        assert int(env["NODE_RANK"]) == int(env["GROUP_RANK"]) == node
        assert (int(env["LOCAL_RANK"]), int(env["LOCAL_WORLD_SIZE"])) == (local, size)
        assert env["TORCHELASTIC_RESTART_COUNT"] == "0"
        there = list(dict.fromkeys(part for part in sys.path if not part or os.path.exists(part)))
        assert (argv, cwd) == (sys.argv, str(tmp_path))
        assert list(dict.fromkeys(part for part in path if part in there)) == there
    assert len({(env["MASTER_ADDR"], env["MASTER_PORT"]) for env, *_ in found}) == 1
    interface = found[0][0]["GLOO_SOCKET_IFNAME"]
    address = found[0][0]["MASTER_ADDR"]
    assert any(given.address == address for given in psutil.net_if_addrs()[interface])


def test_a_restart_gives_one_notice(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    def die_beside_a_deaf_one() -> float:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
            return sums()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        dist.barrier()
        return on(1, lambda: (time.sleep(0.3), os._exit(3)), lambda: time.sleep(1000))

    with Session(2, engine=engine, restarts=1) as own:
        assert own.run(die_beside_a_deaf_one) == 2.0
    said = capsys.readouterr().err
    assert "1 of 1 restarts" in said and "fresh ranks:" not in said


def train(folder: str, crash_at: int) -> tuple[float, int]:
    """A few steps of DDP that go on from the last snapshot. Rank 1 dies once, in step `crash_at`."""
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    snapshot = os.path.join(folder, "snapshot.pt")
    restarts, begin = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), 0
    if restarts and os.path.exists(snapshot):
        state = torch.load(snapshot)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        begin = state["step"] + 1
    for step in range(begin, 10):
        if step == crash_at and not restarts and dist.get_rank() == 1:
            os._exit(9)
        data = torch.rand(8, 4, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        loss = (model(data).squeeze() - data.sum(1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, snapshot)
        dist.barrier()
    dist.all_reduce(loss)
    return loss.item(), restarts


def test_restarts_go_on_from_the_last_snapshot(
    engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Session(2, engine=engine, restarts=1) as own:
        undisturbed, _ = own.run(train, str(tmp_path), -1)
        (tmp_path / "snapshot.pt").unlink()
        assert own.run(train, str(tmp_path), 5) == (undisturbed, 1)
        assert "exit code 9" in (err := capsys.readouterr().err) and "1 of 1 restarts" in err
        assert own.run(lambda: os.environ["TORCHELASTIC_RESTART_COUNT"]) == "0"
        with pytest.raises(RankDied, match="exit code 4"):
            own.run(lambda: os._exit(4))


def test_post_mortem(engine: Engine, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(number: int) -> None:
        on(1, lambda: number / (number - number))

    with Session(2, engine=engine, hold_on_error=True) as own:
        with pytest.raises(ZeroDivisionError):
            own.run(fails, 21)
        own.post_mortem(commands=["up", "up", "p number", "q"])
        out = capsys.readouterr().out
        assert "(rank 1) p number" in out and "21" in out
        assert own.run(sums) == 2.0


# Sessions of their own come first: the ones that follow take over what these have started on a cluster.


def own_group() -> tuple[float, float]:
    first = sums()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="env://")
    return first, sums()


def test_a_function_may_make_its_own_process_group(session: Session) -> None:
    assert session.run(own_group) == (2.0, 2.0)
    assert session.run(sums) == 2.0


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def test_ranks_are_seeded_alike(session: Session) -> None:
    random.seed(42)
    np.random.seed(42)
    torch.manual_seed(42)
    first = session.run_all(draw)
    second = session.run_all(draw)
    assert first[0] == first[1] and second[0] == second[1] and first[0] != second[0]


def test_a_call_runs_on_the_chosen_ranks(sessions: Sessions) -> None:
    own = sessions[3]
    assert own.call(dist.get_rank, ranks=[2, 0], everyone=True) == [0, 2]
    assert own.call(dist.get_rank, ranks=[1]) == [1]
    with pytest.raises(ValueError, match="boom"):
        own.call(boom, ranks=[2])
    assert own.run(sums) == 3.0
    for bad, error in ([3], ValueError), ([], ValueError), (["x"], TypeError), ([True], TypeError):
        with pytest.raises(error, match="rank"):
            own.call(sums, ranks=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rank must be 0 to 2, got 7"):
        own.logs(7)


# ---------------------------------------------------------------------------------------------------------------- data


def test_big_arguments_and_values_are_private_to_each_rank(session: Session) -> None:
    array, tensor = np.zeros(5 << 20), torch.zeros(1 << 20)

    def add(array: np.ndarray, tensor: torch.Tensor) -> tuple[np.ndarray, torch.Tensor, bool]:
        array += dist.get_rank() + 1
        tensor += array[0]
        return array, tensor, array.flags.writeable

    for _ in range(2):
        for rank, (own_array, own_tensor, writeable) in enumerate(session.run_all(add, array, tensor)):
            assert writeable and own_array.shape == array.shape and bool((own_array == rank + 1).all())
            assert bool((own_tensor == rank + 1).all())
    assert not array.any() and not tensor.any()


def test_changed_data_is_sent_again(session: Session) -> None:
    array = np.zeros(1 << 20)
    for value in range(3):
        array[-1] = value
        assert session.run_all(lambda: float(array[-1])) == [value, value]


def test_many_sizes_come_and_go(session: Session) -> None:
    for size in (0, 1, 1000, 1 << 16, (1 << 16) + 1, (16 << 20) + 3):
        data = np.random.default_rng(size).bytes(size)
        assert session.run_all(lambda text: text[::-1], data) == [data[::-1]] * 2


# -------------------------------------------------------------------------------------------------------------- output


def test_output_of_rank_0_live_and_logs(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    def talk() -> None:
        print(f"out of {dist.get_rank()}")
        print("warning", file=sys.stderr)
        os.write(1, b"raw\n")
        os.system("echo child >&2")

    session.run(talk)
    out, err = capsys.readouterr()
    assert out == "out of 0\nraw\n" and sorted(err.split()) == ["child", "warning"]
    assert "out of 1" in session.logs(1) and "child" in session.logs(1)
    session.call(talk, output="all")
    out, err = capsys.readouterr()
    assert "[rank 1] out of 1\n" in out and "[rank 0] out of 0\n" in out


def test_output_is_live(session: Session, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def lines() -> None:
        print("line 0", flush=True)
        while not (tmp_path / "seen").exists():
            time.sleep(0.01)
        print("line 1", flush=True)

    future = session.submit(lines)
    seen = ""

    def shown() -> bool:
        nonlocal seen
        seen += capsys.readouterr().out
        return "line 0" in seen

    assert poll(shown)
    (tmp_path / "seen").touch()
    future.result()


def test_much_output_is_whole(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    def chatter() -> None:
        for number in range(20_000):
            print(f"{number:06} and so on, and on, and on, and on, and on, and on, and on, and on, and on")

    session.run(chatter)
    assert [int(line[:6]) for line in capsys.readouterr().out.splitlines()] == list(range(20_000))


# ------------------------------------------------------------------------------------------------------------ failures


def held_by_ddp() -> None:
    import __main__

    __main__.model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    on(1, boom)


def in_a_subgroup() -> None:
    pair = dist.new_group([0, 1])
    on(1, boom, lambda: dist.all_reduce(torch.ones(1), group=pair))


def computes() -> None:
    while True:
        pass


@pytest.mark.parametrize(
    "fn",
    [
        lambda: on(1, boom),
        lambda: on(0, boom),
        lambda: on(1, boom, computes),
        lambda: on(1, boom, lambda: time.sleep(1000)),
        lambda: on(1, boom, lambda: None),
        boom,
        held_by_ddp,
        in_a_subgroup,
    ],
    ids=["rank 1", "rank 0", "others compute", "others sleep", "others are done", "all", "held", "subgroup"],
)
def test_an_exception_leaves_ranks_and_state(session: Session, fn: Callable[[], Any]) -> None:
    before = session.run_all(remember, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="boom") as caught:
            session.run(fn)  # gloo itself would give up after half an hour
        assert "# the culprit" in str(caught.value.__cause__) and "on rank" in str(caught.value.__cause__)
        assert session.run(sums) == 2.0
    assert [kept[:-1] for kept in session.run_all(remember, 2)] == before


def test_three_ranks_that_wait_for_one_another(sessions: Sessions) -> None:
    """Rank 2 waits for rank 1, which waits for rank 0: only rank 0's leaving lets them go."""

    def chain() -> None:
        rank = dist.get_rank()
        if rank == 0:
            boom()
        dist.recv(torch.zeros(1), src=rank - 1)

    own = sessions[3]
    before = own.run_all(remember, 1)
    with pytest.raises(ValueError, match="boom"):
        own.run(chain)
    assert own.run(sums) == 3.0 and [kept[:-1] for kept in own.run_all(remember, 2)] == before


def test_a_stop_frees_ranks_that_wait_for_each_other(session: Session) -> None:
    """The ranks are in C++ code, where no signal is handled, and no peer leaves."""

    def wait_for_each_other() -> None:
        dist.recv(torch.ones(1), src=1 - dist.get_rank())

    before = session.run_all(remember, 1)
    waiting = session.submit(wait_for_each_other)
    assert poll(lambda: session.stacks().count("recv at") == 2), session.stacks()
    waiting.cancel()
    assert poll(waiting.done)
    assert session.run(sums) == 2.0 and [kept[:-1] for kept in session.run_all(remember, 2)] == before


def test_calls_that_cannot_be_sent_leave_the_session_usable(session: Session) -> None:
    before = session.run_all(remember, 1)
    with pytest.raises(CaptureError):
        session.run(print, threading.Lock(), (i for i in ()))
    with pytest.raises(CaptureError, match="value"):
        session.run(lambda: (i for i in ()))
    assert [kept[:-1] for kept in session.run_all(remember, 2)] == before


def test_a_dead_rank_is_reported_until_restart(session: Session) -> None:
    with pytest.raises(RankDied, match="exit code 3") as caught:
        session.run(lambda: on(1, lambda: (print("last words", flush=True), os._exit(3))))
    assert (caught.value.rank, caught.value.status) == (1, 3) and "last words" in str(caught.value)
    assert "last words" in session.logs(1)
    for _ in range(2):
        with pytest.raises(NbdistError, match=r"rank 1 \(pid \d+\) left with exit code 3.*restart\(\)"):
            session.run(sums)
    assert "exit code 3" in repr(session) and "restart()" in str(session.status())
    session.restart()
    assert session.run(sums) == 2.0 and "exit code" not in repr(session)


def test_a_rank_that_dies_between_calls(session: Session) -> None:
    pids = session.run_all(os.getpid)
    os.kill(pids[1], signal.SIGKILL)
    assert poll(lambda: not psutil.pid_exists(pids[1]))
    with pytest.raises(RankDied, match=r"rank 1 .* SIGKILL"):
        session.run(sums)
    with pytest.raises(NbdistError, match=r"rank 1 .* SIGKILL.*restart\(\)"):
        session.run(sums)
    assert poll(lambda: not psutil.pid_exists(pids[0]))
    session.restart()
    assert session.run(sums) == 2.0


def test_a_timeout_says_where_ranks_wait_and_leaves_them(session: Session) -> None:
    places = "rank 0 waits in all_reduce", "rank 1 is in <lambda>"
    before = session.run_all(remember, 1)
    there = CallClock(lambda: all(place in session.stacks() for place in places))
    with there, pytest.raises(RankTimeout, match=".*".join(places)):
        session.run(lambda: on(1, lambda: time.sleep(1000)))
    assert session.run(sums) == 2.0 and [kept[:-1] for kept in session.run_all(remember, 2)] == before


def test_ranks_that_do_not_end_a_call_are_replaced(session: Session, capsys: pytest.CaptureFixture[str]) -> None:
    def deaf() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        dist.barrier()
        time.sleep(1000)

    pids = session.run_all(os.getpid)
    with pytest.raises(ValueError, match="boom"):
        session.run(lambda: on(1, lambda: (dist.barrier(), boom()), deaf))
    assert poll(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert session.run(sums) == 2.0
    assert "fresh ranks: rank 0 did not leave the last call" in capsys.readouterr().err
    session.run(sums)
    assert "fresh ranks" not in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ in the background, and seen


def test_submit_gives_a_future_and_cancel_lets_ranks_clean_up(session: Session, tmp_path: Path) -> None:
    def waits() -> None:
        mark = tmp_path / f"begun-{dist.get_rank()}"
        try:
            mark.touch()
            time.sleep(1000)
        finally:
            mark.rename(tmp_path / f"cleaned-{dist.get_rank()}")

    before = session.run_all(remember, 1)
    assert session.submit(lambda x: sums() + x, 3).result() == 5.0
    future, later, never = session.submit(waits), session.submit(sums), session.submit(boom)
    assert poll(lambda: len(list(tmp_path.glob("begun-*"))) == 2)
    assert future.running() and not later.running() and never.cancel() and never.cancelled()
    assert future.cancel()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result()
    assert future.cancelled() and not future.cancel()
    assert later.result() == 2.0 and not later.cancel() and len(list(tmp_path.glob("cleaned-*"))) == 2
    assert [kept[:-1] for kept in session.run_all(remember, 2)] == before


def test_status_and_stacks(session: Session) -> None:
    pids = session.run_all(os.getpid)
    session.run(lambda: print("loss 0.25"))
    for rank, row in enumerate(str(session.status()).splitlines()[2:]):
        assert row.split()[:4] == [str(rank), str(pids[rank]), "cpu", "idle"] and "MB" in row
        assert row.endswith("loss 0.25")
    future = session.submit(lambda: on(1, lambda: time.sleep(1000)))
    assert poll(lambda: "rank 0 waits in all_reduce" in session.stacks()), session.stacks()
    future.cancel()
    assert poll(future.done)


def test_a_widget_gets_its_events_while_the_rank_is_busy(session: Session) -> None:
    def waits() -> list[Any]:
        from nbdist.rank import widgets

        heard: list[Any] = []
        handle = widgets.handle_comm_message
        widgets.handle_comm_message = lambda content, buffers: not heard.append((content, list(buffers)))
        while not heard:
            sum(range(1000))
        widgets.handle_comm_message = handle
        return heard[0]

    session.run(int)
    future = session.submit(waits, ranks=[1])
    group = executor_of(session).group
    assert group is not None

    def heard() -> bool:
        assert group.ranks.deliver_widget_event(
            1, {"comm_id": "slider", "data": {"method": "update"}}, [bytes(100_000)]
        )
        time.sleep(0.1)
        return future.done()

    assert poll(heard)
    assert future.result() == ({"comm_id": "slider", "data": {"method": "update"}}, [bytes(100_000)])


# -------------------------------------------------------------------------------------------------------- in a notebook


def test_in_ddp_and_magics_follow_the_engine_in_use(engine: Engine, kernel: Any) -> None:
    kernel.ok(
        f"import os, nbdist, torch, torch.distributed as dist\nfrom nbdist import *\nuse({engine!r})\n%load_ext nbdist"
    )
    kernel.ok("def fn():\n    t = torch.ones(1); dist.all_reduce(t); return t.item()\nassert in_ddp(2, fn) == 2.0")
    kernel.ok("%ddp start 2")
    cell = "%%ddp --output all\nx = torch.full((2,), dist.get_rank() + 1.0)\ndist.all_reduce(x)\nx"
    kernel.ok("%%ddp\nimport torch, torch.distributed as dist")
    assert kernel.ok(cell).text.count("tensor([3., 3.])") == 2
    shown = kernel.ok("%%ddp\nfrom IPython.display import HTML\nHTML(f'<b>{dist.get_rank()}</b>')")
    assert [part["data"]["text/html"] for part in shown.outputs if "data" in part] == ["<b>0</b>"]
    assert kernel.ok("%ddp pull x\nprint(x)").text == "tensor([3., 3.])\n"
    kernel.ok("%ddp stop")
