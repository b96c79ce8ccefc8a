"""Kernels that are forked from a process with torch imported: a quarter of the CPU time of one that is started.

A template process imports what nearly every kernel and fork server imports, and starts no thread. Asked for a kernel,
it forks one. The kernel first forks a child of its own, which waits. When nbdist starts its fork server, that child
becomes the server. Both then run the code that a fresh interpreter runs. Tests about the start of a kernel or a server
start it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Imported by the template. IPython: a fork server makes a shell of its own for ranks. What ipykernel brings along is
#: for the kernel alone.
MODULES = ("torch", "torch.distributed", "torch._dynamo", "numpy", "psutil", "threadpoolctl", "cloudpickle", "IPython")
#: Set while the template imports, as in nbdist's server: OpenBLAS must start no thread, CUDA must not be initialized.
WHILE_IMPORTED = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
#: Part of the template's command line, and so of the command lines of what is forked from it.
MARK = "warm_kernels"
_LIMIT = 1 << 20
_PR_SET_PDEATHSIG = 1


class Forked:
    """A forked process, with as much of the interface of `subprocess.Popen` as its users need."""

    stdin = stdout = stderr = None

    def __init__(self, pid: int, args: list[str]) -> None:
        self.pid, self.args, self.returncode = pid, args, None
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._ended(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def _ended(self, timeout: float | None) -> int | None:
        """Return the status of an ended process, 0 if another process is its parent, None if it still runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], timeout)[0]:
            self.returncode: int | None = 0
            with contextlib.suppress(ChildProcessError):
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


# --- in pytest's process ---


class Template:
    """The template process of one pytest worker. It ends with the worker."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LIMIT)
        with theirs:
            code = "import sys; from warm_kernels import main; main(*sys.argv[1:])"
            self.process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), MARK],
                env={**os.environ, **WHILE_IMPORTED, "PYTHONPATH": str(Path(__file__).parent)},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._environ = dict(os.environ)
        assert self._socket.recv(1), "the template process has failed"

    def fits(self, environ: Mapping[str, str]) -> bool:
        """Return whether libraries would be the same if they were imported with these variables."""
        from nbdist.engines.forkserver import read_at_import

        names = ("LD_", "MALLOC_", "CUDA_", "PYTHON")
        kept = [
            {name: value for name, value in one.items() if name.startswith(names) and name != "PYTHONPATH"}
            for one in (environ, self._environ)
        ]
        return kept[0] == kept[1] and read_at_import(environ) == read_at_import(self._environ)

    def launch(self, command: list[str], *, env: Mapping[str, str], cwd: str, **_: Any) -> Forked:
        """Start a kernel: what `jupyter_client.launcher.launch_kernel` does, with its arguments."""
        arguments = command[command.index("ipykernel_launcher") + 1 :]
        environ = {**env, "JPY_PARENT_PID": str(os.getpid())}
        self._socket.send(pickle.dumps((arguments, environ, cwd)))
        return Forked(int(self._socket.recv(32)), command)

    def close(self) -> None:
        self._socket.close()
        self.process.wait()


# --- in the template ---


def main(fd: str, _mark: str) -> None:
    """Import, then fork a kernel for each request until pytest's end of the socket is closed."""
    for name in MODULES:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not be forked"
    gc.collect()
    gc.freeze()
    paths = [path for path in sys.path if path not in ("", str(Path(__file__).parent))]
    control = socket.socket(fileno=int(fd))
    control.set_inheritable(False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended kernels leave no zombies
    control.send(b"!")
    while True:
        request = control.recv(_LIMIT)
        if not request:
            return
        if not os.fork():
            break
    arguments, environ, cwd = pickle.loads(request)
    become(environ, paths)
    control.send(str(os.getpid()).encode())  # by the kernel, which leads a process group of its own by now
    control.close()
    os.chdir(cwd)
    _kernel(arguments, paths)


def become(environ: Mapping[str, str], paths: list[str]) -> None:
    """In a fork: lead a session, with this environment, and find modules as an interpreter that starts with it."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environ)
    tempfile.tempdir = None  # found by the old environment
    sys.path[:] = [*filter(None, environ.get("PYTHONPATH", "").split(os.pathsep)), *paths]
    importlib.invalidate_caches()


# --- in a kernel ---


def _kernel(arguments: list[str], paths: list[str]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kernel = os.getpid()
    waiting = os.fork()
    if not waiting:
        ours.close()
        _wait_to_be_server(theirs, kernel, paths)
        return
    theirs.close()
    _give_to_nbdist(ours, waiting)
    del sys.modules[__name__]
    sys.argv = ["ipykernel_launcher.py", *arguments]
    from ipykernel import kernelapp

    kernelapp.launch_new_instance()


def _give_to_nbdist(control: socket.socket, pid: int) -> None:
    """Make nbdist take the waiting child for its first fork server, if the server may have what is imported there."""
    from nbdist import interpreter

    start = interpreter.start
    control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LIMIT)

    def start_or_take(module: str, *arguments: str, env: Mapping[str, str], **options: Any) -> Any:
        from nbdist.engines.forkserver import read_at_import

        plain = set(options) <= {"pass_fds"} and not read_at_import(env)
        if module != "nbdist.server.main" or not plain or control.fileno() < 0:
            return start(module, *arguments, env=env, **options)
        with control:
            fds = [1, 2, *options["pass_fds"]]
            environ = {**os.environ, **interpreter.module_path(), **env}
            socket.send_fds(control, [pickle.dumps((arguments, environ, os.getcwd(), fds))], fds)
            control.recv(1)
        return Forked(pid, interpreter.command(module, *arguments))

    interpreter.start = start_or_take  # type: ignore[assignment]


# --- in the child of a kernel that may become its fork server ---


def _wait_to_be_server(control: socket.socket, kernel: int, paths: list[str]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # unless it is asked, it ends with the kernel
    if os.getppid() != kernel:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    request, given, _, _ = socket.recv_fds(control, _LIMIT, 16)
    if not request:
        return
    arguments, environ, cwd, wanted = pickle.loads(request)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 1000) for fd in given]
    for fd in given:
        os.close(fd)
    for fd, number in zip(high, wanted, strict=True):
        if number == control.fileno():
            control = socket.socket(fileno=fcntl.fcntl(control.detach(), fcntl.F_DUPFD_CLOEXEC, 1000))
        os.dup2(fd, number)
        os.close(fd)
    control.send(b"!")
    control.close()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    become(environ, paths)
    os.chdir(cwd)
    sys.argv = ["-c", *arguments]
    del sys.modules[__name__]
    serve: Callable[..., None] = importlib.import_module("nbdist.server.main").main
    serve(*arguments)
