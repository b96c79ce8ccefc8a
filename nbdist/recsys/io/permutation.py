"""A random order of any number of rows, in which each position can be computed separately."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_ROUNDS, _MORE, _FEW = 6, 12, 1 << 12  # with few rows it takes more rounds until every order is about as likely
_CHUNK = 1 << 15  # rows at a time: what is computed on the way stays in the cache
_U = np.uint64


class Permutation:
    """A permutation that moves row i to position ``at(i)`` and depends only on the seed.

    It is a Feistel network on pairs (left, right) with ``row = left * b + right``, where ``a * b`` is slightly more
    than `rows`: each round adds a hash of one half to the other, modulo a or b, which is invertible. A position beyond
    the last row goes through the network again until it is not beyond it ("cycle walking"; Black and Rogaway, Ciphers
    with Arbitrary Finite Domains, 2002). It uses no memory, and any part can be computed anywhere.

    Args:
        rows: The number of rows, 1 to 2**62.
        seed: Any integer.
    """

    def __init__(self, rows: int, seed: int) -> None:
        if not 1 <= rows <= 1 << 62:
            raise ValueError(f"`rows` must be 1 to 2**62, got {rows}")
        self.rows = rows
        self.b = math.isqrt(rows - 1) + 1
        self.a = -(-rows // self.b)
        rounds = _MORE if rows < _FEW else _ROUNDS
        self.keys = np.random.SeedSequence([abs(seed), int(seed < 0)]).generate_state(rounds, np.uint64)

    def at(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        """Return the positions of the rows ``first .. first + count - 1``; shape (count,)."""
        positions = np.arange(first, first + count, dtype=np.uint64)
        for start in range(0, count, _CHUNK):
            chunk = self._once(positions[start : start + _CHUNK])
            beyond = np.flatnonzero(chunk >= _U(self.rows))
            while len(beyond):
                chunk[beyond] = self._once(chunk[beyond])
                beyond = beyond[chunk[beyond] >= _U(self.rows)]
            positions[start : start + _CHUNK] = chunk
        return positions

    def _once(self, row: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        left, right = np.divmod(row, _U(self.b))
        for i, key in enumerate(self.keys):
            if i % 2:
                right = _shift(right, left, key, self.b)
            else:
                left = _shift(left, right, key, self.a)
        return left * _U(self.b) + right


def _shift(
    half: npt.NDArray[np.uint64], other: npt.NDArray[np.uint64], key: np.uint64, modulus: int
) -> npt.NDArray[np.uint64]:
    """Return ``(half + hash of other) % modulus``, computed without a division."""
    mixed = other ^ key
    mixed *= _U(0x9E3779B97F4A7C15)  # splitmix64's finalizer, shortened
    mixed ^= mixed >> _U(32)
    mixed *= _U(0xBF58476D1CE4E5B9)
    mixed >>= _U(32)
    mixed *= _U(modulus)  # modulus <= 2**31: no overflow
    mixed >>= _U(32)
    mixed += half
    np.minimum(mixed, mixed - _U(modulus), out=mixed)  # what is below it wraps around and is the greater one
    return mixed
