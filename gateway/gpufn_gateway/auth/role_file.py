"""The role table in a file, read again after the file has changed."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from gpufn_gateway.auth.roles import Roles
from gpufn_platform.process.settings import InvalidSetting

log = logging.getLogger(__name__)


class RoleFile:
    """Raises InvalidSetting if the file is unusable at the start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._changed_at = _changed_at(path)
        self._roles = _read(path)

    def roles(self) -> Roles:
        """Return the table as it is now; the last valid one if the file is unusable now."""
        changed_at = _changed_at(self._path)
        if changed_at != self._changed_at:
            self._changed_at = changed_at
            try:
                self._roles = _read(self._path)
            except InvalidSetting as error:
                log.error("the earlier role table stays in force: %s", error)
        return self._roles


def _changed_at(path: Path) -> int:
    """Return when a file was changed, in ns; 0 if it does not exist."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _read(path: Path) -> Roles:
    try:
        return Roles.parse(path.read_bytes(), json=path.suffix == ".json")
    except OSError as error:
        raise InvalidSetting(f"GPUFN_OIDC_ROLES={path}: {error.strerror}") from None
    except (ValueError, msgspec.MsgspecError) as error:
        raise InvalidSetting(f"GPUFN_OIDC_ROLES={path}: {error}") from None
