"""The source of the master key: a file, an environment variable, or a command such as a KMS client.

Each gives one key per line, in base64. The first encrypts; the others are earlier keys, which a rotation replaces.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpufn_core.home import Home
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.secrets.envelope import Keyring, SealedSecret, new_master_key

KEY, COMMAND, FILE = "GPUFN_MASTER_KEY", "GPUFN_MASTER_KEY_COMMAND", "GPUFN_MASTER_KEY_FILE"
SETTINGS = (KEY, COMMAND, FILE)
_COMMAND_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class MasterKey:
    """The setting that gives the master key, and its value. `load` reads it anew, so that a rotation needs no
    restart."""

    setting: str
    value: str = field(repr=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str], home: Home) -> MasterKey:
        """Read the setting. Raises InvalidSetting if there are several."""
        given = [name for name in SETTINGS if environ.get(name, "").strip()]
        if len(given) > 1:
            raise InvalidSetting(f"{' and '.join(given)} are set: set one of them.")
        if given:
            return cls(given[0], environ[given[0]].strip())
        return cls(FILE, os.fspath(home.master_key))

    @property
    def file(self) -> Path | None:
        return Path(self.value) if self.setting == FILE else None

    def __str__(self) -> str:
        return f"{self.setting} ({self.value})" if self.setting != KEY else self.setting

    def load(self) -> Keyring | None:
        """Return the keys; None if the file does not exist. Raises InvalidSetting."""
        text = self._read()
        try:
            return None if text is None else Keyring.parse(text)
        except ValueError as error:
            raise InvalidSetting(
                f"{self} has no valid master key: {error}. Write 32 random bytes in base64 (openssl rand -base64 32)."
            ) from None

    def check(self, secrets: Iterable[SealedSecret]) -> None:
        """Raises InvalidSetting if the keys cannot open all `secrets`."""
        stored = list(secrets)
        keyring = self.load() if stored else None
        names = sorted(secret.name for secret in stored if keyring is None or not keyring.opens(secret))
        if names:
            raise InvalidSetting(
                f"{self} is not the master key that encrypts {', '.join(names)}: set the right key. The secrets are "
                "stored unchanged."
            )

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
        if self.setting == KEY:
            return self.value
        if self.setting == COMMAND:
            return _output_of(self.value)
        path = Path(self.value)
        try:
            mode = path.stat().st_mode
            if mode & 0o077:
                raise InvalidSetting(f"{self} can be read by other users: run chmod 600 {path}.")
            return path.read_text()
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidSetting(f"Cannot read {self}: {getattr(error, 'strerror', None) or error}.") from None


def _write(path: Path, keyring: Keyring) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(keyring.text())
        file.flush()
        os.fsync(file.fileno())


def _output_of(command: str) -> str:
    try:
        done = subprocess.run(  # noqa: S603
            shlex.split(command), stdin=subprocess.DEVNULL, capture_output=True, timeout=_COMMAND_TIMEOUT_S, check=True
        )
        return done.stdout.decode("ascii")
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = f"it exited with status {error.returncode}" + "".join(f": {line}" for line in last)
    except subprocess.TimeoutExpired:
        why = f"it ran for more than {_COMMAND_TIMEOUT_S:g} s"
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or "its output is not text"
    raise InvalidSetting(f"{COMMAND} ({command}) gives no master key: {why}.")
