"""`Dict`: a dict by name, for functions and clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from gpufn.data import channel
from gpufn.data.queue import encode
from gpufn_core.encoding import media, values
from gpufn_core.protocol.data import GetEntry, ListKeys, RemoveEntry, SetEntry, check_seconds
from gpufn_core.spec.volume_spec import check_name

_ABSENT: Final = object()


class Dict:
    """A dict by name. Its keys are text. Each operation is one request; of two writes, the later one stays.

    `ttl`: seconds after which an entry disappears, at most 7 days. Default: it stays.

    >>> from gpufn import Dict
    >>> seen = Dict("seen", ttl=3600)
    >>> def is_new(url: str) -> bool:
    ...     return seen.add(url, True)
    """

    def __init__(self, name: str, *, ttl: float | None = None) -> None:
        check_name(name)
        check_seconds("ttl", ttl)
        self.name = name
        self._ttl_s = ttl

    def __getitem__(self, key: str) -> Any:
        value = self.get(key, _ABSENT)
        if value is _ABSENT:
            raise KeyError(key)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self._set(key, value, only_new=False)

    def __delitem__(self, key: str) -> None:
        _, body = channel.current().execute(RemoveEntry(self.name, key))
        if not msgspec.msgpack.decode(body, type=bool):
            raise KeyError(key)

    def __contains__(self, key: str) -> bool:
        return self.get(key, _ABSENT) is not _ABSENT

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or `default` if the key is absent."""
        content_type, body = channel.current().execute(GetEntry(self.name, key))
        return values.decode_value(content_type, body) if content_type else default

    def add(self, key: str, value: Any) -> bool:
        """Store a value if the key is absent. Return whether it was stored: of several callers, one gets True."""
        return self._set(key, value, only_new=True)

    def keys(self) -> list[str]:
        """List the keys, the oldest change first."""
        return msgspec.msgpack.decode(channel.current().execute(ListKeys(self.name))[1], type=list[str])

    def _set(self, key: str, value: Any, *, only_new: bool) -> bool:
        operation = SetEntry(self.name, key, media.NATIVE, self._ttl_s, only_new)
        _, body = channel.current().execute(operation, encode(value))
        return msgspec.msgpack.decode(body, type=bool)
