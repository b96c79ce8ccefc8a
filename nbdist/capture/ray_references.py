"""References to objects and actors of a Ray cluster: the reader first connects to the same cluster."""

from __future__ import annotations

import logging
import sys
from typing import Any


def reduce_of_ray(obj: Any) -> tuple[Any, ...] | None:
    """Return the reduction of a reference to an object or an actor; None for other objects.

    Ray's own pickle of a reference contains its owner, and can be read only in another process of the cluster.
    """
    ray = sys.modules.get("ray")
    if ray is None or type(obj).__module__.partition(".")[0] != "ray":
        return None
    if not isinstance(obj, (ray.ObjectRef, ray.actor.ActorHandle)) or not ray.is_initialized():
        return None
    context = ray.get_runtime_context()
    return _read, (context.gcs_address, context.namespace, ray.cloudpickle.dumps(obj))


def _read(address: str, namespace: str, pickled: bytes) -> Any:
    import ray

    if not ray.is_initialized():
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
    return ray.cloudpickle.loads(pickled)
