"""The master key of the secrets, and its source. Earlier keys are the keys that a rotation replaces."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

from gpufn_core.home import Home
from gpufn_platform.process.settings import InvalidSetting
from gpufn_platform.secrets.envelope import SealedSecret
from gpufn_platform.secrets.key_source import KeySource, settings_of

KEY, COMMAND, FILE = settings_of("GPUFN_MASTER_KEY")


class MasterKey(KeySource):
    @classmethod
    def from_env(cls, environ: Mapping[str, str], home: Home) -> Self:
        """Read the setting. Raises InvalidSetting if there are several."""
        return cls.named(KEY, environ, home.master_key)

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
