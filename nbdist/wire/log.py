"""The last output of a rank, which the kernel keeps, and on a cluster the node of the rank."""

from __future__ import annotations

import collections

#: Characters of output kept of each rank; older text is dropped first.
KEPT = 1 << 20


class Log:
    """The last output of one rank."""

    def __init__(self) -> None:
        self._chunks: collections.deque[str] = collections.deque()
        self._size = 0

    def write(self, text: str) -> None:
        """Append text."""
        self._chunks.append(text)
        self._size += len(text)
        while self._size > KEPT and len(self._chunks) > 1:
            self._size -= len(self._chunks.popleft())

    def replace(self, text: str) -> None:
        """Replace the whole text."""
        self._chunks = collections.deque([text])
        self._size = len(text)

    def text(self, most: int = KEPT) -> str:
        """Return the last text, about `most` characters."""
        chunks, size = collections.deque[str](), 0
        for chunk in reversed(list(self._chunks)):
            if size >= most:
                break
            chunks.appendleft(chunk)
            size += len(chunk)
        return "".join(chunks)

    def tail(self, lines: int = 50) -> str:
        """Return the last lines."""
        return "\n".join(self.text().splitlines()[-lines:])
