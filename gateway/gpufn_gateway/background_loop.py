"""Error handling for the gateway's periodic background tasks."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from gpufn_core.errors import PlatformError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def log_failures(task: str) -> Iterator[None]:
    """Log an exception of one round of `task` instead of raising it: the next round retries."""
    try:
        yield
    except PlatformError as error:
        log.warning("%s is postponed: %s", task, error)
    except Exception:
        log.exception("%s failed; the next round retries it", task)
