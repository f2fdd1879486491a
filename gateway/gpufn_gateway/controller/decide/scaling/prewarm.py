"""Pre-warming: when the next call of a function is expected, from the history of its arrivals. Pure.

The method follows Shahrad et al., "Serverless in the Wild" (USENIX ATC 2020): learn from arrivals, start a worker
before the next call, and use the normal timeout when the history does not predict. The histogram is a bitmap: for each
quarter hour of the last five weeks, whether a call arrived.

    predicted   a slot whose counterparts in the last three hours, days or weeks had a call at least twice
    trusted     a period whose predictions came true at least twice, at least half of the time, and at least twice as
                often as calls came in the other slots: random calls come as often in any slot
    judged      on the last day for hours, the last week for days, five weeks for weeks; without the slots that a
                trusted longer period predicts, because a week explains a weekend and a day does not

Slots that no controller observed are unknown, and do not count against a prediction.
"""

from __future__ import annotations

import datetime
from typing import Final

import msgspec

SLOT_S: Final = 900
EARLY_S: Final = 120  # a slot begins before its round time: periodic calls come at round times, some of them early
_HOUR: Final = 3600 // SLOT_S
_DAY: Final = 24 * _HOUR
_WEEK: Final = 7 * _DAY
SLOTS: Final = 5 * _WEEK
_ALL: Final = (1 << SLOTS) - 1
_LEAST_RIGHT: Final = 2
_LEAST_PRECISION: Final = 0.5
_LEAST_LIFT: Final = 2.0


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
        """Return the history with `slot` in it. Starts with an empty history if the clock has moved by more than the
        whole history."""
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
        """Return the stored form: 850 bytes."""
        bitmaps = (self.called.to_bytes(SLOTS // 8, "little"), self.observed.to_bytes(SLOTS // 8, "little"))
        return msgspec.msgpack.encode((self.last, *bitmaps))

    @classmethod
    def decode(cls, stored: bytes) -> ArrivalHistory:
        """Read the stored form. Raises msgspec.MsgspecError."""
        last, called, observed = msgspec.msgpack.decode(stored, type=tuple[int, bytes, bytes])
        return cls(last, int.from_bytes(called, "little") & _ALL, int.from_bytes(observed, "little") & _ALL)


class Forecast(msgspec.Struct, frozen=True):
    """The expectation for each slot of the hour that begins with `slot`: a text, "" if no call is expected."""

    slot: int
    texts: tuple[str, ...]


def forecast(history: ArrivalHistory, slot: int) -> Forecast:
    """Predict from the slots before `slot`."""
    history = history.at(slot)
    called, observed = (bits >> (history.last - slot + 1) for bits in (history.called, history.observed))
    texts = [""] * _HOUR
    explained = 0  # slots that trusted periods have predicted
    for period in _LONGEST_FIRST:
        predicted = _twice_in_three(called, period)
        predictable = _twice_in_three(observed, period)  # the history before is long enough
        judged = observed & ~explained & ((1 << period.judged_slots) - 1)
        if not _is_trusted(judged & predicted, judged & predictable & ~predicted, called):
            continue
        explained |= predicted
        coming = _twice_in_three(called << _HOUR, period)  # bit 0 is the last slot of the coming hour
        for ahead in range(_HOUR):
            if not texts[ahead] and coming >> (_HOUR - 1 - ahead) & 1:
                texts[ahead] = period.text
    return Forecast(slot, tuple(texts))


def expected_call(forecast: Forecast, history: ArrivalHistory, unix_s: float, lead_s: float) -> str:
    """Return why a worker should be warm now: a call is expected within `lead_s`, which is the time of a cold start.
    Return "" if none is expected.

    A call ends the expectation for its slot, and then the idle timeout counts. In a row of predicted slots, only a call
    in the last slot does: another start within minutes saves nothing.
    """
    slot, texts = forecast.slot, forecast.texts
    last = min(slot_of(unix_s + lead_s) - slot, _HOUR - 1)
    for ahead in range(last + 1):
        is_over = ahead == 0 and history.has_call(slot) and not texts[1]
        if texts[ahead] and not is_over:
            at = datetime.datetime.fromtimestamp((slot + ahead) * SLOT_S, datetime.UTC)
            return f"a call is expected at {at:%H:%M} UTC, {texts[ahead]}"
    return ""


def _is_trusted(predicted: int, other: int, called: int) -> bool:
    """Return whether calls came in most predicted slots, and far more often than in the others."""
    right = (predicted & called).bit_count()
    precision = right / max(1, predicted.bit_count())
    rate_of_others = (other & called).bit_count() / max(1, other.bit_count())
    return right >= _LEAST_RIGHT and precision >= max(_LEAST_PRECISION, _LEAST_LIFT * rate_of_others)


def _twice_in_three(slots: int, period: _Period) -> int:
    """Return the slots whose counterparts in at least two of the three periods before are among `slots`."""
    one, two, three = (slots >> (number * period.slots) for number in (1, 2, 3))
    return one & two | one & three | two & three
