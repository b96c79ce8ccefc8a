"""in_ddp and Session: what ranks find when they start, what comes back, and what is left when a call has failed."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import LINUX, open_fds, poll, shared_memory_names

from nbdist import CaptureError, NotFinite, RankDied, Session, devices, in_ddp, warm
from nbdist.engines import forkserver
from nbdist.system.connections import sockets
from nbdist.system.cores import usable_cores


def world(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    return dist.get_rank(), dist.get_world_size(), dist.get_backend(), args, kwargs


def all_reduce_of_ones() -> float:
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


# -------------------------------------------------------------------------------------------- values and arguments


def test_the_value_of_rank_0_comes_back() -> None:
    assert in_ddp(2, all_reduce_of_ones) == 2.0
    assert in_ddp(3, world, 1, [2], fn=3, ngpus=4) == (0, 3, "gloo", (1, [2]), {"fn": 3, "ngpus": 4})
    assert in_ddp(1, print) is None


def test_a_session_returns_what_each_rank_returned_in_order(session: Session) -> None:
    assert [value[0] for value in session.run_all(world)] == [0, 1]
    assert session.run(world, 5)[::3] == (0, (5,))
    assert session.run_all(len, "abc") == [3, 3]


@pytest.mark.parametrize("ngpus", [-1, True, False, 2.0, "2", None])
def test_numbers_of_ranks_that_make_no_sense(ngpus: Any) -> None:
    error = ValueError if ngpus == -1 else TypeError
    with pytest.raises(error, match="ngpus"):
        in_ddp(ngpus, all_reduce_of_ones)
    with pytest.raises(error, match="nranks"):
        Session(ngpus)


def test_a_session_of_no_rank() -> None:
    with pytest.raises(ValueError, match="nranks must be at least 1, got 0"):
        Session(0)


@pytest.mark.parametrize("ngpus", [0, 2])
def test_arguments_that_are_not_functions_are_refused(ngpus: int) -> None:
    with pytest.raises(TypeError, match="fn must be a function, got 'all_reduce'"):
        in_ddp(ngpus, "all_reduce")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="imports must be"):
        in_ddp(ngpus, all_reduce_of_ones, imports="x = 1")
    with pytest.raises(NameError, match=r"'torhc'.*'torch'"):
        in_ddp(ngpus, all_reduce_of_ones, need="torhc")


@pytest.mark.parametrize(
    "options",
    [{"threads": 0}, {"timeout": 0}, {"output": "loud"}, {"devices": "tpu"}, {"devices": ["cpu"]}, {"engine": "slurm"}],
)
def test_options_that_make_no_sense(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ValueError, match=name):
        Session(2, **options)


def test_more_ranks_than_gpus_names_the_way_to_cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "visible_gpus", lambda: 1)
    with pytest.raises(ValueError, match=r'2 ranks .* 1 GPU is visible.*Session\(2, devices="cpu"\)'):
        in_ddp(2, all_reduce_of_ones)
    with Session(2, devices="cpu") as cpu:
        assert cpu.run(all_reduce_of_ones) == 2.0


@pytest.mark.started
@pytest.mark.skipif(not torch.__version__.endswith("+cpu"), reason="a torch with CUDA has to be asked for GPUs")
def test_a_notebook_that_has_not_imported_torch_need_not_do_so() -> None:
    code = "import sys; from nbdist import in_ddp; print(in_ddp(1, len, 'ab'), 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["2", "False"]


# ------------------------------------------------------------------------------------------------------- ngpus=0


def in_this_process() -> tuple[int, str, float]:
    return os.getpid(), os.environ["WORLD_SIZE"], all_reduce_of_ones()


def fail_here() -> None:
    dist.barrier()
    os.environ["LEFT_BY_A_FAILURE"] = "1"
    raise LookupError("here")


def test_no_ranks_means_a_group_of_one_that_is_gone_afterwards() -> None:
    in_ddp(0, all_reduce_of_ones)  # torch starts threads that stay
    environ, fds = dict(os.environ), open_fds()
    assert in_ddp(0, in_this_process) == (os.getpid(), "1", 1.0)
    with pytest.raises(LookupError, match="here") as caught:
        in_ddp(0, fail_here)
    assert caught.traceback[-1].name == "fail_here" and caught.value.__cause__ is None
    assert not dist.is_initialized() and dict(os.environ) == environ
    assert poll(lambda: open_fds() <= fds), "descriptors were left open"


def test_no_ranks_keeps_a_group_that_is_there(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        assert in_ddp(0, all_reduce_of_ones) == 1.0
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- what a rank finds

TORCHRUN = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT".split()


def surroundings() -> tuple[dict[str, str], list[str], list[str], str, str]:
    return dict(os.environ), sys.path, sys.argv, os.getcwd(), __name__


def test_environment_path_folder_and_arguments_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SET_JUST_NOW", "1")
    monkeypatch.syspath_prepend(tmp_path / "more")
    with Session(2, env={"ONLY_IN_RANKS": "2", "HOME": "/elsewhere"}) as own:
        for rank, (env, path, argv, cwd, name) in enumerate(own.run_all(surroundings)):
            assert [env[name] for name in TORCHRUN[:-1]] == [str(rank), str(rank), "2", "2", "127.0.0.1"]
            assert (env["SET_JUST_NOW"], env["ONLY_IN_RANKS"], env["HOME"]) == ("1", "2", "/elsewhere")
            assert 0 < int(env["MASTER_PORT"]) < 65536 and set(os.environ) <= set(env)
            assert (path, argv, cwd, name) == (sys.path, sys.argv, str(tmp_path), __name__)
    assert "ONLY_IN_RANKS" not in os.environ


def threads() -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_threads_are_cores_over_ranks_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = max(1, len(usable_cores()) // 2)
    assert in_ddp(2, threads) == (share, str(share))
    with Session(1, threads=3) as own:
        assert own.run(threads) == (3, "3")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert in_ddp(2, threads) == (5, "5")
    with Session(1, threads=3) as own:
        assert own.run(threads) == (3, "3")


def listening() -> list[str]:
    return [c.laddr.ip for c in sockets(psutil.Process(), "inet") if c.status == psutil.CONN_LISTEN]


def test_everything_listens_on_loopback_only(session: Session) -> None:
    session.run(all_reduce_of_ones)
    found = session.run_all(listening)
    assert all(found), "gloo listens"
    assert {address for rank in found for address in rank} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def at_the_store() -> int:
    """Sockets of this rank at the port where a store over TCP would be."""
    dist.barrier()
    ports = [(c.laddr, c.raddr) for c in sockets(psutil.Process(), "inet")]
    return sum(int(os.environ["MASTER_PORT"]) in [place.port for place in pair if place] for pair in ports)


@pytest.mark.skipif(not LINUX, reason="a file can be opened by its descriptor on Linux only")
def test_ranks_meet_without_tcp_and_so_without_looking_up_names(session: Session) -> None:
    assert session.run_all(at_the_store) == [0, 0]


def test_a_busy_default_port_does_not_matter() -> None:
    with socket.socket() as busy:
        busy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            busy.bind(("", 29500))
            busy.listen()
        except OSError:
            pass  # busy already: as good
        assert in_ddp(2, all_reduce_of_ones) == 2.0


def test_two_sessions_at_a_time(session: Session) -> None:
    with Session(3) as other:
        assert (other.run(all_reduce_of_ones), session.run(all_reduce_of_ones)) == (3.0, 2.0)


def own_group() -> tuple[float, float, list[int]]:
    first = all_reduce_of_ones()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="env://")
    second = all_reduce_of_ones()
    pair = dist.new_group([0, 1])
    gathered = [torch.zeros((), dtype=torch.int64) for _ in range(2)]
    dist.all_gather(gathered, torch.tensor(dist.get_rank()), group=pair)
    return first, second, [int(t) for t in gathered]


def test_a_function_may_make_its_own_process_group() -> None:
    assert in_ddp(2, own_group) == (2.0, 2.0, [0, 1])


# --------------------------------------------------------------------------------------------------------- seeds


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), torch.rand(()).item()


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _script() -> int:
    """Work as scripts for torchrun do: what they have made is deleted after the process group."""
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    for _ in range(5):
        model(torch.ones(64, 4)).sum().backward()
    dist.destroy_process_group()
    return 1


@pytest.mark.long("a script of its own")
def test_a_script_that_destroys_its_process_group_before_its_model() -> None:
    """gloo's threads and the model waited for each other at the end of every other call."""
    for _ in range(4):
        assert in_ddp.options(imports="import torch._inductor.cudagraph_trees")(2, _script) == 1
    with Session(2) as session:
        assert [session.run(_script) for _ in range(4)] == [1] * 4


def test_ranks_are_seeded_alike_from_the_random_state_of_the_caller(session: Session) -> None:
    seed_all(42)
    first, second = session.run_all(draw), session.run_all(draw)
    assert first[0] == first[1] and second[0] == second[1]
    assert all(a != b for a, b in zip(first[0], second[0], strict=True))
    assert len(set(first[0])) == 3
    seed_all(42)
    assert session.run_all(draw) == first
    seed_all(42)
    assert in_ddp(3, draw) == first[0]
    seed_all(43)
    assert all(a != b for a, b in zip(session.run(draw), first[0], strict=True))


def test_each_library_is_seeded_from_its_own_state(session: Session) -> None:
    seed_all(42)
    first = session.run(draw)
    seed_all(42)
    torch.manual_seed(1)
    again = session.run(draw)
    assert again[:2] == first[:2] and again[2] != first[2]


def test_a_session_with_a_seed_is_seeded_once() -> None:
    drawn = []
    for _ in range(2):
        with Session(2, seed=7) as own:
            drawn += [own.run_all(draw), own.run_all(draw)]
    assert drawn[:2] == drawn[2:] and drawn[0] != drawn[1] and drawn[0][0] == drawn[0][1]


def test_big_arguments_and_values_are_private_to_each_rank(session: Session) -> None:
    array, tensor = np.zeros(1 << 20), torch.zeros(1 << 20)

    def add(array: np.ndarray, tensor: torch.Tensor) -> tuple[np.ndarray, torch.Tensor, int]:
        array += dist.get_rank() + 1
        tensor += array[0]
        return array, tensor, len(array)

    got = session.run_all(add, array, tensor)
    assert [(a[-1], t[-1].item()) for a, t, _ in got] == [(1, 1), (2, 2)]
    assert not array.any() and not tensor.any()
    got[0][0][:] = 9
    assert got[1][0][0] == 2


def test_output_is_kept_for_each_rank(session: Session) -> None:
    session.run(lambda: print("this is rank", dist.get_rank()))
    assert "this is rank 0" in session.logs(0) and poll(lambda: "this is rank 1" in session.logs(1))


# ------------------------------------------------------------------------------------------------------- failures


class Bad(LookupError):
    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{code}: {why}")
        self.code, self.why = code, why


def fail_on_rank_1(how: Any) -> float:
    if dist.get_rank() == 1:
        how()
    return all_reduce_of_ones()  # rank 0 waits here


def raise_bad() -> None:
    raise Bad(7, why="because")  # the culprit


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set no end to the time in which the other ranks leave after the first failure: a call must not use it up."""
    monkeypatch.setattr("nbdist.kernel.calls.ending.GRACE_AFTER_FAILURE", 10_000.0)


def test_a_failure_while_another_rank_waits_is_raised_and_the_next_call_works(patient: None) -> None:
    with Session(2) as own:
        assert own.run(all_reduce_of_ones) == 2.0
        with pytest.raises(Bad) as caught:
            own.run(fail_on_rank_1, raise_bad)
        assert (caught.value.code, caught.value.why) == (7, "because")
        cause = str(caught.value.__cause__)
        assert "rank 1" in cause and "# the culprit" in cause and "raise_bad" in cause and "fail_on_rank_1" in cause
        assert own.run(all_reduce_of_ones) == 2.0


def test_an_exception_of_the_notebook_and_its_source_line(kernel: Any) -> None:
    kernel.ok("""
from nbdist import in_ddp
class Bad(Exception):
    def __init__(self, code, *, why):
        super().__init__(code)
        self.why = why
def fn():
    raise Bad(3, why='so')  # in a cell
""")
    kernel.ok("""
try:
    in_ddp(2, fn)
except Bad as exc:
    assert exc.args == (3,) and exc.why == 'so' and '# in a cell' in str(exc.__cause__)
else:
    raise AssertionError('not raised')
assert in_ddp(2, lambda: 1) == 1
""")


@pytest.mark.parametrize("how", [lambda: sys.exit(3), exit], ids=["sys.exit", "exit"])
def test_an_exit(how: Any) -> None:
    with pytest.raises(SystemExit):
        in_ddp(2, fail_on_rank_1, how)


def test_exceptions_that_cannot_be_pickled_become_a_base_type() -> None:
    def fail() -> None:
        error = OSError(5, "text of it")
        error.stuck = (i for i in ())  # type: ignore[attr-defined]
        raise error

    with pytest.raises(OSError, match="text of it"):
        in_ddp(1, fail)


def kill_itself() -> None:
    print("last words")
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_rank_that_is_killed(patient: None) -> None:
    with Session(2) as own:
        (_, pid) = own.run_all(os.getpid)
        with pytest.raises(RankDied, match=r"rank 1.*SIGKILL") as caught:
            own.run(fail_on_rank_1, kill_itself)
        died = caught.value
        assert (died.rank, died.pid, died.status) == (1, pid, -signal.SIGKILL)
        assert "last words" in died.output and "last words" in str(died)


def test_a_rank_that_leaves() -> None:
    with pytest.raises(RankDied, match="exit code 4") as caught:
        in_ddp(2, fail_on_rank_1, lambda: os._exit(4))
    assert (caught.value.rank, caught.value.status) == (1, 4)


def test_a_value_that_cannot_come_back_names_the_path_to_the_culprit() -> None:
    def fn() -> dict[str, Any]:
        return {"history": [1, (i for i in ())]}

    with pytest.raises(CaptureError, match=r"the value that the function returned\['history'\]\[1\] cannot"):
        in_ddp(2, fn)


# -------------------------------------------------------------------------------------- call after call after call


def test_many_calls_leave_nothing_behind() -> None:
    def state() -> tuple[int, int, int, set[str]]:
        children = psutil.Process().children(recursive=True)
        return open_fds(), psutil.Process().num_threads(), len(children), shared_memory_names()

    big = np.zeros(1 << 17)
    for number in range(6):
        assert len(in_ddp(2, lambda x: x, big)) == len(big)
        if number == 1:
            second = state()
    assert poll(lambda: state()[:3] <= second[:3] and state()[3] <= second[3]), (second, state())


def inside() -> tuple[float, bool, float]:
    computed = time.process_time()  # since the fork
    return computed, "fastai.collab" in sys.modules, all_reduce_of_ones()


@pytest.mark.slow
def test_a_second_call_need_not_import_anything_again() -> None:
    block = "from fastai.collab import *"
    in_ddp(2, inside, imports=block)
    computed, imported, total = min(in_ddp(2, inside, imports=block) for _ in range(2))
    assert imported and total == 2.0
    assert computed < 1.5, "it takes a tenth of a second, and would take several"


def test_warm_returns_at_once_and_takes_no_names_for_modules() -> None:
    assert in_ddp(1, int) == 0
    server = forkserver.server()
    server.process.send_signal(signal.SIGSTOP)
    try:
        warm("import colorsys")  # for which the server cannot do anything now
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert in_ddp(1, lambda: "colorsys" in sys.modules)
    with pytest.raises(ValueError, match="imports must be"):
        warm("torch")


def test_modules_of_the_user_are_as_they_are_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for version in ("first", "second, and longer"):
        (package / "models.py").write_text(f"def version():\n    return {version!r}\n")
        for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
            del sys.modules[name]
        import mine.models  # type: ignore[import-not-found]

        assert in_ddp(2, mine.models.version) == version
        assert in_ddp(2, lambda: version_of_mine(), imports="from mine.models import version as v") == version


def version_of_mine() -> str:
    import __main__

    return __main__.v()  # type: ignore[no-any-return]


def test_threads_and_openmp_in_this_process_do_no_harm() -> None:
    stop = threading.Event()
    busy = [threading.Thread(target=stop.wait) for _ in range(3)]
    for thread in busy:
        thread.start()
    try:
        torch.set_num_threads(2)
        matrix = torch.rand(600, 600)
        torch.mm(matrix, matrix)  # torch's threads are at work from here on
        assert in_ddp(2, lambda: torch.mm(torch.ones(600, 600), torch.ones(600, 600))[0, 0].item()) == 600.0
    finally:
        stop.set()
        for thread in busy:
            thread.join()


def test_calls_from_another_thread() -> None:
    values: list[float] = []
    caller = threading.Thread(target=lambda: values.append(in_ddp(2, all_reduce_of_ones)))
    caller.start()
    assert in_ddp(2, all_reduce_of_ones) == 2.0
    caller.join()
    assert values == [2.0]


def _logarithm() -> None:
    weight = torch.zeros(2, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        weight.log().sum().backward()
        optimizer.step()


@pytest.mark.long("a fork server of a rank")
def test_a_rank_may_have_ranks_of_its_own() -> None:
    assert in_ddp(1, lambda: in_ddp(2, lambda: dist.get_world_size())) == 2


def test_checks_hold_in_the_kernel_too() -> None:
    """`check=` was ignored without ranks."""
    in_ddp(0, _logarithm)
    with pytest.raises(NotFinite, match="the loss of step 1 is -inf"):
        in_ddp.options(check="nan")(0, _logarithm)
    in_ddp.options(check="ranks")(0, _logarithm)
    in_ddp(0, _logarithm)
