"""Syntax checks of URLs that users pass, and quoting of names in URL paths."""

from __future__ import annotations

import ipaddress
from urllib.parse import SplitResult, quote, urlsplit

from gpufn_core.errors import InvalidInput
from gpufn_core.spec.naming import names
from gpufn_core.spec.naming.variant_names import in_path

DEFAULT_GATEWAY = "http://127.0.0.1:8090"

LONGEST_URL = 2048


def gateway_address(url: str) -> str:
    """Return `url` without a trailing slash; the default scheme is http. Raises InvalidInput for an unusable address.

    >>> gateway_address("localhost:8090"), gateway_address("https://gpu.example.org/")
    ('http://localhost:8090', 'https://gpu.example.org')
    """
    if not isinstance(url, str) or url.isdecimal():  # a port; as a host it would be an IPv4 address in decimal
        raise InvalidInput(f"{url!r} is not an address: write for example {DEFAULT_GATEWAY}")
    address = (url if "://" in url else f"http://{url}").rstrip("/")
    parts = _parts_of(address, "http", "https")
    if parts is None or parts.query or parts.fragment:
        raise InvalidInput(f"{public(url)!r} is not an address: write for example {DEFAULT_GATEWAY}")
    return address


def public(url: str) -> str:
    """Return `url` for messages, without user and password.

    >>> public("https://me:s3cret@gpu.example.org/a@b"), public("10.0.0.1:4222")
    ('https://gpu.example.org/a@b', '10.0.0.1:4222')
    """
    scheme, separator, rest = url.rpartition("://")
    server, slash, path = rest.partition("/")
    return f"{scheme}{separator}{server.rpartition('@')[2]}{slash}{path}"


def segment(text: str) -> str:
    """Quote a name or an id as one segment of a path. Raises InvalidInput for text that would be no segment or several:
    servers and proxies unquote slashes and dots.

    >>> segment("resnet.classify"), segment("a b?c")
    ('resnet.classify', 'a%20b%3Fc')
    >>> segment("../nodes")
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidInput: '../nodes' is neither a name nor an id
    """
    if not isinstance(text, str):
        name = getattr(text, "name", None)  # `text` may be a function object
        hint = f": write {name!r}" if isinstance(name, str) else ""
        raise InvalidInput(f"{text!r:.120} is neither a name nor an id, which are text{hint}")
    if text in ("", ".", "..") or "/" in text or not text.isprintable():
        raise InvalidInput(f"{text[:120]!r} is neither a name nor an id")
    return quote(text, safe="")


def function_path(name: str, environment: str = "") -> str:
    """Quote the name of a function, with `environment` if it names none, as one or three segments of a path. Raises
    InvalidInput.

    >>> function_path("resnet.classify"), function_path("search/predict"), function_path("predict", "prod")
    ('resnet.classify', '-/search/predict', 'prod/-/predict')
    """
    name = in_path(name) if isinstance(name, str) else name
    if (
        not isinstance(name, str)
        or not all(map(names.is_group_or_any, name.split("/")[:-1]))
        or name.count("/") > 2
        or name[-1:] == "/"
    ):
        return segment(name)  # raises
    wanted = names.in_environment(name, environment) if environment else name
    return "/".join(map(segment, names.url_name(wanted).split("/")))


def check_webhook(url: str) -> None:
    """Raise InvalidInput for a URL that no webhook can be sent to. The gateway checks whether its address is allowed.

    >>> check_webhook("ftp://example.org")
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidInput: a webhook goes to https://... or http://..., not to 'ftp://example.org'
    """
    if not isinstance(url, str):
        raise InvalidInput(f"webhook is an address, such as 'https://example.org/done', not {url!r}", field="webhook")
    if len(url) > LONGEST_URL:
        raise InvalidInput(f"a webhook's address has at most {LONGEST_URL} characters", field="webhook")
    parts = _parts_of(url, "http", "https")
    if parts is None or not url.isascii():
        raise InvalidInput(f"a webhook goes to https://... or http://..., not to {url[:120]!r}", field="webhook")
    if parts.username is not None or parts.password is not None:
        raise InvalidInput(
            "a webhook's address must have no user and no password: its signature identifies the sender",
            field="webhook",
        )


def check_bus(url: str) -> None:
    """Check `url`: one NATS server or several, separated by commas. Raises InvalidInput without showing a password.

    >>> check_bus("nats://gpufn:s3cret@10.0.0.1:4222,nats://gpufn:s3cret@10.0.0.2:4222")
    >>> check_bus("10.0.0.1:4222")
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidInput: '10.0.0.1:4222' is not a NATS server's address: write for example nats://HOST:4222
    """
    for server in map(str.strip, url.split(",")):
        if _parts_of(server, "nats", "tls") is None:
            raise InvalidInput(f"{public(server)!r} is not a NATS server's address: write for example nats://HOST:4222")


def keeps_secrets(url: str) -> bool:
    """Return whether credentials may go to an address: https, or http on this machine.

    >>> keeps_secrets("https://login.example.org/a?b"), keeps_secrets("http://login.example.org")
    (True, False)
    """
    parts = _parts_of(url, "http", "https")
    return parts is not None and (parts.scheme == "https" or is_loopback(parts.hostname or ""))


def is_issuer(url: str) -> bool:
    """Return whether `url` can be an OpenID provider.

    >>> is_issuer("https://login.example.org/realms/a"), is_issuer("https://login.example.org/?a=b")
    (True, False)
    """
    parts = _parts_of(url, "http", "https")
    return (
        parts is not None and keeps_secrets(url) and not (parts.query or parts.fragment or parts.username is not None)
    )


def is_loopback(host: str) -> bool:
    """True for `localhost` and for loopback addresses, which are compared by value."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    return bool((getattr(address, "ipv4_mapped", None) or address).is_loopback)


def _parts_of(url: str, *schemes: str) -> SplitResult | None:
    """Split a URL with one of `schemes`; None if it has another scheme, no host, a wrong port, or white space."""
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if is_usable and url.isprintable() and " " not in url else None
