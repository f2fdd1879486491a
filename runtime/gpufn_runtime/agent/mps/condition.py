"""Condition of a control daemon, derived from its replies. Pure.

| condition | observation | reaction |
|---|---|---|
| ACTIVE | one server of our user, ACTIVE | none |
| STARTING | no server yet, or an INITIALIZING one | wait; request a server |
| FAULT | a client has caused a server fault | end the clients; the server is ACTIVE again, or is restarted |
| FOREIGN | a server of another user: our clients would queue behind it forever | restart |
| HUNG | no answer in time | restart |
| DOWN | the daemon has ended | restart |
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
    status: str  # as the daemon reports it: INITIALIZING, ACTIVE or FAULT
    uid: int | None  # None: the server is gone


@dataclass(frozen=True)
class Observation:
    is_alive: bool
    answers: bool = False
    servers: tuple[Server, ...] = field(default=())


def condition_of(observation: Observation, own_uid: int) -> Condition:
    if not observation.is_alive:
        return Condition.DOWN
    if not observation.answers:
        return Condition.HUNG
    if any(server.uid not in (None, own_uid) for server in observation.servers):
        return Condition.FOREIGN
    statuses = {server.status for server in observation.servers}
    if "FAULT" in statuses:
        return Condition.FAULT
    return Condition.ACTIVE if statuses == {"ACTIVE"} else Condition.STARTING
