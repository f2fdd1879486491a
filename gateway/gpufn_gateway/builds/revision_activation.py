"""Activation of revisions after their builds: BUILDING revisions become READY and active, or FAILED.

Every gateway runs this, and the controller's leader acts: at each change of a build, and each second for builds that
ended while no controller led.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

from gpufn_core.domain.revision import Revision, RevisionState
from gpufn_core.errors import RequestError
from gpufn_gateway.background_loop import log_failures
from gpufn_gateway.builds import build_rules
from gpufn_gateway.builds.builds import Builds
from gpufn_gateway.functions.deploys import Deploys
from gpufn_gateway.functions.registry import Registry
from gpufn_platform.process.clock import Clock

log = logging.getLogger(__name__)

_TICK_S: Final = 1.0


class RevisionActivation:
    def __init__(
        self, registry: Registry, builds: Builds, deploys: Deploys, clock: Clock, leads: Callable[[], bool]
    ) -> None:
        self._registry = registry
        self._builds = builds
        self._deploys = deploys
        self._clock = clock
        self._leads = leads
        self._is_done = False  # no revision is left with one of its two records written

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            with log_failures("activating built revisions"):
                await self.step()
            await self._builds.wait_any_change(_TICK_S)

    async def step(self) -> None:
        if not self._leads():
            self._is_done = False
            return
        was_done, self._is_done = self._is_done, False
        done = True
        for revision in list(self._revisions(RevisionState.BUILDING)):
            after = build_rules.after_builds(revision, self._builds.known, self._registry.manifests, self._clock.time())
            if after is not None:
                done &= await self._finish(after)
        if not was_done:
            # The previous leader may have died between the two records of a revision, or the bus failed in between.
            for revision in list(self._revisions(RevisionState.READY)):
                function = self._registry.functions.get(revision.function)
                if revision.builds and (function is None or function.latest < revision.number):
                    done &= await self._finish(revision)
        self._is_done = done

    async def _finish(self, after: Revision) -> bool:
        """Finish one revision and return whether it is done. A failure does not hold up other revisions."""
        try:
            await self._deploys.finish(after)
        except RequestError as error:
            log.warning("%s was built but cannot become %s yet: %s", after, after.state, error)
            return False
        log.info("%s was built and is now %s", after, after.state, extra={"function": after.function})
        return True

    def _revisions(self, state: RevisionState) -> Iterator[Revision]:
        for name in list(self._registry.revisions):
            for number in self._registry.numbers(name):
                revision = self._registry.revisions[name][number]
                if revision.state is state:
                    yield revision
