"""The caches of a node, together: files that workers start from."""

from __future__ import annotations

from dataclasses import dataclass

from gpufn_runtime.agent.cache.bundles import BundleCache
from gpufn_runtime.agent.cache.engines import EngineCache
from gpufn_runtime.agent.cache.volumes import Volumes
from gpufn_runtime.agent.cache.weights import WeightsCache
from gpufn_runtime.agent.environments.cache import EnvironmentCache


@dataclass(frozen=True, kw_only=True)
class Caches:
    bundles: BundleCache
    engines: EngineCache
    weights: WeightsCache
    volumes: Volumes | None = None
    environments: EnvironmentCache | None = None

    def sweep(self) -> None:
        """Remove what an agent that was killed had not finished."""
        self.bundles.sweep()
        self.engines.sweep()
        self.weights.sweep()
        if self.environments is not None:
            self.environments.sweep()
