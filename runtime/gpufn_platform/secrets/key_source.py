"""The source of a key: an environment variable, a file, or a command such as a KMS client.

Each gives one key per line, in base64. The first encrypts; the others are earlier keys.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.secrets.envelope import Keyring, new_master_key

_COMMAND_TIMEOUT_S = 30.0


def settings_of(name: str) -> tuple[str, str, str]:
    """Return the settings of a key: the variable itself, a command, and a file."""
    return name, f"{name}_COMMAND", f"{name}_FILE"


@dataclass(frozen=True)
class KeySource:
    """The setting that gives a key, and its value. `load` reads it again, so that a rotation needs no restart."""

    setting: str
    value: str = field(repr=False)

    @classmethod
    def named(cls, name: str, environ: Mapping[str, str], default: Path) -> Self:
        """Read the settings of `name`; without any, the key is in the file `default`. Raises InvalidSetting if there
        are several."""
        given = [setting for setting in settings_of(name) if environ.get(setting, "").strip()]
        if len(given) > 1:
            raise InvalidSetting(f"{' and '.join(given)} are set: set one of them.")
        if given:
            return cls(given[0], environ[given[0]].strip())
        return cls(f"{name}_FILE", os.fspath(default))

    @property
    def file(self) -> Path | None:
        return Path(self.value) if self.setting.endswith("_FILE") else None

    @property
    def _is_command(self) -> bool:
        return self.setting.endswith("_COMMAND")

    def __str__(self) -> str:
        return f"{self.setting} ({self.value})" if self._is_command or self.file else self.setting

    def load(self) -> Keyring | None:
        """Return the keys; None if the file does not exist. Raises InvalidSetting."""
        text = self._read()
        try:
            return None if text is None else Keyring.parse(text)
        except ValueError as error:
            raise InvalidSetting(
                f"{self} has no valid key: {error}. Write 32 random bytes in base64 (openssl rand -base64 32)."
            ) from None

    def create_file(self) -> None:
        """Create the file with a new key, unless it exists. Raises OSError."""
        assert self.file is not None
        with contextlib.suppress(FileExistsError):
            _write(self.file, Keyring([new_master_key()]))

    def replace_file(self, keyring: Keyring) -> None:
        """Replace the file's keys at once. Raises OSError."""
        assert self.file is not None
        temporary = self.file.with_name(f".{self.file.name}.new")
        temporary.unlink(missing_ok=True)
        _write(temporary, keyring)
        temporary.replace(self.file)

    def _read(self) -> str | None:
        if self._is_command:
            return self._output()
        if self.file is None:
            return self.value
        try:
            mode = self.file.stat().st_mode
            if mode & 0o077:
                raise InvalidSetting(f"{self} can be read by other users: run chmod 600 {self.file}.")
            return self.file.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSetting(f"Cannot read {self}: {getattr(error, 'strerror', None) or error}.") from None

    def _output(self) -> str:
        try:
            done = subprocess.run(  # noqa: S603
                shlex.split(self.value),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_COMMAND_TIMEOUT_S,
                check=True,
            )
            return done.stdout.decode("ascii")
        except subprocess.CalledProcessError as error:
            last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
            why = f"it exited with status {error.returncode}" + "".join(f": {line}" for line in last)
        except subprocess.TimeoutExpired:
            why = f"it ran for more than {_COMMAND_TIMEOUT_S:g} s"
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or "its output is not text"
        raise InvalidSetting(f"{self} gives no key: {why}.")


def _write(path: Path, keyring: Keyring) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(keyring.text())
        file.flush()
        os.fsync(file.fileno())
