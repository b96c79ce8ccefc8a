"""Records of the collectives of a rank as they begin and end, whatever Python code calls them.

The methods of torch's `ProcessGroup` are wrapped. The functions of `torch.distributed` are not: other modules import
them under names of their own, and `torch.compile` treats them specially. A collective that C++ calls, such as the
`all_reduce` of DistributedDataParallel's backward pass, is not recorded.
"""

from __future__ import annotations

import _thread
import contextlib
import functools
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from ..system.processes import register_after_fork
from ..system.source_files import is_library, package_of
from ..wire.recording import OF_TWO, Recorder, group_named

#: The methods, each with its name in `torch.distributed` and the position of the tensor argument that is recorded.
_METHODS = {
    "allreduce": ("all_reduce", 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0),
    "broadcast": ("broadcast", 0),
    "reduce": ("reduce", 0),
    "allgather": ("all_gather", 1),
    "_allgather_base": ("all_gather_into_tensor", 1),
    "all_gather_single": ("all_gather_into_tensor", 1),
    "allgather_coalesced": ("all_gather_coalesced", 1),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "reduce_scatter": ("reduce_scatter", 0),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 0),
    "reduce_scatter_single": ("reduce_scatter_tensor", 0),
    "alltoall": ("all_to_all", 1),
    "alltoall_base": ("all_to_all_single", 1),
    "all_to_all_single": ("all_to_all_single", 1),
    "barrier": ("barrier", 9),
    "monitored_barrier": ("monitored_barrier", 9),
    "send": ("send", 0),
    "recv": ("recv", 0),
    "recv_anysource": ("recv", 0),
}
_TORCH_DISTRIBUTED = os.path.join("torch", "distributed", "")
#: Functions of torch that wrap a collective. They are not the function that the caller has named.
_WRAPPERS = {"wrapper", "wrapped", "inner", "inner_func", "call", "wait", "is_completed", "decorate_context"}
_WRAPPERS |= {"_call_impl", "_wrapped_call_impl", "_fn", "__call__"}
#: The largest number of frames in which the user's line is searched.
_MAX_FRAMES = 200
#: The largest number of work objects that are remembered. The end of a work object without a wait is not known.
_MAX_WORKS = 2000


class CollectiveRecorder:
    """Records the collectives of this process, in all process groups."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder: Recorder | None = recorder
        self._main = _thread.get_ident()
        self._works: dict[int, int] = {}  # `id` of the work object that a collective returned -> its number
        self._kinds: dict[str, int] = {}  # file -> 0 the user's, 1 torch.distributed, 2 other libraries
        self._groups: dict[str, tuple[Sequence[int], str]] = {}  # name of a group -> its ranks, its text in the record
        self._dtypes: dict[Any, str] = {}
        self._libraries: dict[types.CodeType, str] = {}  # functions of libraries, as they are named in the record
        register_after_fork(self)

    def after_fork(self) -> None:
        """Stop recording in a process that the function forks: that process is not a rank."""
        self._recorder = None

    def joined(self) -> None:
        """Forget the earlier process groups: this rank has joined new ones."""
        self._groups.clear()
        self._works.clear()
        if self._recorder is not None:
            self._recorder.forget_groups()

    def install(self) -> None:
        """Wrap torch's methods, once in a process."""
        from torch._C import _distributed_c10d as c10d

        for name, (kind, tensor) in _METHODS.items():
            method = getattr(c10d.ProcessGroup, name, None)
            if method is not None:
                setattr(c10d.ProcessGroup, name, self._wrapped(method, kind, tensor))
        c10d.Work.wait = self._wrapped_wait(c10d.Work.wait)  # type: ignore[method-assign]
        c10d.Work.is_completed = self._wrapped_poll(c10d.Work.is_completed)  # type: ignore[method-assign]

    def _wrapped(self, method: Callable[..., Any], kind: str, tensor: int) -> Callable[..., Any]:
        @functools.wraps(method, updated=())
        def call(group: Any, *args: Any, **kwargs: Any) -> Any:
            recorder = self._recorder
            if recorder is None:
                return method(group, *args, **kwargs)
            number = self._begin(recorder, group, kind, args, tensor)
            try:
                work = method(group, *args, **kwargs)
            except BaseException:
                recorder.end(number, raised=True)
                raise
            if work is None:
                recorder.end(number)
            else:
                recorder.leave(number)
                if len(self._works) >= _MAX_WORKS:
                    self._works.clear()
                self._works[id(work)] = number
            return work

        return call

    def _wrapped_wait(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method, updated=())
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            number = self._works.pop(id(work), None)
            recorder = self._recorder
            if number is None or recorder is None:
                return method(work, *args, **kwargs)
            recorder.enter(number, _thread.get_ident() == self._main)
            try:
                result = method(work, *args, **kwargs)
            except BaseException:
                recorder.end(number, raised=True)
                raise
            recorder.end(number)
            return result

        return wait

    def _wrapped_poll(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method, updated=())
        def is_completed(work: Any) -> Any:
            completed, number = method(work), self._works.get(id(work))
            recorder = self._recorder
            if number is not None and recorder is not None:
                if completed:
                    recorder.end(number)
                else:
                    recorder.poll(number, _thread.get_ident() == self._main)
            return completed

        return is_completed

    def _begin(self, recorder: Recorder, group: Any, kind: str, args: Sequence[Any], tensor: int) -> int:
        name = group.group_name
        known = self._groups.get(name)
        if known is None:
            ranks = _members(group)
            known = self._groups[name] = ranks, group_named(name, ranks)
        members, group_text = known
        elements, dtype, peer, tag = -1, "", -1, 0
        if tensor < len(args):
            one: Any = args[tensor]
            while isinstance(one, list | tuple):
                one = one[0] if one else None
            if one is not None:
                elements, dtype = one.numel(), self._dtypes.get(one.dtype, "")
                if not dtype:
                    dtype = self._dtypes[one.dtype] = str(one.dtype).removeprefix("torch.")
        if kind in ("send", "recv"):
            peer, tag = args[1:] if len(args) == 3 else (-1, args[1])  # `recv_anysource` names no rank
        elif args:
            peer = getattr(args[-1], "rootRank", -1)
        peer = members[peer] if 0 <= peer < len(members) else -1
        called, file, line, library = self._caller()
        if kind in OF_TWO and called not in OF_TWO:  # a function that calls several, such as batch_isend_irecv
            called = kind
        main = _thread.get_ident() == self._main
        return recorder.begin(called or kind, group_text, elements, dtype, peer, file, line, main, tag, library)

    def _caller(self) -> tuple[str, str, int, str]:
        """Return the function of torch.distributed that was called, the innermost line outside libraries (file and
        number), and the function of another library that this line called.
        """
        called, library = "", None
        frame = sys._getframe(3)
        for _ in range(_MAX_FRAMES):
            code = frame.f_code
            kind = self._kinds.get(code.co_filename)
            if kind is None:
                kind = self._kinds[code.co_filename] = _kind_of(code.co_filename)
            if kind == 0:
                return called, code.co_filename, frame.f_lineno, self._named(library)
            if code.co_name not in _WRAPPERS:
                if kind == 2:
                    library = code
                elif library is None:
                    called = code.co_name
            if frame.f_back is None:
                break
            frame = frame.f_back
        return called, "", 0, self._named(library)

    def _named(self, code: types.CodeType | None) -> str:
        """Return a function of a library as text, such as "Metric.compute of torchmetrics"; empty without one."""
        if code is None:
            return ""
        found = self._libraries.get(code)
        if found is None:
            name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the short name only
            found = self._libraries[code] = f"{name.replace('<locals>.', '')} of {package_of(code.co_filename)}"
        return found


def _kind_of(file: str) -> int:
    if _TORCH_DISTRIBUTED in file:
        return 1
    return 2 if file.startswith("<") or is_library(file) else 0


def _members(group: Any) -> Sequence[int]:
    """Return the global ranks of a process group, in the order of their numbers in the group."""
    world = sys.modules["torch.distributed.distributed_c10d"]._world
    with contextlib.suppress(Exception):  # torch does not list all groups: not the groups of a device mesh, for example
        return sorted(world.pg_group_ranks[group], key=world.pg_group_ranks[group].__getitem__)
    return range(group.size())
