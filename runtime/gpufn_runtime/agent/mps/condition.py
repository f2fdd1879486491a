"""What a control daemon's answers mean. Pure.

| condition | seen | what follows |
|---|---|---|
| ACTIVE | one server of our user, ACTIVE | nothing |
| STARTING | no server yet, or one that is INITIALIZING | wait; a server is asked for |
| FAULT | a client has made the server fault | its clients are ended; it is ACTIVE again, or started anew |
| FOREIGN | a server of another user: our clients would queue behind it, for ever | started anew |
| HUNG | no answer in time | started anew |
| DOWN | the daemon is gone | started anew |
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Condition(enum.Enum):
    ACTIVE = "its MPS server is active"
    STARTING = "its MPS server is starting"
    FAULT = "its MPS server is in FAULT"
    FOREIGN = "its MPS server belongs to another user"
    HUNG = "its MPS daemon does not answer"
    DOWN = "its MPS daemon has ended"

    @property
    def is_incident(self) -> bool:
        return self not in (Condition.ACTIVE, Condition.STARTING)


@dataclass(frozen=True)
class Server:
    pid: int
    status: str  # as the daemon says: INITIALIZING, ACTIVE or FAULT
    uid: int | None  # None: it has gone meanwhile


@dataclass(frozen=True)
class Observation:
    is_alive: bool
    answers: bool = False
    servers: tuple[Server, ...] = field(default=())


def condition_of(seen: Observation, own_uid: int) -> Condition:
    if not seen.is_alive:
        return Condition.DOWN
    if not seen.answers:
        return Condition.HUNG
    if any(server.uid not in (None, own_uid) for server in seen.servers):
        return Condition.FOREIGN
    statuses = {server.status for server in seen.servers}
    if "FAULT" in statuses:
        return Condition.FAULT
    return Condition.ACTIVE if statuses == {"ACTIVE"} else Condition.STARTING
