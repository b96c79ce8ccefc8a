"""Checks of the system before ranks start: the errors of ranks would not name the cause."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import sys

from ..errors import NbdistError
from ..wire.rendezvous import LOOPBACK, LOOPBACK_INTERFACE

_SIOCGIFFLAGS, _IFF_UP = 0x8913, 1


def check_proc() -> None:
    """Raise `NbdistError` unless /proc, which Linux has, shows the processes of this PID namespace."""
    if sys.platform != "linux":
        return
    try:
        pid = os.readlink("/proc/self")
    except OSError as exc:
        raise NbdistError(f"/proc must be mounted, got {exc.strerror!r}: mount -t proc proc /proc") from exc
    if pid != str(os.getpid()):
        raise NbdistError(
            f"/proc must show the processes of this PID namespace, got process {pid} for process {os.getpid()}: mount "
            f"-t proc proc /proc (`unshare --mount-proc` does it)"
        )


def check_loopback() -> None:
    """Raise `NbdistError` unless the interface over which ranks of this machine communicate is up, with its address."""
    if sys.platform != "linux":
        return
    with socket.socket() as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFFLAGS, struct.pack("16sh14x", LOOPBACK_INTERFACE.encode(), 0))
        except OSError:  # a sandbox refuses the question
            return
    if not struct.unpack("16sh14x", answer)[1] & _IFF_UP:
        raise NbdistError(
            f"the network interface {LOOPBACK_INTERFACE!r} must be up, because ranks of one machine communicate over "
            f"it, and it is down, as in a new network namespace: ip link set {LOOPBACK_INTERFACE} up"
        )
    with socket.socket() as sock:
        try:
            sock.bind((LOOPBACK, 0))
        except OSError as exc:
            if exc.errno == errno.EADDRNOTAVAIL:
                raise NbdistError(
                    f"the network interface {LOOPBACK_INTERFACE!r} must have the address {LOOPBACK}, because ranks of "
                    f"one machine communicate over it, and it has none: ip addr add {LOOPBACK}/8 dev "
                    f"{LOOPBACK_INTERFACE}"
                ) from exc
