"""Addresses that users give, and names as parts of one, as far as their text can tell."""

from __future__ import annotations

from urllib.parse import quote, urlsplit

from gpufn_core.errors import InvalidInput

DEFAULT_GATEWAY = "http://127.0.0.1:8090"

LONGEST_URL = 2048


def gateway_address(url: str) -> str:
    """`url` without a slash at its end; what has no scheme is http. Raises InvalidInput for what leads nowhere.

    >>> gateway_address("localhost:8090"), gateway_address("https://gpu.example.org/")
    ('http://localhost:8090', 'https://gpu.example.org')
    """
    if not isinstance(url, str) or url.isdecimal():  # a port: as a host it would be an IPv4 address, in one number
        raise InvalidInput(f"{url!r} is not an address: write for example {DEFAULT_GATEWAY}")
    whole = (url if "://" in url else f"http://{url}").rstrip("/")
    try:
        parts = urlsplit(whole)
        is_usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or parts.query or parts.fragment or not whole.isprintable() or " " in whole:
        raise InvalidInput(f"{public(url)!r} is not an address: write for example {DEFAULT_GATEWAY}")
    return whole


def public(url: str) -> str:
    """`url` as messages show it: without a user and a password.

    >>> public("https://me:s3cret@gpu.example.org/a@b"), public("10.0.0.1:4222")
    ('https://gpu.example.org/a@b', '10.0.0.1:4222')
    """
    scheme, there, rest = url.rpartition("://")
    server, slash, path = rest.partition("/")
    return f"{scheme}{there}{server.rpartition('@')[2]}{slash}{path}"


def segment(text: str) -> str:
    """A name or an id as one part of a path. Raises InvalidInput for what would be none, or several: servers and
    proxies undo the quotes of a slash and of dots.

    >>> segment("resnet.classify"), segment("a b?c")
    ('resnet.classify', 'a%20b%3Fc')
    >>> segment("../nodes")
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidInput: '../nodes' is neither a name nor an id
    """
    if not isinstance(text, str):
        name = getattr(text, "name", None)  # a function is asked for by it
        instead = f": write {name!r}" if isinstance(name, str) else ""
        raise InvalidInput(f"{text!r:.120} is neither a name nor an id, which are text{instead}")
    if text in ("", ".", "..") or "/" in text or not text.isprintable():
        raise InvalidInput(f"{text[:120]!r} is neither a name nor an id")
    return quote(text, safe="")


def check_webhook(url: str) -> None:
    """Raises InvalidInput for what no webhook can be sent to. Whether its address is allowed, the gateway knows.

    >>> check_webhook("ftp://example.org")
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidInput: a webhook goes to https://... or http://..., not to 'ftp://example.org'
    """
    if not isinstance(url, str):
        raise InvalidInput(f"webhook is an address, such as 'https://example.org/done', not {url!r}", field="webhook")
    if len(url) > LONGEST_URL:
        raise InvalidInput(f"a webhook's address has at most {LONGEST_URL} characters", field="webhook")
    try:
        parts = urlsplit(url)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_usable = False
    if not is_usable or not url.isascii() or not url.isprintable() or " " in url:
        raise InvalidInput(f"a webhook goes to https://... or http://..., not to {url[:120]!r}", field="webhook")
    if parts.username is not None or parts.password is not None:
        raise InvalidInput(
            "a webhook's address holds no user and no password: its signature says who sends it", field="webhook"
        )


def check_bus(url: str) -> None:
    """`url`: one NATS server or several, separated by commas. Raises InvalidInput, which tells no password.

    >>> check_bus("nats://gpufn:s3cret@10.0.0.1:4222,nats://gpufn:s3cret@10.0.0.2:4222")
    >>> check_bus("10.0.0.1:4222")
    Traceback (most recent call last):
        ...
    gpufn.errors.InvalidInput: '10.0.0.1:4222' is not a NATS server's address: write for example nats://HOST:4222
    """
    for server in map(str.strip, url.split(",")):
        try:
            parts = urlsplit(server)
            is_usable = parts.scheme in ("nats", "tls") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable or not server.isprintable() or " " in server:
            raise InvalidInput(f"{public(server)!r} is not a NATS server's address: write for example nats://HOST:4222")
