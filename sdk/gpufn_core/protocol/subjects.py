"""Every subject, stream, consumer and bucket name in NATS, built in one place.

User text never becomes part of a subject: function names match `names.FULL_NAME`, and the rest are our own ids.
"""

from __future__ import annotations

import re

from gpufn_core.spec.priority import Priority

PREFIX = "gpufn.v1"
PLATFORM = "platform"  # replaces an API key's id for actions without a key

# Streams
SYNC = "GPUFN_SYNC"  # work queue in memory: calls whose callers wait
ASYNC = "GPUFN_ASYNC"  # work queue on disk: submitted calls
RESULTS = "GPUFN_RESULTS"  # one record per submitted invocation
DEAD_LETTERS = "GPUFN_DLQ"  # submitted invocations that failed permanently, with their payload
LOGS = "GPUFN_LOGS"
BUILD = "GPUFN_BUILD"  # work queue on disk: build jobs
CHECKPOINTS = "GPUFN_CHECKPOINTS"  # the last checkpoint of each call
WEBHOOKS = "GPUFN_WEBHOOKS"  # work queue on disk: ids of ended calls with a webhook to deliver
AUDIT = "GPUFN_AUDIT"  # one subject: the audit log
QUEUES = "GPUFN_QUEUES"  # work queue on disk: items of queues by name
HISTORY = "GPUFN_HISTORY"  # points and events of the history
PROBE = "GPUFN_PROBE"  # one message in memory, which a gateway uses to check the server's settings

SYNC_FILTER = f"{PREFIX}.inv.s.>"
ASYNC_FILTER = f"{PREFIX}.inv.a.>"
MAPS_FILTER = f"{PREFIX}.map.>"  # in ASYNC, so that a chunk's items and its entry are stored atomically
RESULTS_FILTER = f"{PREFIX}.res.>"
DEAD_LETTERS_FILTER = f"{PREFIX}.dlq.>"
LOGS_FILTER = f"{PREFIX}.log.>"
BUILD_FILTER = f"{PREFIX}.bld.>"
CHECKPOINTS_FILTER = f"{PREFIX}.ckp.>"
WEBHOOKS_FILTER = f"{PREFIX}.hook.>"
AUDIT_FILTER = f"{PREFIX}.audit"
QUEUES_FILTER = f"{PREFIX}.que.>"
HISTORY_FILTER = f"{PREFIX}.hst.>"
HISTORY_EVENTS = f"{PREFIX}.hst.event"
PROBE_FILTER = f"{PREFIX}.probe"
WEBHOOK_CONSUMER = "H-webhooks"

# Key-value buckets and object stores
FUNCTIONS = "gpufn_functions"  # <function> → Function
REVISIONS = "gpufn_revisions"  # <function>.<revision> → Revision
ASSIGNMENTS = "gpufn_assignments"  # <node>.<worker> → Assignment
LEASES = "gpufn_leases"  # <name> → holder
ARRIVALS = "gpufn_arrivals"  # <function> → ArrivalHistory
BUILD_LEASES = "build"  # leases of builds are build.<EngineKey>
NODE_DRAINS = "gpufn_node_drains"  # <node> → NodeDrain
TEAMS = "gpufn_teams"  # <name> → Team
KEY_USE = "gpufn_key_use"  # <key id> → time of its last use
API_KEYS = "gpufn_keys"  # <key id> → ApiKey
TOKEN_KEYS = "gpufn_token_keys"  # <number> → SigningKey  # noqa: S105
USERS = "gpufn_users"  # <user id> → User
USAGE = "gpufn_usage"  # <day>.<function>.<key id or platform>.<node> → Usage
SCHEDULES = "gpufn_schedules"  # <function>, or <function>.<id> → ScheduleRecord
WEBHOOK_SECRETS = "gpufn_webhook_secrets"  # <key id> or platform → secret that signs its webhooks
SECRETS = "gpufn_secrets"  # <name> → SealedSecret
SIGNING = "gpufn_signing"  # key.<name> → TrustedKey; require.<environment> → time of the decision
CLIENT_FILES = "gpufn_client_files"  # <key id or platform>.<id> → ClientFile; batch.<…>.<id> → ClientBatch
DICTS = "gpufn_dicts"  # <dict>.<key in base64url> → value
VOLUMES = "gpufn_volumes"  # <name> → VolumeRecord
BUNDLES = "gpufn_bundles"
BUILDS = "gpufn_builds"  # <build id> → Build
ENGINES = "gpufn_engines"  # <EngineKey> → EngineManifest, once the engine is complete
MODEL_FILES = "gpufn_models"  # uploads: ONNX files, external data, samples
ENGINE_FILES = "gpufn_engine_files"  # engines and build reports
VOLUME_FILES = "gpufn_volume_files"  # files of volumes, and the manifests of their versions
VALUES = "gpufn_values"  # values that `gpufn.put` stores; they expire
ARGUMENT_FILES = "gpufn_arguments"  # arguments too large for their message; each belongs to one invocation
RESULT_FILES = "gpufn_results"  # results too large for their CallRecord; each belongs to one invocation

# Broadcasts over core NATS
NODE_REPORTS = f"{PREFIX}.hb.node.*"
DEVICE_REPORTS = f"{PREFIX}.hb.device.*"
RUNNER_REPORTS = f"{PREFIX}.hb.runner.*"
TOTALS_REPORTS = f"{PREFIX}.hb.totals.*"
GATEWAY_REPORTS = f"{PREFIX}.hb.gateway.*"
HISTORY_PARTS = f"{PREFIX}.hb.history.*"
MIRRORED_CALLS = f"{PREFIX}.hb.mirror.*"
CONTROLLER_REPORT = f"{PREFIX}.hb.controller"
SPANS = f"{PREFIX}.spn"  # finished spans of traces, to all gateways
WAKEUPS = f"{PREFIX}.dmd.*"
WORKER_EVENTS = f"{PREFIX}.evt.worker.*"
CANCELS = f"{PREFIX}.ctl.cancel"
WHEREABOUTS = f"{PREFIX}.ctl.where"
VARIANTS = f"{PREFIX}.ctl.variant"  # a runner asks a gateway for the variant that a function calls
DATA_REQUESTS = f"{PREFIX}.data"  # to one of the gateways


def sync_queue(function: str, revision: int, priority: str = "normal") -> str:
    """Queue of calls whose callers wait. `priority` may be ``*``."""
    return f"{PREFIX}.inv.s.{function}.{revision}.{priority}"


def async_queue(function: str, revision: int, priority: str = "normal", owner: str = PLATFORM) -> str:
    """Queue of submitted calls. `owner` is the id of the submitting API key. `priority` and `owner` may be ``*``."""
    return f"{PREFIX}.inv.a.{function}.{revision}.{priority}.{owner}"


def async_queues_of(owner: str) -> str:
    """Filter for all submitted calls of an API key that have not ended, of any function."""
    return f"{PREFIX}.inv.a.*.*.*.{owner}"


def async_queues(function: str) -> str:
    """Filter for the async queues of all revisions of a function (``*``: of all functions)."""
    return f"{PREFIX}.inv.a.{function}.>"


def queue_owner(subject: str) -> tuple[str, int]:
    """Return the function and revision of a `sync_queue` or `async_queue` subject."""
    tokens = subject.split(".")
    return tokens[4], int(tokens[5])


def queue_class(subject: str) -> Priority:
    """Return the priority class of a `sync_queue` or `async_queue` subject."""
    return Priority(subject.split(".")[6])


def sync_consumer(function: str, revision: int, priority: str = "normal") -> str:
    return f"S-{_consumer_part(function)}-{revision}-{priority}"


def async_consumer(function: str, revision: int, priority: str = "normal") -> str:
    return f"A-{_consumer_part(function)}-{revision}-{priority}"


def _consumer_part(function: str) -> str:
    """Return a function's name as part of a consumer's name, which must not contain a slash. Function names have no
    underscore, so no two get the same part."""
    return function.replace("/", "_")


def result(function: str, invocation: str) -> str:
    """Subject of a CallRecord. The index of a map's item is a separate token: `map_results` matches all items of a map,
    and `result(function, "*")` matches none."""
    return f"{PREFIX}.res.{function}.{invocation.replace('-', '.')}"


def any_result(invocation: str) -> str:
    """Filter for the record of `invocation`, of any function."""
    return result("*", invocation)


def map_results(function: str, map_id: str) -> str:
    """Filter for the records of a map's items."""
    return f"{PREFIX}.res.{function}.{map_id}.*"


def item_index(subject: str) -> int:
    """Return the index of the item whose record is at `subject`, which matches `map_results`."""
    return int(subject.rpartition(".")[2])


def map_log(function: str, map_id: str) -> str:
    """Log of a map, with an entry per accepted chunk."""
    return f"{PREFIX}.map.{function}.{map_id}"


def map_of_log(subject: str) -> tuple[str, str]:
    """Return the function and the id of the map of a `map_log` subject."""
    _, function, map_id = subject.rsplit(".", 2)
    return function, map_id


def webhook(function: str) -> str:
    return f"{PREFIX}.hook.{function}"


def queue(name: str) -> str:
    """Subject of the items of a queue by name."""
    return f"{PREFIX}.que.{name}"


def queue_name(subject: str) -> str:
    return subject.removeprefix(f"{PREFIX}.que.")


def queue_consumer(name: str) -> str:
    return f"Q-{_consumer_part(name)}"


def checkpoint(invocation: str) -> str:
    return f"{PREFIX}.ckp.{invocation}"


def start_note(invocation: str) -> str:
    return f"{PREFIX}.ckp.{invocation}.start"


def progress(invocation: str) -> str:
    """Subject on which a running call reports Progress (core NATS)."""
    return f"{PREFIX}.prg.{invocation}"


def live_items(invocation: str) -> str:
    """Subject on which the items of a submitted generator call are published as they come (core NATS)."""
    return f"{PREFIX}.itm.{invocation}"


def dead_letter(function: str, invocation: str) -> str:
    return f"{PREFIX}.dlq.{function}.{invocation}"


def call_started(invocation: str) -> str:
    """Subject on which a runner announces the start of an attempt of a submitted invocation."""
    return f"{PREFIX}.evt.call.{invocation}"


def logs(function: str) -> str:
    return f"{PREFIX}.log.{function}"


def build_queue(device: str) -> str:
    """Queue of build jobs for one DeviceKind."""
    return f"{PREFIX}.bld.{device_token(device)}"


def build_consumer(device: str) -> str:
    return f"B-{device_token(device)}"


def builders(device: str) -> str:
    """Subject on which builders for a DeviceKind answer presence requests, also while they build."""
    return f"{PREFIX}.ctl.builder.{device_token(device)}"


def device_token(device: str) -> str:
    """Turn a DeviceKind ("NVIDIA L4") into a subject token. No two device names of the driver get the same token."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unnamed"


def replies(caller: str) -> str:
    """Filter that a caller (a gateway or a runner) subscribes to once for the replies to all of its calls."""
    return f"{PREFIX}.rep.*.{caller}.*"


def reply(function: str, caller: str, token: str) -> str:
    return f"{PREFIX}.rep.{function}.{caller}.{token}"


def is_reply(subject: str) -> bool:
    """Return whether `subject` is a reply subject. A subject in a message can be anything."""
    return subject.startswith(f"{PREFIX}.rep.")


WAIT_CHECK_PART = "-"
RUNNER_CALLERS = "runner"  # first token of a runner as a caller: its replies are separate from those to gateways


def wait_check(reply: str) -> str:
    """Subject of the `WaitCheck`, which queries the caller of `reply` whether it still waits."""
    return f"{reply.rpartition('.')[0]}.{WAIT_CHECK_PART}"


def runner_inbox(runner: str) -> str:
    """Subject on which a runner receives credits for the streams that it sends."""
    return f"{PREFIX}.run.{runner}"


def is_runner_inbox(subject: str) -> bool:
    return subject.startswith(f"{PREFIX}.run.")


def node_report(node: str) -> str:
    return f"{PREFIX}.hb.node.{node}"


def device_report(node: str) -> str:
    return f"{PREFIX}.hb.device.{node}"


def gateway_report(gateway: str) -> str:
    return f"{PREFIX}.hb.gateway.{gateway}"


def history(resolution: str) -> str:
    """Subject of the points of a resolution, such as ``60s``."""
    return f"{PREFIX}.hst.{resolution}"


def history_part(gateway: str) -> str:
    """Subject on which a gateway reports its part of ten seconds."""
    return f"{PREFIX}.hb.history.{gateway}"


def mirrored_call(function: str) -> str:
    """Subject of the comparison of a call with its copy, for all gateways (core NATS)."""
    return f"{PREFIX}.hb.mirror.{function}"


def runner_report(node: str) -> str:
    return f"{PREFIX}.hb.runner.{node}"


def totals_report(node: str) -> str:
    return f"{PREFIX}.hb.totals.{node}"


def wakeup(function: str) -> str:
    return f"{PREFIX}.dmd.{function}"


def worker_event(function: str) -> str:
    return f"{PREFIX}.evt.worker.{function}"


def on_node(role: str, node: str) -> str:
    """Subject on which a node's agent, runner or builder reports its host."""
    return f"{PREFIX}.ctl.node.{role}.{node}"


def kill(node: str) -> str:
    """Subject on which an agent receives orders to kill a worker."""
    return f"{PREFIX}.ctl.kill.{node}"


def profile(node: str) -> str:
    """Subject on which an agent receives requests for profiles of its workers."""
    return f"{PREFIX}.ctl.profile.{node}"


def worker_profile(node: str) -> str:
    """Subject on which a runner receives requests for profiles that its workers record themselves."""
    return f"{PREFIX}.ctl.memory.{node}"


def revision_key(function: str, revision: int) -> str:
    return f"{function}.{revision}"


def assignment_key(node: str, worker: str) -> str:
    return f"{node}.{worker}"
