"""When a function is called by itself: a cron line in a time zone, or once.

The lines are read by cronsim, which follows Debian's cron: where the clock is set forward, what falls into the gap runs
right after it; where it is set back, a line with a fixed hour runs once, and one with a `*` goes on by the clock.
"""

from __future__ import annotations

import datetime
import enum
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from gpufn_core.errors import InvalidSpec
from gpufn_core.spec.priority import Priority

if TYPE_CHECKING:
    from cronsim import CronSim

MOST_MISSED = 100
LATE_S = 60.0  # a run that is no later was not missed

_FIELDS = 5
_LONGEST_FOLD_S = 3 * 3600  # no clock is set back by more, but for a day that is left out


class Missed(enum.StrEnum):
    """What becomes of runs whose time has passed while nobody led, or the platform was down."""

    SKIP = "skip"
    ONCE = "once"
    ALL = "all"


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Call a function by itself: `cron` is minute, hour, day of month, month and day of week, in `timezone`.

    `arguments` are what it is called with, `method` which one of a class; `priority` is the class of its calls, else
    the function's. Runs that were missed are made up for `once` (the newest), not at all (`skip`), or `all` (the newest
    100). `at`, in unix seconds, stands for a cron line in a schedule that runs once; a function's own has a cron line.

    >>> Schedule("*/5 9-17 * * MON-FRI", timezone="Europe/Berlin", arguments={"full": False}).missed.value
    'once'
    >>> Schedule("0 0 30 2 *")
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidSpec: schedule: '0 0 30 2 *' never fires: bad day-of-month
    """

    cron: str = ""
    timezone: str = "UTC"
    arguments: dict[str, Any] = {}
    method: str = ""
    missed: Missed = Missed.ONCE
    at: float | None = None
    priority: Priority | None = None

    def __post_init__(self) -> None:
        if bool(self.cron) == (self.at is not None):
            raise InvalidSpec("schedule: give a cron line, such as '*/5 * * * *', or the one time `at`")
        self._check_kinds()
        if self.missed not in tuple(Missed):
            raise InvalidSpec(f"schedule: missed is 'skip', 'once' or 'all', not {self.missed!r}")
        msgspec.structs.force_setattr(self, "missed", Missed(self.missed))
        if self.priority is not None:
            if self.priority not in tuple(Priority):
                raise InvalidSpec(f"schedule: priority is 'hi', 'normal' or 'low', not {self.priority!r}")
            msgspec.structs.force_setattr(self, "priority", Priority(self.priority))
        if not isinstance(self.arguments, dict):
            raise InvalidSpec(f"schedule: arguments are named, such as {{'full': True}}, not {self.arguments!r}")
        try:
            msgspec.msgpack.encode(self.arguments)
        except OverflowError:
            raise InvalidSpec("schedule: a number in its arguments has more than 64 bits") from None
        except TypeError:
            pass  # the function's signature says it better
        if self.cron:
            _check(self.cron, self.timezone)

    def _check_kinds(self) -> None:
        if not isinstance(self.cron, str):
            raise InvalidSpec(f"schedule: a cron line is text such as '*/5 * * * *', not {self.cron!r}")
        if not isinstance(self.timezone, str):
            raise InvalidSpec(f"schedule: a time zone is text such as 'Europe/Berlin', not {self.timezone!r}")
        if not isinstance(self.method, str):
            raise InvalidSpec(f"schedule: a method is its name, not {self.method!r}")
        if self.at is not None and (isinstance(self.at, bool) or not isinstance(self.at, (int, float))):
            instead = ": write .timestamp()" if isinstance(self.at, datetime.datetime) else ""
            raise InvalidSpec(f"schedule: at is a time in unix seconds, not {self.at!r}{instead}")


def next_time(schedule: Schedule, after: float) -> float | None:
    """The first time after `after`, in unix seconds; None when there is none."""
    if schedule.at is not None:
        return schedule.at if schedule.at > after else None
    return next(_times(schedule, after), None)


def due(schedule: Schedule, since: float, now: float) -> list[float]:
    """The times after `since`, until `now`, that a call is to be made for; the oldest first."""
    if schedule.at is not None:
        return [schedule.at] if since < schedule.at <= now else []
    passed = itertools.takewhile(lambda at: at > since, _times(schedule, now, reverse=True))
    if schedule.missed is Missed.SKIP:
        passed = itertools.takewhile(lambda at: now - at <= LATE_S, passed)
    most = 1 if schedule.missed is Missed.ONCE else MOST_MISSED
    return list(itertools.islice(passed, most))[::-1]


def _times(schedule: Schedule, start: float, *, reverse: bool = False) -> Iterator[float]:
    """After `start`; or, `reverse`, at `start` and before.

    Of an hour that the clock shows twice, a line with a fixed hour knows the first only: from within the second,
    cronsim would give times that have passed as coming, and leave them out on the way back.
    """
    zone = _zone(schedule.timezone)
    whole = int(start) + 1 if reverse else start  # a time is a whole second; cronsim's are before what it is given
    begin = datetime.datetime.fromtimestamp(whole, zone)
    if reverse and begin.fold:
        begin = datetime.datetime.fromtimestamp(whole + _LONGEST_FOLD_S, zone)
    times = (time.timestamp() for time in _simulate(schedule.cron, begin, reverse=reverse))
    return itertools.dropwhile(lambda at: at > start if reverse else at <= start, times)


def _simulate(cron: str, begin: datetime.datetime, *, reverse: bool) -> CronSim:
    from cronsim import CronSim  # noqa: PLC0415  only who has a schedule pays for it

    return CronSim(cron, begin, reverse=reverse)


def _zone(name: str) -> datetime.tzinfo:
    """Raises InvalidSpec."""
    if name == "UTC":
        return datetime.UTC  # which needs no files of the system's
    import zoneinfo  # noqa: PLC0415

    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        if not zoneinfo.available_timezones():
            raise InvalidSpec(
                f"schedule: time zone {name!r}: no time zones but UTC are installed here; install the system's package "
                "tzdata, or `pip install tzdata`"
            ) from None
        raise InvalidSpec(f"schedule: there is no time zone {name!r} here; write for example 'Europe/Berlin'") from None


def _check(cron: str, timezone: str) -> None:
    from cronsim import CronSimError  # noqa: PLC0415

    zone = _zone(timezone)
    if len(cron.split()) != _FIELDS:
        raise InvalidSpec(
            f"schedule: a cron line has five fields (minute hour day month weekday), unlike {cron[:40]!r}"
        )
    try:
        next(_simulate(cron, datetime.datetime(2000, 1, 1, tzinfo=zone), reverse=False))
    except CronSimError as error:
        why = str(error)
        verb = "never fires" if why == "Bad day-of-month" else "is no cron line"
        raise InvalidSpec(f"schedule: {cron!r} {verb}: {why[:1].lower()}{why[1:]}") from None
    except StopIteration:
        raise InvalidSpec(f"schedule: {cron!r} never fires: no date is like that") from None
