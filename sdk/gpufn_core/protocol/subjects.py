"""Every subject, stream, consumer and bucket name on the bus, built in one place.

User text never gets into a subject: function names match `FUNCTION_NAME`, the rest are our own ids.
"""

from __future__ import annotations

import re

from gpufn_core.spec.priority import Priority

PREFIX = "gpufn.v1"
PLATFORM = "platform"  # stands where an API key's id does, for what is done without one
FUNCTION_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,38}[a-z0-9])?")

# Streams
SYNC = "GPUFN_SYNC"  # work queue in memory: callers wait for these
ASYNC = "GPUFN_ASYNC"  # work queue on disk: callers come back for these
RESULTS = "GPUFN_RESULTS"  # one record per submitted invocation
DEAD_LETTERS = "GPUFN_DLQ"  # submitted invocations that failed for good, with their payload
LOGS = "GPUFN_LOGS"
BUILD = "GPUFN_BUILD"  # work queue on disk: build jobs
CHECKPOINTS = "GPUFN_CHECKPOINTS"  # the last one of each call that made any
WEBHOOKS = "GPUFN_WEBHOOKS"  # work queue on disk: ids of calls whose end is to be told
PROBE = "GPUFN_PROBE"  # one message in memory, by which a gateway checks the server's settings

SYNC_FILTER = f"{PREFIX}.inv.s.>"
ASYNC_FILTER = f"{PREFIX}.inv.a.>"
MAPS_FILTER = f"{PREFIX}.map.>"  # in ASYNC, so that a chunk's items and its entry are stored together or not at all
RESULTS_FILTER = f"{PREFIX}.res.>"
DEAD_LETTERS_FILTER = f"{PREFIX}.dlq.>"
LOGS_FILTER = f"{PREFIX}.log.>"
BUILD_FILTER = f"{PREFIX}.bld.>"
CHECKPOINTS_FILTER = f"{PREFIX}.ckp.>"
WEBHOOKS_FILTER = f"{PREFIX}.hook.>"
PROBE_FILTER = f"{PREFIX}.probe"
WEBHOOK_CONSUMER = "H-webhooks"

# Key-value buckets and object stores
FUNCTIONS = "gpufn_functions"  # <function> → Function
REVISIONS = "gpufn_revisions"  # <function>.<revision> → Revision
ASSIGNMENTS = "gpufn_assignments"  # <node>.<worker> → Assignment
LEASES = "gpufn_leases"  # <name> → holder
BUILD_LEASES = "build"  # leases of builds are build.<EngineKey>
API_KEYS = "gpufn_keys"  # <key id> → ApiKey
USAGE = "gpufn_usage"  # <day>.<function>.<key id or platform>.<node> → Usage
SCHEDULES = "gpufn_schedules"  # <function>, or <function>.<id> → ScheduleRecord
WEBHOOK_SECRETS = "gpufn_webhook_secrets"  # <key id> or platform → what its webhooks are signed with
BUNDLES = "gpufn_bundles"
BUILDS = "gpufn_builds"  # <build id> → Build
ENGINES = "gpufn_engines"  # <EngineKey> → EngineManifest, once it is whole
MODEL_FILES = "gpufn_models"  # uploaded: ONNX files, external data, samples
ENGINE_FILES = "gpufn_engine_files"  # engines and build reports
ARGUMENT_FILES = "gpufn_arguments"  # arguments too large for their message; each is its own invocation's
RESULT_FILES = "gpufn_results"  # results too large for their CallRecord; each is its own invocation's

# Broadcasts, core NATS
NODE_REPORTS = f"{PREFIX}.hb.node.*"
DEVICE_REPORTS = f"{PREFIX}.hb.device.*"
RUNNER_REPORTS = f"{PREFIX}.hb.runner.*"
GATEWAY_REPORTS = f"{PREFIX}.hb.gateway.*"
CONTROLLER_REPORT = f"{PREFIX}.hb.controller"
DOORBELLS = f"{PREFIX}.dmd.*"
WORKER_EVENTS = f"{PREFIX}.evt.worker.*"
CANCELS = f"{PREFIX}.ctl.cancel"
WHEREABOUTS = f"{PREFIX}.ctl.where"


def is_function_name(name: str) -> bool:
    return FUNCTION_NAME.fullmatch(name) is not None


def sync_queue(function: str, revision: int, priority: str = "normal") -> str:
    """`priority` may be ``*``."""
    return f"{PREFIX}.inv.s.{function}.{revision}.{priority}"


def async_queue(function: str, revision: int, priority: str = "normal", owner: str = PLATFORM) -> str:
    """`owner` is the id of the API key that submits. `priority` and `owner` may be ``*``."""
    return f"{PREFIX}.inv.a.{function}.{revision}.{priority}.{owner}"


def async_queues_of(owner: str) -> str:
    """Matches all that an API key has submitted and that has not ended, whichever function it calls."""
    return f"{PREFIX}.inv.a.*.*.*.{owner}"


def async_queues(function: str) -> str:
    """Matches the async queues of all revisions of a function (``*``: of all functions)."""
    return f"{PREFIX}.inv.a.{function}.>"


def queue_owner(subject: str) -> tuple[str, int]:
    """The function and revision that a `sync_queue` or `async_queue` subject belongs to."""
    tokens = subject.split(".")
    return tokens[4], int(tokens[5])


def queue_class(subject: str) -> Priority:
    """The class of the calls in a `sync_queue` or `async_queue`."""
    return Priority(subject.split(".")[6])


def sync_consumer(function: str, revision: int, priority: str = "normal") -> str:
    return f"S-{function}-{revision}-{priority}"


def async_consumer(function: str, revision: int, priority: str = "normal") -> str:
    return f"A-{function}-{revision}-{priority}"


def result(function: str, invocation: str) -> str:
    """Of a map's item, its index is a token of its own: `map_results` has all, and `result(function, "*")` none."""
    return f"{PREFIX}.res.{function}.{invocation.replace('-', '.')}"


def any_result(invocation: str) -> str:
    """Matches the record of `invocation`, whichever function it belongs to."""
    return result("*", invocation)


def map_results(function: str, map_id: str) -> str:
    """Matches the records of a map's items."""
    return f"{PREFIX}.res.{function}.{map_id}.*"


def item_index(subject: str) -> int:
    """Of the item whose record is at `subject`, which matches `map_results`."""
    return int(subject.rpartition(".")[2])


def map_log(function: str, map_id: str) -> str:
    """What was accepted of a map: an entry per chunk."""
    return f"{PREFIX}.map.{function}.{map_id}"


def webhook(function: str) -> str:
    return f"{PREFIX}.hook.{function}"


def checkpoint(invocation: str) -> str:
    return f"{PREFIX}.ckp.{invocation}"


def start_note(invocation: str) -> str:
    return f"{PREFIX}.ckp.{invocation}.start"


def progress(invocation: str) -> str:
    """Where a call that runs says how far it is: core NATS, a Progress each time."""
    return f"{PREFIX}.prg.{invocation}"


def dead_letter(function: str, invocation: str) -> str:
    return f"{PREFIX}.dlq.{function}.{invocation}"


def call_started(invocation: str) -> str:
    """Where a runner says that an attempt of a submitted invocation began."""
    return f"{PREFIX}.evt.call.{invocation}"


def logs(function: str) -> str:
    return f"{PREFIX}.log.{function}"


def build_queue(device: str) -> str:
    """Build jobs for one DeviceKind."""
    return f"{PREFIX}.bld.{device_token(device)}"


def build_consumer(device: str) -> str:
    return f"B-{device_token(device)}"


def builders(device: str) -> str:
    """Where the builders for a DeviceKind answer whoever asks whether there are any, also while they build."""
    return f"{PREFIX}.ctl.builder.{device_token(device)}"


def device_token(device: str) -> str:
    """A DeviceKind ("NVIDIA L4") as part of a subject; the driver's names differ in more than this drops."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "unnamed"


def runner_caller(runner: str) -> str:
    """A runner's name as a caller. Its first token keeps runners out of the replies to gateways."""
    return f"{RUNNER_CALLERS}.{runner}"


def replies(caller: str) -> str:
    """What one caller (a gateway or a runner) subscribes to, once, for the replies to all of its calls."""
    return f"{PREFIX}.rep.*.{caller}.*"


def reply(function: str, caller: str, token: str) -> str:
    return f"{PREFIX}.rep.{function}.{caller}.{token}"


def is_reply(subject: str) -> bool:
    """Whether somebody waits for a reply there. A subject in a message may be any."""
    return subject.startswith(f"{PREFIX}.rep.")


ASKED = "-"
RUNNER_CALLERS = "runner"


def beside(reply: str) -> str:
    """Where the caller who waits for `reply` is asked whether he still does (`WaitedFor`)."""
    return f"{reply.rpartition('.')[0]}.{ASKED}"


def runner_inbox(runner: str) -> str:
    """Where a runner takes credits for the streams that it feeds."""
    return f"{PREFIX}.run.{runner}"


def is_runner_inbox(subject: str) -> bool:
    return subject.startswith(f"{PREFIX}.run.")


def node_report(node: str) -> str:
    return f"{PREFIX}.hb.node.{node}"


def device_report(node: str) -> str:
    return f"{PREFIX}.hb.device.{node}"


def gateway_report(gateway: str) -> str:
    return f"{PREFIX}.hb.gateway.{gateway}"


def runner_report(node: str) -> str:
    return f"{PREFIX}.hb.runner.{node}"


def doorbell(function: str) -> str:
    return f"{PREFIX}.dmd.{function}"


def worker_event(function: str) -> str:
    return f"{PREFIX}.evt.worker.{function}"


def on_node(role: str, node: str) -> str:
    """Where a node's agent, runner or builder answers on which host it runs."""
    return f"{PREFIX}.ctl.node.{role}.{node}"


def kill(node: str) -> str:
    """Where an agent takes orders to end a worker at once."""
    return f"{PREFIX}.ctl.kill.{node}"


def revision_key(function: str, revision: int) -> str:
    return f"{function}.{revision}"


def assignment_key(node: str, worker: str) -> str:
    return f"{node}.{worker}"
