"""How a process of the platform ends."""

from __future__ import annotations

from typing import Final

EXIT_CONFIGURATION: Final = 78  # sysexits' EX_CONFIG: another start with the same settings fails the same way
