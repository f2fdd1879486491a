"""Detection of a notebook."""

from __future__ import annotations

import sys


def is_notebook() -> bool:
    """Return whether this process is the kernel of a Jupyter notebook. Imports nothing."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else getattr(ipython, "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
