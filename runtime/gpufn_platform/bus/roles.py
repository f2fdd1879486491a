"""NATS permissions: one user per role, with the exact subjects that it may publish and subscribe to.

| role | may |
|---|---|
| `admin` | do everything: `gpufn keys` and tests |
| `gateway` | create and change the platform's streams and buckets, and read and write their contents |
| `agent` | read records and files, report, delete an Assignment whose process has ended |
| `runner` | take calls from their queues, store their results, call other functions |
| `builder` | take builds, store engines and its build records |

The roles of a node (`agent`, `runner`, `builder`) cannot create, change, purge or delete streams: the gateway does
that. A stream with `republish`, `sources`, a mirror or a subject transform would read and write every bucket for its
creator. A consumer's filter is part of the subject of its create request, so a role can create consumers only for
subjects that it may read.

These permissions are a second line of defense. Workers, which run users' code, have no connection to the bus.

The server checks the subject of a request but not its reply subject, so a role can make the server publish a response
to any subject (docs/decisions/0031-bus-permissions-per-role.md). Therefore a bucket refuses messages that replace a
record without the `Nats-Rollup` header, and `gpufn_platform.bus.storage.key_value` ignores messages that the server
copied.
"""

from __future__ import annotations

import json

from gpufn_core.protocol import subjects
from gpufn_platform.bus.connection import PROCESSES

ROLES = ("admin", "gateway", "agent", "runner", "builder")

_STREAMS = (
    subjects.SYNC,
    subjects.ASYNC,
    subjects.RESULTS,
    subjects.DEAD_LETTERS,
    subjects.LOGS,
    subjects.BUILD,
    subjects.CHECKPOINTS,
    subjects.WEBHOOKS,
    subjects.QUEUES,
    subjects.HISTORY,
    subjects.PROBE,
)
_BUCKETS = (
    subjects.FUNCTIONS,
    subjects.REVISIONS,
    subjects.ASSIGNMENTS,
    subjects.LEASES,
    subjects.ARRIVALS,
    subjects.NODE_DRAINS,
    subjects.TEAMS,
    subjects.API_KEYS,
    subjects.KEY_USE,
    subjects.TOKEN_KEYS,
    subjects.USERS,
    subjects.USAGE,
    subjects.SCHEDULES,
    subjects.WEBHOOK_SECRETS,
    subjects.SECRETS,
    subjects.SIGNING,
    subjects.CLIENT_FILES,
    subjects.BUILDS,
    subjects.ENGINES,
    subjects.VOLUMES,
    subjects.DICTS,
)
_STORES = (
    subjects.BUNDLES,
    subjects.MODEL_FILES,
    subjects.ENGINE_FILES,
    subjects.VOLUME_FILES,
    subjects.VALUES,
    subjects.ARGUMENT_FILES,
    subjects.RESULT_FILES,
)
# Gateways append to it and read it; no role changes it.
_AUDIT = tuple(f"STREAM.{verb}" for verb in ("INFO", "CREATE", "UPDATE", "MSG.GET"))
_API = "$JS.API."
_P = subjects.PREFIX


def _allow(*, publish: list[str], subscribe: list[str]) -> dict[str, object]:
    return {"permissions": {"publish": {"allow": publish}, "subscribe": {"allow": subscribe}}}


def _api(stream: str, *verbs: str) -> list[str]:
    """API requests for a stream, such as `STREAM.INFO`."""
    return [f"{_API}{verb}.{stream}" for verb in verbs]


def _follow(stream: str, subject: str) -> list[str]:
    """Read the messages of `subject` in order with an own consumer, and read single messages."""
    return [
        *_api(stream, "STREAM.INFO", "STREAM.MSG.GET"),
        f"{_API}CONSUMER.CREATE.{stream}.*.{subject}",
        *(f"{_API}CONSUMER.{verb}.{stream}.*" for verb in ("MSG.NEXT", "DELETE")),
    ]


def _read_bucket(bucket: str) -> list[str]:
    return _follow(f"KV_{bucket}", f"$KV.{bucket}.>")


def _read_store(store: str) -> list[str]:
    return _api(f"OBJ_{store}", "STREAM.INFO", "STREAM.MSG.GET", "DIRECT.GET")


def _take(stream: str, subject: str) -> list[str]:
    """Take messages of `subject` from a queue and settle them."""
    return [
        f"{_API}CONSUMER.CREATE.{stream}.*.{subject}",
        *(f"{_API}CONSUMER.{verb}.{stream}.*" for verb in ("MSG.NEXT", "INFO")),
        f"$JS.ACK.{stream}.>",
    ]


def _everything_in(stream: str) -> list[str]:
    return [
        *_api(stream, *(f"STREAM.{verb}" for verb in ("INFO", "CREATE", "UPDATE", "PURGE", "MSG.GET", "MSG.DELETE"))),
        *_api(stream, "DIRECT.GET"),
        f"{_API}CONSUMER.CREATE.{stream}.>",
        *(f"{_API}CONSUMER.{verb}.{stream}.*" for verb in ("INFO", "MSG.NEXT", "DELETE")),
        f"$JS.ACK.{stream}.>",
    ]


def _answers_to(*roles: str) -> list[str]:
    """Respond to requests of these roles. Their inboxes for responses of the server are for the server only."""
    return [f"_INBOX.{role}.{PROCESSES}.>" for role in roles]


_PERMISSIONS = {
    "gateway": _allow(
        publish=[
            f"{_P}.>",
            *_answers_to(*ROLES),
            *(f"{_API}{verb}" for verb in ("INFO", "STREAM.LIST")),  # sizes and limits, for metrics
            *(subject for stream in _STREAMS for subject in _everything_in(stream)),
            *_api(subjects.AUDIT, *_AUDIT, "DIRECT.GET"),
            *(subject for bucket in _BUCKETS for subject in (f"$KV.{bucket}.>", *_everything_in(f"KV_{bucket}"))),
            *(subject for store in _STORES for subject in (f"$O.{store}.>", *_everything_in(f"OBJ_{store}"))),
        ],
        subscribe=["_INBOX.gateway.>", f"{_P}.>"],
    ),
    "agent": _allow(
        publish=[
            subjects.NODE_REPORTS,
            subjects.DEVICE_REPORTS,
            subjects.WORKER_EVENTS,
            subjects.logs("*"),
            subjects.on_node("agent", "*"),
            *_answers_to("agent"),  # to an agent that starts under the same node's name
            *_answers_to("gateway"),  # profiles
            f"$KV.{subjects.ASSIGNMENTS}.>",
            *_read_bucket(subjects.ASSIGNMENTS),
            *_read_bucket(subjects.FUNCTIONS),
            *_read_bucket(subjects.REVISIONS),
            *_read_bucket(subjects.ENGINES),
            *_read_bucket(subjects.TEAMS),
            *_read_bucket(subjects.SECRETS),  # encrypted: the agent also needs the master key
            *_read_bucket(subjects.SIGNING),
            *_read_store(subjects.BUNDLES),
            *_read_store(subjects.ENGINE_FILES),
            *_read_store(subjects.MODEL_FILES),  # weights
            *_read_bucket(subjects.VOLUMES),
            *_read_store(subjects.VOLUME_FILES),
        ],
        subscribe=[
            "_INBOX.agent.>",
            subjects.kill("*"),
            subjects.profile("*"),
            subjects.RUNNER_REPORTS,
            subjects.on_node("agent", "*"),
        ],
    ),
    "runner": _allow(
        publish=[
            subjects.RUNNER_REPORTS,
            subjects.TOTALS_REPORTS,
            subjects.WORKER_EVENTS,
            subjects.WAKEUPS,
            subjects.CANCELS,
            subjects.WHEREABOUTS,
            subjects.VARIANTS,
            subjects.DATA_REQUESTS,
            subjects.SPANS,
            subjects.kill("*"),
            subjects.logs("*"),
            subjects.progress("*"),
            subjects.live_items("*"),
            subjects.call_started("*"),
            subjects.runner_inbox("*"),
            subjects.on_node("runner", "*"),
            f"{_P}.rep.>",
            *_answers_to("admin", "gateway", "runner"),  # responses to 'which runner has this call?'
            subjects.SYNC_FILTER,
            subjects.ASYNC_FILTER,
            subjects.RESULTS_FILTER,
            subjects.DEAD_LETTERS_FILTER,
            subjects.CHECKPOINTS_FILTER,
            subjects.WEBHOOKS_FILTER,
            f"$KV.{subjects.USAGE}.>",
            f"$O.{subjects.RESULT_FILES}.>",
            f"$O.{subjects.VOLUME_FILES}.>",  # files that functions commit
            *_read_store(subjects.VOLUME_FILES),
            f"$O.{subjects.VALUES}.>",
            *_read_store(subjects.VALUES),
            f"$O.{subjects.ARGUMENT_FILES}.>",  # arguments of nested calls, and removal of used ones
            *_take(subjects.SYNC, subjects.SYNC_FILTER),
            *_take(subjects.ASYNC, subjects.ASYNC_FILTER),
            *_api(subjects.SYNC, "STREAM.INFO", "STREAM.MSG.GET", "STREAM.MSG.DELETE"),
            *_api(subjects.ASYNC, "STREAM.INFO", "STREAM.MSG.GET", "STREAM.MSG.DELETE", "DIRECT.GET"),
            *_api(subjects.CHECKPOINTS, "STREAM.INFO", "STREAM.MSG.GET", "STREAM.MSG.DELETE"),
            *_api(subjects.RESULTS, "STREAM.INFO", "STREAM.MSG.GET"),
            *_api(subjects.DEAD_LETTERS, "STREAM.INFO", "STREAM.MSG.GET"),
            *_read_bucket(subjects.ASSIGNMENTS),
            *_read_bucket(subjects.FUNCTIONS),
            *_read_bucket(subjects.REVISIONS),
            *_read_bucket(subjects.TEAMS),
            *_api(f"KV_{subjects.USAGE}", "STREAM.INFO", "STREAM.MSG.GET"),
            *_read_store(subjects.RESULT_FILES),
            *_read_store(subjects.ARGUMENT_FILES),
        ],
        subscribe=[
            "_INBOX.runner.>",
            subjects.replies(f"{subjects.RUNNER_CALLERS}.*"),
            subjects.CONTROLLER_REPORT,
            subjects.WORKER_EVENTS,
            subjects.WAKEUPS,
            subjects.CANCELS,
            subjects.WHEREABOUTS,
            subjects.worker_profile("*"),
            subjects.runner_inbox("*"),
            subjects.on_node("runner", "*"),
            subjects.RESULTS_FILTER,
            subjects.DEVICE_REPORTS,  # the energy of its node's GPUs
        ],
    ),
    "builder": _allow(
        publish=[
            subjects.on_node("builder", "*"),
            *_answers_to("gateway"),  # responses to 'are there builders for this device?'
            *_answers_to("builder"),  # to a builder that starts under the same node's name
            f"$KV.{subjects.BUILDS}.>",
            f"$KV.{subjects.ENGINES}.>",
            f"$KV.{subjects.LEASES}.{subjects.BUILD_LEASES}.>",
            f"$O.{subjects.ENGINE_FILES}.>",
            *_take(subjects.BUILD, subjects.BUILD_FILTER),
            *_api(subjects.BUILD, "STREAM.INFO"),
            *_read_bucket(subjects.BUILDS),
            *_read_bucket(subjects.ENGINES),
            *_read_bucket(subjects.SIGNING),
            *_api(f"KV_{subjects.LEASES}", "STREAM.INFO", "STREAM.MSG.GET"),
            *_read_store(subjects.MODEL_FILES),
            *_api(f"OBJ_{subjects.MODEL_FILES}", "STREAM.MSG.DELETE"),  # damaged files
            *_read_store(subjects.ENGINE_FILES),
            *_api(f"OBJ_{subjects.ENGINE_FILES}", "STREAM.MSG.DELETE"),  # engines that could not be published
        ],
        subscribe=[
            "_INBOX.builder.>",
            subjects.NODE_REPORTS,
            f"{_P}.ctl.builder.*",
            subjects.on_node("builder", "*"),
        ],
    ),
}


def users_config(passwords: dict[str, str]) -> str:
    """Return the `users` block of a nats-server configuration."""
    users = [{"user": role, "password": passwords[role], **_PERMISSIONS.get(role, {})} for role in ROLES]
    return ",\n".join(f"    {json.dumps(user)}" for user in users)
