"""A Triton server to try a model repository: on the loopback interface, during a `with` block.

The server comes from the wheel nvidia-pytriton, which has only the Python backend, and runs on Linux (x86-64) without a
container. The server was built for NumPy 1: with NumPy 2 it gives models wrong arrays. So it is in a virtual
environment of its own, separate from the notebook's, with the few packages that the models need.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LOOPBACK = "127.0.0.1"
_ATTEMPTS = 5
_SHARED_MEMORY = Path("/dev/shm")

# The server ends when the thread that started it does, or its process is killed. PR_SET_PDEATHSIG (1) outlasts an exec.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass(frozen=True)
class Server:
    """A running server.

    Examples:
        >>> from pathlib import Path
        >>> import tritonclient.http
        >>> from nbdist.recsys.triton import serve
        >>> Path("repository").mkdir()  # export_ensemble makes one with models
        >>> with serve("repository") as server:
        ...     server.http, server.grpc
        ...     tritonclient.http.InferenceServerClient(server.http).is_server_ready()
        ('127.0.0.1:...', '127.0.0.1:...')
        True
    """

    http: str
    """The address for HTTP, ``host:port``, for `tritonclient.http`."""
    grpc: str
    """The address for gRPC, for `tritonclient.grpc`."""
    pid: int
    log_file: Path

    @property
    def log(self) -> str:
        """Return the warnings and errors so far, and the output of models."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")


class _PortTaken(Exception):
    """Another program has taken a port after it was found free and before the server listened on it."""


@contextlib.contextmanager
def serve(
    path: str | os.PathLike[str],
    *,
    environment: str | os.PathLike[str] | None = None,
    timeout: float = 60.0,
) -> Iterator[Server]:
    """Run a Triton server on the model repository `path` during a `with` block.

    It listens only on the loopback interface, at free ports, and has loaded all models of the repository when the block
    begins. `Ensemble.load` has it load models that are exported later. When the block ends, or this process dies, the
    server and its shared memory are removed.

    Args:
        path: A model repository whose models are ensembles or of the Python backend, such as one that `export_ensemble`
            has written with ``backend="python"``.
        environment: The folder of the server's virtual environment, with the packages in ``requirements/triton.txt``.
            None: the folder in the environment variable NBDIST_TRITON, or `triton` in this environment's own folder.
        timeout: The longest time for loading the models, in seconds.

    Raises:
        FileNotFoundError: There is no such repository, or no server in `environment`. The error describes how to get
            one.
        RuntimeError: The server ended while it started, for example because a model could not be loaded. The error has
            its output.
        TimeoutError: The server was not ready in time.

    Examples:
        >>> import polars as pl
        >>> import torch
        >>> import tritonclient.http as triton
        >>> from nbdist.recsys.etl import Categorify, Workflow
        >>> from nbdist.recsys.triton import export_ensemble, serve
        >>> workflow = Workflow(Categorify("user")).fit(pl.DataFrame({"user": ["ann", "bob"]}))
        >>> model = torch.nn.Embedding.from_pretrained(torch.tensor([[0.0], [0.0], [2.0], [3.0]]))
        >>> def click(model, batch):
        ...     return model(batch["user"])
        >>> ensemble = export_ensemble(workflow, model, "repository", "ctr", predict=click, backend="python")
        >>> [(name, users)] = ensemble.request({"user": ["bob", "ann"]}).items()
        >>> given = triton.InferInput(name, users.shape, "BYTES").set_data_from_numpy(users)
        >>> with serve("repository") as server:
        ...     client = triton.InferenceServerClient(server.http)
        ...     client.infer("ctr", [given]).as_numpy("output").tolist()
        [[3.0], [2.0]]
    """
    repository = Path(path).resolve()
    if not repository.is_dir():
        raise FileNotFoundError(f"there is no model repository {repository}")
    installed = _Installed.find(environment)
    with tempfile.TemporaryDirectory(prefix="nbdist-triton-") as folder, contextlib.ExitStack() as stack:
        installed.link_backends(Path(folder, "backends"))
        for _ in range(_ATTEMPTS):
            try:
                server = stack.enter_context(_running(installed, repository, Path(folder), timeout))
                break
            except _PortTaken:
                continue
        else:
            raise RuntimeError(
                f"the Triton server must have a free port, but other programs took {_ATTEMPTS} of them first: try again"
            )
        yield server


def exists_for_this_machine() -> bool:
    """Return whether the wheels in ``requirements/triton.txt`` support this machine and this version of Python."""
    libc, version = platform.libc_ver()
    return (
        (sys.platform, platform.machine(), libc) == ("linux", "x86_64", "glibc")
        and tuple(map(int, version.split("."))) >= (2, 35)
        and sys.version_info < (3, 13)  # the last with wheels of NumPy 1
    )


@dataclass(frozen=True)
class _Installed:
    """A virtual environment with the server in it."""

    folder: Path
    version: str
    """The version of Python, such as "3.11"."""
    packages: Path
    libraries: tuple[str, ...]
    """The folders that may have the interpreter's shared library."""

    @classmethod
    def find(cls, environment: str | os.PathLike[str] | None) -> _Installed:
        chosen = environment or os.environ.get("NBDIST_TRITON") or Path(sys.prefix, "triton")
        folder = Path(chosen).expanduser().absolute()
        code = (
            "import json, sys, sysconfig as s; libraries = s.get_config_var('LIBDIR'); "
            "print(json.dumps([s.get_python_version(), s.get_path('purelib'), libraries, sys.base_prefix]))"
        )
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            found = subprocess.run([folder / "bin" / "python3", "-c", code], capture_output=True, check=True, env={})
            version, packages, libraries, prefix = json.loads(found.stdout)
            if Path(packages, "pytriton", "tritonserver").is_dir():
                return cls(folder, version, Path(packages), (libraries or "", f"{prefix}/lib"))
        raise FileNotFoundError(
            f"no Triton server in {folder}. On Linux (x86-64, glibc 2.35 or newer), in the folder of nbdist:\n"
            f"    {sys.executable} -m venv {folder}\n"
            f"    {folder}/bin/python -m pip install --no-deps -r requirements/triton.txt\n"
            "Another folder: serve(..., environment=), or the environment variable NBDIST_TRITON"
        )

    @property
    def binary(self) -> Path:
        return self.packages / "pytriton" / "tritonserver" / "bin" / "tritonserver"

    @property
    def environ(self) -> dict[str, str]:
        """Return the environment variables with which the stub finds the interpreter's library and, through its
        `python3`, the packages."""
        libraries = [
            str(self.packages / "nvidia_pytriton.libs"),
            *self.libraries,
            os.environ.get("LD_LIBRARY_PATH", ""),
        ]
        path = [str(self.folder / "bin"), os.environ.get("PATH", "")]
        return {"LD_LIBRARY_PATH": ":".join(filter(None, libraries)), "PATH": ":".join(filter(None, path))}

    def link_backends(self, folder: Path) -> None:
        """Make a folder of backends, whose Python backend has the stub for this environment's Python version."""
        server = self.packages / "pytriton" / "tritonserver"
        stub = server / "python_backend_stubs" / self.version / "triton_python_backend_stub"
        if not stub.is_file():
            raise FileNotFoundError(
                f"the Triton server in {self.folder} has no Python backend for Python {self.version}"
            )
        (folder / "python").mkdir(parents=True)
        for file in [*(server / "backends" / "python").iterdir(), stub]:
            (folder / "python" / file.name).symlink_to(file)


@contextlib.contextmanager
def _running(installed: _Installed, repository: Path, folder: Path, timeout: float) -> Iterator[Server]:
    http, grpc = free_ports()
    region = f"nbdist-triton-{os.getpid()}-{secrets.token_hex(4)}-"
    options = {
        "model-repository": repository,
        "model-control-mode": "explicit",  # a client loads what was added since: see Ensemble.load
        "load-model": "*",
        "backend-directory": folder / "backends",
        "backend-config": f"python,shm-region-prefix-name={region}",
        "http-address": _LOOPBACK,
        "http-port": http,
        "grpc-address": _LOOPBACK,
        "grpc-port": grpc,
        "allow-metrics": "false",
        "log-info": "false",  # tables of all settings
        "exit-timeout-secs": 5,
    }
    log = folder / "log"
    launcher = [sys.executable, "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
    arguments = [str(installed.binary), *(f"--{name}={value}" for name, value in options.items())]
    arguments.append("--disable-auto-complete-config")  # what is exported is complete
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*launcher, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **installed.environ},
            start_new_session=True,  # Ctrl-C is for the notebook; and stubs are ended with it
        )
    server = Server(f"{_LOOPBACK}:{http}", f"{_LOOPBACK}:{grpc}", process.pid, log)
    try:
        _wait_until_ready(process, server, timeout)
        yield server
    finally:
        _stop(process)
        for left in _SHARED_MEMORY.glob(f"{region}*"):  # of a server that was killed
            left.unlink(missing_ok=True)


def free_ports() -> tuple[int, int]:
    """Return free ports of this machine. Another program may take them a moment later."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind((_LOOPBACK, 0))
        return one.getsockname()[1], other.getsockname()[1]


def _wait_until_ready(process: subprocess.Popen[bytes], server: Server, timeout: float) -> None:
    """Wait until all models are loaded; the port for gRPC opens before the one for HTTP."""
    deadline = time.monotonic() + timeout
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy cannot reach our loopback
    while process.poll() is None:
        with contextlib.suppress(OSError, urllib.error.URLError):
            opener.open(f"http://{server.http}/v2/health/ready", timeout=1).close()
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"Triton was not ready after {timeout:g} s. It wrote:\n{_tail(server.log)}")
        time.sleep(0.05)
    if "already in use" in server.log:
        raise _PortTaken
    raise RuntimeError(f"Triton ended with exit code {process.returncode}. It wrote:\n{_tail(server.log)}")


def _tail(log: str, lines: int = 30) -> str:
    return "\n".join(log.rstrip().splitlines()[-lines:])


def _stop(process: subprocess.Popen[bytes], seconds: float = 10.0) -> None:
    """End the server. It ends its stubs when it is asked to end; if it has already ended, they are killed."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
