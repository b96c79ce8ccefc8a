"""A model for Triton's Python backend that recommends items for users, by their ids and what they have taken since.

`FittedRecommender.export` writes this file into a model repository, with ``recommend.json`` and ``arrays.npz`` next to
it; it needs only NumPy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"


class Ids:
    """A sorted index of ids, which finds the position of an id.

    Args:
        values: Integers, shape (n,); or bytes, in an object array.
    """

    def __init__(self, values: Array) -> None:
        self.values = values
        self._places = {value: place for place, value in enumerate(values.tolist())}

    def places(self, values: Array) -> Array:
        """Return the positions of the known values among `values`, each once, in ascending order."""
        found = {self._places.get(value, -1) for value in values.tolist()} - {-1}
        return np.array(sorted(found), dtype=np.int64)


class Recommendations:
    """The recommender whose files are in a folder."""

    def __init__(self, folder: Path) -> None:
        self._given: dict[str, Any] = json.loads((folder / "recommend.json").read_text(encoding="utf-8"))
        with np.load(folder / "arrays.npz") as arrays:
            self._arrays: Mapping[str, Array] = dict(arrays)
        self.names: list[str] = self._given["inputs"]
        self._users, self._items = Ids(self._ids("users")), Ids(self._ids("items"))
        if self._given["kind"] == "IALS":
            vectors = self._arrays["_vectors"]
            self._everyone = self._given["unobserved_weight"] * (vectors.T @ vectors)

    def _ids(self, name: str) -> Array:
        texts = self._given[name]
        if texts is None:
            return self._arrays[name]
        found = np.empty(len(texts), dtype=object)
        found[:] = [text.encode() for text in texts]
        return found

    def __call__(self, users: Array, histories: Array) -> tuple[Array, Array]:
        """Return ids of items and their scores, shape (rows, k), the best first.

        Where fewer than k items are left, the id is a null, and the score is minus infinity.

        Args:
            users: Ids, shape (rows, 1).
            histories: Ids of further items that the users have taken, shape (rows, longest), padded.
        """
        count, k = len(self._items.values), self._given["k"]
        ids = np.full((len(users), k), self._null(), dtype=self._items.values.dtype)
        scores = np.full((len(users), k), -np.inf, dtype=np.float32)
        for row, (user, history) in enumerate(zip(users, histories, strict=True)):
            more, place = self._items.places(history), self._users.places(user)
            taken, seen = (np.union1d(more, self._list(name, place)) for name in ("taken", "seen"))
            found = self._scores(taken) if len(taken) else self._arrays["popularity"].copy()
            found[seen] = -np.inf
            least = np.partition(found, max(0, count - k))[max(0, count - k)]
            best = np.flatnonzero((found >= least) & (found > -np.inf))
            best = best[np.argsort(-found[best], kind="stable")][:k]
            ids[row, : len(best)], scores[row, : len(best)] = self._items.values[best], found[best]
        return ids, scores

    def _null(self) -> Any:
        nulls = {"O": b"\x1a", "u": np.uint64(2**64 - 0xE6), "i": np.int64(-(2**63))}  # as in preprocess.py
        return nulls[self._items.values.dtype.kind]

    def _list(self, name: str, users: Array) -> Array:
        """Return the items that a user has taken; an empty array for an unknown user."""
        values, offsets = self._arrays[f"{name}.values"], self._arrays[f"{name}.offsets"]
        parts = [values[offsets[user] : offsets[user + 1]] for user in users.tolist()]
        return np.concatenate(parts) if parts else values[:0]

    def _scores(self, taken: Array) -> Array:
        """Return a score for each item, float32."""
        arrays, kind = self._arrays, self._given["kind"]
        if kind == "Popularity":
            return arrays["_counts"].copy()
        if kind == "EASE":
            return arrays["_weights"][taken].sum(0)  # type: ignore[no-any-return]
        if kind == "ItemKNN":
            there = np.zeros(len(self._items.values), dtype=np.float32)
            there[taken] = 1
            return (there[arrays["_places"]] * arrays["_cosines"]).sum(1)  # type: ignore[no-any-return]
        vectors = arrays["_vectors"]
        own = vectors[taken]
        weight = len(taken) + self._given["unobserved_weight"] * len(vectors)
        system = self._everyone + own.T @ own + self._given["regularization"] * weight * np.eye(own.shape[1])
        return (vectors @ np.linalg.solve(system, own.sum(0))).astype(np.float32)


class TritonPythonModel:
    """The class that Triton instantiates and calls."""

    def initialize(self, args: dict[str, str]) -> None:
        self._recommendations = Recommendations(Path(args["model_repository"], args["model_version"]))

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return an answer per request."""
        import triton_python_backend_utils as backend  # there in the server alone

        answers = []
        for request in requests:
            columns = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            found = self._recommendations(*(columns[name] for name in self._recommendations.names))
            tensors = [backend.Tensor(name, values) for name, values in zip(("items", "scores"), found, strict=True)]
            answers.append(backend.InferenceResponse(tensors))
        return answers
