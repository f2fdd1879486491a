"""Requests of browsers and other clients to web functions, at `/web/{env}/{app}/{function}/`."""
