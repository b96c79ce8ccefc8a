"""Python programs that are forked from a process with torch imported: a quarter of the CPU time of a started one.

A template process imports what nearly every kernel, script and fork server imports, and starts no thread. `install`
replaces `subprocess.Popen`: where a program of this interpreter is to start, the template forks it. The program becomes
a child of the process that asked, with the descriptors, folder, environment and command line asked for, and runs the
code that a fresh interpreter runs. All programs but kernels forget what only kernels import. A program first forks a
child of its own, which waits. When nbdist starts its fork server in the program, that child becomes the server. The
keeper of a named session has such a child, too. The fork servers of the tests' own processes come from a second
template, with what tests import besides: a rank imports the file of the test whose functions it runs. Tests about a
start are marked `started`.

pytest-xdist's workers are forked from the second template of the process that starts them: what tests import is
imported once for all workers. A fork of each worker is its own second template. A program with the variable `FORKS`,
such as a Jupyter server, has a fork for a template, too: the kernels that it starts are forked from that.

The workers of a Ray node that tests start are forked, too. A fork that is to become the raylet first forks a template
of its workers. The template is a child of the raylet, so its forks are, too. Where the raylet would start a worker, it
starts `warm_worker.py`, which asks the template for the worker and ends.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

#: Imported by the template. IPython: a fork server makes a shell of its own for ranks, and shows their errors by
#: stack_data.
MODULES = (
    *("torch", "torch.distributed", "torch._dynamo", "numpy", "psutil", "threadpoolctl", "cloudpickle"),
    *("IPython", "stack_data"),
)
#: Imported by the template of programs, too: what a kernel and a fork server import when they start.
OF_PROGRAMS = "ipykernel.kernelapp", "ipykernel.debugger", "nbdist.server.server"
#: Beginnings of the names of modules that all programs but kernels forget. A notebook's fork server forgets only the
#: debugger's modules: it makes a shell of ipykernel's.
_OF_DEBUGGER = "debugpy", "pydev", "_pydev"
_OF_KERNELS = *_OF_DEBUGGER, "ipykernel", "comm", "jupyter_c", "tornado", "zmq"
#: Imported by the second template, too.
OF_TESTS = (
    "hypothesis",
    "pytest",
    "jupyter_client.manager",
    "pandas",
    "torchrec.distributed",
    "torchmetrics",
    "fastai.collab",
    "ray",
    *("nbdist.kernel.launch", "nbdist.server.server"),  # as nearly all tests and all servers do
)
#: Set while a template imports, as in nbdist's server: no thread may start, CUDA must not be initialized.
WHILE_IMPORTED = {
    "OPENBLAS_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # a kernel's advice about frozen modules is for its log
}
#: Prefixes of variables that an interpreter and its libraries read once.
READ_ONCE = ("LD_", "MALLOC_", "CUDA_", "PYTHON")
#: Of these, the variables that make no difference to a fork: it finds modules and makes streams by itself, threads may
#: wait either way, and `breakpoint()` reads its variable, which Ray sets, each time.
WITHOUT_EFFECT = {"PYTHONPATH", "PYTHONUNBUFFERED", "OMP_WAIT_POLICY", "PYTHONBREAKPOINT"}
_HERE = str(Path(__file__).parent)
_LIMIT = 1 << 20
#: A variable of programs whose own programs are forked.
FORKS = "NBDIST_TESTS_FORKS"
#: Bytes of a command line that a forked program can show.
_SHOWN = 4096
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_WITH_ARGUMENT = "-c", "-m"
#: What pytest-xdist's workers execute.
_WORKER = ["-c", "import sys;exec(eval(sys.stdin.readline()))"]
#: Kinds of program that the second template forks.
_OF_SECOND = {"server", "worker"}
#: What a raylet starts in place of a worker; and the beginning of the option that says what it starts.
_SHIM = os.path.join(_HERE, "warm_worker.py")
_WORKERS = f"--python_worker_command={sys.executable} "
_started_popen: Any = getattr(subprocess.Popen, "__wrapped__", subprocess.Popen)
_libc = ctypes.CDLL(None)
#: What forks programs in this process, if there is something.
_source: Templates | Template | Waiting | None = None
#: The second template that this process came with, if it is a forked worker.
_own_template: Template | None = None
#: Process ids of fork servers of this process that were not forked.
started_servers: list[int] = []


def read_once(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables without which an imported library is another one."""
    from nbdist.engines.forkserver import read_at_import

    names = [name for name in environ if name.startswith(READ_ONCE) and environ[name]]
    found = {**{name: environ[name] for name in names}, **dict(read_at_import(environ))}
    return {name: found[name] for name in found.keys() - WITHOUT_EFFECT}


def _read_once_by(request: Mapping[str, Any]) -> dict[str, str]:
    """Return `read_once` of what is asked for."""
    environ = request["environ"]
    if request["kind"] == "raylet":  # Ray gives it an allocator, which it does not pass on to its workers
        environ = {name: environ[name] for name in environ if name != "LD_PRELOAD"}
    return read_once(environ)


class Popen(_started_popen):
    """`subprocess.Popen`, but a program of this interpreter is forked where that makes no difference."""

    __wrapped__ = _started_popen
    __module__, __qualname__ = "subprocess", "Popen"  # for what pickles it

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        asked = inspect.signature(_started_popen._execute_child).bind(self, *args, **kwargs).arguments
        request = _request(asked)
        pid = None
        if _source is not None and request is not None:
            fds = [*(asked[name] for name in ("p2cread", "c2pwrite", "errwrite")), *asked["pass_fds"]]
            pid = _source.launch(request, [standard if fd < 0 else fd for standard, fd in enumerate(fds)])
        if pid is None:
            super()._execute_child(*args, **kwargs)
            if request is not None and request["kind"] == "server":
                started_servers.append(self.pid)
            return
        self.pid, self._child_created = pid, True
        pipes = "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"
        self._close_pipe_fds(*(asked[name] for name in pipes))


def _request(asked: Mapping[str, Any]) -> dict[str, Any] | None:
    """Describe what a fork has to become; None where the program has to be started."""
    command = asked["args"]
    if isinstance(command, (str, bytes, os.PathLike)) or asked["shell"]:
        return None
    command, flags = [os.fsdecode(part) for part in command], subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    prepares, fate = asked["preexec_fn"], None
    raylet = os.path.basename(command[0]) == "raylet"
    if raylet and prepares is not None:
        # This function of Ray also blocks interrupts.
        fate = inspect.getclosurevars(prepares).nonlocals.get("fate_share")
    if prepares is not None and fate is None:
        return None
    if flags and command[1 : 1 + len(flags)] == flags:  # the template has the same flags
        del command[1 : 1 + len(flags)]
    if unbuffered := command[1:2] == ["-u"]:
        del command[1]
    plain = asked["executable"] in (None, sys.executable) and asked.get("process_group", -1) in (-1, None)
    plain &= all(asked[name] in (None, -1) for name in ("gid", "gids", "uid", "umask"))
    if not plain or (command[0] != sys.executable and not raylet) or len(command) < 2:
        return None
    if command[1].startswith("-") and not raylet and (command[1] not in _WITH_ARGUMENT or len(command) < 3):
        return None
    if command[1:3] == ["-m", "pytest"]:  # which has a template of its own
        return None
    environ = dict(os.environ if asked["env"] is None else asked["env"])
    environ = {os.fsdecode(name): os.fsdecode(value) for name, value in environ.items()}
    return {
        "command": command,
        "environ": environ,
        "cwd": os.fspath(asked["cwd"] or os.getcwd()),
        "fds": [0, 1, 2, *asked["pass_fds"]],
        "session": bool(asked["start_new_session"]),
        "kind": _kind(command, environ),
        "unbuffered": unbuffered or bool(environ.get("PYTHONUNBUFFERED")),
        "asker": os.getpid(),
        "ends_with_asker": bool(fate),
    }


def _kind(command: list[str], environ: Mapping[str, str]) -> str:
    """Return what a program is for the templates: `server`, `keeper`, `template`, `worker`, `raylet`, `host` of
    programs, or `program`."""
    if command[1:] == _WORKER:
        return "worker"
    if command[0] != sys.executable:
        return "raylet"
    if FORKS in environ and FORKS not in os.environ:
        return "host"
    parts = {"nbdist.server.main": "server", "nbdist.keeper.main": "keeper", "from warm import": "template"}
    return next((kind for part, kind in parts.items() if any(part in one for one in command)), "program")


# --- in the process that asks ---


class Template:
    """A template process, a child of this one. It ends with this one."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        self._socket, self._pid, self._owner = control, pid, os.getpid()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LIMIT)
        self._environ = read_once(os.environ)
        assert self._socket.recv(1), "the template process has failed"

    @classmethod
    def started(cls, *modules: str) -> Template:
        """Start a template that imports these modules."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            code = "import sys; from warm import main; main(*sys.argv[1:-1])"
            process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), *modules, " " * _SHOWN],
                env={**os.environ, "PYTHONPATH": os.pathsep.join([_HERE, os.environ.get("PYTHONPATH", "")])},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        process.returncode = 0  # `close` waits for it
        return cls(ours, process.pid)

    def launch(self, request: dict[str, Any], fds: Sequence[int]) -> int | None:
        """Fork a program; its process id, None where that would not be the same as a start."""
        if os.getpid() != self._owner or _read_once_by(request) != self._environ:
            return None
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # the fork's parent ends at once
        try:
            socket.send_fds(self._socket, [pickle.dumps(request)], fds)
            return int(self._socket.recv(32))
        finally:
            _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)

    def close(self) -> None:
        self._socket.close()
        os.waitpid(self._pid, 0)


class Waiting:
    """A child of a forked program, which becomes its first fork server, or its raylet."""

    def __init__(self, pid: int, control: socket.socket, environ: Mapping[str, str]) -> None:
        self._pid, self._socket, self._owner = pid, control, os.getpid()
        self._environ = dict(environ)

    def launch(self, request: dict[str, Any], fds: Sequence[int]) -> int | None:
        """Make the child what is asked for, once."""
        same = _read_once_by(request) == read_once(self._environ)
        if request["kind"] not in ("server", "raylet") or os.getpid() != self._owner or not same:
            return None
        global _source
        _source = None
        with self._socket:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LIMIT)
            socket.send_fds(self._socket, [pickle.dumps(request)], fds)
            self._socket.recv(1)
        return self._pid


class Templates:
    """Both templates of a process. Each starts when a program is asked of it, unless the process came with it."""

    def __init__(self) -> None:
        self._of_programs: Template | None = None
        self._of_servers = _own_template
        self._lock = threading.RLock()

    def launch(self, request: dict[str, Any], fds: Sequence[int]) -> int | None:
        with self._lock:
            if request["kind"] in _OF_SECOND:
                if self._of_servers is None:  # forked from the first, as any program is
                    self._of_servers = Template.started(*MODULES, *OF_TESTS)
                return self._of_servers.launch(request, fds)
            if self._of_programs is None:
                with all_started():
                    self._of_programs = Template.started(*MODULES, *OF_PROGRAMS)
            return self._of_programs.launch(request, fds)

    def descriptors(self) -> int:
        """Return the number of open descriptors of this process by which templates are asked."""
        return (self._of_programs is not None) + (self._of_servers is not None)

    def close(self) -> None:
        for one in (self._of_servers, self._of_programs):
            if one is not None:
                one.close()


@contextlib.contextmanager
def installed() -> Iterator[Templates]:
    """Fork programs rather than start them."""
    global _source
    _source = templates = Templates()
    _replace_popen()
    try:
        yield templates
    finally:
        _source = None
        templates.close()


def _replace_popen() -> None:
    subprocess.Popen = Popen  # type: ignore[misc]
    for module, name in {"jupyter_client.launcher": "Popen", "ray._private.services": "ConsolePopen"}.items():
        if module in sys.modules:
            setattr(sys.modules[module], name, Popen)


@contextlib.contextmanager
def all_started() -> Iterator[None]:
    """Start all programs meanwhile."""
    global _source
    source, _source = _source, None
    try:
        yield
    finally:
        _source = source


# --- in the template ---


def main(fd: str, *modules: str) -> None:
    """Import, then fork a program for each request until the asker's end of the socket is closed."""
    os.environ.update(WHILE_IMPORTED)
    for name in modules:
        # Ray and others add filters with categories of theirs, and a rank would import them to get the filters.
        own = contextlib.nullcontext() if name in MODULES else warnings.catch_warnings()
        # Some environments have no fastai or TorchRec.
        with contextlib.suppress(ModuleNotFoundError), own:
            importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    gc.collect()
    gc.freeze()
    own = ["", *os.environ["PYTHONPATH"].split(os.pathsep)]
    _serve(socket.socket(fileno=int(fd)), [path for path in sys.path if path not in own])


def _forget(*beginnings: str) -> None:
    """Make this process import modules whose names begin so again, when it needs them."""
    for name in [name for name in sys.modules if name.startswith(beginnings)]:
        del sys.modules[name]


def _same_nbdist() -> bool:
    """Return whether this process has imported the nbdist that it would import now."""
    there, here = importlib.machinery.PathFinder.find_spec("nbdist", sys.path), sys.modules.get("nbdist")
    return there is not None and here is not None and there.origin == here.__file__


def _serve(control: socket.socket, paths: list[str]) -> None:
    """Fork a program for each request. In the fork: run the program."""
    control.set_inheritable(False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTSTP, signal.SIGQUIT):  # of a terminal
        signal.signal(number, signal.SIG_IGN)
    answers = control.type == socket.SOCK_SEQPACKET
    if answers:
        control.send(b"!")
    while True:
        request, given, _, _ = socket.recv_fds(control, _LIMIT, 64)
        if not request:
            return
        if not os.fork():
            break
        for one in given:
            os.close(one)
    asked = pickle.loads(request)
    if os.fork():
        os._exit(0)
    while os.getppid() != asked["asker"]:
        if not os.path.exists(f"/proc/{asked['asker']}"):
            os._exit(0)
        time.sleep(0.0005)
    if asked["session"]:
        os.setsid()
    if answers:
        control.send(str(os.getpid()).encode())
    else:
        os.setpgid(0, asked["group"])  # which the raylet ends when the worker has ended
        os.close(given.pop())  # so the one who asked ends
    control.close()
    if asked["kind"] in ("worker", "host"):
        _run_with_template(asked, given, paths)
        return
    _take(given, asked["fds"])
    if asked["kind"] == "program":
        asked = _fork_waiting(asked["environ"]) or asked
    if asked["kind"] == "raylet":
        _run_raylet(asked, paths)
        return
    _become(asked, paths)
    if asked["kind"] == "keeper":
        _run_keeper(asked["command"], paths)
    else:
        _run(asked["command"])


def _run_with_template(asked: Mapping[str, Any], given: Sequence[int], paths: list[str]) -> None:
    """Run a program that forks programs: a fork of this process is its template."""
    global _own_template, _source
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    template = os.fork()
    if not template:
        ours.close()
        for fd in given:
            os.close(fd)
        _serve(theirs, paths)
        return
    theirs.close()
    _take(given, asked["fds"], ours.fileno())
    this = sys.modules[__name__]
    _become(asked, paths)
    found = Template(ours, template)
    if asked["kind"] == "worker":
        sys.modules[__name__] = this  # conftest.py finds the template in it
        _own_template = found
    else:
        _source = found
        _replace_popen()
    _run(asked["command"])


def _run_raylet(asked: Mapping[str, Any], paths: list[str]) -> None:
    """Become a raylet. A fork of this process, the raylet's child, is the template of its workers."""
    raylet = os.getpid()
    address = f"nbdist-tests-{raylet}"
    control = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    control.bind(f"\0{address}")
    if not os.fork():
        _end_with(raylet)
        _serve(control, paths)
        return
    control.close()
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)  # this and the next stay so in the raylet
    if asked["ends_with_asker"]:
        _end_with(asked["asker"])
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTSTP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    os.chdir(asked["cwd"])
    shim = f"{_WORKERS}-IS {_SHIM} {address} "
    os.execve(asked["command"][0], [part.replace(_WORKERS, shim) for part in asked["command"]], asked["environ"])


def _end_with(parent: int) -> None:
    """Make this process end when its parent ends; at once, if that has happened."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)


class _Became(BaseException):
    """Raised in the child that waited for a keeper, to leave the code of the keeper: `asked` is to run instead."""

    def __init__(self, asked: Any) -> None:
        super().__init__()
        self.asked = asked


def _run_keeper(command: list[str], paths: list[str]) -> None:
    """Run a program that forks the keeper of a named session, which forks the child that waits."""
    fork = os.fork

    def fork_both() -> int:
        os.fork = fork
        if pid := fork():
            return pid
        if asked := _fork_waiting(os.environ):
            raise _Became(asked)
        return 0

    os.fork = fork_both
    try:
        _run(command)
        return
    except _Became as became:
        asked = became.asked
    # Not in the block above: exceptions of ranks would have the handled one as their context.
    _forget("nbdist")  # what the keeper has done with it is not the server's
    _become(asked, paths)
    _run(asked["command"])


def _prepare_server() -> None:
    """Leave out what a fork server does about its memory for the sake of long trainings: a tenth of a second of CPU."""
    memory, loop = map(importlib.import_module, ("nbdist.server.memory", "nbdist.server.server"))
    memory.inflate_object_count = lambda count: None  # type: ignore[attr-defined]
    loop.huge_pages = list  # type: ignore[attr-defined]


def _take(given: Sequence[int], wanted: Sequence[int], *kept: int) -> None:
    """Make descriptors have the numbers wanted, and close all others but those to be kept."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, max(63, *wanted) + 1) for fd in given]
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in high and fd not in kept:
            with contextlib.suppress(OSError):
                os.close(fd)
    for fd, number in zip(high, wanted, strict=True):
        os.dup2(fd, number)
        os.close(fd)


def _become(asked: Mapping[str, Any], paths: list[str]) -> None:
    """Take the environment, folder and standard streams asked for, and forget this module."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTSTP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(asked["environ"])
    os.chdir(asked["cwd"])
    tempfile.tempdir = None  # found by the old environment
    _show(asked["command"])
    sys.orig_argv[:] = asked["command"]
    sys.path[:] = [*filter(None, asked["environ"].get("PYTHONPATH", "").split(os.pathsep)), *paths]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    vars(sys)["__stdin__"] = sys.stdin
    unbuffered = asked["unbuffered"]
    for name, fd, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw: Any = io.FileIO(fd, "w", closefd=False)
        raw = raw if unbuffered else io.BufferedWriter(raw)
        by_line = fd == 2 or os.isatty(fd)
        stream = io.TextIOWrapper(raw, sys.stdout.encoding, errors, line_buffering=by_line, write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    if "ipykernel" in sys.modules and "ipykernel_launcher" not in asked["command"]:
        makes_shell = asked["kind"] == "server" and "notebook" in asked["command"]
        _forget(*(_OF_DEBUGGER if makes_shell else _OF_KERNELS))
    if asked["kind"] not in _OF_SECOND or not _same_nbdist():
        _forget("nbdist")
    importlib.invalidate_caches()
    sys.modules["numpy"].random.seed()
    if asked["kind"] == "server":
        _prepare_server()
    sys.modules.pop(__name__, None)


def _show(command: Sequence[str]) -> None:
    """Make the command line of this process what other processes are to see."""
    stat = Path("/proc/self/stat").read_text()
    start, end = map(int, stat[stat.rindex(")") + 2 :].split()[45:47])
    shown = " ".join(command).encode()[: end - start - 2] + b"\0"
    # Linux shows the text up to the first zero where the last byte is not zero.
    ctypes.memmove(start, shown.ljust(end - start, b" "), end - start)


# --- in a forked program ---


def _fork_waiting(environ: Mapping[str, str]) -> Any:
    """Fork the child that waits, and give it to nbdist for the fork server of this program, whose environment is
    `environ`. Return None; in the child, what it has to become."""
    global _source
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    program = os.getpid()
    if waiting := os.fork():
        theirs.close()
        _source = Waiting(waiting, ours, environ)
        _replace_popen()
        return None
    ours.close()
    return _wait_to_be_server(theirs, program)


def _wait_to_be_server(control: socket.socket, program: int) -> Any:
    """In the child that waits: return what it has to become."""
    _end_with(program)  # unless it is asked
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):  # who reads what the program writes waits for the end of all who could write
        os.dup2(null, fd)
    request, given, _, _ = socket.recv_fds(control, _LIMIT, 64)
    if not request:
        os._exit(0)
    asked = pickle.loads(request)
    if asked["session"]:
        os.setsid()
    control.send(b"!")
    _take(given, asked["fds"])
    control.detach()
    _libc.prctl(_PR_SET_PDEATHSIG, 0)
    return asked


def _run(command: list[str]) -> None:
    """Run a program as `python` does with these arguments."""
    kind, code, rest = command[1], "", command[2:]
    if kind in _WITH_ARGUMENT:
        code, rest = command[2], command[3:]
    module = types.ModuleType("__main__")
    module.__dict__.update({"__builtins__": builtins, "__annotations__": {}})
    sys.modules["__main__"] = module
    sys.argv = [kind, *rest]
    try:
        if kind == "-m":
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(code)  # type: ignore[attr-defined]
        elif kind == "-c":
            sys.path.insert(0, "")
            exec(compile(code, "<string>", "exec"), module.__dict__)
        else:
            sys.path.insert(0, os.path.dirname(os.path.realpath(kind)))
            module.__file__, module.__cached__ = kind, None  # type: ignore[attr-defined]
            loader = importlib.machinery.SourceFileLoader("__main__", kind)
            module.__loader__ = loader
            exec(compile(Path(kind).read_bytes(), kind, "exec"), module.__dict__)
    except Exception as error:
        below = error.__traceback__
        while below is not None and below.tb_frame.f_code.co_filename == __file__:
            below = below.tb_next
        sys.excepthook(type(error), error.with_traceback(below), below)
        sys.exit(1)
