"""`gpufn.put`: store a value once, and pass a reference to it to many calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from gpufn.data import channel
from gpufn_core.encoding import media, values
from gpufn_core.errors import InvalidInput, ResultNotEncodable
from gpufn_core.protocol.data import VALUE_BYTES, GetValue, PutValue, StoredValue, check_seconds

_TTL_S: Final = 3600.0


@dataclass(frozen=True)
class Ref:
    """A reference to a stored value. Functions accept it as an argument with the type hint `Ref`.

    >>> from gpufn import Ref, gpu_function
    >>> @gpu_function
    ... def search(index: Ref, query: str) -> list[int]:
    ...     return [row for row, text in enumerate(index.get()) if query in text]
    """

    id: str
    size: int = 0

    def get(self) -> Any:
        """Return the value: in a worker from the copy on its node, or else from the platform's store. Raises
        DataNotFound if it has expired."""
        _, body = channel.current().execute(GetValue(self.id))
        return values.decode_value(media.NATIVE, body)


def put(value: Any, *, ttl: float = _TTL_S) -> Ref:
    """Store a value of at most 60 MiB for `ttl` seconds, and return a reference to it. Any client that has the
    reference and may call functions can read the value. Raises InvalidInput for a value that cannot be sent.

    >>> import gpufn
    >>> def search_all(index: list[str], queries: list[str]) -> None:
    ...     reference = gpufn.put(index, ttl=600)
    """
    check_seconds("ttl", ttl)
    try:
        _, body = values.encode_result(value, media.NATIVE, limit_bytes=VALUE_BYTES, what="value")
    except ResultNotEncodable as error:
        raise InvalidInput(error.message) from error
    stored = msgspec.msgpack.decode(channel.current().execute(PutValue(ttl), body)[1], type=StoredValue)
    return Ref(stored.id, stored.size)
