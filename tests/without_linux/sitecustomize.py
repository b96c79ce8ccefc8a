"""With this folder on PYTHONPATH, nbdist runs as on a system that has nothing of Linux's own, in every process.

What is taken away is what macOS lacks, too. Its own ways (`lo0`, `renamex_np`) are not there either. Other packages
keep /proc and the name of the platform: psutil is made for this one.
"""

from __future__ import annotations

import fcntl
import importlib.abc
import importlib.machinery
import os
import select
import selectors  # noqa: F401 (before epoll goes: a selector has a descriptor here as with macOS's kqueue)
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent.parent
INSTALLED = ROOT / "build" / "site-packages"  # with nbdist as a link
ABSENT: dict[ModuleType, str] = {
    os: "memfd_create MFD_CLOEXEC pidfd_open sched_getaffinity sched_setaffinity eventfd pipe2 splice copy_file_range "
    "posix_fallocate posix_fadvise",
    signal: "pidfd_send_signal SIGRTMIN SIGRTMAX sigtimedwait sigwaitinfo",
    socket: "SO_PEERCRED SO_PASSCRED SOCK_CLOEXEC SOCK_NONBLOCK MSG_CMSG_CLOEXEC AF_NETLINK",
    select: "epoll",
    fcntl: "F_SETPIPE_SZ F_GETPIPE_SZ F_ADD_SEALS F_GET_SEALS",
}
#: In nbdist's sources: what they ask for, and what they get.
REPLACED = {
    b'sys.platform == "linux"': b"False",
    b'sys.platform != "linux"': b"True",
    b"(sys.platform, ": b'("other", ',
    b'"/proc/': b'"/no-proc/',
    b"process_vm_readv": b"process_vm_absent",
}

for module, names in ABSENT.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
            if name in getattr(module, "__all__", []):
                module.__all__.remove(name)


class Loader(importlib.abc.FileLoader, importlib.abc.SourceLoader):
    """Not a `SourceFileLoader`: pytest, which rewrites modules of its plugins, would read the sources itself."""

    def get_data(self, path: str) -> bytes:
        if not path.endswith(".py"):
            raise OSError("no bytecode: it is of the source as it stands")
        data = Path(path).read_bytes()
        if self.name.partition(".")[0] == "nbdist":
            for old, new in REPLACED.items():
                data = data.replace(old, new)
        return data


def nbdist_folder(folder: str) -> importlib.machinery.FileFinder:
    """Finds nbdist itself, and what is in it. Raises `ImportError` for any other folder."""
    found = Path(folder)
    if not (found in (ROOT, INSTALLED) or {ROOT / "nbdist", INSTALLED / "nbdist"} & {found, *found.parents}):
        raise ImportError
    return importlib.machinery.FileFinder(folder, (Loader, [".py"]))


sys.path_hooks.insert(0, nbdist_folder)
sys.path_importer_cache.clear()
# As small as macOS's: what is sent at once has to go in parts.
pair = socket.socketpair


def socketpair(*args: int) -> tuple[socket.socket, socket.socket]:
    ends = pair(*args)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    return ends


socket.socketpair = socketpair  # type: ignore[assignment]
