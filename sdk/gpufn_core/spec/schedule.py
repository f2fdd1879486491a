"""The schedule of a function: a cron line in a time zone, or a single time.

cronsim evaluates the lines and follows Debian's cron. When the clock is set forward, runs that fall into the gap start
right after it. When it is set back, a line with a fixed hour runs once, and a line with a `*` follows the clock.
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

MAX_MISSED = 100
LATE_S = 60.0  # a run that is at most this late does not count as missed

_FIELDS = 5
_LONGEST_FOLD_S = 3 * 3600  # no clock is set back by more, except where a time zone skips a day


class Missed(enum.StrEnum):
    """Policy for runs whose time passed while there was no leader or the platform was down."""

    SKIP = "skip"
    ONCE = "once"
    ALL = "all"


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Call a function on a schedule: `cron` is minute, hour, day of month, month and day of week, in `timezone`.

    `arguments` are the arguments of each call, `method` selects a method of a class, and `priority` is the class of the
    calls (default: the function's). `missed` selects which missed runs are made up for: `once` (the newest), `skip`
    (none) or `all` (the newest 100). `at`, in unix seconds, replaces the cron line in a schedule that runs once. A
    schedule in a function's declaration needs a cron line.

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
            pass  # the check against the function's signature has a better message
        if self.cron:
            _check(self.cron, self.timezone)

    def _check_kinds(self) -> None:
        if not isinstance(self.cron, str):
            raise InvalidSpec(f"schedule: a cron line is text such as '*/5 * * * *', not {self.cron!r}")
        if not isinstance(self.timezone, str):
            raise InvalidSpec(f"schedule: a time zone is text such as 'Europe/Berlin', not {self.timezone!r}")
        if not isinstance(self.method, str):
            raise InvalidSpec(f"schedule: method is the name of a method, not {self.method!r}")
        if self.at is not None and (isinstance(self.at, bool) or not isinstance(self.at, (int, float))):
            hint = ": write .timestamp()" if isinstance(self.at, datetime.datetime) else ""
            raise InvalidSpec(f"schedule: at is a time in unix seconds, not {self.at!r}{hint}")


def next_time(schedule: Schedule, after: float) -> float | None:
    """Return the first time after `after`, in unix seconds; None if there is none."""
    if schedule.at is not None:
        return schedule.at if schedule.at > after else None
    return next(_times(schedule, after), None)


def due(schedule: Schedule, since: float, now: float) -> list[float]:
    """Return the times after `since` and up to `now` for which a call is due, oldest first."""
    if schedule.at is not None:
        return [schedule.at] if since < schedule.at <= now else []
    times = itertools.takewhile(lambda at: at > since, _times(schedule, now, reverse=True))
    if schedule.missed is Missed.SKIP:
        times = itertools.takewhile(lambda at: now - at <= LATE_S, times)
    limit = 1 if schedule.missed is Missed.ONCE else MAX_MISSED
    return list(itertools.islice(times, limit))[::-1]


def _times(schedule: Schedule, start: float, *, reverse: bool = False) -> Iterator[float]:
    """Yield the times after `start`; with `reverse`, the times at `start` and before.

    In an hour that the clock shows twice, a line with a fixed hour runs in the first only. Started from within the
    second, cronsim would yield past times as future ones, and skip them in reverse.
    """
    zone = _zone(schedule.timezone)
    whole = int(start) + 1 if reverse else start  # times are whole seconds; cronsim yields those before its start
    begin = datetime.datetime.fromtimestamp(whole, zone)
    if reverse and begin.fold:
        begin = datetime.datetime.fromtimestamp(whole + _LONGEST_FOLD_S, zone)
    times = (time.timestamp() for time in _simulate(schedule.cron, begin, reverse=reverse))
    return itertools.dropwhile(lambda at: at > start if reverse else at <= start, times)


def _simulate(cron: str, begin: datetime.datetime, *, reverse: bool) -> CronSim:
    from cronsim import CronSim  # noqa: PLC0415  imported only where there is a schedule

    return CronSim(cron, begin, reverse=reverse)


def _zone(name: str) -> datetime.tzinfo:
    """Return the time zone of this name. Raises InvalidSpec."""
    if name == "UTC":
        return datetime.UTC  # needs no time zone files
    import zoneinfo  # noqa: PLC0415

    try:
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):
        if not zoneinfo.available_timezones():
            raise InvalidSpec(
                f"schedule: time zone {name!r}: only UTC is installed here; install the system package tzdata, or "
                "`pip install tzdata`"
            ) from None
        raise InvalidSpec(f"schedule: unknown time zone {name!r}; write for example 'Europe/Berlin'") from None


def _check(cron: str, timezone: str) -> None:
    try:
        from cronsim import CronSimError  # noqa: PLC0415
    except ModuleNotFoundError:
        return  # a worker with packages of its own: the deploy has checked the line, and the gateway evaluates it

    zone = _zone(timezone)
    if len(cron.split()) != _FIELDS:
        raise InvalidSpec(f"schedule: a cron line has five fields (minute hour day month weekday), not {cron[:40]!r}")
    try:
        next(_simulate(cron, datetime.datetime(2000, 1, 1, tzinfo=zone), reverse=False))
    except CronSimError as error:
        reason = str(error)
        verb = "never fires" if reason == "Bad day-of-month" else "is not a valid cron line"
        raise InvalidSpec(f"schedule: {cron!r} {verb}: {reason[:1].lower()}{reason[1:]}") from None
    except StopIteration:
        raise InvalidSpec(f"schedule: {cron!r} never fires: no date matches") from None
