"""The fork server: it comes back when it is killed, stays fit to be forked, and takes all with it when it goes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import pkgutil
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from cells import cells
from conftest import living, open_fds, poll
from torch.nn.parallel import DistributedDataParallel

from nbdist import RankDied, Session, in_ddp, recsys
from nbdist.engines import forkserver
from nbdist.server import cuda_driver

pytestmark = pytest.mark.slow

#: Each starts an interpreter and a fork server.
SCRIPTS = pytest.mark.long("more ways for a script to end")
CELLS = cells("server/cells/server.py")
ROOT = str(Path(__file__).parent.parent.parent)


@pytest.fixture(autouse=True, scope="module")
def not_that_of_other_tests() -> None:
    """Stop a server that may have been forked with modules of its own."""
    forkserver.stop()


def all_reduce_of_ones() -> float:
    total = torch.ones(())
    dist.all_reduce(total)
    return total.item()


def server() -> psutil.Process:
    return psutil.Process(forkserver.server().process.pid)


def gone(pid: int) -> bool:
    try:
        return not living([psutil.Process(pid)])
    except psutil.NoSuchProcess:
        return True


# ----------------------------------------------------------------------------------------------- the server itself


def test_a_server_that_was_killed_is_replaced() -> None:
    with Session(2) as session:
        pids = session.run_all(os.getpid)
        killed = server()
        killed.kill()
        assert poll(lambda: all(gone(pid) for pid in (killed.pid, *pids))), "ranks do not outlive their server"
        with pytest.raises(RankDied, match="was the fork server killed"):
            session.run(all_reduce_of_ones)
        session.restart()
        assert session.run(all_reduce_of_ones) == 2.0
    assert in_ddp(2, all_reduce_of_ones) == 2.0
    assert server().pid != killed.pid


@pytest.mark.long("modules that notebooks import")
@pytest.mark.started
def test_modules_of_data_parallel_training_are_imported_before_the_fork() -> None:
    """`DistributedDataParallel` and accelerate import hundreds of modules of torch when they are used."""
    forkserver.stop()

    def imported_at_use() -> list[str]:
        before = set(sys.modules)
        DistributedDataParallel(torch.nn.Linear(1, 1))
        Accelerator(cpu=True).prepare(torch.nn.Linear(1, 1))
        return [name for name in set(sys.modules) - before if name.startswith(("torch.", "sympy."))]

    assert in_ddp(2, imported_at_use, imports="import accelerate") == []


@pytest.mark.long("modules that notebooks import")
@pytest.mark.started
def test_modules_of_optimizers_are_imported_before_the_fork(tmp_path: Path) -> None:
    """In a process of its own: the server of the tests may have imported it for others."""
    script = tmp_path / "script.py"
    script.write_text(CELLS["an optimizer"])
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_server_killed_again_and_again_leaves_no_descriptor() -> None:
    fds = []
    for _ in range(3):
        assert in_ddp(1, all_reduce_of_ones) == 1.0
        fds.append(open_fds())
        killed = server()
        killed.kill()
        assert poll(lambda: gone(killed.pid))  # noqa: B023
    assert fds[2] <= fds[1]


def huge_pages_can_be_had() -> bool:
    return sys.platform == "linux" and tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 1)


@pytest.mark.long("the server's memory")
@pytest.mark.started
@pytest.mark.skipif(not huge_pages_can_be_had(), reason="MADV_COLLAPSE came with Linux 6.1")
def test_an_idle_server_gathers_its_memory_in_huge_pages() -> None:
    forkserver.stop()
    assert in_ddp(1, all_reduce_of_ones) == 1.0

    def gathered() -> bool:
        lines = Path(f"/proc/{server().pid}/smaps_rollup").read_text().splitlines()[1:]
        kilobytes = {name: int(size) for name, size, _ in (line.split() for line in lines)}
        return kilobytes["AnonHugePages:"] > kilobytes["Anonymous:"] / 4

    assert poll(gathered)


def full_collections() -> int:
    before = gc.get_stats()[2]["collections"]
    for _ in range(200):  # enough for one, were all objects new to Python
        _ = [[] for _ in range(1000)]
    return int(gc.get_stats()[2]["collections"]) - before


@pytest.mark.long("the server's memory")
@pytest.mark.started
def test_ranks_collect_garbage_as_rarely_as_a_fresh_interpreter() -> None:
    forkserver.stop()
    assert in_ddp(1, full_collections) == 0


def test_the_server_has_one_thread_and_no_user_modules() -> None:
    assert in_ddp(2, all_reduce_of_ones) == 2.0
    assert server().num_threads() == 1
    before = server().pid
    os.kill(before, signal.SIGINT)
    assert in_ddp(2, all_reduce_of_ones) == 2.0 and server().pid == before


def threads_and_modules(module: str) -> tuple[int, bool, int]:
    return psutil.Process().num_threads(), module in sys.modules, os.getpid()


@pytest.mark.long("modules that notebooks import")
def test_modules_that_start_threads_are_left_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noisy_module.py").write_text(CELLS["a module that starts a thread"])
    (tmp_path / "quiet_module.py").write_text("")
    (tmp_path / "broken_module.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    forkserver.stop()  # a new one writes where capfd reads
    with Session(2) as session:
        before = session.run_all(threads_and_modules, "noisy_module")
        pid = server().pid
        forkserver.server().ask("preload", ["broken_module", "noisy_module", "quiet_module"], sys.path)
        # The session goes on, with the same ranks; new ranks come from a server that has the quiet module only.
        assert [rank[2] for rank in session.run_all(threads_and_modules, "")] == [rank[2] for rank in before]
        noisy, quiet = (in_ddp(1, threads_and_modules, name)[1] for name in ("noisy_module", "quiet_module"))
        assert quiet and not noisy and server().pid == pid and server().num_threads() == 1
        assert in_ddp(1, threads_and_modules, "noisy_module", imports="import noisy_module")[1]
        assert "noisy_module starts threads" in capfd.readouterr().err
        # It still knows its children.
        os.kill(before[1][2], signal.SIGKILL)
        with pytest.raises(RankDied) as caught:
            session.run(all_reduce_of_ones)
        assert (caught.value.rank, caught.value.status) == (1, -signal.SIGKILL)


@pytest.mark.long("modules that notebooks import")
def test_a_package_that_starts_threads_is_refused_once_and_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "noisy_package").mkdir()
    (tmp_path / "noisy_package/__init__.py").write_text(CELLS["a module that starts a thread"])
    (tmp_path / "noisy_package/inner.py").write_text("")
    (tmp_path / "noisy_package/other.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    forkserver.stop()
    in_ddp(1, os.getpid)
    pid = server().pid
    for module in ("noisy_package.inner", "noisy_package.other", "noisy_package"):
        forkserver.server().ask("preload", [module], sys.path)
        in_ddp(1, os.getpid)
    said = capfd.readouterr().err
    assert said.count("starts threads") == 1 and "noisy_package starts threads" in said and server().pid == pid


DRIVER = """
static int initialised = 0;
int cuInit(unsigned int flags) { initialised = 1; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return initialised ? 0 : 3; }
"""


def driver_state(path: str) -> int | None:
    """Return what the imitated driver answers in this process; None where it is not even loaded."""
    try:
        driver = ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    except OSError:
        return None
    return int(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())))


@pytest.mark.skipif(sys.platform != "linux" or not shutil.which("cc"), reason="imitates libcuda.so.1 with a C compiler")
def test_modules_that_initialise_cuda_are_left_to_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`cuInit` in the server would keep each rank from its GPU, and torch does not know of it."""
    library = str(tmp_path / "libcuda.so.1")
    (tmp_path / "driver.c").write_text(DRIVER)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, tmp_path / "driver.c"], check=True
    )
    (tmp_path / "loads_driver.py").write_text(f"import ctypes\ndriver = ctypes.CDLL({library!r})\n")
    (tmp_path / "uses_driver.py").write_text("import loads_driver\nloads_driver.driver.cuInit(0)\n")
    (tmp_path / "asks_torch.py").write_text("import os; asked = os.environ['PYTORCH_NVML_BASED_CUDA_CHECK']")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)  # lightning_fabric sets it when it is imported
    forkserver.stop()
    pid = in_ddp(1, os.getppid)
    for module in ("loads_driver", "uses_driver", "asks_torch"):
        forkserver.server().ask("preload", [module], sys.path)
    # A driver that is only loaded does no harm; one with a call of `cuInit` is gone with the caller.
    assert in_ddp(1, lambda: ("uses_driver" in sys.modules, driver_state(library), os.getppid())) == (False, 3, pid)
    assert in_ddp(1, lambda: (sys.modules["asks_torch"].asked, os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK"))) == (
        "1",
        None,
    )
    assert in_ddp(1, driver_state, library, imports="import uses_driver") == 0
    assert "uses_driver initialises CUDA when imported" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_hip_is_initialised_where_its_device_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch for AMD's GPUs calls them CUDA devices, and no fork may follow there, either."""
    device = tmp_path / "kfd"
    monkeypatch.setattr(cuda_driver, "_AMD", str(device))
    assert not cuda_driver.initialised()
    device.touch()
    assert not cuda_driver.initialised()
    with device.open():
        assert cuda_driver.initialised()
    assert not cuda_driver.initialised()


@pytest.mark.long("modules that notebooks import")
@pytest.mark.started
def test_common_modules_can_be_preloaded(capfd: pytest.CaptureFixture[str]) -> None:
    forkserver.stop()
    for module in ("pyarrow", "pandas", "matplotlib.pyplot", "sklearn.linear_model", "fastai.collab"):
        forkserver.server().preload([module])
        assert in_ddp(1, threads_and_modules, module)[1], capfd.readouterr().err
        assert server().num_threads() == 1


def packages_imported_for(modules: list[str]) -> set[str]:
    before = set(sys.modules)
    for module in modules:
        importlib.import_module(module)
    packages = {name.partition(".")[0] for name in sys.modules.keys() - before}
    return {name for name in packages - sys.stdlib_module_names if name.isidentifier()}


@pytest.mark.long("modules that notebooks import")
@pytest.mark.started
def test_ranks_import_little_for_nbdist_recsys(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of nbdist.recsys can be asked of a server, which is not replaced for it and shows no error.

    Ranks of a session start with what those packages need that the notebook has imported.
    """
    monkeypatch.setattr(forkserver, "installed", lambda name: True)  # as nbdist is, but for those who change it
    modules = [one.name for one in pkgutil.walk_packages(recsys.__path__, "nbdist.recsys.")]
    modules.remove("nbdist.recsys.parallel.fused_rows")  # for GPUs
    forkserver.stop()
    little = {"nbdist", "polars", "_polars_runtime_32", "onnxruntime", "torch"}
    with Session(1) as session:
        assert session.run(packages_imported_for, modules) <= little
    forkserver.server().preload(modules)
    assert in_ddp(1, packages_imported_for, modules) <= little
    assert not re.search("starts threads|Traceback", capfd.readouterr().err)


def start_children() -> list[int]:
    """A child, one in a session of its own, and one whose parent is gone."""
    plain = subprocess.Popen(["sleep", "1000"])
    own = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    orphan = subprocess.run(["sh", "-c", "setsid sleep 1000 >&2 & echo $!"], stdout=subprocess.PIPE, text=True)
    return [plain.pid, own.pid, int(orphan.stdout)]


def test_processes_of_ranks_end_with_them() -> None:
    with Session(2) as session:
        children = [pid for pids in session.run_all(start_children) for pid in pids]
        assert not any(map(gone, children))
    assert poll(lambda: all(map(gone, children)))


# --------------------------------------------------------------------------------------------- the end of a kernel

BUSY = CELLS["busy ranks"]


@contextlib.contextmanager
def script(code: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    (folder / "script.py").write_text(code)
    (folder / "tmp").mkdir()
    env = {**os.environ, "PYTHONPATH": ROOT, "TMPDIR": str(folder / "tmp")}
    with subprocess.Popen([sys.executable, "script.py"], cwd=folder, env=env, text=True, stdout=subprocess.PIPE) as one:
        try:
            yield one
            one.wait()
        finally:
            one.kill()  # where the test has failed: it may never end by itself


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=SCRIPTS)])
def test_all_ends_with_the_kernel_whatever_the_ranks_do(tmp_path: Path, signum: int) -> None:
    places = [tmp_path / str(rank) for rank in range(4)]
    with script(f"{BUSY}session.run(fn, {str(tmp_path)!r})", tmp_path) as kernel:
        try:
            assert poll(lambda: all(place.exists() for place in places))
            process = psutil.Process(kernel.pid)
            assert poll(lambda: len(process.children(recursive=True)) >= 1 + 4 + 2)
            descendants = process.children(recursive=True)
        finally:
            kernel.send_signal(signum)
    assert poll(lambda: not living(descendants)), "these outlived the kernel"
    assert not any((tmp_path / "tmp").iterdir())


@pytest.mark.parametrize(
    "how",
    ["", "os._exit(3)", *(pytest.param(how, marks=SCRIPTS) for how in ("sys.exit(3)", "raise KeyboardInterrupt"))],
)
def test_a_kernel_that_leaves_without_closing_its_session(tmp_path: Path, how: str) -> None:
    code = f"{BUSY}print(*session.run_all(os.getpid), flush=True)\n{how}\n"
    with script(code, tmp_path) as kernel:
        out, _ = kernel.communicate()
    pids = [int(word) for word in out.split()]
    assert len(pids) == 4 and poll(lambda: all(map(gone, pids)))
    assert kernel.returncode == {"": 0, "raise KeyboardInterrupt": -signal.SIGINT}.get(how, 3)
    assert not any((tmp_path / "tmp").iterdir())


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the names of sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def test_the_folder_of_ranks_that_were_killed_with_their_server_is_removed(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All processes of a user may be killed at once: then nothing that runs knows of the folder."""
    with script(CELLS["ranks that wait"], short_path) as kernel:
        assert kernel.stdout and kernel.stdout.readline() == "started\n"
        killed = psutil.Process(kernel.pid).children(recursive=True)
        for process in killed:
            process.suspend()  # or the first that notices a death removes the folder
        kernel.kill()
        for process in killed:
            process.kill()
    assert poll(lambda: not living(killed))
    left = list((short_path / "tmp").iterdir())
    assert left
    monkeypatch.setattr(tempfile, "tempdir", str(short_path / "tmp"))
    forkserver.stop()
    assert in_ddp(1, lambda: 1) == 1
    forkserver.stop()
    assert not any(folder.exists() for folder in left)


@pytest.mark.slow
def test_a_process_forked_from_the_kernel_has_a_server_of_its_own(tmp_path: Path) -> None:
    with script(CELLS["a process forked from the kernel"], tmp_path) as kernel:
        out, _ = kernel.communicate()
    assert kernel.returncode == 0 and sorted(out.split()) == ["child", "first", "last", "parent"]
