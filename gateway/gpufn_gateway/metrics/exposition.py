"""The format of `/metrics`: OpenMetrics for a client that accepts it, otherwise Prometheus' text format."""

from __future__ import annotations

from typing import Final

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ACCEPTED: Final = "application/openmetrics-text"


def accepts_openmetrics(accept: str) -> bool:
    """Return whether a client accepts OpenMetrics 1.0. A client may list other versions beside it.

    >>> accepts_openmetrics("application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2,*/*;q=0.1")
    True
    >>> accepts_openmetrics("*/*"), accepts_openmetrics("application/openmetrics-text; version=2.0.0")
    (False, False)
    """
    for part in accept.split(","):
        kind, *parameters = (token.strip().lower().replace(" ", "") for token in part.split(";"))
        given = dict(parameter.partition("=")[::2] for parameter in parameters)
        version, quality = given.get("version", "1.0.0").strip('"'), given.get("q", "1")
        if kind == _ACCEPTED and version in {"0.0.1", "1.0.0"} and quality.strip("0.") != "":
            return True
    return False
