"""Objects that the requests of schemathesis name. They are stored before."""

from __future__ import annotations

from typing import Final

MODEL: Final = b"a model"
FUNCTION: Final = "shout"
BUNDLE_VARIABLE: Final = "GPUFN_TEST_BUNDLE"  # the digest of a bundle
KEY_VARIABLE: Final = "GPUFN_TEST_KEY"  # the id of an API key that authenticates no request
