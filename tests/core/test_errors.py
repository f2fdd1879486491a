"""The tree of errors."""

from __future__ import annotations

import inspect

from gpufn_core import errors


def test_the_tree_has_each_class() -> None:
    assert errors.__doc__ is not None
    classes = [each for each in vars(errors).values() if inspect.isclass(each) and issubclass(each, errors.GpufnError)]
    assert [each.__name__ for each in classes if each.__name__ not in errors.__doc__] == []
    assert len(classes) > 40
