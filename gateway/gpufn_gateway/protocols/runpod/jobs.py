"""Jobs: requests as gpufn's arguments and options, and calls in RunPod's terms."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from gpufn_core.domain.invocation import InvocationState
from gpufn_core.encoding.msgspec_errors import parse_validation_error
from gpufn_core.errors import InvalidInput
from gpufn_core.protocol.limits import LONGEST_TIMEOUT_S
from gpufn_core.protocol.records import CallRecord
from gpufn_gateway.arguments.json_body import decode_json
from gpufn_gateway.protocols.captured import Outcome
from gpufn_gateway.protocols.platform import CallOptions, Figures, json_of
from gpufn_gateway.submitted import call_views
from gpufn_gateway.webhooks.payload import Payload

FORM: Final = "runpod"  # of its webhooks
_STATES: Final = {
    InvocationState.QUEUED: "IN_QUEUE",
    InvocationState.RUNNING: "IN_PROGRESS",
    InvocationState.SUCCEEDED: "COMPLETED",
    InvocationState.CANCELLED: "CANCELLED",
    InvocationState.TIMED_OUT: "TIMED_OUT",
    InvocationState.EXPIRED: "TIMED_OUT",
}


class Policy(msgspec.Struct, forbid_unknown_fields=True):
    """`ttl` and `executionTimeout` are in milliseconds."""

    ttl: int | None = None
    lowPriority: bool = False  # noqa: N815  as on the wire
    executionTimeout: int | None = None  # noqa: N815


class NewJob(msgspec.Struct, forbid_unknown_fields=True):
    """The body of run and runsync. `input` has the keyword arguments of the function."""

    input: dict[str, msgspec.Raw]
    webhook: str | None = None
    policy: Policy = msgspec.field(default_factory=Policy)

    @property
    def arguments(self) -> bytes:
        return msgspec.json.encode(self.input)

    def options(self) -> CallOptions:
        """Return the options of the call. Raises InvalidInput."""
        if self.policy.executionTimeout is not None:
            raise InvalidInput(
                "policy.executionTimeout is not supported: the function's own timeout limits each attempt. "
                "policy.ttl limits the whole call.",
                field="policy.executionTimeout",
            )
        ttl = self.policy.ttl
        if ttl is not None and not 0 < ttl <= LONGEST_TIMEOUT_S * 1000:
            raise InvalidInput("policy.ttl must be above 0 ms and at most 7 days", field="policy.ttl")
        return CallOptions(
            timeout_s=None if ttl is None else ttl / 1000,
            priority="low" if self.policy.lowPriority else None,
            webhook=self.webhook,
            webhook_form=FORM,
        )


def new_job(body: bytes) -> NewJob:
    """Parse the body of run and runsync. Raises InvalidInput with the field."""
    try:
        return decode_json(body, NewJob)
    except msgspec.ValidationError as error:
        found = parse_validation_error(str(error))
        if found.is_missing:
            raise InvalidInput(f"{found.path}: missing", field=found.path) from None
        if found.is_unknown:
            known = "input, webhook and policy" if not found.at else "ttl and lowPriority"
            raise InvalidInput(f"{found.path}: not supported; a job may have {known}", field=found.path) from None
        path = found.path or "the body"
        raise InvalidInput(f"{path}: {found.text}", field=found.path or None) from None


def state(of: InvocationState) -> str:
    """Return a state in RunPod's terms.

    >>> state(InvocationState.QUEUED), state(InvocationState.FAILED), state(InvocationState.EXPIRED)
    ('IN_QUEUE', 'FAILED', 'TIMED_OUT')
    """
    return _STATES.get(of, "FAILED")


def job(view: dict[str, Any], output: msgspec.Raw | None = None) -> dict[str, Any]:
    """Return a job from the status of its call."""
    fields: dict[str, Any] = {"id": view["id"], "status": state(InvocationState(view["state"]))}
    if view["queue_s"] is not None:
        fields["delayTime"] = round(view["queue_s"] * 1000)
    if view["run_s"] is not None:
        fields["executionTime"] = round(view["run_s"] * 1000)
    if view["worker"]:
        fields["workerId"] = view["worker"]
    if output is not None:
        fields["output"] = output
    elif view["progress"] is not None:
        fields["output"] = view["progress"].message  # as RunPod shows the updates of a running job
    if view["error"] is not None:
        fields["error"] = view["error"].message
    return fields


def webhook_payload(record: CallRecord, result: bytes) -> Payload:
    """Return the webhook of a job that has ended. A result above the size of a record is omitted."""
    is_whole = record.state is InvocationState.SUCCEEDED and not record.blob
    output = json_of(Outcome(record.content_type, result, [])) if is_whole else None
    return Payload(msgspec.json.encode(job(call_views.status(record), output)))


def health(figures: Figures) -> dict[str, Any]:
    """Return the figures of an endpoint."""
    return {
        "jobs": {
            "completed": figures.succeeded,
            "failed": figures.failed,
            "inProgress": figures.running,
            "inQueue": figures.queued,
            "retried": 0,
        },
        "workers": {
            "idle": max(0, figures.ready - figures.running),
            "initializing": figures.starting,
            "ready": figures.ready,
            "running": min(figures.running, figures.ready),
            "throttled": 0,
            "unhealthy": 0,
        },
    }
