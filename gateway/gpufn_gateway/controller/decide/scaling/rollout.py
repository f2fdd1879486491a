"""Rollout from one revision to the next: which one gets workers, and when calls move over. Pure.

1. A deploy sets `active`. While `serving` is another revision, `serving` scales by its policy as before. `active` gets
   as many workers as `serving` has READY and needs: at least one, and at most its own max_workers.
2. `serving` moves when as many workers of `active` are READY, so that capacity does not dip; it moves at once if
   `serving` itself fails to start. If `serving` has no READY worker, calls do not move yet: on the only GPU it made
   room for `active`, which must first prove that it starts. While `active` fails to start, nothing moves and calls
   stay.
3. A revision with a pending check takes no calls before one of its workers is READY. The first failed start makes the
   revision FAILED, and `serving` becomes `active` again. Without room the check ends, and the rules above apply. While
   no worker is warm, calls move at once, so that a deploy without room still changes the code of the next call.
4. While a split sends calls to several revisions, each of them scales by its own demand, within the max_workers of the
   function (`divide`). A function that keeps workers warm keeps at least one for each revision with a weight.
   `serving` moves as before, and ends the split.
5. A retired revision keeps its workers while calls are queued for it, and its busy workers until their calls end. It
   keeps all of them for LINGER_S after `serving` moved. Gateways learn of the move a moment later, and a call that a
   gateway still sends to the old revision would find no worker.

An attempt to start `active` in the place of the only worker of `serving` costs calls. So one failure opens its circuit,
and the place is returned. The next attempt takes it only when the old worker has been idle for as long as the circuit
was open.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping

import msgspec

from gpufn_core.domain.revision import CheckState, Function
from gpufn_core.domain.traffic import WHOLE
from gpufn_core.spec.function_spec import ScalingPolicy
from gpufn_gateway.controller.decide.scaling.policy import Demand, Workers

LINGER_S = 2.0


class Role(enum.StrEnum):
    SERVING = "serving"
    NEXT = "next"  # active, but not serving yet
    SPLIT = "split"  # gets a part of the calls
    RETIRED = "retired"


class RevisionHealth(msgspec.Struct, frozen=True):
    """State of a revision in a rollout: its READY workers, the number that its policy wants (None: unknown), whether
    its starts fail, and its max_workers (None: unknown). `held` counts all workers that are not leaving."""

    ready: int = 0
    want: int | None = None
    is_failing: bool = False
    max_workers: int | None = None
    held: int = 0
    check: CheckState | None = None


def role_of(function: Function, revision: int) -> Role:
    if revision == function.serving:
        return Role.SERVING
    if revision == function.active:
        return Role.NEXT
    return Role.SPLIT if revision in function.called else Role.RETIRED


def is_split(function: Function, revision: int) -> bool:
    """Return whether a revision shares the calls of its function with another."""
    return function.traffic is not None and (revision == function.serving or revision in function.traffic.called)


def part_of(scaling: ScalingPolicy, function: Function, revision: int) -> ScalingPolicy:
    """Return the policy of a revision of a split function: its part of min_workers, rounded up."""
    if function.traffic is None or not scaling.min_workers:
        return scaling
    least = math.ceil(scaling.min_workers * function.traffic.weight_of(revision) / WHOLE)
    return msgspec.structs.replace(scaling, min_workers=min(least, scaling.max_workers))


def divide(wanted: Mapping[int, int], most: int) -> dict[int, int]:
    """Divide `most` workers between revisions that want more: first one for each, then in proportion.

    >>> divide({1: 6, 2: 2, 3: 0}, 4), divide({1: 3, 2: 1}, 1), divide({1: 3, 2: 1}, 10)
    ({1: 3, 2: 1, 3: 0}, {1: 1, 2: 0}, {1: 3, 2: 1})
    """
    if sum(wanted.values()) <= most:
        return dict(wanted)
    by_size = sorted(wanted, key=lambda number: (-wanted[number], number))
    given = {number: int(wanted[number] > 0 and place < most) for place, number in enumerate(by_size)}
    left, more = most - sum(given.values()), sum(max(0, each - 1) for each in wanted.values())
    shares = {number: left * max(0, wanted[number] - 1) / more if more else 0.0 for number in by_size}
    for number in by_size:
        given[number] += int(shares[number])
    left -= sum(int(share) for share in shares.values())
    for number in sorted(by_size, key=lambda number: int(shares[number]) - shares[number])[:left]:
        given[number] += 1
    return {number: given[number] for number in wanted}


def workers_for_next(serving: RevisionHealth, max_workers: int | None) -> int:
    """Return the workers for the next revision. At least one: it must prove that it starts before it gets calls."""
    needed = serving.ready if serving.want is None else min(serving.ready, serving.want)
    return max(1, needed if max_workers is None else min(needed, max_workers))


def workers_for_retired(demand: Demand | None, workers: Workers, retired_for_s: float) -> int:
    """Return the workers to keep. Unknown demand changes nothing; with calls there is always at least one worker."""
    if demand is None:
        return workers.held
    least = 1 if demand.calls else 0
    if demand.queued or retired_for_s < LINGER_S:
        return max(workers.held, least)
    return max(workers.held - workers.idle, least) if demand.running else 0


def may_move(serving: RevisionHealth, following: RevisionHealth) -> tuple[bool, str]:
    """Return whether calls now go to the next revision, and why."""
    if following.is_failing:
        return False, "the new revision's workers fail to start: calls stay with the old one"
    if following.check is CheckState.PENDING:
        return False, "its check is pending: calls stay with the old one until a worker has started"
    if following.check is CheckState.UNCHECKED and not serving.held and not following.held:
        return True, "no worker is warm, and none could be started to check it"
    if serving.ready == 0 and serving.is_failing:
        return True, "the old revision's workers fail to start"
    needed = workers_for_next(serving, following.max_workers)
    if following.ready >= needed:
        return True, f"{following.ready} of the new revision ready"
    return False, f"{following.ready} of {needed} of the new revision ready"
