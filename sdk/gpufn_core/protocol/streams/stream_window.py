"""The flow control of a stream: the items on the way between a generator and the reader. Pure.

At most STREAM_WINDOW items are on the way, and no further item is sent while they have WINDOW_BYTES. Without the second
bound, a client that reads nothing would let 64 items of 7 MiB wait in the memory of each process.
"""

from __future__ import annotations

from collections import deque
from typing import Final

STREAM_WINDOW: Final = 64  # items
WINDOW_BYTES: Final = 4 << 20


class UnreadItems:
    """The items that were sent but not read yet.

    >>> unread = UnreadItems()
    >>> unread.add(WINDOW_BYTES), unread.has_room
    (None, False)
    >>> unread.read_until(1), unread.has_room
    (None, True)
    """

    __slots__ = ("_bytes", "_read", "_sizes")

    def __init__(self) -> None:
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._read = 0

    @property
    def has_room(self) -> bool:
        """True if a further item may be sent."""
        return self._bytes < WINDOW_BYTES and len(self._sizes) < STREAM_WINDOW

    def add(self, size: int) -> None:
        self._sizes.append(size)
        self._bytes += size

    def read_until(self, count: int) -> None:
        """Record that the reader has read `count` items in total."""
        while self._read < count and self._sizes:
            self._bytes -= self._sizes.popleft()
            self._read += 1


class ReadItems:
    """The items that were read since the generator last got credit. Notify it early enough that it need not wait.

    >>> read = ReadItems()
    >>> read.add(10), read.add(WINDOW_BYTES // 4)
    (False, True)
    """

    __slots__ = ("bytes", "count")

    def __init__(self) -> None:
        self.count = self.bytes = 0

    def add(self, size: int) -> bool:
        """Add an item. Return True if credit is due; then call `clear`."""
        self.count += 1
        self.bytes += size
        return self.count >= STREAM_WINDOW // 2 or self.bytes >= WINDOW_BYTES // 4

    def clear(self) -> None:
        self.count = self.bytes = 0
