"""The next login: from the tokens of a provider, and from the gateway's token in exchange for them."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpufn.client.login.device_flow import DeviceFlow, Grant
from gpufn.client.login.stored_logins import Login
from gpufn.client.views.access import ProviderView, TokenView


def renewed(exchange: Callable[[str], TokenView], login: Login) -> Login:
    """Return the next login. `exchange` gives the gateway's token for the provider's. Raises Unauthorized if the login
    has ended, GatewayUnavailable."""
    provider = ProviderView(issuer=login.issuer, client_id=login.client_id, client_secret=login.client_secret)
    with DeviceFlow(provider) as flow:
        grant = flow.refresh(login.refresh_token)
    return login_of(provider, grant, exchange(grant.id_token))


def login_of(provider: ProviderView, grant: Grant, issued: TokenView) -> Login:
    return Login(
        token=issued.token,
        expires_at=time.time() + issued.expires_in_s,
        name=issued.name,
        issuer=provider.issuer,
        client_id=provider.client_id,
        client_secret=provider.client_secret,
        refresh_token=grant.refresh_token,
    )
