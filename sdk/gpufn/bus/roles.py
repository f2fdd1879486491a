"""Who may do what on the bus. One user per role; each role hears only its own inboxes.

Permissions here are a second line: workers, which run code that is not ours, have no connection at all.
`gateway` and `admin` may publish anything. `agent` and `runner` live on nodes, so they may neither write what the
controller decides nor read API keys nor destroy what is stored; only the agent may end an assignment, when its worker's
process is gone.
"""

from __future__ import annotations

import json

from gpufn.protocol import subjects

ROLES = ("admin", "gateway", "agent", "runner", "builder")

_KEYS = (subjects.API_KEYS, subjects.WEBHOOK_SECRETS)
_DECIDED = (subjects.FUNCTIONS, subjects.REVISIONS, subjects.ASSIGNMENTS, subjects.LEASES, subjects.SCHEDULES, *_KEYS)
# Every direct way to read a stream's messages, for the streams that hold keys and secrets.
_READ_KEYS = [
    f"$JS.API.{verb}.KV_{bucket}{rest}"
    for bucket in _KEYS
    for verb, rest in (
        ("STREAM.MSG.GET", ""),
        ("STREAM.UPDATE", ""),
        ("DIRECT.GET", ""),
        ("DIRECT.GET", ".>"),
        ("CONSUMER.CREATE", ""),
        ("CONSUMER.CREATE", ".>"),
        ("CONSUMER.DURABLE.CREATE", ".>"),
        ("CONSUMER.MSG.NEXT", ".>"),
    )
]
_DESTROY = [f"$JS.API.STREAM.{verb}.>" for verb in ("DELETE", "PURGE", "RESTORE", "SNAPSHOT")]
_BLOBS = (subjects.BUNDLES, subjects.MODEL_FILES, subjects.ENGINE_FILES)
_BUILT = (subjects.BUILDS, subjects.ENGINES)  # the builder's to write, and the gateway's
_DECIDE = [*(f"$KV.{bucket}.>" for bucket in _DECIDED + _BUILT), *(f"$O.{bucket}.>" for bucket in _BLOBS)]
_DENIED = {
    "agent": [subject for subject in _DECIDE if subjects.ASSIGNMENTS not in subject] + _DESTROY + _READ_KEYS,
    "runner": _DECIDE + _DESTROY + _READ_KEYS,
    "builder": _READ_KEYS,
}


def users_config(passwords: dict[str, str]) -> str:
    """The `users` of a nats-server configuration."""
    lines = []
    for role in ROLES:
        user: dict[str, object] = {"user": role, "password": passwords[role]}
        if role != "admin":
            user["permissions"] = {
                "publish": {"deny": denied} if (denied := _DENIED.get(role)) else {"allow": [">"]},
                "subscribe": {"allow": [f"_INBOX.{role}.>", f"{subjects.PREFIX}.>"]},
            }
        lines.append(f"    {json.dumps(user)}")
    return ",\n".join(lines)
