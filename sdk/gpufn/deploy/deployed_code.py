"""Whether a deployed function has the code of the file that declares it here.

The digest covers the function's own code (`gpufn.deploy.code_digest`) and the project's modules that its file imports. It
leaves out the files of `--include` and of an image, which only the deploy command knows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from gpufn.declare.declarations import Declared, declared_here
from gpufn.deploy.code_digest import code_digest
from gpufn.deploy.import_collector import Collector, import_name
from gpufn_core.errors import GpufnError, InvalidBundle

if TYPE_CHECKING:
    from gpufn.client.views import FunctionView


class Api(Protocol):
    def function(self, name: str) -> FunctionView: ...


def difference(api: Api, name: str) -> str:
    """Return the warning that the deployed function `name` has other code than its file here.

    Return "" where the code is the same, and where it cannot be compared: this process does not declare the function
    exactly once, no file does, another version of Python made the digest, or the gateway refuses to show the function.
    """
    declared = declared_here(name)
    if len(declared) != 1:
        return ""
    (function,) = declared
    here = digest_of_function(function)
    if not here:
        return ""
    try:
        deployed = api.function(name)
    except GpufnError:  # the call itself reports a gateway or a function that is not there
        return ""
    source = deployed.source
    if source is None or source.code in ("", here) or deployed.spec.get("python") != _python():
        return ""
    file = Path(_file_of(function) or "")
    return (
        f"{name}@{deployed.active} was deployed with other code than {file.name} has now: calls run the deployed code. "
        f"To deploy the file: gpufn deploy {file}"
    )


def digest_of_function(function: Declared) -> str:
    """Return the digest of the function's code as its file has it now; "" where no file declares it at top level."""
    file = _file_of(function)
    if file is None or "<locals>" in function.raw.__qualname__:
        return ""
    try:
        root, module = import_name(Path(file).resolve())  # a script's own name is `__main__`
        files = Collector([root])
        files.add(module)
    except (InvalidBundle, OSError):
        return ""
    return code_digest(files.files, module, function.raw.__qualname__)


def _file_of(function: Declared) -> Any:
    return getattr(sys.modules.get(function.raw.__module__), "__file__", None)


def _python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"
