"""A certificate authority for tests, made by `openssl`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.conftest import missing


class Pair(NamedTuple):
    chain: Path
    key: Path


class Authority:
    """An authority that issues certificates. Clients trust `file`."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            missing("openssl is not installed")
        self._folder = folder
        self.file, self._key = folder / "ca.pem", folder / "ca.key"
        _certificate(Pair(self.file, self._key), "-subj", "/CN=Test CA", "-addext", "keyUsage=critical,keyCertSign")

    def issue(self, name: str, *, alternative_names: str = "IP:127.0.0.1,DNS:localhost") -> Pair:
        """Issue a certificate for this machine with `name` as its subject."""
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        _certificate(
            pair, "-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative_names}",
            "-addext", "basicConstraints=critical,CA:FALSE",
            "-CA", str(self.file), "-CAkey", str(self._key),
        )  # fmt: skip
        return pair


def _certificate(pair: Pair, *options: str) -> None:
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "30",
            "-out", pair.chain, "-keyout", pair.key, *options,
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
