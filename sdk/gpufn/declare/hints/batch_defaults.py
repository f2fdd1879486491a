"""Defaults of functions with `batch=`, whose parameters are lists with one value per call."""

from __future__ import annotations

import inspect

from gpufn_core.errors import InvalidSpec


def of_one_call(parameter: inspect.Parameter) -> inspect.Parameter:
    """Return a parameter of a batch with the default of one call. Raises InvalidSpec.

    >>> of_one_call(inspect.signature(lambda top=[5]: None).parameters["top"])
    <Parameter "top=5">
    """
    default = parameter.default
    if default is parameter.empty:
        return parameter
    if not isinstance(default, (list, tuple)) or len(default) != 1:
        raise InvalidSpec(
            f"with batch=..., {parameter.name} is a list with one value per call, so its default is a list with the "
            f"value of one call: write {parameter.name}=[{default!r}]"
        )
    return parameter.replace(default=default[0])
