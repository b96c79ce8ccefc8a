"""The GPUs that variables such as CUDA_VISIBLE_DEVICES show to a process, read as torch reads them."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

#: The variable that names the GPUs for CUDA: numbers, or names as `nvidia-smi -L` has them.
VISIBLE = "CUDA_VISIBLE_DEVICES"
#: The same for AMD's GPUs, which torch calls CUDA devices, too. There it comes before the one for CUDA.
VISIBLE_HIP = "HIP_VISIBLE_DEVICES"

_KINDS = ("GPU-", "MIG-")
_NUMBER = re.compile(r"[+-]?[0-9]+")


class Visible(NamedTuple):
    """The GPUs that a variable shows."""

    variable: str
    entries: list[str] | None
    """The entries that count: numbers, or names, in full where this machine's are known. None: all GPUs."""
    ended: str
    """The reason why further entries do not count; empty if all do."""

    def said(self, environ: Mapping[str, str]) -> str:
        """Return a text about the entries that do not count, to put after the number of GPUs; empty if all do."""
        return f" ({self.variable}={environ[self.variable]}: {self.ended})" if self.ended else ""


def visible(environ: Mapping[str, str], known: Sequence[str]) -> Visible:
    """Return the GPUs that a process with these variables sees, given the names of this machine's GPUs, if they are
    known.

    A list is of one kind: numbers, names that begin with GPU-, or names that begin with MIG-. It ends at the first
    entry of another kind, and at one that this machine does not have. A list that has an entry twice shows no GPU.
    """
    variable = VISIBLE_HIP if is_hip() and VISIBLE_HIP in environ else VISIBLE
    text = environ.get(variable)
    if text is None:
        return Visible(variable, None, "")
    kind = next((kind for kind in _KINDS if text.startswith(kind)), "")
    parts, entries, ended = text.split(","), list[str](), ""
    for part in parts:
        entry = part if kind and part.startswith(kind) else "" if kind else _number(part)
        if not entry:
            # Without a GPU on purpose: an empty list, or a negative number.
            ended = "" if part.strip() in ("", "-1") else f"the list ends at {part!r}, which is {_not_of(kind)}"
            break
        if entry in entries:
            return Visible(variable, [], _twice(entry))
        entries.append(entry)
    return _on_this_machine(Visible(variable, entries, ended), kind, known)


def _on_this_machine(listed: Visible, kind: str, known: Sequence[str]) -> Visible:
    """Return the entries that exist on this machine, with their names in full."""
    if not known or kind == "MIG-":
        return listed
    entries: list[str] = []
    for entry in listed.entries or ():
        found = [name for name in known if name.startswith(entry)] if kind else known[int(entry) : int(entry) + 1]
        if len(found) != 1:
            what = "the beginning of several names" if found else "no GPU of this machine"
            return listed._replace(entries=entries, ended=f"the list ends at {entry!r}, which is {what}")
        own = found[0] if kind else entry
        if own in entries:
            return listed._replace(entries=[], ended=_twice(own))
        entries.append(own)
    return listed._replace(entries=entries)


def _number(part: str) -> str:
    """Return the number at the beginning of an entry; empty if there is none, or a negative one."""
    found = _NUMBER.match(part.strip())
    number = -1 if found is None else int(found[0])
    return str(number) if number >= 0 else ""


def _not_of(kind: str) -> str:
    return f"no name that begins with {kind}" if kind else "no number of a GPU"


def _twice(entry: str) -> str:
    return f"a list with {entry!r} twice shows no GPU"


def variables(shown: str) -> dict[str, str]:
    """Return the variables that show these GPUs to a process; an empty text shows none."""
    # HIP takes an empty list for none, and reads its own variable first.
    return {VISIBLE: shown} | ({VISIBLE_HIP: shown or "-1"} if is_hip() else {})


def is_hip() -> bool:
    """Return whether torch is built for AMD's GPUs. torch is not imported for it."""
    torch: Any = sys.modules.get("torch")
    return bool(torch.version.hip) if hasattr(torch, "version") else "+rocm" in build()


@functools.cache
def build() -> str:
    """Return the version of torch with the kind of its build, such as 2.13.0+cpu; empty if torch is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return ""
