"""TorchRec's keyed jagged tensor, with what a loader knows of the ids in it. Imported where one is made."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class LoadedJagged(KeyedJaggedTensor):
    """A `KeyedJaggedTensor` whose ids a loader has looked at: so that a GPU need not be waited for to check them.

    Args:
        limits: The smallest and the largest id of each key that has any.
        values: The ids.
        **others: What else `KeyedJaggedTensor` takes.
    """

    def __init__(self, limits: dict[str, tuple[int, int]], *, values: Tensor, **others: Any) -> None:
        super().__init__(values=values, **others)
        self._limits, self._version = limits, _version(values)

    @property
    def limits(self) -> dict[str, tuple[int, int]] | None:
        """The limits that were given; None where somebody may have written other ids since."""
        version = _version(self.values())
        return self._limits if version is not None and version == self._version else None


def _version(tensor: Tensor) -> int | None:
    """The number of writes to a tensor; None where torch does not count them."""
    return None if tensor.is_inference() else tensor._version
