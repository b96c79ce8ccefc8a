"""The ids of the next batch, which are sent to the ranks that store their rows during the backward pass of the current
batch.

TorchRec's `TrainPipelineSparseDist` does this for models that torch.fx can trace and that are called with the batch
itself. Here a model may be called in any way, by `predict`, and between the steps with other batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardedModule


class _Begun(NamedTuple):
    features: KeyedJaggedTensor
    context: Any
    request: Any
    """TorchRec's request in flight: for sizes first, then for ids."""


class InputsAhead:
    """The sender of the next batch's ids for a model's sharded collections. All ranks must call its methods at the same
    time.

    Args:
        collections: The sharded collections, each with the features that it takes.
        device: The device of this rank.
    """

    def __init__(self, collections: Mapping[ShardedModule[Any, Any, Any, Any], set[str]], device: torch.device) -> None:
        self._collections = dict(collections)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._begun: dict[ShardedModule[Any, Any, Any, Any], _Begun] = {}
        for collection in self._collections:
            collection.forward = _Forward(self, collection)

    def start(self, features: KeyedJaggedTensor) -> None:
        """Start sending the ids of a batch; all ranks must have the same number of samples."""
        self._begun.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())  # which the ids have been copied for
        with self._beside():
            for collection, names in self._collections.items():
                if names <= set(features.keys()):
                    context = collection.create_context()
                    request = collection.input_dist(context, features)
                    self._begun[collection] = _Begun(features, context, request)

    def proceed(self) -> None:
        """Continue when the sizes are known."""
        with self._beside():
            for collection, begun in self._begun.items():
                self._begun[collection] = begun._replace(request=begun.request.wait())

    def take(self, collection: ShardedModule[Any, Any, Any, Any], features: Any) -> tuple[Any, Any] | None:
        """Return the context and the ids that have arrived for a collection, if the ids of these features were sent."""
        if collection not in self._begun or self._begun[collection].features is not features:
            return None
        begun = self._begun.pop(collection)
        with self._beside():
            ids = begun.request.wait()
        if self._stream is not None:
            current = torch.cuda.current_stream()
            current.wait_stream(self._stream)
            ids.record_stream(current)  # their memory is not given away before that stream is done with it
            begun.context.record_stream(current)
        return begun.context, ids

    def _beside(self) -> contextlib.AbstractContextManager[Any]:
        """On a GPU, run the work of the `with` block concurrently with the work that is already running."""
        return contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


class _Forward:
    """The forward of a collection, which uses ids that were sent ahead."""

    def __init__(self, ahead: InputsAhead, collection: ShardedModule[Any, Any, Any, Any]) -> None:
        self._ahead, self._collection, self._original = ahead, collection, collection.forward

    def __call__(self, features: Any, *others: Any, **options: Any) -> Any:
        there = self._ahead.take(self._collection, features)
        if there is None:
            return self._original(features, *others, **options)
        context, ids = there
        return self._collection.compute_and_output_dist(context, ids)
