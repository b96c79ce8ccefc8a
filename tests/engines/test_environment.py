"""Environment variables that count before a rank can set them: read by imports, or when sockets are opened."""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import Kernel

from nbdist import NbdistError, RayOptions, Session, in_ddp, parallel_map
from nbdist.engines import forkserver
from nbdist.system import search_path


def seen() -> tuple[int, dict[str, Any], int]:
    """The rank's server, what TORCH_LOGS has set, and whether OpenMP binds its threads."""
    from threadpoolctl import threadpool_info

    levels = dict(torch._logging._internal.log_state.log_qname_to_level)
    openmp = next(pool["filepath"] for pool in threadpool_info() if pool["internal_api"] == "openmp")
    return os.getppid(), levels, ctypes.CDLL(openmp).omp_get_proc_bind()


def test_variables_that_are_read_at_import_hold() -> None:
    with Session(2) as plain, Session(2, env={"ANYTHING": "1", "OMP_NUM_THREADS": "1"}) as alike:
        server, levels, bound = plain.run(seen)
        assert not levels and not bound and alike.run(seen)[0] == server
        with Session(2, env={"TORCH_LOGS": "+dynamo", "OMP_PROC_BIND": "true"}) as other:
            own, levels, bound = other.run(seen)
            assert own != server and "torch._dynamo" in levels and bound == 1
            assert other.run_all(seen)[1][0] == own, "one server for all of them"
        with Session(1, env={"OMP_PROC_BIND": "true", "TORCH_LOGS": "+dynamo"}) as same:
            assert same.run(seen)[0] == own
        assert plain.run(seen)[0] == server and in_ddp(1, seen)[0] == server


@pytest.mark.long("interpreters of their own")
def test_variables_that_the_notebook_has_set_since_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    first = in_ddp(1, seen)
    monkeypatch.setenv("TORCH_LOGS", "+aot")
    own, levels, _ = in_ddp(1, seen)
    assert own != first[0] and levels
    monkeypatch.delenv("TORCH_LOGS")
    assert in_ddp(1, seen) == first


def test_variables_of_libraries_and_ranks_need_no_other_server() -> None:
    held = ["OMP_NUM_THREADS", "MKL_NUM_THREADS", "KMP_INIT_AT_FORK", "TORCH_NCCL_BLOCKING_WAIT", "PATH"]
    held.append("TORCHINDUCTOR_COMPILE_THREADS")  # set in each rank, too: replay_step finds it recorded
    assert not forkserver.read_at_import(dict.fromkeys(held, "1"))
    assert len(forkserver.read_at_import({"PYTORCH_CUDA_ALLOC_CONF": "a", "TORCHINDUCTOR_FREEZING": "1"})) == 2


def listening() -> set[str]:
    """The addresses at which this process listens."""
    process: Any = psutil.Process()
    found = (process.net_connections if hasattr(process, "net_connections") else process.connections)("tcp")
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def test_ranks_of_one_machine_listen_to_the_network_only_if_asked(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    addresses = {
        name: address.address
        for name, found in psutil.net_if_addrs().items()
        for address in found
        if address.family == socket.AF_INET and not address.address.startswith("127.")
    }
    if not addresses:
        pytest.skip("no network")
    interface, address = next(iter(addresses.items()))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)
    assert in_ddp(0, listening) <= {"127.0.0.1"} | listening()
    with Session(2) as own, Session(2) as again:
        assert own.run_all(listening) == again.run_all(listening) == [{"127.0.0.1"}] * 2
    told = capfd.readouterr().err
    assert told.count(f"GLOO_SOCKET_IFNAME={interface} is not used") == 1 and "Session(env={'GLOO_SOCKET" in told
    with Session(2, env={"GLOO_SOCKET_IFNAME": interface}) as asked:
        # without Linux the store is at a port of this machine's, whatever the ranks use
        assert [found - {"127.0.0.1"} for found in asked.run_all(listening)] == [{address}] * 2
    assert "not used" not in capfd.readouterr().err


@pytest.mark.parametrize("version", ["2.49.0", "2.51.2"])
def test_a_ray_without_tokens_is_not_started(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="what is tested is an installed Ray")
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    with Session(1, engine=RayOptions()) as session, pytest.raises(NbdistError, match=f"Ray {version} has no tokens"):
        session.run(os.getpid)


OWN_VARIABLE = """
import os
seen = os.environ.get("READ_AT_IMPORT"), os.environ["LOCAL_RANK"]
"""


@pytest.mark.long("interpreters of their own")
def test_fresh_interpreters_have_all_variables_before_any_import(kernel: Kernel) -> None:
    """A variable that a library reads on import is too late for the fork server, unless this is known."""
    (kernel.cwd / "reads_variables.py").write_text(OWN_VARIABLE)
    kernel.ok("""
import os, sys
import torch, torch.distributed as dist
from nbdist import RankDied, Session, in_ddp
def look():
    import reads_variables
    total = torch.ones(1)
    dist.all_reduce(total)
    return total.item(), *reads_variables.seen, sys.flags.hash_randomization, hash("nbdist"), os.getppid()
fresh = Session(2, start="spawn", env={"READ_AT_IMPORT": "yes", "PYTHONHASHSEED": "7"})
first, second = fresh.run_all(look)
assert first[:4] == (2.0, "yes", "0", 1) and second[:4] == (2.0, "yes", "1", 1), (first, second)
assert first[4] == second[4], "the seed of hashes is read when Python starts"
assert first[5] == in_ddp(1, os.getppid), "they are the server's children, which ends what they leave"
""")
    assert kernel.ok("fresh.run(display, 3)").text == "3\n", "they look like the notebook"
    died = kernel.run("fresh.run(os._exit, 3)")
    assert died.error == "RankDied" and "exit code 3" in died.message
    kernel.ok("fresh.restart()\nassert fresh.run(look)[0] == 2.0\nfresh.close()")


def test_ways_to_start_that_there_are_not() -> None:
    with pytest.raises(ValueError, match="start must be one of 'forkserver', 'spawn', got 'fork'"):
        Session(1, start="fork")
    with pytest.raises(ValueError, match='start="spawn" is for ranks of this machine'):
        Session(1, engine=RayOptions(), start="spawn")


# --- folders ---


def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    with Session(2) as session:
        assert session.run(os.getcwd) == str(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        assert session.run(sum, [1, 2]) == 3
        with pytest.warns(UserWarning, match=f"folder no longer exists, so ranks work in {tempfile.gettempdir()}"):
            assert in_ddp(2, os.getcwd) == tempfile.gettempdir()
        session.restart()
        assert session.run(sum, [1, 2]) == 3
    assert parallel_map(abs, [-1, -2], workers=2, progress=False) == [1, 2]
    forkserver.stop()
    assert in_ddp(2, sum, [1, 2]) == 3, "a server that starts there works, too"


def test_a_working_folder_that_cannot_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A private folder of another user, after `sudo -u`."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(search_path, "_warned", False)
    with pytest.warns(UserWarning, match=f"cannot be entered by this user, so ranks work in {tempfile.gettempdir()}"):
        assert search_path.working_folder() == tempfile.gettempdir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert search_path.working_folder() == tempfile.gettempdir(), "the warning is shown once"


def test_a_relative_folder_of_modules_is_where_it_was_first_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "sub").mkdir()
    (tmp_path / "src" / "relative_one.py").write_text("import relative_two\nvalue = 3 + relative_two.value\n")
    (tmp_path / "src" / "relative_two.py").write_text("value = 4\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("src")
    one = importlib.import_module("relative_one")

    def late() -> tuple[int, int]:
        import relative_two

        return one.value, relative_two.value

    os.chdir("sub")
    try:
        assert in_ddp(2, late) == (7, 4)
    finally:
        for name in ("relative_one", "relative_two"):
            del sys.modules[name]
