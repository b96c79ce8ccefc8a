"""ipywidgets in a rank: widgets of all versions, with comms that are connected to the kernel."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .shell import shell


def handle_comm_message(content: dict[str, Any], buffers: Sequence[bytes]) -> bool:
    """Pass a message of the page to a widget of this rank. Returns whether the widget exists."""
    if "comm" not in sys.modules and shell() is None:
        return True  # here will be none
    manager = sys.modules["comm"].get_comm_manager() if "comm" in sys.modules else shell().kernel.comm_manager
    comm = manager.comms.get(content["comm_id"])
    if comm is not None:
        comm.handle_msg({"content": content, "buffers": buffers})
    return comm is not None


def connect_widgets(rank_shell: Any, send: Callable[..., None], parent: Mapping[str, Any]) -> None:
    """Make the widgets of this rank send by `send`, in any version of ipywidgets.

    The connection of a widget to its view is a comm. From ipykernel 6.18 on, `comm.create_comm` makes it. Before that,
    and for ipywidgets 7 with any ipykernel, it is an `ipykernel.comm.Comm`, and `kernel.comm_manager` must exist.

    Args:
        rank_shell: The rank's IPython shell.
        send: Takes the kind of a message and, by name, its content with `metadata` and `buffers` (as hex).
        parent: The substitute for the front end's message that started the cell.
    """
    kernel = types.SimpleNamespace(get_parent=lambda channel=None: parent, _parent_header=parent)
    if importlib.util.find_spec("comm") is None:
        kernel.comm_manager = _Comms()
    else:
        comm: Any = importlib.import_module("comm")
        kernel.comm_manager = comm.get_comm_manager()
        comm.create_comm = _comm_class(comm.base_comm.BaseComm, kernel, send)
    rank_shell.kernel = kernel
    if _is_old("ipykernel", (6, 18)) or _is_old("ipywidgets", (8,)):
        module = importlib.import_module("ipykernel.comm")
        module.Comm = module.comm.Comm = _comm_class(module.Comm, kernel, send)  # type: ignore[attr-defined]


def _is_old(package: str, least: tuple[int, ...]) -> bool:
    """Return whether a package is installed in a version below `least`, read from its metadata, which is faster than an
    import."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        parts = version(package).split(".")[: len(least)]
    except PackageNotFoundError:
        return False
    return tuple(int(part) for part in parts) < least


def _comm_class(base: Any, kernel: Any, send: Callable[..., None]) -> Any:
    """Make the class of a rank's comms, whose other ends are in the front end. `base` has the other methods."""

    def publish_msg(
        self: Any, msg_type: str, data: Any = None, metadata: Any = None, buffers: Any = None, **keys: Any
    ) -> None:
        send(
            msg_type,
            data=data or {},
            comm_id=self.comm_id,
            metadata=metadata or {},
            buffers=[bytes(buffer).hex() for buffer in buffers or []],
            **keys,
        )

    def handle_msg(self: Any, msg: dict[str, Any]) -> None:
        # Without the events of a cell, which show figures: the function may just be drawing one.
        if self._msg_callback is not None:
            self._msg_callback(msg)

    # A property, since the old class has a trait of that name that takes nothing but a real kernel.
    own_kernel = property(lambda self: kernel, lambda self, value: None)
    names = {"kernel": own_kernel, "publish_msg": publish_msg, "handle_msg": handle_msg}
    return type("RankComm", (base,), {**names, "_publish_msg": publish_msg})  # as it is called before ipykernel 6.18


class _Comms:
    """Registry of comms where the package `comm` is not installed."""

    def __init__(self) -> None:
        self.comms: dict[str, Any] = {}
        self.targets: dict[str, Any] = {}

    def register_target(self, name: str, handler: Any) -> None:
        self.targets[name] = handler

    def unregister_target(self, name: str, handler: Any) -> Any:
        return self.targets.pop(name)

    def register_comm(self, comm: Any) -> str:
        self.comms[comm.comm_id] = comm
        return str(comm.comm_id)

    def unregister_comm(self, comm: Any) -> None:
        self.comms.pop(comm.comm_id)

    def get_comm(self, comm_id: str) -> Any:
        return self.comms.get(comm_id)
