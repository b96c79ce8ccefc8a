"""The Python stacks of ranks, and a line of text for each rank about what it does."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...engines.contract import Ranks
from ...notebook.shell import cell_numbers
from ...system.source_files import is_library

_THREAD = re.compile(r"^Thread (-?\d+) \(", re.M)
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?),? in (?P<name>.*)$', re.M)
#: The ends of the paths of the rank's own loop, whose folder may be another one on another machine. The frames of the
#: function that the rank runs are above these.
_OWN = tuple(os.path.join("nbdist", "rank", name) for name in ("loop.py", "call.py", "outcome.py", "world.py"))
#: The file whose frame is on top of the stack for a moment when an interrupt arrives.
_INTERRUPT = os.path.join("nbdist", "rank", "interrupts.py")
#: The file that asks the kernel for typed input.
_KEYBOARD = os.path.join("nbdist", "rank", "keyboard.py")
#: The function that the statement `import` calls.
_IMPORT = "_find_and_load"
#: Functions that wrap another one. They are not the function that the caller has named.
_WRAPPERS = {"wrapper", "wrapped", "inner", "decorate_context", "_call_impl", "_wrapped_call_impl", "__call__"}


#: The number of ranks up to which each rank has a line of its own.
_FEW = 8


@dataclass(frozen=True)
class Frame:
    """A frame of a stack: file, line and function."""

    file: str
    line: str
    name: str

    def place(self, numbers: Mapping[str, int]) -> str:
        """Return the file or cell, and the line. `numbers`: the number of each cell by its file name."""
        number = numbers.get(self.file)
        return (
            f"{os.path.basename(self.file)}:{self.line}" if number is None else f"Cell In[{number}], line {self.line}"
        )


def take(ranks: Ranks, pending: Container[int] | None = None) -> dict[int, list[Frame] | None]:
    """Fetch the stack of each rank's main thread, innermost frame first; None for a rank that is not in `pending`."""
    numbers = range(len(ranks.pids))
    found = ranks.stacks([rank for rank in numbers if pending is None or rank in pending])
    return {rank: main_thread(found[rank]) if rank in found else None for rank in numbers}


def other_threads(dump: str) -> list[tuple[int, list[Frame]]] | None:
    """Parse a rank's answer: the other threads that run Python code, each with its number in the system (-1: not known)
    and its innermost frames. None if the answer does not name them.
    """
    _, *parts = _THREAD.split(dump)
    threads = [
        (int(number), [Frame(**match.groupdict()) for match in _FRAME.finditer(text)])
        for number, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    return threads or None


def main_thread(dump: str) -> list[Frame]:
    """Parse a dump of `faulthandler`: the frames of the main thread, innermost first, down to the rank's own loop."""
    for thread in re.split(r"^(?=Current thread|Thread)", dump, flags=re.M):
        frames = [Frame(**match.groupdict()) for match in _FRAME.finditer(thread)]
        frames = [frame for frame in frames if not frame.file.endswith(_INTERRUPT)]
        own = [i for i, frame in enumerate(frames) if frame.file.endswith(_OWN)]
        if own:
            return frames[: own[0] + 1]
    return []


def describe(frames: list[Frame] | None) -> str:
    """Describe in a few words what a rank does, given its stack."""
    if frames is None:
        return "has returned"
    if not frames:
        return "has not started yet, or does not answer"
    *inner, own = frames
    if own.name == "serve":  # the answer may not have arrived yet
        return "has returned" if any(frame.name == "send" for frame in inner) else "waits for a call"
    if own.name in ("join", "_join"):
        return "is joining the process group"
    if own.name == "leave":
        return "is leaving the process group of the last call"
    if any(frame.file.endswith(_KEYBOARD) for frame in inner):
        return "waits for typed input"
    user = of_user(inner)
    if user is None:
        if any(frame.name == _IMPORT for frame in inner):
            return "is importing a module"
        return f"is in {inner[0].name if inner else 'the function'}"
    place = user.place(cell_numbers())
    if user is not inner[0] and inner[inner.index(user) - 1].name == _IMPORT:
        return f"is importing a module at {place}"
    called = [frame.name for frame in reversed(inner[: inner.index(user)]) if frame.name not in _WRAPPERS]
    return f"waits in {called[0]} at {place}" if called else f"is in {user.name} at {place}"


def of_user(frames: Iterable[Frame]) -> Frame | None:
    """Return the innermost frame outside libraries, or None."""
    return next((frame for frame in frames if not (frame.file.startswith("<frozen") or is_library(frame.file))), None)


def raised_at(text: str) -> Frame | None:
    """Return the innermost frame of the user's code in the text of a traceback, or None."""
    text = text[max(text.rfind("Traceback (most recent call last)"), 0) :]
    return of_user(reversed([Frame(*match.group("file", "line", "name")) for match in _FRAME.finditer(text)]))


def report(stacks: Mapping[int, list[Frame] | None]) -> str:
    """Return one line about what all ranks do, then their stacks, innermost call last.

    With many ranks, those with the same stack are listed together.
    """
    lines = ["; ".join(f"{who} {what}" for who, what in _together(stacks, describe))]
    numbers = cell_numbers()

    def stack(frames: list[Frame] | None) -> str:
        calls = reversed(frames[:-1]) if frames else ()  # a function in C has no frame
        return "\n".join(f"  {frame.place(numbers)} in {frame.name}" for frame in calls)

    for who, text in _together(stacks, stack):
        if text:
            lines += [f"\nStack of {who} (most recent call last):", text]
    return "\n".join(lines)


def _together(
    stacks: Mapping[int, list[Frame] | None], text: Callable[[list[Frame] | None], str]
) -> list[tuple[str, str]]:
    """Pair each text about a rank with the names of its ranks: one pair for each rank or, with many ranks, for each
    distinct text.
    """
    if len(stacks) <= _FEW:
        return [(f"rank {rank}", text(frames)) for rank, frames in stacks.items()]
    groups: dict[str, list[int]] = {}
    for rank, frames in stacks.items():
        groups.setdefault(text(frames), []).append(rank)
    return [
        (f"rank {ranks[0]}" if len(ranks) == 1 else f"each of {len(ranks)} ranks ({_ranges(ranks)})", what)
        for what, ranks in groups.items()
    ]


def _ranges(ranks: Sequence[int]) -> str:
    """Return ranks as text, such as `0-3, 7`."""
    known = set(ranks)
    starts = [rank for rank in ranks if rank - 1 not in known]
    ends = [rank for rank in ranks if rank + 1 not in known]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))
