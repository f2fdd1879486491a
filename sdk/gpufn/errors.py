"""Exceptions of gpufn: one tree with stable codes, for `except` clauses. Defined in `gpufn_core.errors`."""

from gpufn_core.errors import *  # noqa: F403
