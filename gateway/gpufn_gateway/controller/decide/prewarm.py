"""Pre-warming: when the next call of a function is expected, from the history of its arrivals. Pure.

The method is that of Shahrad et al., "Serverless in the Wild" (USENIX ATC 2020): learn from arrivals, start a worker
before the next call, and use the normal timeout when the history does not predict. The histogram is a bitmap: for each
slot of five minutes in the last five weeks, whether a call arrived.

    predicted   a call in at least two of the same slots of the last three hours, days or weeks
    trusted     a period whose own predictions came true at least half of the time, and at least twice
    own         predictions that no trusted longer period makes: a week explains a weekend better than a day does

An hour is judged over the last day, a day over the last week, a week over all five. Slots that no controller observed
are unknown, and do not count against a prediction.
"""

from __future__ import annotations

import datetime
from typing import Final

import msgspec

SLOT_S: Final = 300
EARLY_S: Final = 60  # a slot begins a minute before its round time: periodic calls come at round times, some too early
LONGEST_LEAD_S: Final = 3300.0  # a forecast has the slots of one hour
_HOUR: Final = 3600 // SLOT_S
_DAY: Final = 24 * _HOUR
_WEEK: Final = 7 * _DAY
SLOTS: Final = 5 * _WEEK
_ALL: Final = (1 << SLOTS) - 1
_LEAST_RIGHT: Final = 2
_LEAST_PRECISION: Final = 0.5


class _Period(msgspec.Struct, frozen=True):
    slots: int
    judged_slots: int
    text: str


_LONGEST_FIRST: Final = (
    _Period(_WEEK, SLOTS, "as in the last weeks"),
    _Period(_DAY, _WEEK, "as on the last days"),
    _Period(_HOUR, _DAY, "as in the last hours"),
)


def slot_of(unix_s: float) -> int:
    return int((unix_s + EARLY_S) // SLOT_S)


class ArrivalHistory(msgspec.Struct, frozen=True):
    """The arrivals of one function. Bit k of a bitmap is the slot `last - k`."""

    last: int = 0
    called: int = 0
    observed: int = 0

    def at(self, slot: int) -> ArrivalHistory:
        """Return the history with `slot` in it. Starts anew if the clock has moved by more than the whole history."""
        ahead = slot - self.last
        if abs(ahead) >= SLOTS:
            return ArrivalHistory(slot)
        if ahead <= 0:
            return self
        return ArrivalHistory(slot, (self.called << ahead) & _ALL, (self.observed << ahead) & _ALL)

    def record(self, slot: int, *, is_call: bool) -> ArrivalHistory:
        """Record that `slot` was observed, and whether a call arrived."""
        history = self.at(slot)
        bit = 1 << (history.last - slot)
        if history.observed & bit and (not is_call or history.called & bit):
            return history
        return ArrivalHistory(history.last, history.called | (bit if is_call else 0), history.observed | bit)

    def merge(self, other: ArrivalHistory) -> ArrivalHistory:
        """Return the arrivals that either history has."""
        last = max(self.last, other.last)
        one, two = self.at(last), other.at(last)
        return ArrivalHistory(last, one.called | two.called, one.observed | two.observed)

    def has_call(self, slot: int) -> bool:
        return bool(slot <= self.last and self.called >> (self.last - slot) & 1)

    def encode(self) -> bytes:
        """Return the stored form: 2.5 KB."""
        bitmaps = (self.called.to_bytes(SLOTS // 8, "little"), self.observed.to_bytes(SLOTS // 8, "little"))
        return msgspec.msgpack.encode((self.last, *bitmaps))

    @classmethod
    def decode(cls, stored: bytes) -> ArrivalHistory:
        """Read the stored form. Raises msgspec.MsgspecError."""
        last, called, observed = msgspec.msgpack.decode(stored, type=tuple[int, bytes, bytes])
        return cls(last, int.from_bytes(called, "little") & _ALL, int.from_bytes(observed, "little") & _ALL)


class Forecast(msgspec.Struct, frozen=True):
    """The expectation for `slot` and the slots of the hour that it begins: a text for each, "" if no call is expected.
    """

    slot: int
    texts: tuple[str, ...]


def forecast(history: ArrivalHistory, slot: int) -> Forecast:
    """Predict from the slots before `slot`."""
    history = history.at(slot)
    called, observed = (bits >> (history.last - slot + 1) for bits in (history.called, history.observed))
    texts = [""] * _HOUR
    explained = 0  # slots that trusted periods have predicted
    for period in _LONGEST_FIRST:
        predicted = _predicted(called, period)
        own = predicted & observed & ~explained & ((1 << period.judged_slots) - 1)
        right = (own & called).bit_count()
        if right < _LEAST_RIGHT or right < _LEAST_PRECISION * own.bit_count():
            continue
        explained |= predicted
        coming = _predicted(called << _HOUR, period)  # bit 0 is the last slot of the coming hour
        for ahead in range(_HOUR):
            if not texts[ahead] and coming >> (_HOUR - 1 - ahead) & 1:
                texts[ahead] = period.text
    return Forecast(slot, tuple(texts))


def expected_call(forecast: Forecast, history: ArrivalHistory, unix_s: float, lead_s: float) -> str:
    """Return why a worker should be warm now: a call is expected within `lead_s`, which is the time of a cold start.
    Return "" if none is expected.

    A call ends the expectation for its slot, and then the idle timeout counts. In a row of predicted slots only the
    last call does: to stop a worker and start another within minutes saves nothing.
    """
    slot, texts = forecast.slot, forecast.texts
    last = min(slot_of(unix_s + min(lead_s, LONGEST_LEAD_S)) - slot, _HOUR - 1)
    for ahead in range(last + 1):
        is_over = ahead == 0 and history.has_call(slot) and not texts[1]
        if texts[ahead] and not is_over:
            at = datetime.datetime.fromtimestamp((slot + ahead) * SLOT_S, datetime.UTC)
            return f"a call is expected at {at:%H:%M} UTC, {texts[ahead]}"
    return ""


def _predicted(called: int, period: _Period) -> int:
    """Return the slots that had a call in at least two of the last three periods."""
    one, two, three = (called >> (number * period.slots) for number in (1, 2, 3))
    return one & two | one & three | two & three
