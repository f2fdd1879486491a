"""How many tries at a time a receiver gets, so that one that does not answer leaves the gateway's hands to the others.

One that answers soon gets as many as there are. When `MOST` of its tries have waited for `SLOW_S`, it is slow, and gets
no more than those until one is answered sooner. What comes for it meanwhile comes back later, each a moment after the
one before: so also a long queue for it costs little, and finds it busy all the time.

Pure: `now` is seconds of any one clock.

>>> receivers = Receivers()
>>> any(receivers.begin("a.example", now=0.0) for _ in range(MOST + 1))
False
>>> receivers.begin("a.example", now=SLOW_S), receivers.begin("a.example", now=SLOW_S)
(5.0, 5.01)
>>> receivers.end("a.example", began=0.0, now=SLOW_S); receivers.end("a.example", began=0.0, now=SLOW_S)
>>> receivers.begin("a.example", now=SLOW_S)
0.0
"""

from __future__ import annotations

from typing import Final

MOST: Final = 8
SLOW_S: Final = 2.0
AGAIN_AFTER_S: Final = 5.0
APART_S: Final = 0.01


class _Receiver:
    __slots__ = ("again_at", "began", "is_slow")

    def __init__(self) -> None:
        self.began: list[float] = []  # the tries under way
        self.is_slow = False
        self.again_at = 0.0  # of the last one that was put off


class Receivers:
    def __init__(self) -> None:
        self._receivers: dict[str, _Receiver] = {}  # those with tries under way

    def begin(self, receiver: str, now: float) -> float:
        """0: try, and say `end`. Otherwise seconds after which to ask again."""
        found = self._receivers.setdefault(receiver, _Receiver())
        found.is_slow |= sum(now - began >= SLOW_S for began in found.began) >= MOST
        if found.is_slow and len(found.began) >= MOST:
            found.again_at = max(now + AGAIN_AFTER_S, found.again_at + APART_S)
            return found.again_at - now
        found.began.append(now)
        return 0.0

    def end(self, receiver: str, began: float, now: float) -> None:
        """Answered, or given up."""
        found = self._receivers[receiver]
        found.began.remove(began)
        found.is_slow = now - began >= SLOW_S
        if not found.began:
            del self._receivers[receiver]
