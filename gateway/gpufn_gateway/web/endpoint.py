"""A request to a web endpoint: a call of its function, with arguments from the query and the body."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from gpufn_core.encoding import media
from gpufn_gateway.arguments import query as query_arguments
from gpufn_gateway.calls.arguments import Arguments
from gpufn_gateway.functions.target import Target
from gpufn_gateway.http import negotiation
from gpufn_gateway.http.body_reader import Receive, Scope, Send
from gpufn_gateway.http.responses import GPUFN_FORMAT
from gpufn_gateway.problems import RouteError
from gpufn_gateway.routes.calls.invoke import Invoke
from gpufn_gateway.web.headers import NOT_STORED
from gpufn_gateway.web.match import Match


async def serve_endpoint(invoke: Invoke, match: Match, scope: Scope, receive: Receive, send: Send) -> None:
    """Raises GpufnError before the response has started."""
    calls = invoke.calls
    if match.address.rest != "/":
        raise RouteError(404, f"The endpoint {match.target.name} has no paths below its own.")
    served = {*match.web.methods, *(["HEAD"] if "GET" in match.web.methods else [])}
    if scope["method"] not in served:
        methods = ", ".join(sorted(served))
        raise RouteError(405, f"{scope['method']} is not allowed here; use {methods}.", allow=methods)
    headers: dict[bytes, bytes] = dict(scope["headers"])
    query: bytes = scope["query_string"]
    content_type = headers.get(b"content-type")
    is_json = negotiation.body_kind(content_type) is media.JSON
    is_form = negotiation.is_urlencoded(content_type)

    async def read(name: str, target: Target, headers: dict[bytes, bytes], receive: Receive) -> Arguments:
        texts, body = query, await calls.bodies.read(headers, receive, may_share=False) or b"{}"
        if is_form and not body.lstrip().startswith(b"{"):  # `curl -d` sends JSON with the type of a form too
            texts, body = b"&".join(filter(None, (query, body))), b"{}"
        arguments = query_arguments.merged(texts, body, target.signature)
        accept = negotiation.result_encoding(headers.get(b"accept"))
        return Arguments(media.JSON, accept, calls.bodies.wrap(arguments, may_share=False))

    call = await calls.prepare(
        match.address.name,
        headers,
        receive,
        may_share=True,
        query=query,
        read=read if is_json and (query or is_form) else None,
        principal=match.principal,
    )

    async def send_uncached(event: MutableMapping[str, Any]) -> None:
        if event["type"] == "http.response.start":
            event = {**event, "headers": [*event["headers"], *NOT_STORED]}
        await send(event)

    await invoke.respond(call, receive, send_uncached, GPUFN_FORMAT)
