"""From one revision to the next: who gets workers, and when calls move over.

1. Deploy sets `active`. While `serving` is another revision, that one scales by its policy as before, and `active` gets
   as many workers as are READY there and needed, at least one, and no more than its own max_workers.
2. When as many of `active` are READY, so that capacity does not dip, `serving` moves; at once when it fails to start
   itself. That it has nobody READY is no reason: on the only GPU it gave way to `active`, which has yet to show that it
   starts. While `active` fails to start nothing moves: calls stay with what works.
3. A revision that is to be checked takes no calls before one worker of it is READY. The first start that fails makes it
   FAILED, and `serving` is `active` again. Without room its check ends, and the rules above go on; while nobody is warm
   calls move at once, so that a deploy without room changes what the next call runs.
4. A retired revision keeps its workers while anything is queued for it, and those that run something until it has
   ended; and all of them for LINGER_S after `serving` moved: gateways learn of the move a moment later, and a call that
   one of them still sent there would find nobody.

A try of `active` that takes the place of the only worker of `serving` costs calls. So one failure opens its circuit,
the place goes back, and the next try takes it only when the old worker was idle for as long as the circuit was open.
"""

from __future__ import annotations

import enum

import msgspec

from gpufn_core.domain.revision import CheckState, Function
from gpufn_gateway.controller.decide.policy import Demand, Workers

LINGER_S = 2.0


class Role(enum.StrEnum):
    SERVING = "serving"
    NEXT = "next"  # active, and calls do not go there yet
    RETIRED = "retired"


class Standing(msgspec.Struct, frozen=True):
    """How a revision stands: READY workers, those that its policy wants (None: unknown), whether its starts fail, and
    how many workers it may have (None: unknown). `held` are all workers that are not on their way out."""

    ready: int = 0
    want: int | None = None
    is_failing: bool = False
    most: int | None = None
    held: int = 0
    check: CheckState | None = None


def role_of(function: Function, revision: int) -> Role:
    if revision == function.serving:
        return Role.SERVING
    return Role.NEXT if revision == function.active else Role.RETIRED


def workers_for_next(serving: Standing, most: int | None) -> int:
    """`most` is its max_workers. One at least, for a revision shows that it starts before calls go there."""
    needed = serving.ready if serving.want is None else min(serving.ready, serving.want)
    return max(1, needed if most is None else min(needed, most))


def workers_for_retired(demand: Demand | None, workers: Workers, retired_for_s: float) -> int:
    """Unknown changes nothing; with calls there is always somebody to take them."""
    if demand is None:
        return workers.held
    least = 1 if demand.calls else 0
    if demand.queued or retired_for_s < LINGER_S:
        return max(workers.held, least)
    return max(workers.held - workers.idle, least) if demand.running else 0


def may_move(serving: Standing, following: Standing) -> tuple[bool, str]:
    """Whether calls go to the next revision from now on, and why."""
    if following.is_failing:
        return False, "the new revision's workers fail to start: calls stay with the old one"
    if following.check is CheckState.PENDING:
        return False, "it is checked: calls stay with the old one until a worker has started"
    if following.check is CheckState.UNCHECKED and not serving.held and not following.held:
        return True, "no worker is warm, and none could be started to check it"
    if serving.ready == 0 and serving.is_failing:
        return True, "the old revision's workers fail to start"
    needed = workers_for_next(serving, following.most)
    if following.ready >= needed:
        return True, f"{following.ready} of the new revision ready"
    return False, f"{following.ready} of {needed} of the new revision ready"
