"""Variables with credentials for the origins of weights. Only agents keep them."""

from __future__ import annotations

from typing import Final

CREDENTIALS: Final = ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
