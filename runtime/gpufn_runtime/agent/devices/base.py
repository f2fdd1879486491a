"""What finds devices."""

from __future__ import annotations

from typing import Protocol

from gpufn.device import Device


class Inventory(Protocol):
    def devices(self) -> tuple[Device, ...]:
        """What this node has now. Never raises: what cannot be read is not there."""
        ...
