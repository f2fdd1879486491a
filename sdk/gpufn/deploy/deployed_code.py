"""Comparison of a deployed function's code with the file that declares it here.

The digest covers the function's own code (`gpufn.deploy.code_digest`) and the project's modules that its file imports.
It omits the files of `--include` and of an image, which only the deploy command knows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpufn.declare.declarations import Declaration, declarations_of
from gpufn.deploy.code_digest import code_digest
from gpufn.deploy.imports.import_collector import Collector, import_name
from gpufn_core.errors import GpufnError, InvalidBundle

if TYPE_CHECKING:
    from gpufn.client.views.functions import FunctionView


class Api(Protocol):
    def function(self, name: str) -> FunctionView: ...


def difference(api: Api, name: str) -> str:
    """Return a warning if the code of the deployed function `name` differs from its file here.

    Return "" if the code is the same or cannot be compared. It cannot be compared if this process does not declare the
    function exactly once, no file declares it, another version of Python made the digest, or the gateway does not show
    the function.
    """
    declared = declarations_of(name)
    if len(declared) != 1:
        return ""
    (function,) = declared
    here = digest_of_function(function)
    if not here:
        return ""
    try:
        deployed = api.function(name)
    except GpufnError:  # the call itself reports a missing gateway or function
        return ""
    source = deployed.source
    if source is None or source.code in ("", here) or deployed.spec.get("python") != _python():
        return ""
    file = Path(_file_of(function) or "")
    return (
        f"the deployed code of {name}@{deployed.active} differs from {file.name}: calls run the deployed code. "
        f"To deploy the file: gpufn deploy {file}"
    )


def digest_of_function(function: Declaration) -> str:
    """Return the digest of the function's code in its current file, or "" if no file declares it at top level."""
    file = _file_of(function)
    if file is None or "<locals>" in function.raw.__qualname__:
        return ""
    try:
        root, module = import_name(Path(file).resolve())  # not __module__: that is `__main__` in a script
        files = Collector([root])
        files.add(module)
    except (InvalidBundle, OSError):
        return ""
    return code_digest(files.files, module, function.raw.__qualname__)


def _file_of(function: Declaration) -> Any:
    return getattr(sys.modules.get(function.raw.__module__), "__file__", None)


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
