"""Turns for senders of requests: for work that keeps the event loop busy, or that holds a resource that all share.

A sender is a team, or a key or a user without a team (`Access.sender_of`).
"""

from __future__ import annotations

import asyncio
import weakref


class Turns:
    """Each sender has `at_once`; further requests of it wait in order."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._senders: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()

    def of(self, sender: str) -> asyncio.Semaphore:
        """Return the turns of a sender. Keep the object while you use or await one."""
        turns = self._senders.get(sender)
        if turns is None:
            turns = self._senders[sender] = asyncio.Semaphore(self._at_once)
        return turns
