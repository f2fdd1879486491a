"""The gateway's HTTP interface (docs/http.md) from Python.

    Client    one method per endpoint; what it raises is from `gpufn.errors`

`_requests` sends (and says what is repeated), `_answers` and `_streams` read what comes back; the endpoints of calls,
maps and models are in `_http_calls`, `_http_maps` and `_http_models`; `_http_transport` brings `.remote` and its
siblings here.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from gpufn.call.result_decoding import PLAIN
from gpufn.client.call_api import CallApi
from gpufn.client.http import JSON_BODY
from gpufn.client.http_models import ModelRequests
from gpufn.client.views import (
    FunctionView,
    InvocationView,
    Keys,
    KeyView,
    Nodes,
    Schedules,
    ScheduleView,
    WebhookSecret,
)
from gpufn.declare.argument_checks import check_list, check_seconds
from gpufn_core.encoding.urls import segment
from gpufn_core.errors import GpufnError, InvalidInput
from gpufn_core.protocol.records import KeyLimits
from gpufn_core.spec.priority import priority_of
from gpufn_core.spec.schedule import Schedule

if TYPE_CHECKING:
    from gpufn.deploy.bundle import AnyFunction
    from gpufn.deploy.deployment import Deployment

T = TypeVar("T")


class Client(CallApi, ModelRequests):
    """One gateway. Without arguments: GPUFN_URL and GPUFN_API_KEY, else the platform on this machine. A worker is told
    neither: there, a function is called by `f.remote(...)`.

    >>> with Client("http://127.0.0.1:1") as client:
    ...     client.functions()
    Traceback (most recent call last):
        ...
    gpufn.errors.GatewayUnavailable: no gateway answers at http://127.0.0.1:1: is `gpufn up` running?
    """

    def __init__(self, url: str | None = None, api_key: str | None = None, *, trust_results: bool = False) -> None:
        """With `trust_results` pickled results are read, which runs code that the functions chose."""
        super().__init__(url, api_key)
        if trust_results:
            self._reader = PLAIN.trusting()

    # Deploy

    def deploy(
        self,
        *functions: AnyFunction,
        include: Sequence[str] = (),
        wait: bool = True,
        timeout_s: float | None = None,
        force: bool = False,
        check: bool = True,
        replace: bool = False,
    ) -> list[FunctionView]:
        """Deploy functions of this process: by source when they are in a module's file, else by value.

        Returns when calls go to the new revisions: their models are built, and one worker of each has started. `check`
        False starts no worker while none of the old revision is warm. `wait=False` returns at once, without the
        functions whose models are being built. A function whose code and options did not change keeps its revision and
        its workers, unless `force`. `replace` also replaces a function that came from another file or project, which is
        a Conflict otherwise.

        Raises BuildFailed when a model cannot be built, FunctionStartFailed when a new revision does not start,
        TimeoutError after `timeout_s` (the function's own startup_timeout when not given); the old one serves on. A
        failure of one function does not stop the deploys of the others, and is raised after them. Where no node has
        room for a worker now, the revision is not checked, and a warning gives the reason.
        """
        from gpufn.deploy import deployment as _deployment  # noqa: PLC0415

        check_list("include", include, "['data/*']")
        check_seconds("timeout_s", timeout_s)
        made = []
        for deployable in list(_deployment.deployables(functions, include)):  # nothing goes out where one is refused
            deployment = _deployment.deploy(self, deployable, force=force, check=check, replace=replace)
            for warning in deployment.warnings():
                warnings.warn(warning, stacklevel=2)
            made.append(deployment)
        if wait:
            return self._finished(made, timeout_s)
        return [deployment.view for deployment in made if deployment.view is not None]

    def _finished(self, made: Sequence[Deployment], timeout_s: float | None) -> list[FunctionView]:
        from gpufn.deploy import deployment as _deployment  # noqa: PLC0415

        views: list[FunctionView] = []
        failures: list[Exception] = []
        for deployment in made:
            try:
                view = _deployment.finish(self, deployment, timeout_s)
            except (GpufnError, TimeoutError) as error:
                failures.append(error)
                continue
            if unchecked := _deployment.unchecked(view):
                warnings.warn(unchecked, stacklevel=3)
            views.append(view)
        if failures:
            for other in failures[1:]:
                failures[0].add_note(str(other))
            raise failures[0]
        return views

    # Schedules

    def schedules(self, function: str | None = None) -> list[ScheduleView]:
        """When functions are called by themselves; those that they declare and those that were added."""
        params = {} if function is None else {"function": function}
        return self._json(Schedules, "GET", "/v1/schedules", params=params).schedules

    def add_schedule(
        self,
        function: str,
        schedule: Schedule | str | None = None,
        *,
        in_s: float | None = None,
        arguments: Mapping[str, Any] | None = None,
        priority: str | None = None,
    ) -> ScheduleView:
        """Call a function by itself, as `schedule` or its cron line says; or once, `in_s` seconds from now, with
        `arguments` and as of class `priority`. Raises InvalidInput and InvalidSpec.
        """
        segment(function)  # its name, as elsewhere
        check_seconds("in_s", in_s)
        if arguments is not None and not isinstance(arguments, Mapping):
            raise InvalidInput(f"arguments are named, such as {{'full': True}}, not {arguments!r}", field="arguments")
        if isinstance(schedule, str):
            schedule = Schedule(schedule)
        wanted: dict[str, Any] = {"function": function}
        if schedule is not None:
            given = {"timezone": schedule.timezone, "missed": schedule.missed, "method": schedule.method}
            when = {"cron": schedule.cron} if schedule.cron else {"at": schedule.at}
            wanted |= given | when | {"arguments": dict(arguments or schedule.arguments)}
            priority = priority or schedule.priority
        else:
            name, _, method = function.partition(".")
            wanted |= {"function": name, "method": method, "in_s": in_s, "arguments": dict(arguments or {})}
        try:
            body = msgspec.json.encode(wanted | {"priority": priority and priority_of(priority)})
        except (TypeError, OverflowError) as error:
            raise InvalidInput(f"arguments of a schedule are what JSON has words for: {error}") from error
        return self._json(ScheduleView, "POST", "/v1/schedules", content=body, headers=JSON_BODY)

    def remove_schedule(self, id: str) -> None:  # noqa: A002
        """One that was added. Raises ScheduleNotFound."""
        self._request("DELETE", f"/v1/schedules/{segment(id)}")

    def pause_schedule(self, id: str, *, paused: bool = True) -> ScheduleView:  # noqa: A002
        """Make no calls until it is resumed (`paused=False`); those in between are not made up for."""
        return self._json(ScheduleView, "POST", f"/v1/schedules/{segment(id)}/{'pause' if paused else 'resume'}")

    def run_schedule(self, id: str) -> InvocationView:  # noqa: A002
        """One call more, now."""
        return self._json(InvocationView, "POST", f"/v1/schedules/{segment(id)}/run")

    # The platform

    def nodes(self) -> list[dict[str, Any]]:
        """What each node reported last: its devices and processes."""
        return self._json(Nodes, "GET", "/v1/nodes").nodes

    def keys(self) -> list[KeyView]:
        """The API keys, without their secrets."""
        return self._json(Keys, "GET", "/v1/keys").keys

    def create_key(
        self,
        label: str,
        scopes: Sequence[str],
        *,
        rate: float | None = None,
        burst: int | None = None,
        concurrency: int | None = None,
        queued: int | None = None,
        run_s: float | None = None,
        gpu_s: float | None = None,
    ) -> KeyView:
        """Make an API key; its secret is in the answer, this once.

        Its limits: `rate` in calls per second, of which `burst` may come at once; `concurrency`, calls that are waited
        for at a time; `queued`, submitted calls that have not ended; `run_s` and `gpu_s`, the seconds that its calls
        run and their GPU seconds, per day of UTC.
        """
        check_list("scopes", scopes, "['invoke:f', 'read']")
        limits = _limits(
            rate=rate, burst=burst, concurrency=concurrency, queued=queued, run_s=run_s, gpu_s=gpu_s
        )  # fmt: skip
        body = msgspec.json.encode({"label": label, "scopes": list(scopes), "limits": limits})
        return self._json(KeyView, "POST", "/v1/keys", content=body, headers=JSON_BODY)

    def limit_key(self, id: str, **limits: Any) -> KeyView:  # noqa: A002
        """Give a key other limits, as `create_key` takes them, in place of all that it has."""
        body = msgspec.json.encode(_limits(**limits))
        return self._json(KeyView, "PUT", f"/v1/keys/{segment(id)}/limits", content=body, headers=JSON_BODY)

    def delete_key(self, id: str) -> None:  # noqa: A002
        """Who uses it is refused from then on."""
        self._request("DELETE", f"/v1/keys/{segment(id)}")

    def webhook_secret(self, key: str = "platform", *, change: bool = False) -> str:
        """What webhooks are signed with, for those who receive them: of the calls of an API key, or the platform's own.

        `change` makes a new one; until the next change, the one before it signs as well.
        """
        return self._json(WebhookSecret, "POST" if change else "GET", f"/v1/keys/{segment(key)}/webhook-secret").secret

    def is_alive(self) -> bool:
        """Whether a gateway answers."""
        return self._status("/healthz") == 200

    def is_ready(self) -> bool:
        """Whether a call would be served."""
        return self._status("/readyz") == 200

    def _why_not_ready(self) -> str:
        """The gateway's reason, or "": it gave none, or it is ready."""
        try:
            answer = self._request("GET", "/readyz", check=False).json()
        except (GpufnError, ValueError):
            return ""
        reason = answer.get("reason") if isinstance(answer, dict) else None
        return reason if isinstance(reason, str) else ""

    def metrics(self) -> str:
        """In the text format of Prometheus."""
        return self._request("GET", "/metrics").text

    def openapi(self) -> dict[str, Any]:
        """OpenAPI 3.1 of the deployed functions."""
        return self._json(dict[str, Any], "GET", "/openapi.json")


def _limits(**limits: Any) -> KeyLimits:
    """Raises InvalidInput for what is no limit, and what JSON has no word for but null, which is none."""
    known = KeyLimits.__struct_fields__
    for name, value in limits.items():
        if name not in known:
            raise InvalidInput(f"there is no limit {name!r}: there are {', '.join(known)}", field=f"limits.{name}")
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidInput(f"{name} is a number, not {value}", field=f"limits.{name}")
    return KeyLimits(**limits)
