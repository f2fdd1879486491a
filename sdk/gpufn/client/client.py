"""Python client for the gateway's HTTP API (docs/http.md).

    Client    one method per endpoint; raises the exceptions of `gpufn.errors`

`http` sends and retries requests. `responses` and `streams` decode responses. The modules of `endpoints` hold the
requests of each group of endpoints.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import msgspec

from gpufn.call.result_decoding import PLAIN
from gpufn.client.call_api import CallApi
from gpufn.client.endpoints.data import DataRequests
from gpufn.client.endpoints.history import HistoryRequests
from gpufn.client.endpoints.models import ModelRequests
from gpufn.client.endpoints.terminals import TerminalRequests
from gpufn.client.endpoints.traffic import TrafficRequests
from gpufn.client.endpoints.volumes import VolumeRequests
from gpufn.client.http import JSON_BODY
from gpufn.client.views.access import (
    AuditPage,
    KeyView,
    ProviderView,
    SecretView,
    SignerView,
    SigningView,
    TeamView,
    TokenView,
    UserView,
)
from gpufn.client.views.calls import InvocationView
from gpufn.client.views.functions import FunctionView, FunctionViews, ScheduleView
from gpufn.declare.declarations import mark_deployed
from gpufn.declare.hints.argument_checks import check_list, check_seconds
from gpufn_core.domain.team import Team, TeamLimits
from gpufn_core.encoding.urls import function_path, segment
from gpufn_core.errors import GpufnError, InvalidInput
from gpufn_core.ids import new_ulid
from gpufn_core.protocol.records import KeyLimits
from gpufn_core.spec.naming import names
from gpufn_core.spec.naming.secret_scopes import scope_of
from gpufn_core.spec.priority import priority_of
from gpufn_core.spec.schedule import Schedule

if TYPE_CHECKING:
    from gpufn.deploy.bundle import AnyFunction
    from gpufn.deploy.deployment import Deployment

T = TypeVar("T")

_NO_TEAM_LIMITS = TeamLimits()


class _Provider(msgspec.Struct):
    provider: ProviderView | None = None


class Client(CallApi, ModelRequests, TerminalRequests, VolumeRequests, DataRequests, HistoryRequests, TrafficRequests):
    """Client of one gateway.

    The defaults are GPUFN_URL and GPUFN_API_KEY, else the platform on this machine and the token of `gpufn login`.
    Workers have neither variable: call functions with `f.remote(...)` there.

    >>> with Client("http://127.0.0.1:1") as client:
    ...     client.functions()
    Traceback (most recent call last):
        ...
    gpufn.errors.GatewayUnavailable: no gateway answers at http://127.0.0.1:1: is `gpufn up` running?
    """

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        environment: str | None = None,
        trust_results: bool = False,
    ) -> None:
        """`environment` is where `deploy` puts functions, and where functions are that are named without one. With
        `trust_results`, unpickle pickled results, which runs code that the functions chose."""
        super().__init__(url, api_key, environment)
        if trust_results:
            self._reader = PLAIN.with_trust()

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
        app: str | None = None,
        sign: str | os.PathLike[str] | None = None,
    ) -> list[FunctionView]:
        """Deploy functions of this process: by source if they are defined in a module's file, else by value.

        Return once calls go to the new revisions: their models are built, and one worker of each has started. With
        `check=False`, start a worker only if the old revision has a warm one. `wait=False` returns at once, without the
        functions whose models are still being built. A function whose code and options did not change keeps its
        revision and its workers, unless `force` is set. Without `replace`, deploying over a function from another file
        or project raises Conflict. `app` is the app of functions that declare none.
        `sign` is the file of a private key that signs the deploy (default: GPUFN_SIGNING_KEY).

        Raises BuildFailed if a model cannot be built, FunctionStartFailed if a new revision does not start, and
        TimeoutError after `timeout_s` (default: the function's startup_timeout). The old revision keeps serving in each
        case. One function's failure does not stop the deploys of the others; it is raised after them. If no node has
        room for a worker now, the revision is not checked, and a warning gives the reason.
        """
        from gpufn.deploy import deployables as _deployables  # noqa: PLC0415
        from gpufn.deploy import deployment as _deployment  # noqa: PLC0415
        from gpufn.deploy.signing_key import read_signer  # noqa: PLC0415

        check_list("include", include, "['data/*']")
        check_seconds("timeout_s", timeout_s)
        deployments = []
        home = names.Home(self.environment or names.DEFAULT, app or names.DEFAULT)
        deploy_id = new_ulid()
        signer = read_signer(sign)
        for deployable in list(_deployables.deployables(functions, include, home)):  # validate all before sending any
            deployment = _deployment.deploy(
                self, deployable, force=force, check=check, replace=replace, deploy_id=deploy_id, signer=signer
            )
            for warning in deployment.warnings():
                warnings.warn(warning, stacklevel=2)
            deployments.append(deployment)
        for function in functions:
            mark_deployed(function)
        if wait:
            return self._finish(deployments, timeout_s)
        return FunctionViews(deployment.view for deployment in deployments if deployment.view is not None)

    def _finish(self, deployments: Sequence[Deployment], timeout_s: float | None) -> list[FunctionView]:
        from gpufn.deploy import deployment as _deployment  # noqa: PLC0415

        views = FunctionViews()
        failures: list[Exception] = []
        for deployment in deployments:
            try:
                view = _deployment.finish(self, deployment, timeout_s)
            except (GpufnError, TimeoutError) as error:
                failures.append(error)
                continue
            if warning := _deployment.unchecked_warning(view):
                warnings.warn(warning, stacklevel=3)
            views.append(view)
        if failures:
            for other in failures[1:]:
                failures[0].add_note(str(other))
            raise failures[0]
        return views

    # Schedules

    def schedules(self, function: str | None = None) -> list[ScheduleView]:
        """List the declared and the added schedules, of one function or of all."""
        params = {} if function is None else {"function": self._function_path(function)}
        return self._member(list[ScheduleView], "schedules", "GET", "/v1/schedules", params=params)

    def add_schedule(
        self,
        function: str,
        schedule: Schedule | str | None = None,
        *,
        in_s: float | None = None,
        arguments: Mapping[str, Any] | None = None,
        priority: str | None = None,
    ) -> ScheduleView:
        """Call a function on a schedule or cron line, or once, `in_s` seconds from now.

        The calls get `arguments` and the priority class `priority`. Raises InvalidInput and InvalidSpec.
        """
        check_seconds("in_s", in_s)
        if arguments is not None and not isinstance(arguments, Mapping):
            raise InvalidInput(
                f"arguments must map names to values, such as {{'full': True}}, not {arguments!r}", field="arguments"
            )
        if isinstance(schedule, str):
            schedule = Schedule(schedule)
        request: dict[str, Any] = {"function": self._function_path(function)}
        if schedule is not None:
            options = {"timezone": schedule.timezone, "missed": schedule.missed, "method": schedule.method}
            when = {"cron": schedule.cron} if schedule.cron else {"at": schedule.at}
            request |= options | when | {"arguments": dict(arguments or schedule.arguments)}
            priority = priority or schedule.priority
        else:
            name, _, method = self._function_path(function).partition(".")
            request |= {"function": name, "method": method, "in_s": in_s, "arguments": dict(arguments or {})}
        try:
            body = msgspec.json.encode(request | {"priority": priority and priority_of(priority)})
        except (TypeError, OverflowError) as error:
            raise InvalidInput(f"cannot encode the schedule's arguments as JSON: {error}") from error
        return self._json(ScheduleView, "POST", "/v1/schedules", content=body, headers=JSON_BODY)

    def remove_schedule(self, id: str) -> None:  # noqa: A002
        """Remove an added schedule. Raises ScheduleNotFound."""
        self._request("DELETE", f"/v1/schedules/{function_path(id)}")

    def pause_schedule(self, id: str, *, paused: bool = True) -> ScheduleView:  # noqa: A002
        """Pause a schedule, or resume it with `paused=False`. Calls due during the pause are skipped."""
        return self._json(ScheduleView, "POST", f"/v1/schedules/{function_path(id)}/{'pause' if paused else 'resume'}")

    def run_schedule(self, id: str) -> InvocationView:  # noqa: A002
        """Make one extra call of a schedule now."""
        return self._json(InvocationView, "POST", f"/v1/schedules/{function_path(id)}/run")

    # The platform

    def nodes(self) -> list[dict[str, Any]]:
        """Return the last report of each node: its devices and processes."""
        return self._member(list[dict[str, Any]], "nodes", "GET", "/v1/nodes")

    def silent_nodes(self) -> list[dict[str, Any]]:
        """Return the drained nodes that do not report: `node`, `since` and `by`. They stay drained until
        `undrain_node`. Older gateways list none."""
        return list(self._json(dict[str, Any], "GET", "/v1/nodes").get("not_reporting", ()))

    def drain_node(self, node: str) -> None:
        """Let a node accept no new workers. Its workers finish their calls, and others start on other nodes."""
        self._request("PUT", f"/v1/nodes/{quote(node, safe='')}/drain")

    def undrain_node(self, node: str) -> None:
        """Let a drained node accept workers again."""
        self._request("DELETE", f"/v1/nodes/{quote(node, safe='')}/drain")

    def secrets(self) -> list[SecretView]:
        """List the secrets for functions that the key may read, without their values."""
        return self._member(list[SecretView], "secrets", "GET", "/v1/secrets")

    def set_secret(self, name: str, value: str, *, env: str = "", app: str = "") -> SecretView:
        """Set a secret for the app `app` of the environment `env`, for an environment, or for every function.

        A function gets the most specific one. The workers of the functions that get it are replaced; no call is lost.
        """
        body = msgspec.json.encode({"value": value})
        path, params = f"/v1/secrets/{segment(name)}", {"scope": scope_of(env, app)}
        return self._json(SecretView, "PUT", path, content=body, headers=JSON_BODY, params=params)

    def delete_secret(self, name: str, *, env: str = "", app: str = "") -> None:
        """Delete a secret; its functions get the next wider one. Raises SecretNotFound; Conflict if a function would
        have none."""
        self._request("DELETE", f"/v1/secrets/{segment(name)}", params={"scope": scope_of(env, app)})

    def rotate_master_key(self) -> int:
        """Encrypt the secrets under a new master key; return their number."""
        return self._member(int, "encrypted", "POST", "/v1/secrets/rotate")

    def teams(self) -> list[TeamView]:
        """List the teams and their usage. A key of a team sees its own."""
        return self._member(list[TeamView], "teams", "GET", "/v1/teams")

    def set_team(
        self,
        name: str,
        owns: Sequence[str],
        *,
        weight: float = 1.0,
        limits: TeamLimits = _NO_TEAM_LIMITS,
        isolation: str = "process",
        callers: Sequence[str] = (),
        trust_domains: Sequence[str] = (),
    ) -> Team:
        """Create a team, or replace its settings. `owns` are patterns of functions, such as ``prod/search/*``. Its
        functions need the tier `isolation`, or a stronger one. `callers` are patterns of other functions whose code may
        call them. In `trust_domains` they share GPUs with other teams that have the same.

        Raises InvalidInput; Conflict if another team owns functions of these patterns, or if functions have less
        isolation.
        """
        check_list("owns", owns, "['prod/search/*']")
        settings = {"owns": list(owns), "weight": weight, "limits": limits, "isolation": isolation}
        settings |= {"callers": list(callers), "trust_domains": list(trust_domains)}
        body = msgspec.json.encode(settings)
        return self._json(Team, "PUT", f"/v1/teams/{segment(name)}", content=body, headers=JSON_BODY)

    def delete_team(self, name: str) -> None:
        """Remove a team. Its functions stay and belong to no team."""
        self._request("DELETE", f"/v1/teams/{segment(name)}")

    def audit(self, after: int = -100, limit: int = 100) -> AuditPage:
        """Return records of the audit log after the number `after`; with a negative one, the last so many."""
        params = {"after": str(after), "limit": str(limit)}
        return self._json(AuditPage, "GET", "/v1/audit", params=params)

    def signing(self) -> SigningView:
        """Return the trusted keys, and the environments that require signatures."""
        return self._json(SigningView, "GET", "/v1/signing")

    def trust_key(self, name: str, public_key: str, patterns: Sequence[str] = ("*",)) -> SignerView:
        """Trust a public key (PEM) to sign functions that match one of `patterns`, such as `prod/*`. Raises
        InvalidInput, Conflict."""
        check_list("patterns", patterns, "['prod/*']")
        body = msgspec.json.encode({"public_key": public_key, "patterns": list(patterns)})
        return self._json(SignerView, "PUT", f"/v1/signing/keys/{segment(name)}", content=body, headers=JSON_BODY)

    def distrust_key(self, name: str) -> SignerView:
        """Stop trusting a key: running workers continue, new workers of revisions that it signed do not start. Raises
        SignerNotFound."""
        return self._json(SignerView, "DELETE", f"/v1/signing/keys/{segment(name)}")

    def require_signatures(self, environment: str, *, force: bool = False) -> SigningView:
        """Require signatures in an environment. Raises Conflict if functions there could not start any more, unless
        `force` is set."""
        body = msgspec.json.encode({"force": force})
        path = f"/v1/signing/required/{segment(environment)}"
        return self._json(SigningView, "PUT", path, content=body, headers=JSON_BODY)

    def allow_unsigned(self, environment: str) -> SigningView:
        """Allow unsigned deploys in an environment again."""
        return self._json(SigningView, "DELETE", f"/v1/signing/required/{segment(environment)}")

    # Logins

    def provider(self) -> ProviderView | None:
        """Return the OpenID provider of `gpufn login`; None if the gateway has none."""
        # Without the stored login: if that has ended, its renewal raises, and nobody could log in again.
        return self._json(_Provider, "GET", "/v1/auth", auth=None).provider

    def exchange(self, jwt: str) -> TokenView:
        """Return a token in exchange for a JSON Web Token of an OpenID provider that the gateway accepts."""
        return self._exchange(jwt)

    def token(self, scopes: Sequence[str] | None = None, *, expires_in_s: float | None = None) -> TokenView:
        """Return a short-lived token for this client's API key or login. Without `scopes` it has all of them.

        It ends with the key or the login. Raises Forbidden for a scope that this client does not have.
        """
        if scopes is not None:
            check_list("scopes", scopes, "['invoke:f', 'read']")
        wanted = {"scopes": None if scopes is None else list(scopes), "expires_in_s": expires_in_s}
        body = msgspec.json.encode({name: value for name, value in wanted.items() if value is not None})
        return self._json(TokenView, "POST", "/v1/auth/token", content=body, headers=JSON_BODY)

    def console_ticket(self) -> str:
        """Return a ticket that signs a browser in at the web console for 30 seconds; "" if no client needs a key."""
        return self._member(str, "ticket", "POST", "/v1/console/ticket")

    def users(self) -> list[UserView]:
        """List the users and workloads that have logged in."""
        return self._member(list[UserView], "users", "GET", "/v1/users")

    def revoke_tokens(self, user: str | None = None) -> None:
        """Reject the tokens of a user, or all tokens, that were issued until now."""
        self._request("DELETE", "/v1/auth/tokens" if user is None else f"/v1/users/{segment(user)}/tokens")

    # Keys

    def keys(self) -> list[KeyView]:
        """List the API keys, without their secrets."""
        return self._member(list[KeyView], "keys", "GET", "/v1/keys")

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
        expires_in_s: float | None = None,
        team: str = "",
    ) -> KeyView:
        """Create an API key, for a team if one is named. Only this response contains its secret. After `expires_in_s`
        seconds the gateway rejects it; the last key with the scope admin must not expire.

        Limits: `rate`, calls per second, with a `burst` of calls at once; `concurrency`, synchronous calls in flight;
        `queued`, submitted calls that have not ended; `run_s` and `gpu_s`, the run time and the GPU seconds of its
        calls per UTC day.
        """
        check_list("scopes", scopes, "['invoke:f', 'read']")
        limits = _limits(
            rate=rate, burst=burst, concurrency=concurrency, queued=queued, run_s=run_s, gpu_s=gpu_s
        )  # fmt: skip
        body: dict[str, Any] = {"label": label, "scopes": list(scopes), "limits": limits}
        if expires_in_s is not None:
            body["expires_in_s"] = expires_in_s
        if team:
            body["team"] = team
        return self._json(KeyView, "POST", "/v1/keys", content=msgspec.json.encode(body), headers=JSON_BODY)

    def rotate_key(self, id: str, *, overlap_s: float = 0.0) -> KeyView:  # noqa: A002
        """Replace the secret of a key. Only this response contains the new one; the previous one stays valid for
        `overlap_s` seconds."""
        body = msgspec.json.encode({"overlap_s": overlap_s})
        return self._json(KeyView, "POST", f"/v1/keys/{segment(id)}/rotate", content=body, headers=JSON_BODY)

    def limit_key(self, id: str, **limits: Any) -> KeyView:  # noqa: A002
        """Replace all limits of a key. Takes the limits of `create_key`."""
        body = msgspec.json.encode(_limits(**limits))
        return self._json(KeyView, "PUT", f"/v1/keys/{segment(id)}/limits", content=body, headers=JSON_BODY)

    def delete_key(self, id: str) -> None:  # noqa: A002
        """Delete a key. The gateway rejects it from then on."""
        self._request("DELETE", f"/v1/keys/{segment(id)}")

    def webhook_secret(self, key: str = "platform", *, change: bool = False) -> str:
        """Return the secret that signs the webhooks of a key's calls, for receivers that verify them.

        The secret of `platform` signs the webhooks of functions, and of calls without a key. `change` creates a new
        secret; the previous one also signs until the next change.
        """
        return self._member(str, "secret", "POST" if change else "GET", f"/v1/keys/{segment(key)}/webhook-secret")

    def is_alive(self) -> bool:
        """Return whether the gateway responds."""
        return self._status("/healthz") == 200

    def is_ready(self) -> bool:
        """Return whether the gateway can serve calls."""
        return self._status("/readyz") == 200

    def _why_not_ready(self) -> str:
        """Return the reason why the gateway is not ready, or "" if it is ready or reports none."""
        try:
            answer = self._request("GET", "/readyz", check=False).json()
        except GpufnError as error:
            return error.message
        except ValueError:
            return ""
        reason = answer.get("reason") if isinstance(answer, dict) else None
        return reason if isinstance(reason, str) else ""

    def metrics(self) -> str:
        """Return the gateway's metrics in the Prometheus text format."""
        return self._request("GET", "/metrics").text

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI 3.1 document of the deployed functions."""
        return self._json(dict[str, Any], "GET", "/openapi.json")


def _limits(**limits: Any) -> KeyLimits:
    """Raises InvalidInput for an unknown limit, and for NaN and infinity, which JSON encodes as null (no limit)."""
    known = KeyLimits.__struct_fields__
    for name, value in limits.items():
        if name not in known:
            raise InvalidInput(f"unknown limit {name!r}; the limits are {', '.join(known)}", field=f"limits.{name}")
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidInput(f"{name} must be a finite number, not {value}", field=f"limits.{name}")
    return KeyLimits(**limits)
