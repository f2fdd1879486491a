"""`NamedFunction`: a deployed function that is known only by name, without its code."""

from __future__ import annotations

import inspect
from typing import Any, NoReturn

from gpufn.call.remote import Remote
from gpufn_core.errors import InvalidInput
from gpufn_core.spec.naming.names import function_name
from gpufn_core.spec.naming.variant_names import in_path, split

_ANY_ARGUMENTS = inspect.Signature(
    [
        inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL),
        inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
    ]
)


class NamedFunction(Remote[..., Any, Any]):
    """A function, or a class's method, that is deployed as `name` or `name.method`.

    The function is looked up when it is called. The call raises FunctionNotFound, or InvalidInput for wrong arguments.
    """

    _kind = None

    def __init__(self, name: str, *, pickle: bool = False) -> None:
        self._may_pickle = pickle
        if not isinstance(name, str) or not name.strip("_."):
            raise InvalidInput(f"from_name takes the name of a deployed function, not {name!r}")
        base, _, self._method_name = in_path(name).partition(".")
        function, selector, _ = split(base)
        self._function_name = function_name(function) if selector is None else f"{function_name(function)}({selector})"

    @property
    def name(self) -> str:
        """The deployed name."""
        return self.target().path

    def _signature(self) -> inspect.Signature:
        return _ANY_ARGUMENTS

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise InvalidInput(f"{self.name} is known only by name and cannot run in this process: use .remote(...)")

    def __repr__(self) -> str:
        return f"<NamedFunction {self.name}>"
