"""Exit codes of the platform's processes."""

from __future__ import annotations

from typing import Final

EXIT_CONFIGURATION: Final = 78  # EX_CONFIG of sysexits.h: another start with the same settings fails the same way
