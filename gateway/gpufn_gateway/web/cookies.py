"""Cookies of an application, for its own paths only. Pure.

All applications share an origin. Frameworks set cookies for all of its paths. So a browser would send them to the
applications of others, and an application could replace cookies of others and of the console.
"""

from __future__ import annotations


def confined(cookie: bytes, root: str) -> bytes:
    """Return the value of a Set-Cookie field, with a path below `root`, and for no other host.

    >>> confined(b"id=1; Path=/; Domain=example.org; Secure", "/web/prod/shop/site")
    b'id=1; Path=/web/prod/shop/site/; Secure'
    >>> confined(b"id=1; path=/web/prod/shop/site/cart", "/web/prod/shop/site")
    b'id=1; path=/web/prod/shop/site/cart'
    """
    pair, *attributes = (part.strip() for part in cookie.split(b";"))
    kept = [pair]
    for attribute in attributes:
        name, _, value = (part.strip() for part in attribute.partition(b"="))
        if name.lower() == b"path" and not value.startswith(f"{root}/".encode()):
            kept.append(b"Path=" + f"{root}/".encode())
        elif name.lower() != b"domain":
            kept.append(attribute)
    return b"; ".join(kept)
