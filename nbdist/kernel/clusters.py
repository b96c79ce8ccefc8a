"""`cluster`: Ray on hosts or on Slurm's nodes, started from the notebook, and ended with it."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from .. import engines
from ..checks import check_count, check_number, nearest
from ..engines.contract import EngineOptions
from ..engines.ray.launch import launching
from ..errors import NbdistError, entry
from .calls.arguments import check_platform
from .cell.cell import Cell


class Cluster:
    """Ray on several machines, until `close`, or until the notebook and all named sessions there have ended; the result
    of `nbdist.cluster`.

    Attributes: `options`, the engine options for this cluster.
    """

    def __init__(self, machines: launching.Machines, options: EngineOptions, where: str) -> None:
        self.options, self._machines, self._where = options, machines, where
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "running" if self._machines.alive() else "lost, in part at least"
        return f"<nbdist.cluster: {self._where}, {state}>"

    def running(self) -> bool:
        """Return whether Ray runs on all machines, as far as this process knows."""
        return not self._closed and self._machines.alive()

    def close(self) -> None:
        """End Ray on all machines; named sessions there lose their ranks. Later calls run on this machine again."""
        if self._forget():
            self._machines.close()

    def leave(self) -> None:
        """End Ray on all machines. If named sessions run there, Ray ends with the last of them."""
        if self._forget():
            self._machines.leave() if self._machines.lent else self._machines.close()

    def _forget(self) -> bool:
        """Make later calls run on this machine again; return False if they already do."""
        if self._closed:
            return False
        self._closed = True
        atexit.unregister(self.leave)
        if engines.in_use() == self.options:
            engines.use("local")
        return True

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


_last: tuple[Any, Cluster] | None = None


@entry
def cluster(
    where: str | Sequence[str],
    *,
    nodes: int | None = None,
    gpus: int = 0,
    options: Sequence[str] = (),
    python: str | None = None,
    ray_start: Sequence[str] = (),
    wait: float = 300.0,
    **engine: Any,
) -> Cluster:
    """Start Ray on machines, run all later calls there (like `nbdist.use`), and end Ray with the notebook, or with the
    last named session there.

    Each machine needs Python, torch, Ray and nbdist in the notebook's versions. A difference, or a machine that cannot
    be reached, raises an error at once. Ray on the machines accepts only clients with its token, which this notebook
    has. A second call with the same arguments returns the running cluster; with other arguments, it ends that one
    first.

    Args:
        where: "slurm": nodes that `srun` gives, in the notebook's allocation or in a new one. A list: hosts that ssh
            reaches without a question; the first host becomes the head; the notebook needs no other way to them.
        nodes: The number of Slurm's nodes.
        gpus: The number of GPUs of each machine. If it is not 0, each rank gets a GPU of its own.
        options: Further arguments of srun (`["--partition=gpu", "--time=4:00:00"]`), or of ssh (`["-p", "2222"]`).
        python: The path of the interpreter on the machines. None: the path of this interpreter.
        ray_start: Further arguments of `ray start`, such as `["--num-cpus=16"]`. By default, Ray gets the cores that a
            program may use on the machine.
        wait: The longest time to wait until Ray runs on all machines, in seconds, including the time in Slurm's queue.
        **engine: Further fields of `RayOptions`, such as `cpus` and `placement`.

    Returns:
        The cluster, with a method `close`; also a context manager.

    Raises:
        TypeError, ValueError: An argument is invalid.
        NbdistError: ssh or srun is missing; a host cannot be reached, or has no Ray, another version or too few GPUs;
            or the `wait` is over.

    Examples:
        >>> cluster(["host1", "host2"], nodes=2)
        Traceback (most recent call last):
        ValueError: nodes=2 is for "slurm": a list names its hosts

    On four nodes of Slurm::

        nbdist.cluster("slurm", nodes=4, gpus=8, options=["--partition=gpu"])
        in_ddp(32, train)
    """
    global _last
    check_platform()
    check_count(gpus, least=0, name="gpus")
    check_number(wait, above=0, name="wait", unit="seconds")
    hosts = _check_where(where, nodes)
    fields = launching.engine_options(gpus, engine)  # refuses before anything starts
    if fields.address is not None:
        raise TypeError("cluster() sets address= itself: leave it out")
    if importlib.util.find_spec("ray") is None:
        raise NbdistError('a Ray cluster needs Ray here, too: pip install "nbdist[ray]"')
    asked = repr((where, nodes, gpus, options, python, ray_start, engine))
    if _last is not None and _last[0] == asked and _last[1].running():
        engines.use(_last[1].options)
        return _last[1]
    if _last is not None:
        _last[1].leave()
    about: dict[str, Any] = {"python": python or sys.executable, "arguments": ray_start, "wait": wait}
    about |= {"gpus": gpus, "say": Cell().notice}
    if hosts is None:
        assert nodes is not None
        start = functools.partial(launching.by_slurm, nodes, options)
        words = f"{nodes} node{'s' * (nodes > 1)} of Slurm"
    else:
        start = functools.partial(launching.by_ssh, hosts, options)
        words = ", ".join(hosts)
    machines = start(**about)
    own = Cluster(machines, dataclasses.replace(fields, address=machines.address), words)
    _last = asked, own
    atexit.register(own.leave)
    engines.use(own.options)
    return own


def _check_where(where: Any, nodes: Any) -> list[str] | None:
    """Return the names of the hosts; None for Slurm."""
    if where == "slurm":
        if nodes is None:
            raise ValueError('nodes must be the number of nodes: cluster("slurm", nodes=2)')
        check_count(nodes, least=1, name="nodes")
        return None
    if isinstance(where, str) or not where or not all(isinstance(host, str) and host for host in where):
        raise ValueError(f"where must be 'slurm' or a list of hosts, got {where!r}{nearest(where, ['slurm'])}")
    if nodes is not None:
        raise ValueError(f'nodes={nodes!r} is for "slurm": a list names its hosts')
    for host in where:
        if host.startswith("-") or list(where).count(host) > 1:
            raise ValueError(f"{host!r} is no host" if host.startswith("-") else f"{host!r} is there twice")
    return list(where)
