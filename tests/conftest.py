"""Nothing may survive a test: no process, no descriptor, no name in /dev/shm; and tests that run a real kernel."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from textwrap import dedent
from typing import Any

#: A thread of a pool that has nothing to do sleeps. By default it looks for work in a loop, on cores that others need.
#: OpenMP reads it when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import psutil
import pytest
import warm as warm_programs

from nbdist import Session, warm
from nbdist.engines import forkserver
from nbdist.wire import rank_memory

pytest_plugins = ["progress", "pages"]
#: Tests on imitated GPUs have a command of their own, `make gpu-imitated`: elsewhere they are not collected.
collect_ignore = [] if "libcudart-imitated.so" in os.environ.get("LD_PRELOAD", "") else ["gpu"]


ROOT = Path(__file__).parent.parent


def site_packages() -> str:
    """Return a folder for PYTHONPATH in which nbdist is installed, as users have it: servers import it for ranks."""
    folder = ROOT / "build" / "site-packages"
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.joinpath("nbdist").symlink_to(os.path.join("..", "..", "nbdist"))
    return str(folder)


gc.disable()  # imports take a fifth less


def pytest_collection_finish() -> None:
    """Leave what imports have made out of garbage collections: many tests ask for one, of a second each."""
    gc.enable()
    _freeze()


@pytest.fixture(scope="module", autouse=True)
def modules_of_a_file_are_frozen() -> Iterator[None]:
    """Leave out of later files' garbage collections, too, what the tests of a file have imported."""
    yield
    _freeze()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


_programs = contextlib.ExitStack()
_templates: list[warm_programs.Templates] = []


def pytest_configure() -> None:
    """Give named sessions a folder, and fork programs rather than start them.

    They take signals as in the foreground: a run in the background (`nohup make test &`) ignores some of them, and so
    would all that it starts.

    How fast the machine is decides no test: Hypothesis would say that an example takes too long. It is imported here
    because ranks import this file: the file of a test whose functions they run imports it.
    """
    from hypothesis import HealthCheck, settings

    about = {"deadline": None, "max_examples": 50, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("any machine", **about)
    settings.load_profile("any machine")
    folder = _programs.enter_context(tempfile.TemporaryDirectory(prefix="nbdist-state-"))
    os.environ["XDG_STATE_HOME"] = folder  # the tests must not see the user's named sessions
    if LINUX:
        _templates.append(_programs.enter_context(warm_programs.installed()))
    for number, handler in {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: lambda *_: None}.items():
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def pytest_unconfigure() -> None:
    """End the process that programs are forked from."""
    _programs.close()


@pytest.fixture(autouse=True)
def started_or_forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start what a test marked `started` starts. Its fork servers end with it: other tests fork their own.

    No test leaves a variable behind that makes later tests start what they would fork.
    """
    before, debugger = warm_programs.read_once(os.environ), os.environ.get("PYTHONBREAKPOINT")
    if request.node.get_closest_marker("started") is None:
        yield
    else:
        warm_programs.started_servers.clear()
        with warm_programs.all_started():
            yield
        if any(map(psutil.pid_exists, warm_programs.started_servers)):
            forkserver.stop()
    assert warm_programs.read_once(os.environ) == before
    assert os.environ.get("PYTHONBREAKPOINT") == debugger


#: Whether nbdist finds what only Linux has: not on macOS, nor with `without_linux/` on PYTHONPATH.
LINUX = rank_memory.POSSIBLE
#: Whether this IPython's tracebacks say `Cell In[3], line 2`. Before 8.0 they name the file that it makes up for it.
NUMBERS_CELLS = int(version("ipython").split(".")[0]) >= 8


def poll(condition: Callable[[], Any], seconds: float = 300.0) -> bool:
    """Wait until `condition()` holds; whether it did in a time that only a hang takes.

    A look that takes long, such as one at all processes, is taken less often: the cores are for what is waited for.
    """
    begin = time.monotonic()
    deadline = begin + seconds
    while not condition():
        looked = time.monotonic()
        if looked > deadline:
            return False
        time.sleep(min(0.5, max(0.01, 2 * (looked - begin))))
        begin = time.monotonic()
    return True


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that have not ended. A zombie has: only its parent has not asked for its status yet."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Deadly:
    """Kills the process in which it is "read", or that which has it "written" there."""

    def __init__(self, when: str) -> None:
        self.when = when

    def __reduce__(self) -> tuple[Any, ...]:
        if self.when == "written":
            die()
        return die, ()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def child_pids(pid: int, recursive: bool = False) -> list[int]:
    """The child processes of a process. psutil would read about all processes of the machine, after each test."""
    if not os.path.exists("/proc/self/task"):
        return [child.pid for child in psutil.Process(pid).children(recursive=recursive)]
    found: list[int] = []
    parents = [pid]
    for parent in parents:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                found += map(int, _proc(parent, f"task/{thread}/children").split())
        if recursive:
            parents += [one for one in found if one not in parents]
    return found


def _proc(pid: int, name: str) -> bytes:
    """Return the first bytes of a file in /proc about a process; nothing if it has ended. After each test such files
    are read, so this does without the layers of `open`."""
    try:
        fd = os.open(f"/proc/{pid}/{name}", os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.read(fd, 1 << 16)
    except OSError:
        return b""
    finally:
        os.close(fd)


def processes(pids: Iterable[int]) -> list[psutil.Process]:
    """Return the processes of these ids that exist."""
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def children(pid: int, recursive: bool = False) -> list[psutil.Process]:
    """The child processes of a process."""
    return processes(child_pids(pid, recursive))


def _command(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    if os.path.isdir("/proc/self"):
        return _proc(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")
    with contextlib.suppress(psutil.NoSuchProcess):
        return " ".join(psutil.Process(pid).cmdline())
    return ""


def ranks_of(pid: int | None = None, known: Iterable[int] = ()) -> list[psutil.Process]:
    """The living ranks, and what they started, of the fork servers of `pid` (this process) and of its clusters, without
    the ranks with `known` process ids."""
    found: set[int] = set()
    for child in child_pids(os.getpid() if pid is None else pid):
        command = _command(child)
        family = child_pids(child, recursive=True) if "/raylet " in command else []
        for one in (child, *family):
            if "nbdist.server.main" in (command if one == child else _command(one)):
                found.update(child_pids(one, recursive=True))
    return living(processes(found.difference(known)))


def open_fds() -> int:
    """Return the number of open descriptors, leaving out templates, which start when a test first needs them."""
    own = sum(one.descriptors() for one in _templates)
    return len(os.listdir("/proc/self/fd")) - own if sys.platform == "linux" else 0


def shared_memory_names() -> set[str]:
    """The names in /dev/shm, but for semaphores: nbdist makes none, and other programs on the machine do."""
    names = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
    return {name for name in names if not name.startswith("sem.")}


def left_in_shared_memory(before: set[str]) -> set[str]:
    """Return new names in /dev/shm that stay: other tests that run at the same time make some, too.

    Names of Triton servers stay as long as these run; their own tests watch them. joblib may leave an empty folder
    when a kernel in which it has run ends at once.
    """
    others = ("psm_", "nbdist-triton-", "joblib_memmapping_folder_")
    new = {name for name in shared_memory_names() - before if not name.startswith(others)}
    poll(lambda: not new & shared_memory_names())
    return new & shared_memory_names()


class Sessions:
    """Sessions that all tests of a file share: `sessions[3]`, of three ranks, is made when it is first asked for.

    Args:
        imports: The argument of `nbdist.warm` before the first session is made.
        options: Options of each session.
    """

    def __init__(self, imports: str = "", **options: Any) -> None:
        self._imports = imports
        self._options = options
        self._made: dict[int, Session] = {}
        self._ranks: set[int] = set()

    def __getitem__(self, nranks: int) -> Session:
        if self._imports and not self._made:
            warm(self._imports)
        if nranks not in self._made or "closed" in repr(self._made[nranks]):
            # The time of a test is over at 600 s: before that the error says where the ranks are that hang.
            self._made[nranks] = Session(nranks, **{"timeout": 500, **self._options})
        return self._made[nranks]

    def outlived_by(self) -> list[psutil.Process]:
        """Return what `ranks_of` finds, without the ranks of these sessions. Processes of these ranks end with their
        call."""
        found = ranks_of(known=self._ranks)
        if found:  # the tables need milliseconds for each rank: its memory
            tables = "\n".join(str(session.status()) for session in self._made.values())
            self._ranks |= set(map(int, re.findall(r"^\d+ +(\d+) ", tables, re.MULTILINE)))
        return [process for process in found if process.pid not in self._ranks]

    def close(self) -> None:
        for session in self._made.values():
            session.close()


@pytest.fixture(scope="module")
def sessions(request: pytest.FixtureRequest) -> Iterator[Sessions]:
    """The sessions of a file, which may have imports to `WARM` and `OPTIONS` of them all. All end with it."""
    sessions = Sessions(getattr(request.module, "WARM", ""), **getattr(request.module, "OPTIONS", {}))
    yield sessions
    sessions.close()
    assert poll(lambda: not ranks_of()), f"these outlived their session: {ranks_of()}"


@pytest.fixture
def session(request: pytest.FixtureRequest, sessions: Sessions) -> Session:
    """The file's session of two ranks, or of as many as its `RANKS` says."""
    return sessions[getattr(request.module, "RANKS", 2)]


@pytest.fixture(autouse=True)
def nothing_survives(sessions: Sessions) -> Iterator[None]:
    """No rank, child of a rank, or shared-memory name is left after a test, but for the ranks of `sessions`."""
    before = shared_memory_names()
    yield
    assert poll(lambda: not sessions.outlived_by()), f"these outlived the test: {sessions.outlived_by()}"
    left = left_in_shared_memory(before)
    assert not left, f"left in /dev/shm: {left}"


def start_cluster(folder: str, second: dict[str, Any] | None = None, **head: Any) -> Any:
    """Start Ray on two nodes of four CPUs each, all on this machine."""
    from nbdist.engines.ray.launch.local_cluster import LocalCluster

    os.makedirs("/tmp/ray", exist_ok=True)  # where Ray notes the address for `auto`
    cluster = LocalCluster(1, {"include_log_monitor": False, **head}, num_cpus=4, temp_dir=folder)
    cluster.add_node(**{"resources": {"second": 1.0}, **(second or {})})
    return cluster


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A cluster for all tests. It, and what it started for itself, is gone after them."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        patch.setenv("PYTHONPATH", site_packages())
        cluster = start_cluster(folder)
        try:
            yield cluster
        finally:
            cluster.shutdown()


@dataclass
class Result:
    """The outcome of a cell, as a front end sees it."""

    text: str = ""
    error: str | None = None
    message: str = ""
    traceback: str = ""
    number: int = 0
    """The cell's, as in `In [3]`."""
    outputs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def plain_traceback(self) -> str:
        """The traceback without its colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.traceback)


class Kernel:
    """A real IPython kernel, driven as a front end drives it."""

    def __init__(self, cwd: Path, env: dict[str, str] | None = None, wrapper: list[str] | None = None) -> None:
        """`env` is set on top of the environment; `wrapper` is a command that starts the kernel's command."""
        from jupyter_client.manager import KernelManager  # here, as ranks import this file

        self.cwd = cwd
        self._stuck = False
        # No ports: another process could take one before the kernel does.
        self._sockets = tempfile.TemporaryDirectory()
        self.manager = KernelManager(transport="ipc", ip=os.path.join(self._sockets.name, "kernel"))
        # Not the installed kernelspec: the interpreter that runs the tests.
        command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        command.append("--HistoryManager.hist_file=:memory:")
        self.manager.kernel_spec.argv = [*(wrapper or []), *command]
        path = os.pathsep.join(filter(None, [site_packages(), os.environ.get("PYTHONPATH")]))
        self.environ = environ = {**os.environ, "PYTHONPATH": path, **(env or {})}
        self.manager.start_kernel(cwd=str(cwd), env=environ)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready()

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def start(self, code: str, watched: bool = False) -> str:
        """Start a cell; returns its message id. `watched`: as for somebody who could type something."""
        assert not self._stuck, "it is still at the cell of a test whose time was over"
        # ipykernel 6 drops a cell that comes right after one that has failed, unless the latter was asked not to.
        return str(self.client.execute(code, store_history=True, allow_stdin=watched, stop_on_error=False))

    def finish(self, message_id: str, until: Callable[[Result], bool] | None = None) -> Result:
        """Gather what a cell sends until it is done, or until `until(result)`."""
        result = Result()
        try:
            return self._gather(result, message_id, until)
        except BaseException as exc:
            self._stuck = not isinstance(exc, Exception)  # the test's time is over
            print(f"the cell has sent so far: {result}")
            raise

    def _gather(self, result: Result, message_id: str, until: Callable[[Result], bool] | None) -> Result:
        while True:
            message = self.client.get_iopub_msg()
            if message["parent_header"].get("msg_id") != message_id:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                self._await_reply(message_id)
                return result
            if kind == "execute_input":
                result.number = content["execution_count"]
            elif kind == "stream":
                result.text += content["text"]
            elif kind in ("display_data", "execute_result", "update_display_data"):
                result.text += content["data"].get("text/plain", "") + "\n"
            elif kind == "error":
                result.error, result.message = content["ename"], content["evalue"]
                result.traceback = "\n".join(content["traceback"])
            if kind not in ("status", "execute_input"):
                result.outputs.append({"kind": kind, "envelope": message["metadata"], **content})
            if until is not None and until(result):
                return result

    def _await_reply(self, message_id: str) -> None:
        """ipykernel 7.0 to 7.3 may lose a request that comes while it sends a reply (ipython/ipykernel#1529)."""
        while self.client.get_shell_msg()["parent_header"].get("msg_id") != message_id:
            pass

    def run(self, code: str) -> Result:
        """Run a cell to its end."""
        return self.finish(self.start(code))

    def ok(self, code: str) -> Result:
        """Run a cell that must not raise."""
        result = self.run(code)
        assert result.error is None, result.traceback
        return result

    def interrupt(self) -> None:
        """Interrupt as the front end's stop button does."""
        self.manager.interrupt_kernel()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self._sockets.cleanup()


@contextlib.contextmanager
def endless(kernel: Kernel, *names: str, of: str = "calls.ending") -> Iterator[None]:
    """Give these times of `nbdist.kernel.calls.ending`, or of another module, no end in a kernel meanwhile: no wait
    there ends by its time.

    They stay so where the test fails.
    """
    kernel.ok(f"import nbdist.kernel.{of} as _waiting\n_times = [getattr(_waiting, name) for name in {names}]")
    kernel.ok(f"for _name in {names}: setattr(_waiting, _name, 1e6)")
    yield
    kernel.ok(f"for _name, _time in zip({names}, _times): setattr(_waiting, _name, _time)")


def typed(kernel: Kernel, code: str, *lines: str) -> tuple[list[str], str]:
    """Run a cell and type `lines` where it asks for input; its prompts, and what it printed, the error included."""
    left, prompts, text = list(lines), [], []

    def answer(message: dict[str, Any]) -> None:
        prompts.append(message["content"]["prompt"])
        assert left, f"asked for more than was typed: {prompts}; printed: {''.join(text)}"
        kernel.client.input(left.pop(0))

    def output(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            text.append(message["content"]["text"])
        elif message["msg_type"] == "error":
            text.append("\n".join(message["content"]["traceback"]))

    kernel.client.allow_stdin = True
    hooks: dict[str, Any] = {"stdin_hook": answer, "output_hook": output}
    kernel.client.execute_interactive(code, allow_stdin=True, stop_on_error=False, **hooks)
    assert not left, f"not asked for: {left}; printed: {''.join(text)}"
    return prompts, re.sub(r"\x1b\[[0-9;]*m", "", "".join(text))


@pytest.fixture
def kernel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kernel]:
    """A fresh kernel in an empty folder; whatever it started must be gone soon after it."""
    kernel = Kernel(tmp_path)
    children = set()
    try:
        yield kernel
        with contextlib.suppress(psutil.NoSuchProcess):  # the test has killed it
            children = set(psutil.Process(kernel.pid).children(recursive=True))
    finally:
        kernel.close()
    assert poll(lambda: not living(children)), f"outlived the kernel: {children}"


@pytest.fixture(scope="module")
def notebook(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start a kernel for a whole file, which may have a `FIRST_CELL`."""
    kernel = Kernel(tmp_path_factory.mktemp("notebook"))
    try:
        kernel.ok(getattr(request.module, "FIRST_CELL", ""))
        yield kernel
    finally:
        kernel.close()


Cell = Callable[[str], Result]


@pytest.fixture
def cell(notebook: Kernel) -> Cell:
    """Runs a cell, which must not raise, in a notebook without variables from other tests.

    `%reset` collects garbage twice; what is left then need not be looked through again.
    """
    notebook.ok("%reset -f\nimport gc\ngc.freeze()\ndel gc\nfrom nbdist import CaptureError, Session, in_ddp")
    return lambda code: notebook.ok(dedent(code))
