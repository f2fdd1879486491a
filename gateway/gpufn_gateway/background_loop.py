"""What a gateway does beside its calls, again and again until cancelled."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from gpufn_core.errors import PlatformError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def tried_again(what: str) -> Iterator[None]:
    """One round of `what`: a failure of it ends nothing, for another round comes."""
    try:
        yield
    except PlatformError as error:
        log.warning("%s is put off: %s", what, error)
    except Exception:
        log.exception("%s failed; it is tried again", what)
