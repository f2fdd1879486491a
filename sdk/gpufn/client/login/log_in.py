"""Log in at a gateway through its OpenID provider, and renew the login."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpufn.client.client import Client
from gpufn.client.login.device_flow import DeviceCode, DeviceFlow, Grant
from gpufn.client.login.stored_logins import Login, Logins
from gpufn.client.views import ProviderView, TokenView
from gpufn_core.errors import Conflict


def log_in(client: Client, show: Callable[[DeviceCode], None]) -> TokenView:
    """Log in, and store the login for later clients of this gateway. `show` tells the user what to do.

    Raises Conflict if the gateway has no provider, and the exceptions of `DeviceFlow`.
    """
    provider = client.provider()
    if provider is None:
        raise Conflict(f"the gateway at {client.url} has no identity provider: use an API key")
    with DeviceFlow(provider) as flow:
        code = flow.start()
        show(code)
        grant = flow.finish(code)
    issued = client.exchange(grant.id_token)
    Logins().put(client.url, _login(provider, grant, issued))
    return issued


def renewed(address: str, login: Login) -> Login:
    """Return the next login at the gateway `address`. Raises Unauthorized if it has ended, GatewayUnavailable."""
    provider = ProviderView(issuer=login.issuer, client_id=login.client_id, client_secret=login.client_secret)
    with DeviceFlow(provider) as flow:
        grant = flow.refresh(login.refresh_token)
    with Client(address, login.token) as client:
        return _login(provider, grant, client.exchange(grant.id_token))


def _login(provider: ProviderView, grant: Grant, issued: TokenView) -> Login:
    return Login(
        token=issued.token,
        expires_at=time.time() + issued.expires_in_s,
        name=issued.name,
        issuer=provider.issuer,
        client_id=provider.client_id,
        client_secret=provider.client_secret,
        refresh_token=grant.refresh_token,
    )
