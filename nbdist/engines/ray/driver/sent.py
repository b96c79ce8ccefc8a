"""Code that Ray runs on a node before nbdist is known to be installed there: Ray sends it by value.

Therefore this module imports nothing at its top that a node may lack.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ....deaths import OTHER_VERSIONS

if TYPE_CHECKING:
    from ..node.agent import Event


def by_value() -> None:
    """Make Ray send the functions and classes of this module by value."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])


def differences(here: Mapping[str, str]) -> str:
    """Describe how the versions on this node differ from the notebook's; empty if they do not."""
    found = {name: _build_of(_version(name)) for name in here}
    return "; ".join(
        f"{name} is {found[name] or 'not installed'}, here {_build_of(version)}"
        for name, version in here.items()
        if found[name] != _build_of(version)
    )


def _build_of(version: str | None) -> str | None:
    """Remove the build's name: torch's `+cpu` and `+cu130` make no difference to pickles."""
    return None if version is None else version.partition("+")[0]


def _version(name: str) -> str | None:
    try:
        if name == "nbdist":
            import nbdist

            return nbdist.__version__
        return platform.python_version() if name == "Python" else importlib.metadata.version(name)
    except ImportError:  # and PackageNotFoundError
        return None


class Host:
    """The actor of a node: checks its versions, then holds the agent of its ranks."""

    def differences(self, here: Mapping[str, str]) -> str:
        return differences(here)

    def node_id(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()

    def draining(self) -> dict[str, int]:
        """Return the nodes of the cluster that will be taken away, with the time: milliseconds since 1970; 0:
        unknown."""
        from ray._private.state import state  # a driver of ray:// has no such thing

        return dict(state.get_draining_nodes())

    def open(self, surroundings: Sequence[Any], *arguments: Any) -> Any:
        import ray

        from nbdist.engines.ray.node import agent as node

        described = node.describe(ray.util.get_node_ip_address(), *surroundings)
        self.agent = node.Agent(*arguments)
        return described

    def poll(self, number: int) -> Any:
        return self.agent.poll(number)

    def deliver(self, *arguments: Any) -> None:
        self.agent.deliver(*arguments)

    def store(self, *arguments: Any) -> Any:
        return self.agent.stored.store(*arguments)

    def ask(self, *arguments: Any) -> Any:
        return self.agent.ask(*arguments)


def work(call: str, here: Mapping[str, str], *arguments: Any) -> Iterator[list[Event]]:
    """Run a chunk of `parallel_map`, and yield its events as they come."""
    if found := differences(here):
        yield [("exit", 0, None, OTHER_VERSIONS.format(found))]
        return
    from nbdist.engines.ray.node import chunk

    yield from chunk.work(call, *arguments)


def work_at_once(*arguments: Any) -> list[Event]:
    """Run a chunk of `parallel_map`, and return its events."""
    return [event for events in work(*arguments) for event in events]
