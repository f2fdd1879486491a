"""Functions of an app that the deployed file no longer has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpufn_core.spec.naming.names import DEFAULT, home_of
from gpufn_core.spec.naming.variant_names import is_variant

if TYPE_CHECKING:
    from gpufn.client.views.functions import FunctionView
    from gpufn.deploy.deployables import Deployable


def leftovers(deployed: Iterable[FunctionView], deployables: Sequence[Deployable]) -> list[str]:
    """Return the names of the functions in the apps of `deployables` that are not among them.

    Many files share the app `default`: there, only functions that came from the same file count.
    """
    names = {deployable.spec.name for deployable in deployables}
    homes = {home_of(name) for name in names}
    sources = [deployable.source for deployable in deployables if deployable.source is not None]

    def belongs(view: FunctionView) -> bool:
        home = home_of(view.name)
        if home not in homes or is_variant(view.name):
            return False
        return home.app != DEFAULT or any(
            view.source is not None and view.source.is_same_file(source) for source in sources
        )

    return sorted(view.name for view in deployed if view.name not in names and belongs(view))
