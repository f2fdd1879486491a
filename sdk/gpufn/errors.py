"""The exceptions of gpufn: one class tree with stable codes. `gpufn_core.errors` defines them."""

from gpufn_core.errors import *  # noqa: F403
