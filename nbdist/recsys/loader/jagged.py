"""TorchRec's keyed jagged tensor, with the limits of its ids. This module is imported when one is made."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class LoadedJagged(KeyedJaggedTensor):
    """A `KeyedJaggedTensor` whose ids a loader has checked, so that checking them does not wait for a GPU.

    Args:
        limits: The smallest and the largest id of each key that has any.
        values: The ids.
        **others: Further arguments of `KeyedJaggedTensor`.
    """

    def __init__(self, limits: dict[str, tuple[int, int]], *, values: Tensor, **others: Any) -> None:
        super().__init__(values=values, **others)
        self._limits, self._version = limits, _version(values)

    @property
    def limits(self) -> dict[str, tuple[int, int]] | None:
        """Return the given limits; None if other ids may have been written since."""
        version = _version(self.values())
        return self._limits if version is not None and version == self._version else None


def _version(tensor: Tensor) -> int | None:
    """Return the number of writes to a tensor; None if torch does not count them."""
    return None if tensor.is_inference() else tensor._version
