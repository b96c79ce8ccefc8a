"""Parts of messages: the place of a rank in the process group, the kernel's settings, and the header of a call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .rendezvous import RendezvousAddress

#: A variable of ranks on a cluster, which are notified when one of their machines will be taken away.
NOTICES = "NBDIST_NOTICES"


class Slot(NamedTuple):
    """The position of a rank in torchrun's terms (rank, local rank, and so on), and its share of the node."""

    node: int
    local_rank: int
    local_world_size: int
    interface: str
    """The network interface for process groups; empty if the libraries choose it."""
    threads: int
    """The number of threads that is the rank's share."""
    cores: Sequence[int]
    """The cores that are the rank's share, if ranks are bound to cores."""


@dataclass(frozen=True)
class World:
    """The place of a rank: its numbers, the store of its process group, and the part of the machine that it may use."""

    rank: int
    world_size: int
    device: str
    """`cpu` or `cuda:N`, where N counts the GPUs that the rank sees; `cuda` is the GPU with the number of the rank on
    its node."""
    backend: str
    slot: Slot
    rendezvous: RendezvousAddress
    threads: int
    """The number of threads for the kernels of torch and BLAS."""
    cores: Sequence[int] | None = None
    """The cores that the rank is bound to. None: all cores."""
    visible: str | None = None
    """The rank's CUDA_VISIBLE_DEVICES. None: the variable is not changed."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of `init_process_group`, such as the `timeout` of a collective in seconds."""
    shares_gpu: bool = False
    """True if other ranks of this machine use the same GPU."""
    group: int = 0
    """The number of the process group among the groups that the ranks join, one after the other."""


@dataclass(frozen=True)
class Setting:
    """The state of the kernel that its ranks adopt."""

    environ: Mapping[str, str]
    cwd: str
    path: Sequence[str]
    argv: Sequence[str]
    reads_memory: bool = False
    """True if the kernel may try to read big answers out of the rank's memory."""
    standard: Sequence[str] = ()
    """Modules of Python's standard library that the kernel has loaded, although the rank would find others on `path`
    first."""


@dataclass(frozen=True)
class PerRank:
    """An argument with a value for each rank of a call, in the order of the ranks."""

    values: Sequence[Any]


@dataclass(frozen=True)
class Header:
    """The header of a call, which a rank reads before it can open the parcel."""

    imports: str
    sources: Mapping[str, str] = field(default_factory=dict)
    """The source text, by file name, of code that is in no file (the cells of a notebook)."""
    cells: Mapping[str, int] = field(default_factory=dict)
    """The number of each cell, by the same file names."""
    need: frozenset[str] = frozenset()
    """Names that the caller listed. They take precedence over the same names from the import block."""
    settings: Mapping[str, bytes] = field(default_factory=dict)
    """Pickles of the settings of the notebook, by name."""
    imported_alongside: Sequence[str] = ()
    """Modules that the notebook has imported, from packages that the call uses."""
    modules: Sequence[str] = ()
    """Modules that the call uses, in the order in which the notebook has imported them."""
    places: Mapping[str, tuple[str | None, list[str] | None]] = field(default_factory=dict)
    """The file and the submodule folders of modules that a rank cannot find by `sys.path`."""
    own_sources: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)
    """The source of each of the user's modules that the notebook has executed: as `own_sources` returns them."""
    gone: Sequence[str] = ()
    """Variables that earlier calls have sent, and that the notebook no longer has."""
    in_modules: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """For variables whose object the user's own modules have, too, as after `from settings import RATES`: each module
    and its attribute."""


@dataclass(frozen=True)
class ProcessStart:
    """The header of a process of a context, which the process reads before it can open its parcel."""

    library: str
    """The library of the process: "multiprocessing" or "multiprocess"."""
    preparation: Mapping[str, Any]
    """The argument of the library's `spawn.prepare`: name, key, log level and the like."""
    threads: int
    """The number of threads for the kernels of torch and BLAS."""
    seeds: Sequence[int]
    """The seeds for `random`, NumPy and torch."""
    trackers: Sequence[str]
    """The libraries whose resource trackers the process shares with the notebook, in the order of their descriptors,
    which come first. A tracker of its own would unlink, at its end, objects that the notebook still uses."""
    worker: bool
    """True if the process works for a pool. Then all of its messages are for the notebook."""
