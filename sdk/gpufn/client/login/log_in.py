"""Log in at a gateway through its OpenID provider."""

from __future__ import annotations

from collections.abc import Callable

from gpufn.client.client import Client
from gpufn.client.login.device_flow import DeviceCode, DeviceFlow
from gpufn.client.login.renewal import login_of
from gpufn.client.login.stored_logins import Logins
from gpufn.client.views.access import TokenView
from gpufn_core.errors import Conflict


def log_in(client: Client, show: Callable[[DeviceCode], None]) -> TokenView:
    """Log in, and store the login for later clients of this gateway. `show` shows the instructions to the user.

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
    Logins().put(client.url, login_of(provider, grant, issued))
    return issued
