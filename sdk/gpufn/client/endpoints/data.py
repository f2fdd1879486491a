"""Queues and dicts: the endpoints that list and delete them. Their items are read and written with `gpufn.Queue` and
`gpufn.Dict`."""

from __future__ import annotations

import msgspec

from gpufn.client.http import Requests


class QueueView(msgspec.Struct, frozen=True):
    """A queue. `items` includes the leased ones."""

    name: str
    items: int


class DictView(msgspec.Struct, frozen=True):
    """A dict."""

    name: str
    entries: int


class DataRequests(Requests):
    """Endpoints of queues and dicts. A name without an environment is in the client's environment, or in `default`."""

    def queues(self) -> list[QueueView]:
        """List the queues that have items, by name."""
        return self._member(list[QueueView], "queues", "GET", "/v1/queues")

    def delete_queue(self, name: str) -> None:
        """Delete a queue with its items. Raises DataNotFound if there is none."""
        self._request("DELETE", f"/v1/queues/{self._function_path(name)}")

    def dicts(self) -> list[DictView]:
        """List the dicts that have entries, by name."""
        return self._member(list[DictView], "dicts", "GET", "/v1/dicts")

    def delete_dict(self, name: str) -> None:
        """Delete all entries of a dict. Raises DataNotFound if there are none."""
        self._request("DELETE", f"/v1/dicts/{self._function_path(name)}")
